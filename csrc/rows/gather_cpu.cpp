// gather_rows: out[i] = src[indices[i]], with a conversion on the way where asked.
#include <torch/csrc/stable/library.h>

#include "common/ids.h"
#include "common/parallel.h"
#include "common/rowmath.h"
#include "common/tensor.h"

namespace commlib {
namespace {

template <class From, class To>
void gather(const From* src, const int64_t* ids, To* out, int64_t num_ids, int64_t dim,
            bool fresh) {
  const int64_t bytes = dim * int64_t{sizeof(From) + sizeof(To)};
  const bool stream = !fresh && num_ids * dim * int64_t{sizeof(To)} >= kLarge;
  parallel_items(num_ids, bytes, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const From* row = src + ids[i] * dim;
      if (i + kAhead < end) prefetch(src + ids[i + kAhead] * dim, dim * int64_t{sizeof(From)});
      if constexpr (std::is_same_v<From, To>) {
        if (dim == 1) {
          out[i] = *row;
        } else {
          copy_bytes(out + i * dim, row, dim * int64_t{sizeof(To)}, stream);
        }
      } else {
        convert(row, out + i * dim, dim);
      }
    }
    drain();
  });
}

void gather_into(const Tensor& src, const Tensor& indices, const Tensor& out, bool fresh) {
  check_dim(src, 2, "src");
  check_ids(indices, "indices");
  check_dim(out, 2, "out");
  check_inplace(out, "out");
  check_same_size(out.size(0), "out.shape[0]", indices.size(0), "len(indices)");
  check_same_size(out.size(1), "out.shape[1]", src.size(1), "src.shape[1]");
  const Tensor x = dense(src), ids = dense(indices);
  const int64_t n = ids.numel(), dim = x.size(1);
  check_ids_in_range(data<int64_t>(ids), n, x.size(0), "indices");
  dispatch(x.scalar_type(), [&](auto from) {
    dispatch(out.scalar_type(), [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      gather(data<From>(x), data<int64_t>(ids), mutable_data<To>(out), n, dim, fresh);
    });
  });
}

Tensor gather_rows(const Tensor& src, const Tensor& indices, std::optional<ScalarType> dtype) {
  check_dim(src, 2, "src");
  check_ids(indices, "indices");
  Tensor out = make(src, {indices.size(0), src.size(1)}, dtype.value_or(src.scalar_type()));
  gather_into(src, indices, out, true);
  return out;
}

void gather_rows_out(const Tensor& src, const Tensor& indices, const Tensor& out) {
  gather_into(src, indices, out, false);
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("gather_rows", TORCH_BOX(&commlib::gather_rows));
  m.impl("gather_rows_out", TORCH_BOX(&commlib::gather_rows_out));
}
