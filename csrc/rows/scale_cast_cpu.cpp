// scale_cast_rows: factor * src rounded once to another dtype, in one pass.
#include <torch/csrc/stable/library.h>

#include "common/parallel.h"
#include "common/rowmath.h"
#include "common/tensor.h"

namespace commlib {
namespace {

template <class From, class To>
void scale_cast(const From* src, To* out, acc_t<From> factor, int64_t n) {
  parallel_items(n, sizeof(From) + sizeof(To), [=](int64_t begin, int64_t end) {
    acc_t<From> buffer[kBlock];
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t count = std::min(kBlock, end - i);
      set_row(buffer, src + i, factor, count);
      convert(buffer, out + i, count);
    }
  });
}

Tensor scale_cast_rows(const Tensor& src, double scale, ScalarType dtype) {
  check_dim(src, 2, "src");
  const Tensor x = dense(src);
  Tensor out = make(x, {x.size(0), x.size(1)}, dtype);
  dispatch(x.scalar_type(), [&](auto from) {
    dispatch(dtype, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      scale_cast(data<From>(x), mutable_data<To>(out), static_cast<acc_t<From>>(scale), x.numel());
    });
  });
  return out;
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("scale_cast_rows", TORCH_BOX(&commlib::scale_cast_rows));
}
