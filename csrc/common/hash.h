// MurmurHash3 x86_32 of an 8-byte little-endian key: one definition for host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define COMMLIB_HD __host__ __device__ __forceinline__
#else
#define COMMLIB_HD inline __attribute__((always_inline))
#endif

// On a function that is a plain loop: compiled for AVX2 too, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define COMMLIB_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define COMMLIB_CLONES
#endif

namespace commlib {

COMMLIB_HD uint32_t rotl32(uint32_t x, int k) { return (x << k) | (x >> (32 - k)); }

COMMLIB_HD uint32_t murmur3_block(uint32_t h, uint32_t k) {
  k *= 0xcc9e2d51u;
  k = rotl32(k, 15);
  k *= 0x1b873593u;
  h ^= k;
  h = rotl32(h, 13);
  return h * 5u + 0xe6546b64u;
}

COMMLIB_HD uint32_t murmur3_finish(uint32_t h) {
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  return h ^ (h >> 16);
}

COMMLIB_HD uint32_t murmur3(uint64_t key, uint32_t seed) {
  uint32_t h = murmur3_block(seed, static_cast<uint32_t>(key));
  h = murmur3_block(h, static_cast<uint32_t>(key >> 32));
  return murmur3_finish(h ^ 8u);  // 8: the key's length in bytes
}

}  // namespace commlib
