// Connections and clocks: announcements, failures, goodbyes, deadlines, and the wait for them.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <limits>

#include "scheduler/clock.h"
#include "scheduler/scheduler.h"

namespace commlib::scheduler {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int kMaxReads = 16;  // of one connection at a time: the others get their turn

std::string seconds(double duration_s) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", duration_s);
  return text;
}

// Milliseconds for poll(2), rounded up, so that nobody wakes just before the deadline.
int milliseconds(double duration_s) {
  return static_cast<int>(std::ceil(std::clamp(duration_s, 0.0, 3600.0) * 1e3));
}

// At most `size` bytes, not ending within a UTF-8 character.
std::string_view cut(std::string_view text, size_t size) {
  if (text.size() <= size) return text;
  while (size > 0 && (text[size] & 0xc0) == 0x80) --size;
  return text.substr(0, size);
}

pollfd interest(const Connection& connection) {
  const bool backlog = connection.backlog_bytes() > 0;
  pollfd entry{};
  entry.fd = connection.reads() || backlog ? connection.fd() : -1;  // -1: left out
  entry.events = static_cast<short>((connection.reads() ? POLLIN : 0) | (backlog ? POLLOUT : 0));
  return entry;
}

}  // namespace

// Sends what was kept and reads what is there, without waiting.
void Scheduler::exchange() {
  if (connections_.empty() || closed_) return;
  std::transform(connections_.begin(), connections_.end(), polled_.begin(), interest);
  if (::poll(polled_.data(), polled_.size(), 0) <= 0) return;
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (polled_[i].revents == 0) continue;
    connections_[i].flush();
    if (connections_[i].reads()) receive(i);
  }
}

void Scheduler::receive(size_t i) {
  Connection& connection = connections_[i];
  for (int round = 0; round < kMaxReads && connection.reads(); ++round) {
    const auto received = connection.receive(scratch_);
    if (received == Connection::Received::kNothing) return;
    if (received == Connection::Received::kEnd) {
      connection.stop_reading();
      connection.stop_writing();
      set_failure(rank_behind(i), "is gone: its control connection ended");
      return;
    }
    Message message;
    auto status = Decoder::Status::kMessage;
    while (connection.reads() &&
           (status = connection.decoder.next(message)) == Decoder::Status::kMessage) {
      handle(i, message);
    }
    if (status == Decoder::Status::kMalformed) malformed(i, connection.decoder.error());
  }
}

void Scheduler::handle(size_t i, const Message& message) {
  switch (message.kind) {
    case Kind::kAnnounce:
      add_announced(i, message);
      return;
    case Kind::kFailure:
      if (message.index >= static_cast<uint64_t>(options_.num_ranks)) {
        malformed(i, "rank = " + std::to_string(message.index));
      } else {
        set_failure(message.index, message.text, i);
      }
      return;
    case Kind::kGoodbye:
      connections_[i].stop_reading();
      connections_[i].stop_writing();
      if (!departed_) departed_ = i;
      if (options_.rank == 0 && message.count < log_.total()) {
        const LogEntry* missed = log_.find(message.count);
        set_failure(rank_behind(i), "has left; it does not take part in " +
                                        (missed ? "'" + missed->name + "'" : "what was announced"));
      }
  }
}

// Followers: keeps one unit; slices of a request must come in order.
void Scheduler::add_announced(size_t i, const Message& message) {
  if (options_.rank == 0) return malformed(i, "an announcement, which only rank 0 may make");
  const int64_t slice_idx = message.index, num_slices = static_cast<int64_t>(message.count);
  const auto partly = partly_.find(message.text);
  const bool in_order = partly == partly_.end() ? slice_idx == 0
                                                : slice_idx == partly->second.slice_idx + 1 &&
                                                      num_slices == partly->second.num_slices;
  if (!in_order) {
    return malformed(i, "slice " + std::to_string(slice_idx) + " of " + std::to_string(num_slices) +
                            " of '" + message.text + "', out of order");
  }
  if (announced_.size() == kMaxAhead) {
    connections_[i].stop_reading();
    return set_failure(options_.rank, "is more than " + std::to_string(kMaxAhead) +
                                          " units behind rank 0, at '" + announced_.front().name +
                                          "'");
  }
  if (num_slices > 1) {
    if (slice_idx + 1 < num_slices) {
      partly_[message.text] = {{}, slice_idx, num_slices};
    } else {
      partly_.erase(partly);
    }
  }
  news_s_ = now_s();
  if (announced_.empty()) head_s_ = news_s_;
  announced_.push_back({message.text, slice_idx, num_slices});
}

void Scheduler::malformed(size_t i, const std::string& what) {
  connections_[i].stop_reading();
  set_failure(rank_behind(i), "sent a malformed control message: " + what);
}

// Tells every follower that `unit` goes next.
void Scheduler::announce(const Unit& unit) {
  if (connections_.empty()) return;
  const std::string bytes = encode(Kind::kAnnounce, static_cast<uint32_t>(unit.slice_idx),
                                   static_cast<uint64_t>(unit.num_slices), unit.name);
  for (size_t i = 0; i < connections_.size(); ++i) {
    connections_[i].send(bytes);
    if (connections_[i].backlog_bytes() > kMaxBacklogBytes) {
      connections_[i].stop_writing();
      set_failure(rank_behind(i), "does not read its control connection: " +
                                      std::to_string(kMaxBacklogBytes >> 20) + " MiB wait for it");
    }
  }
}

// The first failure stands, and is passed on to every rank but the one it was heard from.
void Scheduler::set_failure(int64_t rank, std::string text, std::optional<size_t> heard_from) {
  if (failure_) return;
  failure_ = {rank, std::string(cut(text, kMaxFailureBytes))};
  if (closed_) return;
  const std::string bytes = encode(Kind::kFailure, static_cast<uint32_t>(rank), 0, failure_->text);
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (i != heard_from) connections_[i].send(bytes);
  }
  notify();
}

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
  std::transform(connections_.begin(), connections_.end(), awaited_.begin(), interest);
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
