// parallel_for over items of a known weight, on torch's own thread pool.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace commlib {

inline constexpr int64_t kMinBytesPerThread =
    64 * 1024;  // below it a thread costs more than it saves

// Calls f(begin, end) on disjoint ranges that cover [0, n). bytes_per_item: memory that one item
// moves. f must not throw.
template <class F>
void parallel_items(int64_t n, int64_t bytes_per_item, const F& f) {
  if (n <= 0) return;
  const int64_t grain =
      std::max<int64_t>(1, kMinBytesPerThread / std::max<int64_t>(1, bytes_per_item));
  if (n <= grain) {
    f(int64_t{0}, n);
  } else {
    torch::stable::parallel_for(0, n, grain, f);
  }
}

// How many parts to cut work of `bytes` into where the cut itself is chosen by the caller.
inline int64_t num_parts(int64_t bytes) {
  const int64_t most = static_cast<int64_t>(torch::stable::get_num_threads());
  return std::clamp<int64_t>(bytes / kMinBytesPerThread, 1, std::max<int64_t>(1, most));
}

// Calls f(part) for part in [0, parts), each on its own thread where there is one.
template <class F>
void parallel_parts(int64_t parts, const F& f) {
  if (parts == 1) {
    f(int64_t{0});
    return;
  }
  torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) f(part);
  });
}

}  // namespace commlib
