// commlib._C.Scheduler: converts, releases the GIL, turns exceptions into Python's. Limited
// API 3.10.
#include "scheduler/python.h"

#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "scheduler/python_args.h"
#include "scheduler/scheduler.h"

namespace commlib::scheduler {

namespace {

struct Object {
  PyObject_HEAD;
  Scheduler* core;  // owned; never nullptr once __new__ has returned
};

Scheduler& core(PyObject* self) { return *reinterpret_cast<Object*>(self)->core; }

// Sets the Python error of the exception that is being handled; returns nullptr.
PyObject* raise() {
  try {
    throw;
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::system_error& error) {
    PyErr_SetString(PyExc_OSError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Runs `work`. Returns false with a Python error set if it threw.
template <class Work>
bool with_gil(Work&& work) {
  try {
    work();
    return true;
  } catch (...) {
    raise();
    return false;
  }
}

// The same without the GIL, for what may wait.
template <class Work>
bool without_gil(Work&& work) {
  std::exception_ptr error;
  Py_BEGIN_ALLOW_THREADS;
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  Py_END_ALLOW_THREADS;
  return with_gil([&error] {
    if (error) std::rethrow_exception(error);
  });
}

PyObject* none() { return Py_NewRef(Py_None); }

// Other ranks' texts come off a socket: whatever is no UTF-8 is replaced.
PyObject* to_str(const std::string& text) {
  return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"rank",      "num_ranks", "fds",  "credit_bytes",
                                "timeout_s", "log_size",  nullptr};
  PyObject *rank, *num_ranks, *fd_list, *credit_bytes, *timeout_s, *log_size = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO|O:Scheduler", const_cast<char**>(names),
                                   &rank, &num_ranks, &fd_list, &credit_bytes, &timeout_s,
                                   &log_size)) {
    return nullptr;
  }
  Options options;
  std::vector<int> fds;
  if (!to_int("rank", rank, options.rank) || !to_int("num_ranks", num_ranks, options.num_ranks) ||
      !to_fds(fd_list, fds) || !to_int("credit_bytes", credit_bytes, options.credit_bytes) ||
      !to_double("timeout_s", timeout_s, options.timeout_s) ||
      !to_int("log_size", log_size, options.log_size)) {
    return nullptr;
  }
  std::unique_ptr<Scheduler> made;
  try {
    made = std::make_unique<Scheduler>(options, fds);
  } catch (...) {
    return raise();
  }
  const auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* self = alloc(type, 0);
  if (self) reinterpret_cast<Object*>(self)->core = made.release();
  return self;
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  std::unique_ptr<Scheduler> last(reinterpret_cast<Object*>(self)->core);
  without_gil([&last] { last.reset(); });
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* submit(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  static constexpr Signature<4> kSignature = {
      "submit", {"name", "priority", "num_bytes", "num_slices"}, 3};
  PyObject* slots[4];
  std::string_view name;
  int64_t priority = 0, num_bytes = 0, num_slices = 1;
  if (!kSignature.sort(args, num_args, keywords, slots) || !to_view("name", slots[0], name) ||
      !to_int("priority", slots[1], priority) || !to_int("num_bytes", slots[2], num_bytes) ||
      !to_int("num_slices", slots[3], num_slices)) {
    return nullptr;
  }
  auto work = [&] { core(self).submit(name, priority, num_bytes, num_slices); };
  return with_gil(work) ? none() : nullptr;
}

PyObject* next(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  static constexpr Signature<1> kSignature = {"next", {"timeout_s"}, 1};
  PyObject* slots[1];
  double timeout_s = 0;
  if (!kSignature.sort(args, num_args, keywords, slots) ||
      !to_double("timeout_s", slots[0], timeout_s)) {
    return nullptr;
  }
  std::optional<Unit> unit;
  auto work = [&] { unit = core(self).next(timeout_s); };
  if (!(timeout_s == 0 ? with_gil(work) : without_gil(work))) return nullptr;
  if (!unit) return none();
  return Py_BuildValue("(NLL)", to_str(unit->name), (long long)unit->slice_idx,
                       (long long)unit->num_slices);
}

PyObject* done(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  static constexpr Signature<2> kSignature = {"done", {"name", "slice_idx"}, 1};
  PyObject* slots[2];
  std::string_view name;
  int64_t slice_idx = 0;
  if (!kSignature.sort(args, num_args, keywords, slots) || !to_view("name", slots[0], name) ||
      !to_int("slice_idx", slots[1], slice_idx)) {
    return nullptr;
  }
  return with_gil([&] { core(self).done(name, slice_idx); }) ? none() : nullptr;
}

PyObject* fail(PyObject* self, PyObject* text) {
  std::string_view view;
  if (!to_view("text", text, view)) return nullptr;
  return with_gil([&] { core(self).fail(view); }) ? none() : nullptr;
}

PyObject* wake(PyObject* self, PyObject*) {
  return with_gil([self] { core(self).wake(); }) ? none() : nullptr;
}

PyObject* poll(PyObject* self, PyObject*) {
  return with_gil([self] { core(self).poll(); }) ? none() : nullptr;
}

PyObject* close(PyObject* self, PyObject*) {
  return without_gil([self] { core(self).close(); }) ? none() : nullptr;
}

PyObject* log(PyObject* self, PyObject*) {
  std::vector<LogEntry> entries;
  if (!without_gil([&] { entries = core(self).log(); })) return nullptr;
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(entries.size()));
  for (size_t i = 0; list && i < entries.size(); ++i) {
    const LogEntry& entry = entries[i];
    PyObject* item =
        Py_BuildValue("(NLLLLddd)", to_str(entry.name), (long long)entry.slice_idx,
                      (long long)entry.num_slices, (long long)entry.priority,
                      (long long)entry.num_bytes, entry.submit_s, entry.issue_s, entry.done_s);
    if (!item || PyList_SetItem(list, static_cast<Py_ssize_t>(i), item) != 0) Py_CLEAR(list);
  }
  return list;
}

PyObject* get_failure(PyObject* self, void*) {
  std::optional<Failure> failure;
  if (!with_gil([&] { failure = core(self).failure(); })) return nullptr;
  if (!failure) return none();
  return Py_BuildValue("(LN)", (long long)failure->rank, to_str(failure->text));
}

template <auto kMethod>
PyObject* get_number(PyObject* self, void*) {
  return PyLong_FromLongLong(static_cast<long long>((core(self).*kMethod)()));
}

template <class Function>
PyCFunction method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

int add_scheduler_type(PyObject* module) {
  constexpr int kVector = METH_FASTCALL | METH_KEYWORDS;
  static PyMethodDef methods[] = {
      {"submit", method(submit), kVector, "Queue a request that is ready on this rank."},
      {"next", method(next), kVector, "Wait for the next unit: (name, slice_idx, num_slices)."},
      {"done", method(done), kVector, "A unit is complete: its credit comes back."},
      {"fail", fail, METH_O, "This rank has failed: every rank is told."},
      {"wake", wake, METH_NOARGS, "End a waiting next, or the one to come."},
      {"poll", poll, METH_NOARGS, "Look at connections without waiting."},
      {"close", close, METH_NOARGS, "Say goodbye and close the connections."},
      {"log", log, METH_NOARGS, "What was issued, in order."},
      {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef attributes[] = {
      {"failure", get_failure, nullptr, "(rank, text) of the first failure, or None.", nullptr},
      {"num_queued", get_number<&Scheduler::num_queued>, nullptr,
       "Requests with a slice not issued yet.", nullptr},
      {"bytes_in_flight", get_number<&Scheduler::bytes_in_flight>, nullptr,
       "Bytes issued and not done.", nullptr},
      {"total_issued", get_number<&Scheduler::total_issued>, nullptr, "Units ever issued.",
       nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("One lane's order of collectives: rank 0's priority queue is "
                                    "the schedule, the other ranks replay it.")},
      {Py_tp_new, reinterpret_cast<void*>(create)},
      {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
      {Py_tp_methods, methods},
      {Py_tp_getset, attributes},
      {0, nullptr}};
  static PyType_Spec spec = {"commlib._C.Scheduler", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (!type) return -1;
  const int added = PyModule_AddObjectRef(module, "Scheduler", type);
  Py_DECREF(type);
  return added;
}

}  // namespace commlib::scheduler
