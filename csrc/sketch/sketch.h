// The count sketch of rows: where row `id` goes in table j, and with which sign. Host and device.
#pragma once

#include "common/hash.h"

namespace commlib {

inline constexpr int kMaxHashes = 16;

// Bucket in [0, num_buckets), num_buckets < 2^32, by multiply-shift.
COMMLIB_HD int64_t bucket_of(int64_t id, int64_t num_buckets, uint32_t seed, int j) {
  const uint64_t h = murmur3(static_cast<uint64_t>(id), seed + 2u * static_cast<uint32_t>(j));
  return static_cast<int64_t>((h * static_cast<uint64_t>(num_buckets)) >> 32);
}

// True where the sign of row `id` in table j is minus: the top bit of an independent hash.
COMMLIB_HD bool is_negative(int64_t id, uint32_t seed, int j) {
  return murmur3(static_cast<uint64_t>(id), seed + 2u * static_cast<uint32_t>(j) + 1u) >> 31;
}

}  // namespace commlib
