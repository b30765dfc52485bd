// Loops over the bits of a byte array, little-endian: bit i is byte i>>3, bit i&7. Host only.
#pragma once

#include <cstdint>
#include <cstring>

namespace commlib {

inline uint64_t load_word(const uint8_t* bytes, int64_t n) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, static_cast<size_t>(n < 8 ? n : 8));
  return word;
}

inline int64_t popcount64(uint64_t x) {
  x -= (x >> 1) & 0x5555555555555555ull;
  x = (x & 0x3333333333333333ull) + ((x >> 2) & 0x3333333333333333ull);
  x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0full;
  return static_cast<int64_t>((x * 0x0101010101010101ull) >> 56);
}

inline int64_t count_bits(const uint8_t* bytes, int64_t n) {
  int64_t count = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    count += popcount64(word);
  }
  return i < n ? count + popcount64(load_word(bytes + i, n - i)) : count;
}

// Writes the positions of the set bits, plus `first`; returns where the next one would go.
inline int64_t* list_bits(const uint8_t* bytes, int64_t n, int64_t first, int64_t* out) {
  for (int64_t i = 0; i < n; i += 8) {
    for (uint64_t word = load_word(bytes + i, n - i); word != 0; word &= word - 1) {
      *out++ = first + 8 * i + __builtin_ctzll(word);
    }
  }
  return out;
}

inline void set_bits(const int64_t* ids, int64_t n, uint8_t* bytes) {
  for (int64_t i = 0; i < n; ++i) {
    bytes[ids[i] >> 3] = static_cast<uint8_t>(bytes[ids[i] >> 3] | (1u << (ids[i] & 7)));
  }
}

}  // namespace commlib
