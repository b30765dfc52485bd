// LEB128: seven bits a byte, low bits first, the top bit says "more follows".
#pragma once

#include <cstdint>

namespace commlib {

inline constexpr int kMaxVarint = 9;  // bytes of 63 bits, the longest gap

inline int varint_size(uint64_t x) { return (70 - __builtin_clzll(x | 1)) / 7; }

inline uint8_t* put_varint(uint64_t x, uint8_t* out) {
  for (; x >= 0x80; x >>= 7) *out++ = static_cast<uint8_t>(x | 0x80);
  *out++ = static_cast<uint8_t>(x);
  return out;
}

// Reads one number of at most 63 bits; returns the byte after it, or null where the number is cut
// off by `end`, longer than it needs to be, or too large.
inline const uint8_t* get_varint(const uint8_t* in, const uint8_t* end, uint64_t* x) {
  uint64_t value = 0;
  for (int i = 0; i < kMaxVarint && in < end; ++i, ++in) {
    value |= static_cast<uint64_t>(*in & 0x7f) << (7 * i);
    if (*in < 0x80) {
      if (*in == 0 && i > 0) return nullptr;
      *x = value;
      return in + 1;
    }
  }
  return nullptr;
}

}  // namespace commlib
