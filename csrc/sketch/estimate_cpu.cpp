#include <algorithm>
#include <limits>
#include <type_traits>

#include "sketch/estimate.h"

namespace commlib {
namespace {

#define COMMLIB_INLINE inline __attribute__((always_inline))

template <class A>
COMMLIB_INLINE void mean(const A* const* rows, const A* signs, int num_hashes, A scale,
                         A* __restrict out, int64_t dim) {
  if (num_hashes == 1) {
    const A *row = rows[0], factor = signs[0] * scale;
    for (int64_t d = 0; d < dim; ++d) out[d] = factor * row[d];
    return;
  }
  if (num_hashes == 3) {
    const A *x = rows[0], *y = rows[1], *z = rows[2];
    const A sx = signs[0], sy = signs[1], sz = signs[2];
    for (int64_t d = 0; d < dim; ++d) out[d] = (sx * x[d] + sy * y[d] + sz * z[d]) / A{3} * scale;
    return;
  }
  for (int64_t d = 0; d < dim; ++d) out[d] = signs[0] * rows[0][d];
  for (int j = 1; j < num_hashes; ++j) {
    const A *row = rows[j], sign = signs[j];
    for (int64_t d = 0; d < dim; ++d) out[d] += sign * row[d];
  }
  const A count = static_cast<A>(num_hashes);
  for (int64_t d = 0; d < dim; ++d) out[d] = out[d] / count * scale;
}

template <class A>
COMMLIB_INLINE A smaller(A a, A b) {
  return a < b ? a : b;
}
template <class A>
COMMLIB_INLINE A larger(A a, A b) {
  return a < b ? b : a;
}

template <class A>
COMMLIB_INLINE void median3(const A* const* rows, const A* signs, A scale, A* __restrict out,
                            int64_t dim) {
  const A *x = rows[0], *y = rows[1], *z = rows[2];
  const A sx = signs[0], sy = signs[1], sz = signs[2];
  constexpr A nan = std::numeric_limits<A>::quiet_NaN();
  for (int64_t d = 0; d < dim; ++d) {
    const A a = sx * x[d], b = sy * y[d], c = sz * z[d];
    const A middle = larger(smaller(a, b), smaller(larger(a, b), c)) * scale;
    out[d] = ((a != a) | (b != b) | (c != c)) ? nan : middle;
  }
}

// Sorts all columns of a block at once, by odd-even transposition.
template <class A>
COMMLIB_INLINE void median_any(const A* const* rows, const A* signs, int num_hashes, A scale,
                               A* __restrict out, int64_t dim) {
  using Flag = std::conditional_t<sizeof(A) == 4, int32_t, int64_t>;  // as wide as A: vectorises
  constexpr int64_t kColumns = 64;
  constexpr A nan = std::numeric_limits<A>::quiet_NaN();
  A x[kMaxHashes][kColumns];
  Flag bad[kColumns];
  for (int64_t at = 0; at < dim; at += kColumns) {
    const int64_t count = std::min(kColumns, dim - at);
    std::fill(bad, bad + count, Flag{0});
    for (int j = 0; j < num_hashes; ++j) {
      const A *row = rows[j] + at, sign = signs[j];
      for (int64_t d = 0; d < count; ++d) {
        x[j][d] = sign * row[d];
        bad[d] |= x[j][d] != x[j][d];
      }
    }
    for (int pass = 0; pass < num_hashes; ++pass) {
      for (int j = pass & 1; j + 1 < num_hashes; j += 2) {
        A* __restrict a = x[j], * __restrict b = x[j + 1];
        for (int64_t d = 0; d < count; ++d) {
          const A low = smaller(a[d], b[d]), high = larger(a[d], b[d]);
          a[d] = low;
          b[d] = high;
        }
      }
    }
    const A *low = x[(num_hashes - 1) / 2], *high = x[num_hashes / 2];
    const bool odd = num_hashes % 2 != 0;
    for (int64_t d = 0; d < count; ++d) {
      const A middle = odd ? low[d] : (low[d] + high[d]) * A{0.5};
      out[at + d] = bad[d] ? nan : middle * scale;
    }
  }
}

template <class A>
COMMLIB_INLINE void median(const A* const* rows, const A* signs, int num_hashes, A scale, A* out,
                           int64_t dim) {
  num_hashes == 3 ? median3(rows, signs, scale, out, dim)
                  : median_any(rows, signs, num_hashes, scale, out, dim);
}

}  // namespace

template <>
COMMLIB_CLONES void mean_row(const float* const* rows, const float* signs, int num_hashes,
                             float scale, float* out, int64_t dim) {
  mean(rows, signs, num_hashes, scale, out, dim);
}
template <>
COMMLIB_CLONES void mean_row(const double* const* rows, const double* signs, int num_hashes,
                             double scale, double* out, int64_t dim) {
  mean(rows, signs, num_hashes, scale, out, dim);
}
template <>
COMMLIB_CLONES void median_row(const float* const* rows, const float* signs, int num_hashes,
                               float scale, float* out, int64_t dim) {
  median(rows, signs, num_hashes, scale, out, dim);
}
template <>
COMMLIB_CLONES void median_row(const double* const* rows, const double* signs, int num_hashes,
                               double scale, double* out, int64_t dim) {
  median(rows, signs, num_hashes, scale, out, dim);
}

}  // namespace commlib
