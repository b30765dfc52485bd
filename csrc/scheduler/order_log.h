// What was issued, in order: the newest entries, numbered from the first ever. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace commlib::scheduler {

// One unit. Times are seconds on std::chrono::steady_clock; done_s is NaN while it is in flight.
struct LogEntry {
  std::string name;
  int64_t slice_idx;
  int64_t num_slices;
  int64_t priority;
  int64_t num_bytes;  // of this slice
  double submit_s;
  double issue_s;
  double done_s = std::numeric_limits<double>::quiet_NaN();
};

class OrderLog {
 public:
  // Keeps the newest `size` entries (at least one).
  explicit OrderLog(size_t size) : size_(size) {}

  // Appends an entry and returns its number.
  uint64_t add(LogEntry entry) {
    if (entries_.size() < size_) {
      entries_.push_back(std::move(entry));
    } else {
      entries_[total_ % size_] = std::move(entry);
    }
    return total_++;
  }

  // The entry of a number, or nullptr where it is older than what is kept or not there yet.
  LogEntry* find(uint64_t number) {
    const bool kept = number < total_ && total_ - number <= entries_.size();
    return kept ? &entries_[number % size_] : nullptr;
  }

  // A copy of what is kept, oldest first.
  std::vector<LogEntry> entries() const {
    std::vector<LogEntry> ordered;
    ordered.reserve(entries_.size());
    for (uint64_t number = total_ - entries_.size(); number < total_; ++number) {
      ordered.push_back(entries_[number % size_]);
    }
    return ordered;
  }

  uint64_t total() const { return total_; }

 private:
  const size_t size_;
  uint64_t total_ = 0;
  std::deque<LogEntry> entries_;  // number k stands at k % size_; grows without moving
};

}  // namespace commlib::scheduler
