// sketch_decode: every row of the union from its buckets, by mean or median.
#include <torch/csrc/stable/library.h>

#include "common/parallel.h"
#include "common/tensor.h"
#include "sketch/estimate.h"
#include "sketch/place.h"

namespace commlib {
namespace {

template <class A>
void decode(const Lookup<A>& lookup, A* out, bool median, A scale) {
  const int64_t dim = lookup.dim;
  const int64_t bytes = dim * int64_t{sizeof(A)} * (lookup.num_hashes + 1);
  parallel_items(lookup.num_rows, bytes, [=](int64_t begin, int64_t end) {
    const A* rows[kMaxHashes];
    A signs[kMaxHashes];
    for (int64_t i = begin; i < end; ++i) {
      lookup.fetch(i + kAhead);
      lookup.find(i, rows, signs);
      median ? median_row(rows, signs, lookup.num_hashes, scale, out + i * dim, dim)
             : mean_row(rows, signs, lookup.num_hashes, scale, out + i * dim, dim);
    }
  });
}

Tensor sketch_decode(const Tensor& sketch, const Tensor& indices, int64_t seed, std::string decoder,
                     double scale) {
  check_dim(sketch, 3, "sketch");
  check_ids(indices, "indices");
  check_sketch_size(sketch.size(0), sketch.size(1), seed);
  COMMLIB_CHECK(decoder == "mean" || decoder == "median", "ValueError", "decoder = '", decoder,
                "' is not 'mean' or 'median'");
  const Tensor s = dense(sketch), ids = dense(indices);
  const int64_t n = ids.numel(), dim = s.size(2);
  if (s.scalar_type() != ScalarType::Double) check_dtype(s, ScalarType::Float, "sketch");
  Tensor out = make(s, {n, dim}, s.scalar_type());
  const int num_hashes = static_cast<int>(s.size(0));
  const auto places = place_rows(data<int64_t>(ids), n, num_hashes, s.size(1), seed);
  const auto run = [&](auto a) {
    using A = decltype(a);
    const Lookup<A> lookup{data<A>(s), places.get(), n, num_hashes, s.size(1), dim};
    decode(lookup, mutable_data<A>(out), decoder == "median", static_cast<A>(scale));
  };
  s.scalar_type() == ScalarType::Double ? run(double{}) : run(float{});
  return out;
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("sketch_decode", TORCH_BOX(&commlib::sketch_decode));
}
