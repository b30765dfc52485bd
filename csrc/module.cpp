// The Python module commlib._C: importing it loads this library, whose static initialisers register
// the ops. Its one member is the scheduler's type.
#include "scheduler/python.h"

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "_C",
                                   "commlib CPU kernels and the scheduler's core",
                                   -1,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  PyObject* module = PyModule_Create(&definition);
  if (module && commlib::scheduler::add_scheduler_type(module) != 0) Py_CLEAR(module);
  return module;
}
