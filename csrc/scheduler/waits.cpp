// What ends by time: deadlines, the wait of `next`, and closing.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "scheduler/clock.h"
#include "scheduler/scheduler.h"

namespace commlib::scheduler {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

std::string seconds(double duration_s) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", duration_s);
  return text;
}

// Milliseconds for poll(2), rounded up, so that nobody wakes just before the deadline.
int milliseconds(double duration_s) {
  return static_cast<int>(std::ceil(std::clamp(duration_s, 0.0, 3600.0) * 1e3));
}

}  // namespace

// When this rank has waited long enough: only followers wait for others.
double Scheduler::deadline_s() const {
  if (leads()) return kNever;
  if (!announced_.empty()) return head_s_ + options_.timeout_s;
  if (requests_.num_queued() == 0) return kNever;
  return std::max(requests_.oldest()->submit_s, news_s_) + options_.timeout_s;
}

void Scheduler::check_deadline(double now_s) {
  if (leads() || failure_ || next_request()) return;
  const bool departed = departed_ && announced_.empty() && requests_.num_queued() > 0;
  if (departed) {
    set_failure(0, "has left; it never announced '" + requests_.oldest()->name + "'");
  } else if (now_s >= deadline_s()) {
    if (!announced_.empty()) {
      set_failure(options_.rank, "has not submitted '" + announced_.front().name +
                                     "', which rank 0 announced " + seconds(now_s - head_s_) +
                                     " ago");
    } else {
      const auto oldest = requests_.oldest();
      set_failure(0, "has not announced '" + oldest->name + "', which rank " +
                         std::to_string(options_.rank) + " submitted " +
                         seconds(now_s - oldest->submit_s) + " ago: rank 0 has not submitted it");
    }
  }
}

// Sleeps, without the mutex, until a connection or the pipe is readable, or until_s.
void Scheduler::wait(std::unique_lock<std::mutex>& lock, double until_s) {
  std::transform(connections_.begin(), connections_.end(), awaited_.begin(),
                 [](const Connection& connection) { return connection.interest(); });
  awaited_.back() = {wakeup_.fd(), POLLIN, 0};
  awaited_s_ = until_s;
  const int wait_ms = milliseconds(until_s - now_s());
  waiting_ = true;
  lock.unlock();
  ::poll(awaited_.data(), awaited_.size(), wait_ms);
  lock.lock();
  waiting_ = false;
  if (signalled_) wakeup_.drain();
  signalled_ = false;
}

void Scheduler::poll() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  exchange();
  check_deadline(now_s());
  notify_if_due();  // what was read here cannot end the poll(2) of `next` any more
}

void Scheduler::fail(std::string_view text) {
  const std::lock_guard lock(mutex_);
  set_failure(options_.rank, std::string(text));
}

void Scheduler::close() {
  double timeout_s = options_.timeout_s;
  uint64_t num_issued = 0;
  {
    std::unique_lock lock(mutex_);
    if (closed_) return;
    exchange();
    closed_ = true;
    notify();
    idle_.wait(lock, [this] { return !in_next_; });  // it is awake, and leaves
    if (failure_) timeout_s = std::min(timeout_s, 1.0);
    num_issued = log_.total();
  }
  say_goodbye(timeout_s, num_issued);
  wakeup_.close();
}

void Scheduler::say_goodbye(double timeout_s, uint64_t num_issued) {
  const std::string bytes = encode(Kind::kGoodbye, 0, num_issued, {});
  for (Connection& connection : connections_) connection.send(bytes);
  const double until = now_s() + timeout_s;
  for (;;) {
    std::vector<pollfd> late;
    for (const Connection& connection : connections_) {
      if (connection.backlog_bytes() > 0) late.push_back({connection.fd(), POLLOUT, 0});
    }
    const double left = until - now_s();
    if (late.empty() || left <= 0) break;
    ::poll(late.data(), late.size(), milliseconds(left));
    for (Connection& connection : connections_) connection.flush();
  }
  for (Connection& connection : connections_) connection.close(scratch_);
}

}  // namespace commlib::scheduler
