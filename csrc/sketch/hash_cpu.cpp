// murmur3_32 of int64 keys.
#include <torch/csrc/stable/library.h>

#include "common/hash.h"
#include "common/parallel.h"
#include "common/tensor.h"

namespace commlib {
namespace {

COMMLIB_CLONES void hash_keys(const int64_t* keys, int64_t* hashes, int64_t n, uint32_t seed) {
  for (int64_t i = 0; i < n; ++i) hashes[i] = murmur3(static_cast<uint64_t>(keys[i]), seed);
}

Tensor murmur3_32(const Tensor& keys, int64_t seed) {
  check_ids(keys, "keys");
  COMMLIB_CHECK(seed >= 0 && seed < (int64_t{1} << 32), "ValueError", "seed = ", seed,
                " is outside [0, 2^32)");
  const Tensor k = dense(keys);
  Tensor out = make(k, {k.numel()}, ScalarType::Long);
  const int64_t* in = data<int64_t>(k);
  int64_t* h = mutable_data<int64_t>(out);
  parallel_items(k.numel(), 16, [=](int64_t begin, int64_t end) {
    hash_keys(in + begin, h + begin, end - begin, static_cast<uint32_t>(seed));
  });
  return out;
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("murmur3_32", TORCH_BOX(&commlib::murmur3_32));
}
