// sketch_encode: rows are sorted by bucket (a counting sort that keeps their order), then each
// bucket is summed and written once. Buckets never share a thread's work, so the sum of a bucket is
// formed in the order of the rows whatever the number of threads.
#include <torch/csrc/stable/library.h>

#include "common/parallel.h"
#include "common/rowmath.h"
#include "common/tensor.h"
#include "sketch/place.h"

namespace commlib {
namespace {

struct Buckets {
  std::unique_ptr<int64_t[]> start;  // [c + 1]
  std::unique_ptr<int64_t[]> row;    // [n], position << 1 | is_negative
};

Buckets sort_by_bucket(const Place* places, int64_t n, int64_t num_buckets) {
  Buckets b{std::make_unique<int64_t[]>(static_cast<size_t>(num_buckets) + 1),
            std::make_unique_for_overwrite<int64_t[]>(static_cast<size_t>(n))};
  for (int64_t i = 0; i < n; ++i) ++b.start[bucket(places[i])];
  int64_t end = 0;
  for (int64_t k = 0; k < num_buckets; ++k) b.start[k] = end += b.start[k];
  b.start[num_buckets] = n;
  for (int64_t i = n - 1; i >= 0; --i)
    b.row[--b.start[bucket(places[i])]] = i << 1 | negative(places[i]);
  return b;
}

// out = sum of the rows of one bucket. num_left counts rows to the end of the table, so those of
// the next buckets can be fetched ahead.
template <class T>
void sum_bucket(const T* values, const int64_t* rows, int64_t count, int64_t num_left,
                acc_t<T> scale, acc_t<T>* out, int64_t dim) {
  if (count == 0) std::fill(out, out + dim, acc_t<T>{0});
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < num_left) {
      prefetch(values + (rows[i + kAhead] >> 1) * dim, dim * int64_t{sizeof(T)});
    }
    const T* row = values + (rows[i] >> 1) * dim;
    const acc_t<T> factor = (rows[i] & 1) ? -scale : scale;
    i == 0 ? set_row(out, row, factor, dim) : add_row(out, row, factor, dim);
  }
}

template <class T>
void encode(const int64_t* ids, const T* values, acc_t<T>* sketch, int64_t n, int64_t dim,
            int num_hashes, int64_t num_buckets, int64_t seed, double scale) {
  const auto places = place_rows(ids, n, num_hashes, num_buckets, seed);
  const int64_t rows_per_bucket = n / num_buckets + 1;
  const int64_t bytes = dim * int64_t{sizeof(acc_t<T>)} * (1 + rows_per_bucket);
  for (int j = 0; j < num_hashes; ++j) {
    const Buckets b = sort_by_bucket(places.get() + j * n, n, num_buckets);
    acc_t<T>* table = sketch + j * num_buckets * dim;
    parallel_items(num_buckets, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        const int64_t* rows = b.row.get() + b.start[k];
        sum_bucket(values, rows, b.start[k + 1] - b.start[k], n - b.start[k],
                   static_cast<acc_t<T>>(scale), table + k * dim, dim);
      }
    });
  }
}

Tensor sketch_encode(const Tensor& indices, const Tensor& values, int64_t num_hashes,
                     int64_t num_buckets, int64_t seed, double scale) {
  check_ids(indices, "indices");
  check_dim(values, 2, "values");
  check_same_size(values.size(0), "values.shape[0]", indices.size(0), "len(indices)");
  check_sketch_size(num_hashes, num_buckets, seed);
  const Tensor ids = dense(indices), x = dense(values);
  const int64_t dim = x.size(1);
  Tensor sketch = make(x, {num_hashes, num_buckets, dim}, acc_dtype(x.scalar_type()));
  dispatch(x.scalar_type(), [&](auto t) {
    using T = decltype(t);
    encode(data<int64_t>(ids), data<T>(x), mutable_data<acc_t<T>>(sketch), ids.numel(), dim,
           static_cast<int>(num_hashes), num_buckets, seed, scale);
  });
  return sketch;
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("sketch_encode", TORCH_BOX(&commlib::sketch_encode));
}
