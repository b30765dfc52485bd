#include "common/rowmath.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define COMMLIB_X86 1
#define COMMLIB_AVX2 __attribute__((target("avx2,f16c")))
#endif

namespace commlib {
namespace {

template <class T>
void widen_scalar(const T* src, float* dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = to_float(src[i]);
}

template <class T>
void narrow_scalar(const float* src, T* dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = narrow_to<T>::from(src[i]);
}

// sum += factor * src, or sum = factor * src
template <bool kAdd, class T>
inline __attribute__((always_inline)) void combine(acc_t<T>* __restrict sum,
                                                   const T* __restrict src, acc_t<T> factor,
                                                   int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> term = factor * cast<acc_t<T>>(src[i]);
    sum[i] = kAdd ? sum[i] + term : term;
  }
}

#ifdef COMMLIB_X86
const bool has_avx2 = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}();

COMMLIB_AVX2 inline __m256 load8(const f16* src) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
}

COMMLIB_AVX2 inline __m256 load8(const bf16* src) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

template <class T>
COMMLIB_AVX2 void widen_avx2(const T* src, float* dst, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, load8(src + i));
  widen_scalar(src + i, dst + i, n - i);
}

template <bool kAdd, class T>
COMMLIB_AVX2 void combine_avx2(acc_t<T>* sum, const T* src, acc_t<T> factor, int64_t n) {
  int64_t i = 0;
  if constexpr (is_half_v<T>) {
    const __m256 f = _mm256_set1_ps(factor);
    for (; i + 8 <= n; i += 8) {
      const __m256 term = _mm256_mul_ps(f, load8(src + i));
      _mm256_storeu_ps(sum + i, kAdd ? _mm256_add_ps(_mm256_loadu_ps(sum + i), term) : term);
    }
  }
  combine<kAdd>(sum + i, src + i, factor, n - i);
}

COMMLIB_AVX2 void narrow_avx2(const float* src, f16* dst, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), half);
  }
  narrow_scalar(src + i, dst + i, n - i);
}

COMMLIB_AVX2 void narrow_avx2(const float* src, bf16* dst, int64_t n) {
  const __m256i bias = _mm256_set1_epi32(0x7fff), one = _mm256_set1_epi32(1);
  const __m256i nan = _mm256_set1_epi32(0x7fc0);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_loadu_ps(src + i);
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(bias, odd));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i out = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), nan, is_nan);
    const __m128i half =
        _mm_packus_epi32(_mm256_castsi256_si128(out), _mm256_extracti128_si256(out, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), half);
  }
  narrow_scalar(src + i, dst + i, n - i);
}
#else
constexpr bool has_avx2 = false;
template <class From, class To>
void widen_avx2(const From*, To*, int64_t) {}
template <class From, class To>
void narrow_avx2(const From*, To*, int64_t) {}
template <bool kAdd, class T>
void combine_avx2(acc_t<T>*, const T*, acc_t<T>, int64_t) {}
#endif

}  // namespace

void widen(const f16* src, float* dst, int64_t n) {
  has_avx2 ? widen_avx2(src, dst, n) : widen_scalar(src, dst, n);
}
void widen(const bf16* src, float* dst, int64_t n) {
  has_avx2 ? widen_avx2(src, dst, n) : widen_scalar(src, dst, n);
}
void narrow(const float* src, f16* dst, int64_t n) {
  has_avx2 ? narrow_avx2(src, dst, n) : narrow_scalar(src, dst, n);
}
void narrow(const float* src, bf16* dst, int64_t n) {
  has_avx2 ? narrow_avx2(src, dst, n) : narrow_scalar(src, dst, n);
}

template <class T>
void add_row(acc_t<T>* sum, const T* src, acc_t<T> factor, int64_t n) {
  has_avx2 ? combine_avx2<true>(sum, src, factor, n) : combine<true>(sum, src, factor, n);
}
template <class T>
void set_row(acc_t<T>* dst, const T* src, acc_t<T> factor, int64_t n) {
  has_avx2 ? combine_avx2<false>(dst, src, factor, n) : combine<false>(dst, src, factor, n);
}

#define COMMLIB_ROWS(T)                                          \
  template void add_row(acc_t<T>*, const T*, acc_t<T>, int64_t); \
  template void set_row(acc_t<T>*, const T*, acc_t<T>, int64_t);
COMMLIB_ROWS(float)
COMMLIB_ROWS(double)
COMMLIB_ROWS(f16)
COMMLIB_ROWS(bf16)
#undef COMMLIB_ROWS

}  // namespace commlib
