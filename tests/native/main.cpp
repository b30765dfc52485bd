// Runs every test, or those whose name contains the first argument. A test that hangs is killed.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <exception>

#include "check.h"

int main(int argc, char** argv) {
  constexpr unsigned kTestSeconds = 60;
  int num_failed = 0, num_run = 0;
  for (const auto& test : testing::all_tests()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    std::printf("%s ... ", test.name);
    std::fflush(stdout);
    ::alarm(kTestSeconds);  // SIGALRM ends the process; the line above says in which test
    ++num_run;
    try {
      test.run();
      std::printf("ok\n");
    } catch (const std::exception& error) {
      ++num_failed;
      std::printf("FAILED\n  %s\n", error.what());
    }
  }
  std::printf("%d of %d tests passed\n", num_run - num_failed, num_run);
  return num_failed > 0 || num_run == 0;
}
