// Places of rows in a sketch on the host: bucket and sign in one word, and checks of a sketch's
// size.
#pragma once

#include <cstdint>
#include <memory>

#include "common/check.h"
#include "common/parallel.h"
#include "sketch/sketch.h"

namespace commlib {

// bucket << 1 | is_negative
using Place = uint64_t;
inline int64_t bucket(Place p) { return static_cast<int64_t>(p >> 1); }
inline bool negative(Place p) { return (p & 1) != 0; }

// places[j * n + i]: where row ids[i] goes in table j.
inline std::unique_ptr<Place[]> place_rows(const int64_t* ids, int64_t n, int num_hashes,
                                           int64_t num_buckets, int64_t seed) {
  auto places = std::make_unique_for_overwrite<Place[]>(static_cast<size_t>(n * num_hashes));
  Place* out = places.get();
  const uint32_t s = static_cast<uint32_t>(seed);
  parallel_items(n, 64 * num_hashes, [=](int64_t begin, int64_t end) {
    for (int j = 0; j < num_hashes; ++j) {
      for (int64_t i = begin; i < end; ++i) {
        out[j * n + i] = static_cast<Place>(bucket_of(ids[i], num_buckets, s, j)) << 1 |
                         static_cast<Place>(is_negative(ids[i], s, j));
      }
    }
  });
  return places;
}

inline void check_sketch_size(int64_t num_hashes, int64_t num_buckets, int64_t seed) {
  COMMLIB_CHECK(num_hashes >= 1 && num_hashes <= kMaxHashes, "ValueError",
                "num_hashes = ", num_hashes, " is outside [1, ", kMaxHashes, "]");
  COMMLIB_CHECK(num_buckets >= 1 && num_buckets < (int64_t{1} << 32), "ValueError",
                "num_buckets = ", num_buckets, " is outside [1, 2^32)");
  COMMLIB_CHECK(seed >= 0 && seed < (int64_t{1} << 32), "ValueError", "seed = ", seed,
                " is outside [0, 2^32)");
}

}  // namespace commlib
