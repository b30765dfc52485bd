// One lane's order of collectives: the leader's priority queue is the schedule, the others replay
// it.
//
//   rank 0, the leader                            rank k, a follower
//
//   submit ─► heap by (priority, number)          submit ─► by name
//                │ next: the most urgent,               ▲
//                │ once credit allows                   │ next: the head, once submitted here
//                ├─► log ─► (issue)                announced, in order ─► log ─► (issue)
//                └── announce ───── control connection ────┘
//   done ─► credit comes back                     done
//
//   failures:  rank k ──► rank 0 ──► all; the first that a rank hears of stands
//   goodbye:   each way, before a connection is closed
//
// One connection from the leader to each follower, one message a unit (wire.h), no answers: nothing
// is negotiated. A rank without connections decides alone: one rank, or a transport that matches
// collectives by name. Each wait ends by its own timeout, and every rank watches its own clock:
//
//   announced, and not submitted here for timeout_s     this rank fails
//   submitted here, and nothing announced for timeout_s  rank 0 fails
//   a connection that ends without goodbye              the rank behind it fails
//
// Cost: a submit, next and done each O(log queued), under one mutex; one send a follower and unit.
#pragma once

#include <poll.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "scheduler/connection.h"
#include "scheduler/order_log.h"
#include "scheduler/requests.h"
#include "scheduler/wakeup.h"

namespace commlib::scheduler {

struct Options {
  int64_t rank = 0;
  int64_t num_ranks = 1;
  int64_t credit_bytes = 0;  // more: fuller link, and urgent requests wait for more bytes in flight
  double timeout_s = 60;     // more: slower ranks are waited for, and lost ones named later
  int64_t log_size = 65536;  // entries kept
};

// A slice of a request, to be issued now.
struct Unit {
  std::string name;
  int64_t slice_idx;
  int64_t num_slices;
};

struct Failure {
  int64_t rank;
  std::string text;
};

class Scheduler {
 public:
  static constexpr int64_t kMaxRequestBytes = int64_t{1} << 50;
  static constexpr size_t kMaxAhead = size_t{1} << 20;          // units announced, not issued here
  static constexpr size_t kMaxBacklogBytes = size_t{64} << 20;  // to a follower that does not read
  static constexpr size_t kMaxFailureBytes = 4096;

  // Takes over `fds`, connected stream sockets: on rank 0 one to each of ranks 1..n-1 in order, on
  // other ranks one to rank 0, or none anywhere. Throws std::invalid_argument, and then leaves the
  // descriptors to the caller; std::system_error where none are left for its own pipe.
  Scheduler(const Options& options, std::span<const int> fds);

  // Closes. No other call may be running.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // The request is ready on this rank. Lower priority goes first, ties in the order of submission.
  // Throws std::invalid_argument if a request of this name is queued or in flight, if the name is
  // empty or longer than 65535 bytes, for a number out of range, and after close.
  void submit(std::string_view name, int64_t priority, int64_t num_bytes, int64_t num_slices);

  // Waits for the next unit and returns it; nothing after timeout_s (0: at once), wake, close or a
  // failure. One thread at a time, else std::logic_error. Its bytes are in flight until done.
  std::optional<Unit> next(double timeout_s);

  // A unit is complete: its credit comes back. Throws std::invalid_argument if it is not in flight.
  void done(std::string_view name, int64_t slice_idx);

  // Makes the waiting `next` return nothing, or the one to come, once.
  void wake();

  // Looks at connections and clocks without waiting, for a rank that is busy elsewhere. What a
  // connection did not take at once is sent by next, poll, submit or close: a leader that calls
  // none of them may keep followers waiting.
  void poll();

  // This rank has failed: every rank is told. Text beyond kMaxFailureBytes is cut off.
  void fail(std::string_view text);

  // Says goodbye, closes the connections and ends a waiting `next`. What peers do not read within
  // timeout_s (one second after a failure) is lost. Idempotent.
  void close();

  // The first failure of any rank that this one has heard of.
  std::optional<Failure> failure() const;

  std::vector<LogEntry> log() const;
  uint64_t total_issued() const;
  size_t num_queued() const;        // requests with a slice not issued yet
  int64_t bytes_in_flight() const;  // units issued, not done

 private:
  struct Announced {
    std::string name;
    int64_t slice_idx;
    int64_t num_slices;
  };

  // Everything below needs mutex_, but what says otherwise.
  bool leads() const { return options_.rank == 0 || connections_.empty(); }
  int64_t rank_behind(size_t connection) const {
    return options_.rank == 0 ? static_cast<int64_t>(connection) + 1 : 0;
  }
  Request* next_request();
  std::optional<Unit> take(double now_s);
  void notify();
  void notify_if_due();

  // control.cpp
  void exchange();
  void receive(size_t connection);
  void handle(size_t connection, const Message& message);
  void add_announced(size_t connection, const Message& message);
  void malformed(size_t connection, const std::string& what);
  void announce(const Unit& unit);
  void set_failure(int64_t rank, std::string text, std::optional<size_t> heard_from = {});

  // waits.cpp
  double deadline_s() const;
  void check_deadline(double now_s);
  void wait(std::unique_lock<std::mutex>& lock, double until_s);
  void say_goodbye(double timeout_s, uint64_t num_issued);  // needs no mutex: all others are out

  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable idle_;  // no `next` is running
  bool in_next_ = false;
  bool waiting_ = false;  // in poll(2), without the mutex, until
  double awaited_s_ = 0;
  bool signalled_ = false;  // wakeup_ was signalled since
  bool woken_ = false;      // by wake()
  bool closed_ = false;
  Wakeup wakeup_;

  Requests requests_;
  OrderLog log_;
  int64_t num_in_flight_ = 0;
  int64_t bytes_in_flight_ = 0;
  std::optional<Failure> failure_;

  std::vector<Connection> connections_;
  std::optional<size_t> departed_;  // connection of the first rank that said goodbye
  std::vector<char> scratch_;
  std::vector<pollfd> polled_;   // by exchange
  std::vector<pollfd> awaited_;  // by wait, which drops the mutex

  // Followers: what was announced and is not issued here.
  std::deque<Announced> announced_;
  std::unordered_map<std::string, Announced> partly_;  // name -> its slice announced last
  double head_s_ = 0;                                  // since when announced_.front() is the head
  double news_s_ = 0;  // last time a unit was announced, or done here
};

}  // namespace commlib::scheduler
