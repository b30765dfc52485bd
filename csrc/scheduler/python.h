// The Python type commlib._C.Scheduler.
#pragma once

#include <Python.h>

namespace commlib::scheduler {

// Adds the type to a module. Returns 0, or -1 with a Python error set.
int add_scheduler_type(PyObject* module);

}  // namespace commlib::scheduler
