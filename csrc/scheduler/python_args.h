// Arguments of vectorcall methods: positions and keywords to slots, slots to C++ values. Every
// function returns false with a Python error set that names the method, the argument and its value.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace commlib::scheduler {

// The names of a method's arguments; the first `num_required` have no default.
template <int N>
struct Signature {
  const char* method;
  const char* names[N];
  int num_required;

  // Sorts arguments into `slots` (borrowed); absent ones are nullptr.
  bool sort(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords,
            PyObject* (&slots)[N]) const {
    for (PyObject*& slot : slots) slot = nullptr;
    if (num_args > N) {
      PyErr_Format(PyExc_TypeError, "%s takes at most %d arguments, got %zd", method, N, num_args);
      return false;
    }
    for (Py_ssize_t i = 0; i < num_args; ++i) slots[i] = args[i];
    const Py_ssize_t num_keywords = keywords ? PyTuple_Size(keywords) : 0;
    for (Py_ssize_t k = 0; k < num_keywords; ++k) {
      if (!put(PyTuple_GetItem(keywords, k), args[num_args + k], slots)) return false;
    }
    for (int i = 0; i < num_required; ++i) {
      if (slots[i]) continue;
      PyErr_Format(PyExc_TypeError, "%s needs the argument '%s'", method, names[i]);
      return false;
    }
    return true;
  }

  // Puts one keyword argument into its slot.
  bool put(PyObject* keyword, PyObject* value, PyObject* (&slots)[N]) const {
    for (int i = 0; i < N; ++i) {
      if (PyUnicode_CompareWithASCIIString(keyword, names[i]) != 0) continue;
      if (slots[i]) {
        PyErr_Format(PyExc_TypeError, "%s got the argument '%U' twice", method, keyword);
        return false;
      }
      slots[i] = value;
      return true;
    }
    PyErr_Format(PyExc_TypeError, "%s has no argument '%U'", method, keyword);
    return false;
  }
};

// TypeError "name must be `wanted`, got TYPE: VALUE".
inline bool wrong_type(const char* name, const char* wanted, PyObject* got) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(got));
  PyErr_Format(PyExc_TypeError, "%s must be %s, got %R of %R", name, wanted, got, type);
  return false;
}

// An int; nullptr keeps the default.
inline bool to_int(const char* name, PyObject* from, int64_t& to) {
  if (!from) return true;
  if (!PyLong_Check(from)) return wrong_type(name, "int", from);
  int overflow = 0;
  to = PyLong_AsLongLongAndOverflow(from, &overflow);
  if (overflow) PyErr_Format(PyExc_ValueError, "%s = %R does not fit into 64 bits", name, from);
  return !overflow && !PyErr_Occurred();
}

// A float or int.
inline bool to_double(const char* name, PyObject* from, double& to) {
  if (!PyFloat_Check(from) && !PyLong_Check(from)) return wrong_type(name, "float", from);
  to = PyFloat_AsDouble(from);
  return !PyErr_Occurred();
}

// The UTF-8 bytes of a str; they belong to `from`.
inline bool to_view(const char* name, PyObject* from, std::string_view& to) {
  if (!PyUnicode_Check(from)) return wrong_type(name, "str", from);
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(from, &size);
  if (bytes) to = {bytes, static_cast<size_t>(size)};
  return bytes != nullptr;
}

// A sequence of descriptors.
inline bool to_fds(PyObject* from, std::vector<int>& fds) {
  PyObject* items = PySequence_List(from);
  if (!items) {
    PyErr_Clear();
    return wrong_type("fds", "a sequence of int", from);
  }
  bool good = true;
  for (Py_ssize_t i = 0; good && i < PyList_Size(items); ++i) {
    int64_t fd = -1;
    good = to_int("fds[...]", PyList_GetItem(items, i), fd);
    if (good && (fd < 0 || fd > INT32_MAX)) {
      PyErr_Format(PyExc_ValueError, "fds[%zd] = %lld is no descriptor", i, (long long)fd);
      good = false;
    }
    fds.push_back(static_cast<int>(fd));
  }
  Py_DECREF(items);
  return good;
}

}  // namespace commlib::scheduler
