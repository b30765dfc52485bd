// Which rank owns a row, computed from the row's number alone: a bijection between rows and
// (owner, index_within), with index_within = row / n < ceil(V / n). Host and device.
//
// Every n consecutive rows go to n different ranks; each such group is rotated by a hash, so
// strided ids do not all fall on one rank.
#pragma once

#include "common/hash.h"

namespace commlib {

inline constexpr uint32_t kOwnerSeed = 0x5bd1e995u;

COMMLIB_HD int64_t owner_shift(int64_t index_within, int64_t num_ranks) {
  const uint64_t h = murmur3(static_cast<uint64_t>(index_within), kOwnerSeed);
  return static_cast<int64_t>((h * static_cast<uint64_t>(num_ranks)) >> 32);
}

COMMLIB_HD int64_t index_within_of(int64_t row, int64_t num_ranks) {
  if ((static_cast<uint64_t>(row) >> 32) == 0) {  // a division of half the width, half the time
    return static_cast<uint32_t>(row) / static_cast<uint32_t>(num_ranks);
  }
  return row / num_ranks;
}

COMMLIB_HD int64_t owner_of(int64_t row, int64_t index_within, int64_t num_ranks) {
  const int64_t place = row - index_within * num_ranks + owner_shift(index_within, num_ranks);
  return place < num_ranks ? place : place - num_ranks;
}

COMMLIB_HD int64_t row_of(int64_t owner, int64_t index_within, int64_t num_ranks) {
  const int64_t place = owner - owner_shift(index_within, num_ranks);
  return index_within * num_ranks + (place < 0 ? place + num_ranks : place);
}

}  // namespace commlib
