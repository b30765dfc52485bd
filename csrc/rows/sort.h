// Stable sort of (id, position) pairs by id: least significant digit first, 11 bits a pass.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

namespace commlib {

struct IdAt {
  int64_t id;
  int64_t at;
};

// The n ids with their positions, ids ascending, equal ids in order of occurrence.
// ids must lie in [0, limit). Memory: 2 n pairs while it runs.
inline std::unique_ptr<IdAt[]> sort_ids(const int64_t* ids, int64_t n, int64_t limit) {
  constexpr int kBits = 11;
  constexpr int64_t kDigits = int64_t{1} << kBits;
  auto from = std::make_unique_for_overwrite<IdAt[]>(static_cast<size_t>(n));
  auto to = std::make_unique_for_overwrite<IdAt[]>(static_cast<size_t>(n));
  bool sorted = true;
  for (int64_t i = 0; i < n; ++i) {
    from[i] = {ids[i], i};
    if (i > 0) sorted &= ids[i - 1] <= ids[i];
  }
  if (sorted) return from;
  for (int shift = 0; shift < 63 && ((limit - 1) >> shift) > 0; shift += kBits) {
    std::array<int64_t, kDigits> next{};
    for (int64_t i = 0; i < n; ++i) ++next[(from[i].id >> shift) & (kDigits - 1)];
    int64_t sum = 0;
    for (int64_t& count : next) sum += std::exchange(count, sum);
    for (int64_t i = 0; i < n; ++i) to[next[(from[i].id >> shift) & (kDigits - 1)]++] = from[i];
    std::swap(from, to);
  }
  return from;
}

}  // namespace commlib
