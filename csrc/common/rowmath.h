// The loops over one row that all kernels are made of: convert, add, set. Halves (and sums of any
// dtype) go through AVX2 + F16C where the processor has them, chosen at run time; both paths give
// the same bits.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace commlib {

void widen(const f16* src, float* dst, int64_t n);
void widen(const bf16* src, float* dst, int64_t n);
void narrow(const float* src, f16* dst, int64_t n);
void narrow(const float* src, bf16* dst, int64_t n);

// sum += factor * src. T is one of the four dtypes.
template <class T>
void add_row(acc_t<T>* sum, const T* src, acc_t<T> factor, int64_t n);

// dst = factor * src
template <class T>
void set_row(acc_t<T>* dst, const T* src, acc_t<T> factor, int64_t n);

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

}  // namespace commlib
