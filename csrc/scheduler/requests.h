// The requests of one rank: which are queued, which are in flight, which is most urgent.
//
//   add ──► queued, in submission order ──issue (its last slice)──► in flight ──complete──► gone
//              └─ heap by (priority, submission number), where this rank decides the order
//
// A request is in the heap once, whatever its number of slices, so a more urgent one passes between
// two slices without anything being moved. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace commlib::scheduler {

struct Request {
  static constexpr uint64_t kDone = UINT64_MAX;

  std::string name;
  int64_t priority = 0;
  int64_t num_bytes = 0;
  int64_t num_slices = 1;
  double submit_s = 0;
  std::vector<uint64_t> issued{};  // number in the log of each slice issued so far, or kDone
  int64_t num_done = 0;
  std::list<Request>::iterator place{};  // kept by Requests

  int64_t next_slice() const { return static_cast<int64_t>(issued.size()); }

  // Bytes of one slice; the slices add up to num_bytes.
  int64_t unit_bytes(int64_t slice_idx) const {
    return num_bytes / num_slices + (slice_idx < num_bytes % num_slices);
  }

  bool is_in_flight(int64_t slice_idx) const {
    return slice_idx >= 0 && slice_idx < next_slice() &&
           issued[static_cast<size_t>(slice_idx)] != kDone;
  }
};

class Requests {
 public:
  // `ranked`: keep the heap, so that most_urgent may be asked.
  explicit Requests(bool ranked) : ranked_(ranked) {}

  // The request called `name`, or nullptr. Requests stay where they are until they are complete.
  Request* find(std::string_view name) {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }

  // Queues a request whose name is not here yet.
  void add(Request request) {
    Request& added = queued_.emplace_back(std::move(request));
    added.place = std::prev(queued_.end());
    by_name_.emplace(added.name, &added);
    if (ranked_) {
      heap_.push_back({added.priority, num_added_++, &added});
      std::push_heap(heap_.begin(), heap_.end(), later);
    }
  }

  // The queued request with the lowest (priority, submission number), or nullptr.
  Request* most_urgent() { return heap_.empty() ? nullptr : heap_.front().request; }

  // The first submitted of the queued requests, or nullptr.
  const Request* oldest() const { return queued_.empty() ? nullptr : &queued_.front(); }

  // Notes that the next slice was issued, as number `log_idx`. Where ranked, `request` is
  // most_urgent().
  void issue(Request& request, uint64_t log_idx) {
    request.issued.push_back(log_idx);
    if (request.next_slice() < request.num_slices) return;
    in_flight_.splice(in_flight_.end(), queued_, request.place);
    if (ranked_) {
      std::pop_heap(heap_.begin(), heap_.end(), later);
      heap_.pop_back();
    }
  }

  // Notes that a slice in flight is complete; the request is destroyed with its last.
  void complete(Request& request, int64_t slice_idx) {
    request.issued[static_cast<size_t>(slice_idx)] = Request::kDone;
    if (++request.num_done < request.num_slices) return;
    by_name_.erase(request.name);
    in_flight_.erase(request.place);
  }

  size_t num_queued() const { return queued_.size(); }

 private:
  struct Rank {
    int64_t priority;
    uint64_t number;
    Request* request;
  };
  static bool later(const Rank& a, const Rank& b) {
    return a.priority != b.priority ? a.priority > b.priority : a.number > b.number;
  }

  const bool ranked_;
  uint64_t num_added_ = 0;
  std::list<Request> queued_, in_flight_;  // moved between by splice: addresses stay
  std::unordered_map<std::string_view, Request*> by_name_;
  std::vector<Rank> heap_;
};

}  // namespace commlib::scheduler
