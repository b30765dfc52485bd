// The four element types and the conversions between them: round to nearest even, every NaN quiet.
// acc_t<T> is what T is summed in: float, and double for double.
#pragma once

#include <bit>
#include <cstdint>

#include "common/hash.h"  // COMMLIB_HD

namespace commlib {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

template <class T>
struct acc {
  using type = float;
};
template <>
struct acc<double> {
  using type = double;
};
template <class T>
using acc_t = typename acc<T>::type;

template <class T>
inline constexpr bool is_half_v = sizeof(T) == 2;

// Bits of an element that are not its sign.
template <class T>
inline constexpr uint64_t magnitude_mask = ~uint64_t{0} >> (65 - 8 * sizeof(T));

namespace detail {
template <class To, class From>
COMMLIB_HD To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  __builtin_memcpy(&y, &x, sizeof(y));
  return y;
}
}  // namespace detail

COMMLIB_HD float to_float(float x) { return x; }
COMMLIB_HD float to_float(double x) { return static_cast<float>(x); }
COMMLIB_HD float to_float(bf16 x) {
  return detail::bits_as<float>(static_cast<uint32_t>(x.bits) << 16);
}
COMMLIB_HD float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) {  // inf, NaN (made quiet)
    const uint32_t quiet = rest > 0x7c00u ? 0x400000u : 0u;
    return detail::bits_as<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13) | quiet);
  }
  if (rest < 0x400u) {  // zero, denormals: units of 2^-24, the last place of 0.5
    const float value = detail::bits_as<float>(0x3f000000u + rest) - 0.5f;
    return detail::bits_as<float>(detail::bits_as<uint32_t>(value) | sign);
  }
  return detail::bits_as<float>(sign | ((rest << 13) + 0x38000000u));
}

template <class T>
struct narrow_to {
  template <class A>
  static COMMLIB_HD T from(A x) {
    return static_cast<T>(x);
  }
};
template <>
struct narrow_to<bf16> {
  static COMMLIB_HD bf16 from(float x) {
    const uint32_t bits = detail::bits_as<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
  static COMMLIB_HD bf16 from(double x) { return from(static_cast<float>(x)); }
};
template <>
struct narrow_to<f16> {
  static COMMLIB_HD f16 from(float x) {
    const uint32_t bits = detail::bits_as<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t rest = bits & 0x7fffffffu;
    uint32_t out;
    if (rest > 0x7f800000u) {
      out = 0x7e00u | ((rest >> 13) & 0x3ffu);
    } else if (rest >= 0x477ff000u) {  // 65520 and more round to infinity
      out = 0x7c00u;
    } else if (rest < 0x38800000u) {  // below 2^-14: let the adder round a denormal
      const float magic = detail::bits_as<float>(rest) + 0.5f;
      out = detail::bits_as<uint32_t>(magic) - 0x3f000000u;
    } else {
      out = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    }
    return {static_cast<uint16_t>(sign | out)};
  }
  static COMMLIB_HD f16 from(double x) { return from(static_cast<float>(x)); }
};

// Any of the four to any of the four.
template <class To, class From>
COMMLIB_HD To cast(From x) {
  if constexpr (sizeof(From) == 8 || sizeof(From) == 4) {
    return narrow_to<To>::from(x);
  } else {
    return narrow_to<To>::from(to_float(x));
  }
}

}  // namespace commlib
