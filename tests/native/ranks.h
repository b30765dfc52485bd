// Threads as ranks: schedulers joined by socket pairs, in one process.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "scheduler/clock.h"
#include "scheduler/scheduler.h"

namespace testing {

using commlib::scheduler::Failure;
using commlib::scheduler::LogEntry;
using commlib::scheduler::now_s;
using commlib::scheduler::Options;
using commlib::scheduler::Scheduler;
using commlib::scheduler::Unit;

constexpr double kLong = 20;  // a wait that no passing test reaches the end of

struct Pair {
  int left = -1, right = -1;
  Pair() {
    int fds[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0) throw std::runtime_error("socketpair");
    left = fds[0], right = fds[1];
  }
};

using Ranks = std::vector<std::unique_ptr<Scheduler>>;

inline Ranks make_ranks(int64_t num_ranks, int64_t credit_bytes = 1000, double timeout_s = kLong) {
  std::vector<int> leader;
  Ranks ranks(static_cast<size_t>(num_ranks));
  for (int64_t rank = 1; rank < num_ranks; ++rank) {
    const Pair pair;
    leader.push_back(pair.left);
    ranks[static_cast<size_t>(rank)] = std::make_unique<Scheduler>(
        Options{rank, num_ranks, credit_bytes, timeout_s}, std::vector{pair.right});
  }
  ranks[0] = std::make_unique<Scheduler>(Options{0, num_ranks, credit_bytes, timeout_s}, leader);
  return ranks;
}

// Runs every function in a thread of its own; throws what the first of them threw.
inline void run_threads(const std::vector<std::function<void()>>& functions) {
  std::vector<std::exception_ptr> errors(functions.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < functions.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        functions[i]();
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// "a/0 b/0 b/1" of what was issued.
inline std::string order(const Scheduler& scheduler) {
  std::string text;
  for (const LogEntry& entry : scheduler.log()) {
    text += (text.empty() ? "" : " ") + entry.name + "/" + std::to_string(entry.slice_idx);
  }
  return text;
}

// Issues and completes units until there is none; waits for each up to `timeout_s`.
inline void drain(Scheduler& scheduler, double timeout_s = 0) {
  while (auto unit = scheduler.next(timeout_s)) scheduler.done(unit->name, unit->slice_idx);
}

// Issues and completes exactly `count` units.
inline void replay(Scheduler& scheduler, uint64_t count) {
  while (scheduler.total_issued() < count) {
    const auto unit = scheduler.next(kLong);
    if (!unit)
      fail(__FILE__, __LINE__,
           "no unit: " + (scheduler.failure() ? scheduler.failure()->text : "late"));
    scheduler.done(unit->name, unit->slice_idx);
  }
}

// Waits until `num_left` ranks, this one included, are through. A leader that went away instead
// would keep back what its sockets had not taken yet.
inline void finish(Scheduler& scheduler, std::atomic<int>& num_left) {
  --num_left;
  for (const double until = now_s() + kLong; num_left > 0 && now_s() < until;) {
    scheduler.poll();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Polls until the rank hears of a failure; "rank: text".
inline std::string await_failure(Scheduler& scheduler) {
  for (const double until = now_s() + kLong; now_s() < until;) {
    scheduler.poll();
    if (const auto failure = scheduler.failure()) {
      return std::to_string(failure->rank) + ": " + failure->text;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return "no failure";
}

// "name/slice_idx" or "nothing". A wait of kLong has to be ended by somebody, not by time.
inline std::string next_name(Scheduler& scheduler, double timeout_s = 0) {
  const double begin = now_s();
  const auto unit = scheduler.next(timeout_s);
  CHECK(now_s() - begin < kLong / 2);
  return unit ? unit->name + "/" + std::to_string(unit->slice_idx) : "nothing";
}

}  // namespace testing
