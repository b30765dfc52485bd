// The clock of log, deadlines and waits: steady_clock, which is Python's time.perf_counter on
// Linux.
#pragma once

#include <chrono>

namespace commlib::scheduler {

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace commlib::scheduler
