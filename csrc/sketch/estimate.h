// Estimates of one row from its buckets: mean, and median over the hashes. A is float or double.
#pragma once

#include <cstdint>

#include "common/memory.h"
#include "sketch/place.h"

namespace commlib {

// out = scale * (sum of sign_j * rows[j]) / num_hashes, summed in the order of j.
template <class A>
void mean_row(const A* const* rows, const A* signs, int num_hashes, A scale, A* out, int64_t dim);

// out = scale * median of sign_j * rows[j]; of an even number, the mean of the middle two; NaN if
// any is NaN.
template <class A>
void median_row(const A* const* rows, const A* signs, int num_hashes, A scale, A* out, int64_t dim);

// Where each row of a union lies in a sketch.
template <class A>
struct Lookup {
  const A* sketch;
  const Place* places;  // [num_hashes, num_rows]
  int64_t num_rows;
  int num_hashes;
  int64_t num_buckets;
  int64_t dim;

  const A* row(int j, int64_t i) const {
    return sketch + (j * num_buckets + bucket(places[j * num_rows + i])) * dim;
  }
  void fetch(int64_t i) const {
    if (i >= num_rows) return;
    for (int j = 0; j < num_hashes; ++j) prefetch(row(j, i), dim * int64_t{sizeof(A)});
  }
  void find(int64_t i, const A** rows, A* signs) const {
    for (int j = 0; j < num_hashes; ++j) {
      rows[j] = row(j, i);
      signs[j] = negative(places[j * num_rows + i]) ? A{-1} : A{1};
    }
  }
};

}  // namespace commlib
