// The Python module commlib._C: importing it loads this library, whose static initialisers register
// the ops. It has no members.
#include <Python.h>

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT,
                               "_C",
                               "commlib CPU kernels",
                               -1,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
  return PyModule_Create(&module);
}
