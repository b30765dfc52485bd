// A small test runner: TEST(name) { ... CHECK(...) ... } registers itself; main.cpp runs them all.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace testing {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

struct Register {
  Register(const char* name, void (*run)()) { all_tests().push_back({name, run}); }
};

// Ends the test. It throws, so it also ends a rank's thread; ranks.h carries that to the test.
[[noreturn]] inline void fail(const char* file, int line, const std::string& text) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + text);
}

template <class Left, class Right>
void check_equal(const char* file, int line, const char* what, const Left& left,
                 const Right& right) {
  if (left == right) return;
  std::ostringstream text;
  text << what << " is " << left << ", expected " << right;
  fail(file, line, text.str());
}

inline void check_contains(const char* file, int line, const std::string& text,
                           const std::string& part) {
  if (text.find(part) == std::string::npos) {
    fail(file, line, "'" + text + "' does not contain '" + part + "'");
  }
}

template <class Error, class Statement>
void check_throws(const char* file, int line, const char* part, Statement statement) {
  std::string thrown = "nothing was thrown";
  try {
    statement();
  } catch (const Error& error) {
    thrown = error.what();
  }
  check_contains(file, line, thrown, part);
}

}  // namespace testing

#define TEST(name)                                               \
  static void name();                                            \
  static const ::testing::Register register_##name(#name, name); \
  static void name()

#define CHECK(condition)                                               \
  do {                                                                 \
    if (!(condition)) ::testing::fail(__FILE__, __LINE__, #condition); \
  } while (0)
#define CHECK_EQ(left, right) ::testing::check_equal(__FILE__, __LINE__, #left, left, right)
#define CHECK_CONTAINS(text, part) ::testing::check_contains(__FILE__, __LINE__, text, part)
#define CHECK_THROWS(type, part, statement) \
  ::testing::check_throws<type>(__FILE__, __LINE__, part, [&] { statement; })
