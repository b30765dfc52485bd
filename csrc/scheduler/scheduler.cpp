// What callers do: submit, next, done.
#include "scheduler/scheduler.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>

#include "scheduler/clock.h"

namespace commlib::scheduler {

namespace {

template <class... Args>
[[noreturn]] void refuse(const Args&... parts) {
  std::ostringstream text;
  ((text << parts), ...);
  throw std::invalid_argument(text.str());
}

// Returns the options if they and the sockets are usable; else throws.
const Options& checked(const Options& options, std::span<const int> fds) {
  const auto& [rank, num_ranks, credit_bytes, timeout_s, log_size] = options;
  if (num_ranks < 1) refuse("num_ranks = ", num_ranks, ": at least 1");
  if (rank < 0 || rank >= num_ranks) refuse("rank = ", rank, ": from 0 to ", num_ranks - 1);
  if (credit_bytes < 0) refuse("credit_bytes = ", credit_bytes, ": not negative");
  if (!(timeout_s > 0) || std::isinf(timeout_s)) {
    refuse("timeout_s = ", timeout_s, ": positive and finite");
  }
  if (log_size < 1) refuse("log_size = ", log_size, ": at least 1");
  const size_t expected = rank == 0 ? static_cast<size_t>(num_ranks) - 1 : 1;
  if (!fds.empty() && fds.size() != expected) {
    refuse("fds has ", fds.size(), " descriptors; rank ", rank, " of ", num_ranks, " takes ",
           expected, ", or none where each rank decides alone");
  }
  for (size_t i = 0; i < fds.size(); ++i) {
    if (!is_connected_stream(fds[i])) {
      refuse("fds[", i, "] = ", fds[i], " is not a connected stream socket");
    }
    for (size_t j = 0; j < i; ++j) {
      if (fds[i] == fds[j]) refuse("fds[", j, "] and fds[", i, "] are both ", fds[i]);
    }
  }
  return options;
}

}  // namespace

Scheduler::Scheduler(const Options& options, std::span<const int> fds)
    : options_(checked(options, fds)),
      requests_(options.rank == 0 || fds.empty()),
      log_(static_cast<size_t>(options.log_size)),
      scratch_(fds.empty() ? 0 : 65536) {
  connections_.reserve(fds.size());
  polled_.resize(fds.size());
  awaited_.resize(fds.size() + 1);
  for (int fd : fds) connections_.emplace_back(fd);
  news_s_ = now_s();
}

Scheduler::~Scheduler() { close(); }

void Scheduler::submit(std::string_view name, int64_t priority, int64_t num_bytes,
                       int64_t num_slices) {
  if (name.empty()) refuse("name is empty");
  if (name.size() > kMaxTextBytes) {
    refuse("name has ", name.size(), " bytes, at most ", kMaxTextBytes, ": '", name.substr(0, 40),
           "...'");
  }
  if (num_bytes < 0 || num_bytes > kMaxRequestBytes) {
    refuse("num_bytes = ", num_bytes, " of '", name, "': from 0 to ", kMaxRequestBytes);
  }
  if (num_slices < 1 || num_slices > INT32_MAX) {
    refuse("num_slices = ", num_slices, " of '", name, "': from 1 to ", INT32_MAX);
  }
  const std::lock_guard lock(mutex_);
  if (closed_) refuse("'", name, "' was submitted on rank ", options_.rank, " after close");
  if (requests_.find(name)) {
    refuse("'", name, "' is queued or in flight already on rank ", options_.rank,
           ": give each request its own name (table, step, round)");
  }
  requests_.add({std::string(name), priority, num_bytes, num_slices, now_s()});
  for (Connection& connection : connections_) connection.flush();
  if (departed_) check_deadline(now_s());
  notify_if_due();
}

// The request whose next slice may be issued now, or nullptr.
Request* Scheduler::next_request() {
  if (leads()) {
    Request* top = requests_.most_urgent();
    if (!top || num_in_flight_ == 0) return top;
    const int64_t unit_bytes = top->unit_bytes(top->next_slice());
    return unit_bytes <= options_.credit_bytes - bytes_in_flight_ ? top : nullptr;
  }
  if (announced_.empty()) return nullptr;
  const Announced& head = announced_.front();
  Request* request = requests_.find(head.name);
  // Where the leader is a round ahead, an earlier request of this name is still in flight here.
  return request && request->next_slice() == head.slice_idx ? request : nullptr;
}

std::optional<Unit> Scheduler::take(double now_s) {
  Request* request = next_request();
  if (!request) return {};
  if (!leads()) {
    request->num_slices = announced_.front().num_slices;
    announced_.pop_front();
    head_s_ = now_s;
  } else if (departed_) {
    set_failure(rank_behind(*departed_),
                "has left; it does not take part in '" + request->name + "'");
    return {};
  }
  Unit unit{request->name, request->next_slice(), request->num_slices};
  const int64_t unit_bytes = request->unit_bytes(unit.slice_idx);
  const uint64_t log_idx = log_.add({unit.name, unit.slice_idx, unit.num_slices, request->priority,
                                     unit_bytes, request->submit_s, now_s});
  requests_.issue(*request, log_idx);
  ++num_in_flight_;
  bytes_in_flight_ += unit_bytes;
  if (leads()) announce(unit);
  return unit;
}

std::optional<Unit> Scheduler::next(double timeout_s) {
  if (!(timeout_s >= 0) || std::isinf(timeout_s)) {
    refuse("timeout_s = ", timeout_s, ": finite and not negative");
  }
  std::unique_lock lock(mutex_);
  if (in_next_) throw std::logic_error("next is running in another thread: one at a time");
  in_next_ = true;
  struct Leave {
    Scheduler& scheduler;
    ~Leave() {
      scheduler.in_next_ = false;
      scheduler.idle_.notify_all();
    }
  } leave{*this};
  double now = now_s();
  const double until = now + timeout_s;
  for (;;) {
    exchange();
    if (closed_ || failure_) return {};
    if (woken_) {
      woken_ = false;
      return {};
    }
    if (auto unit = take(now)) return unit;
    check_deadline(now);
    if (failure_ || now >= until) return {};
    wait(lock, std::min(until, deadline_s()));
    now = now_s();
  }
}

void Scheduler::done(std::string_view name, int64_t slice_idx) {
  const std::lock_guard lock(mutex_);
  Request* request = requests_.find(name);
  if (!request || !request->is_in_flight(slice_idx)) {
    refuse("slice ", slice_idx, " of '", name, "' is not in flight on rank ", options_.rank);
  }
  news_s_ = now_s();
  if (LogEntry* entry = log_.find(request->issued[static_cast<size_t>(slice_idx)])) {
    entry->done_s = news_s_;
  }
  --num_in_flight_;
  bytes_in_flight_ -= request->unit_bytes(slice_idx);
  requests_.complete(*request, slice_idx);
  notify_if_due();
}

void Scheduler::wake() {
  const std::lock_guard lock(mutex_);
  woken_ = true;
  notify();
}

void Scheduler::notify() {
  if (!waiting_ || signalled_) return;
  signalled_ = true;
  wakeup_.signal();
}

// Ends the wait of `next` where it would now do something, or has to look at a clock earlier.
void Scheduler::notify_if_due() {
  if (!waiting_ || signalled_) return;
  if (failure_ || next_request() || deadline_s() < awaited_s_) notify();
}

std::optional<Failure> Scheduler::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::vector<LogEntry> Scheduler::log() const {
  const std::lock_guard lock(mutex_);
  return log_.entries();
}

uint64_t Scheduler::total_issued() const {
  const std::lock_guard lock(mutex_);
  return log_.total();
}

size_t Scheduler::num_queued() const {
  const std::lock_guard lock(mutex_);
  return requests_.num_queued();
}

int64_t Scheduler::bytes_in_flight() const {
  const std::lock_guard lock(mutex_);
  return bytes_in_flight_;
}

}  // namespace commlib::scheduler
