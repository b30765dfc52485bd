// Errors that carry values. COMMLIB_CHECK(cond, "IndexError", "indices[", i, "] = ", x, ...) throws
// std::runtime_error("IndexError: indices[3] = 9 ..."); commlib/ops.py turns the first word back
// into the Python type. Never call it inside parallel_for.
#pragma once

#include <sstream>
#include <stdexcept>

namespace commlib {

template <class... Args>
[[noreturn]] __attribute__((noinline, cold)) void fail(const char* kind, const Args&... parts) {
  std::ostringstream text;
  text << kind << ": ";
  ((text << parts), ...);
  throw std::runtime_error(text.str());
}

}  // namespace commlib

#define COMMLIB_CHECK(cond, kind, ...)                                    \
  do {                                                                    \
    if (__builtin_expect(!(cond), 0)) ::commlib::fail(kind, __VA_ARGS__); \
  } while (0)
