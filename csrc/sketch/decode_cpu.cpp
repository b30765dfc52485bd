// sketch_decode: every row of the union from its buckets, by mean or median.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <type_traits>
#include <vector>

#include "common/parallel.h"
#include "common/rowmath.h"
#include "common/tensor.h"
#include "sketch/estimate.h"
#include "sketch/place.h"

namespace commlib {
namespace {

// Out is A, or a half type to which each row is rounded as soon as it is known.
template <class A, class Out>
void decode(const Lookup<A>& lookup, Out* out, bool median, A scale) {
  const int64_t dim = lookup.dim;
  const int64_t bytes = dim * (int64_t{sizeof(A)} * lookup.num_hashes + int64_t{sizeof(Out)});
  parallel_items(lookup.num_rows, bytes, [=](int64_t begin, int64_t end) {
    const A* rows[kMaxHashes];
    A signs[kMaxHashes];
    std::vector<A> wide(std::is_same_v<A, Out> ? 0 : dim);
    for (int64_t i = begin; i < end; ++i) {
      A* row = wide.data();
      if constexpr (std::is_same_v<A, Out>) row = out + i * dim;
      lookup.fetch(i + kAhead);
      lookup.find(i, rows, signs);
      median ? median_row(rows, signs, lookup.num_hashes, scale, row, dim)
             : mean_row(rows, signs, lookup.num_hashes, scale, row, dim);
      if constexpr (!std::is_same_v<A, Out>) convert(row, out + i * dim, dim);
    }
  });
}

Tensor sketch_decode(const Tensor& sketch, const Tensor& indices, int64_t seed, std::string decoder,
                     double scale, std::optional<ScalarType> dtype) {
  check_dim(sketch, 3, "sketch");
  check_ids(indices, "indices");
  check_sketch_size(sketch.size(0), sketch.size(1), seed);
  COMMLIB_CHECK(decoder == "mean" || decoder == "median", "ValueError", "decoder = '", decoder,
                "' is not 'mean' or 'median'");
  const Tensor s = dense(sketch), ids = dense(indices);
  const int64_t n = ids.numel(), dim = s.size(2);
  if (s.scalar_type() != ScalarType::Double) check_dtype(s, ScalarType::Float, "sketch");
  const ScalarType out_dtype = dtype.value_or(s.scalar_type());
  COMMLIB_CHECK(s.scalar_type() == ScalarType::Float || out_dtype == ScalarType::Double,
                "TypeError", "a float64 sketch decodes to float64 only");
  COMMLIB_CHECK(s.scalar_type() == ScalarType::Double || out_dtype != ScalarType::Double,
                "TypeError", "a float32 sketch does not decode to float64");
  Tensor out = make(s, {n, dim}, out_dtype);
  const int num_hashes = static_cast<int>(s.size(0));
  const auto places = place_rows(data<int64_t>(ids), n, num_hashes, s.size(1), seed);
  const auto run = [&](auto a, auto o) {
    using A = decltype(a);
    using Out = decltype(o);
    const Lookup<A> lookup{data<A>(s), places.get(), n, num_hashes, s.size(1), dim};
    decode(lookup, mutable_data<Out>(out), decoder == "median", static_cast<A>(scale));
  };
  switch (out_dtype) {
    case ScalarType::Double:
      run(double{}, double{});
      break;
    case ScalarType::Half:
      run(float{}, f16{});
      break;
    case ScalarType::BFloat16:
      run(float{}, bf16{});
      break;
    default:
      check_dtype(out, ScalarType::Float, "dtype");
      run(float{}, float{});
  }
  return out;
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("sketch_decode", TORCH_BOX(&commlib::sketch_decode));
}
