// The native side of bench/scheduler.py, which compiles and runs it. Prints nanoseconds, one number
// a line, under a line with the name of the series.
//
//   queue DEPTH COUNT        latency, cycle, burst and, for DEPTH 1, handover: as in scheduler.py
//   announce RANKS COUNT     next: in the leader's next; reach: from its submit until the last
//                            follower has the unit
#include "scheduler/scheduler.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "scheduler/clock.h"

using commlib::scheduler::now_s;
using commlib::scheduler::Options;
using commlib::scheduler::Scheduler;

namespace {

constexpr int64_t kCredit = int64_t{1} << 40;
constexpr double kTimeout = 60;

struct Series {
  const char* name;
  std::vector<double> samples{};

  void add(double duration_s) { samples.push_back(duration_s * 1e9); }
  void print() const {
    std::puts(name);
    for (double sample : samples) std::printf("%.0f\n", sample);
  }
};

std::vector<std::string> make_names(size_t count) {
  std::vector<std::string> names;
  for (size_t i = 0; i < count; ++i) names.push_back("table." + std::to_string(i) + ".values");
  return names;
}

// With `depth` requests queued, one more urgent is submitted, issued and completed.
void run_hold(size_t depth, const std::vector<std::string>& names) {
  Scheduler lane({0, 1, kCredit, kTimeout}, {});
  for (size_t i = 0; i + 1 < depth; ++i) lane.submit("queued." + std::to_string(i), 1, 100, 1);
  Series latency{"latency"}, cycle{"cycle"};
  for (const std::string& name : names) {
    const double begin = now_s();
    lane.submit(name, 0, 100, 1);
    lane.next(0);
    const double issued = now_s();
    lane.done(name, 0);
    latency.add(issued - begin);
    cycle.add(now_s() - begin);
  }
  latency.print();
  cycle.print();
}

// A thread issues and completes bursts of `depth`; the next burst comes when one is complete.
void run_bursts(size_t depth, const std::vector<std::string>& names) {
  Scheduler lane({0, 1, kCredit, kTimeout}, {});
  std::counting_semaphore<> complete(0);
  std::vector<double> issued_s(names.size());
  std::thread thread([&] {
    for (size_t i = 0; i < names.size(); ++i) {
      const auto unit = lane.next(kTimeout);
      issued_s[i] = now_s();
      lane.done(unit->name, unit->slice_idx);
      if ((i + 1) % depth == 0) complete.release();
    }
  });
  Series burst{"burst"}, handover{"handover"};
  for (size_t first = 0; first < names.size(); first += depth) {
    const double begin = now_s();
    for (size_t i = first; i < first + depth; ++i) {
      lane.submit(names[i], static_cast<int64_t>(i % 7), 100, 1);
    }
    complete.acquire();
    burst.add((now_s() - begin) / static_cast<double>(depth));
    if (depth == 1) handover.add(issued_s[first] - begin);
  }
  thread.join();
  burst.print();
  if (depth == 1) handover.print();
}

void must(bool good, const char* what) {
  if (good) return;
  std::perror(what);
  std::exit(1);
}

// Two ends of a TCP connection over loopback.
std::pair<int, int> connect_loopback() {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  must(::bind(listener, generic, size) == 0 && ::listen(listener, 1) == 0, "listen");
  must(::getsockname(listener, generic, &size) == 0, "getsockname");
  const int left = ::socket(AF_INET, SOCK_STREAM, 0);
  must(::connect(left, generic, size) == 0, "connect");
  const int right = ::accept(listener, nullptr, nullptr);
  must(right >= 0, "accept");
  ::close(listener);
  return {left, right};
}

// The leader issues one unit after another, each when all followers have completed the last.
void run_announce(int64_t num_ranks, const std::vector<std::string>& names) {
  std::vector<int> leader_fds;
  std::vector<std::unique_ptr<Scheduler>> followers;
  for (int64_t rank = 1; rank < num_ranks; ++rank) {
    const auto [left, right] = connect_loopback();
    leader_fds.push_back(left);
    followers.push_back(std::make_unique<Scheduler>(Options{rank, num_ranks, kCredit, kTimeout},
                                                    std::vector{right}));
  }
  Scheduler leader({0, num_ranks, kCredit, kTimeout}, leader_fds);
  std::counting_semaphore<> complete(0);
  std::vector<std::vector<double>> issued_s(followers.size());
  std::vector<std::thread> threads;
  for (size_t f = 0; f < followers.size(); ++f) {
    threads.emplace_back([&, f] {
      for (const std::string& name : names) followers[f]->submit(name, 0, 100, 1);
      complete.release();
      for (size_t i = 0; i < names.size(); ++i) {
        const auto unit = followers[f]->next(kTimeout);
        issued_s[f].push_back(now_s());
        followers[f]->done(unit->name, unit->slice_idx);
        complete.release();
      }
    });
  }
  auto await_followers = [&] {
    for (size_t f = 0; f < followers.size(); ++f) complete.acquire();
  };
  await_followers();
  Series next{"next"}, reach{"reach"};
  for (size_t i = 0; i < names.size(); ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));  // followers are asleep again
    const double begin = now_s();
    leader.submit(names[i], 0, 100, 1);
    const double submitted = now_s();
    leader.next(0);
    next.add(now_s() - submitted);
    leader.done(names[i], 0);
    await_followers();
    double last = begin;
    for (const auto& times : issued_s) last = std::max(last, times[i]);
    reach.add(last - begin);
  }
  for (std::thread& thread : threads) thread.join();
  next.print();
  if (num_ranks > 1) reach.print();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "%s queue DEPTH COUNT | announce RANKS COUNT\n", argv[0]);
    return 2;
  }
  const auto size = static_cast<size_t>(std::atoll(argv[2]));
  const auto names = make_names(static_cast<size_t>(std::atoll(argv[3])));
  if (std::strcmp(argv[1], "announce") == 0) {
    run_announce(static_cast<int64_t>(size), names);
  } else {
    run_hold(size, names);
    run_bursts(size, names);
  }
}
