// Estimates of one row from its buckets: mean, and median over the hashes. A is float or double.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/rowmath.h"
#include "sketch/place.h"

namespace commlib {

// out = scale * (sum of sign_j * rows[j]) / num_hashes, summed in the order of j.
template <class A>
void mean_row(const A* const* rows, const A* signs, int num_hashes, A scale, A* out, int64_t dim) {
  set_row(out, rows[0], signs[0], dim);
  for (int j = 1; j < num_hashes; ++j) add_row(out, rows[j], signs[j], dim);
  const A count = static_cast<A>(num_hashes);
  if (num_hashes > 1) {
    for (int64_t d = 0; d < dim; ++d) out[d] = out[d] / count * scale;
  } else if (scale != A{1}) {
    for (int64_t d = 0; d < dim; ++d) out[d] *= scale;
  }
}

// out = scale * median of sign_j * rows[j]; of an even number, the mean of the middle two; NaN if
// any is NaN. Sorts all columns of a block at once by odd-even transposition.
template <class A>
void median_row(const A* const* rows, const A* signs, int num_hashes, A scale, A* out,
                int64_t dim) {
  constexpr int64_t kColumns = 64;
  A x[kMaxHashes][kColumns];
  bool nan[kColumns];
  for (int64_t at = 0; at < dim; at += kColumns) {
    const int64_t count = std::min(kColumns, dim - at);
    std::fill(nan, nan + count, false);
    for (int j = 0; j < num_hashes; ++j) {
      for (int64_t d = 0; d < count; ++d) {
        x[j][d] = signs[j] * rows[j][at + d];
        nan[d] |= x[j][d] != x[j][d];
      }
    }
    for (int pass = 0; pass < num_hashes; ++pass) {
      for (int j = pass & 1; j + 1 < num_hashes; j += 2) {
        for (int64_t d = 0; d < count; ++d) {
          const A low = x[j][d] < x[j + 1][d] ? x[j][d] : x[j + 1][d];
          const A high = x[j][d] < x[j + 1][d] ? x[j + 1][d] : x[j][d];
          x[j][d] = low;
          x[j + 1][d] = high;
        }
      }
    }
    const A *low = x[(num_hashes - 1) / 2], *high = x[num_hashes / 2];
    for (int64_t d = 0; d < count; ++d) {
      const A middle = num_hashes % 2 ? low[d] : (low[d] + high[d]) * A{0.5};
      out[at + d] = nan[d] ? std::numeric_limits<A>::quiet_NaN() : middle * scale;
    }
  }
}

// Collects the bucket rows and signs of row i of n.
template <class A>
void find_rows(const A* sketch, const Place* places, int64_t i, int64_t n, int num_hashes,
               int64_t num_buckets, int64_t dim, const A** rows, A* signs) {
  for (int j = 0; j < num_hashes; ++j) {
    const Place p = places[j * n + i];
    rows[j] = sketch + (j * num_buckets + bucket(p)) * dim;
    signs[j] = negative(p) ? A{-1} : A{1};
  }
}

}  // namespace commlib
