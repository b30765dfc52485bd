// Rows of one dtype to rows of another, and the three row loops that all kernels are made of.
// fp16 and bf16 go through AVX2 + F16C where the processor has them, chosen at run time; both paths
// give the same bits.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace commlib {

void widen(const f16* src, float* dst, int64_t n);
void widen(const bf16* src, float* dst, int64_t n);
void narrow(const float* src, f16* dst, int64_t n);
void narrow(const float* src, bf16* dst, int64_t n);

inline constexpr int64_t kBlock = 512;  // elements of a buffer that stays in L1

template <class From, class To>
void convert(const From* src, To* dst, int64_t n) {
  if constexpr (is_half_v<From> && sizeof(To) == 4) {
    widen(src, dst, n);
  } else if constexpr (sizeof(From) == 4 && is_half_v<To>) {
    narrow(src, dst, n);
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = cast<To>(src[i]);
  }
}

// Calls f(acc values, offset, count) for blocks of a row, converted to the type it is summed in.
template <class T, class F>
inline __attribute__((always_inline)) void for_blocks(const T* src, int64_t n, const F& f) {
  if constexpr (is_half_v<T>) {
    float buffer[kBlock];
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t count = n - i < kBlock ? n - i : kBlock;
      widen(src + i, buffer, count);
      f(buffer, i, count);
    }
  } else {
    f(src, int64_t{0}, n);
  }
}

// sum += factor * src
template <class T>
void add_row(acc_t<T>* sum, const T* src, acc_t<T> factor, int64_t n) {
  for_blocks(src, n, [&](const acc_t<T>* x, int64_t at, int64_t count) {
    acc_t<T>* __restrict out = sum + at;
    for (int64_t i = 0; i < count; ++i) out[i] += factor * x[i];
  });
}

// dst = factor * src
template <class T>
void set_row(acc_t<T>* dst, const T* src, acc_t<T> factor, int64_t n) {
  for_blocks(src, n, [&](const acc_t<T>* x, int64_t at, int64_t count) {
    acc_t<T>* __restrict out = dst + at;
    for (int64_t i = 0; i < count; ++i) out[i] = factor * x[i];
  });
}

}  // namespace commlib
