// What goes over the connections: announcements, failures, goodbyes.
#include <algorithm>

#include "scheduler/clock.h"
#include "scheduler/scheduler.h"

namespace commlib::scheduler {

namespace {

constexpr int kMaxReads = 16;  // of one connection at a time: the others get their turn

// At most `size` bytes, not ending within a UTF-8 character.
std::string_view cut(std::string_view text, size_t size) {
  if (text.size() <= size) return text;
  while (size > 0 && (text[size] & 0xc0) == 0x80) --size;
  return text.substr(0, size);
}

}  // namespace

// Sends what was kept and reads what is there, without waiting.
void Scheduler::exchange() {
  if (connections_.empty() || closed_) return;
  std::transform(connections_.begin(), connections_.end(), polled_.begin(),
                 [](const Connection& connection) { return connection.interest(); });
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

}  // namespace commlib::scheduler
