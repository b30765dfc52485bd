// scatter_rows_ (copy) and scatter_add_rows_ (add in order of occurrence) into a dense tensor.
#include <torch/csrc/stable/library.h>

#include "common/ids.h"
#include "common/parallel.h"
#include "common/rowmath.h"
#include "common/tensor.h"

namespace commlib {
namespace {

void check_scatter(const Tensor& dst, const Tensor& indices, const Tensor& src) {
  check_dim(dst, 2, "dst");
  check_ids(indices, "indices");
  check_dim(src, 2, "src");
  check_inplace(dst, "dst");
  check_same_size(src.size(0), "src.shape[0]", indices.size(0), "len(indices)");
  check_same_size(src.size(1), "src.shape[1]", dst.size(1), "dst.shape[1]");
}

template <class T>
void scatter(T* dst, const int64_t* ids, const T* src, int64_t num_ids, int64_t dim) {
  const bool stream = num_ids * dim * int64_t{sizeof(T)} >= kLarge;
  parallel_items(num_ids, 2 * dim * int64_t{sizeof(T)}, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (dim == 1) {
        dst[ids[i]] = src[i];
      } else {
        copy_bytes(dst + ids[i] * dim, src + i * dim, dim * int64_t{sizeof(T)}, stream);
      }
    }
    drain();
  });
}

void scatter_rows_(const Tensor& dst, const Tensor& indices, const Tensor& src) {
  check_scatter(dst, indices, src);
  check_dtype(src, dst.scalar_type(), "src");
  const Tensor x = dense(src), ids = dense(indices);
  check_ids_in_range(data<int64_t>(ids), ids.numel(), dst.size(0), "indices");
  dispatch(x.scalar_type(), [&](auto t) {
    using T = decltype(t);
    scatter(mutable_data<T>(dst), data<int64_t>(ids), data<T>(x), ids.numel(), x.size(1));
  });
}

// dst += factor * src, the sum of each add formed in acc_t<Src> and rounded once to Dst.
template <class Dst, class Src>
void add_scaled(Dst* dst, const Src* src, acc_t<Src> factor, int64_t n) {
  if constexpr (std::is_same_v<Dst, acc_t<Src>>) {
    add_row(dst, src, factor, n);
  } else {
    float sum[kBlock];
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t count = std::min(kBlock, n - i);
      widen(dst + i, sum, count);
      add_row(sum, src + i, factor, count);
      narrow(sum, dst + i, count);
    }
  }
}

// Rows are divided by id, not by position, so every dst row is added to by one thread, in order.
template <class Dst, class Src>
void scatter_add(Dst* dst, const int64_t* ids, const Src* src, double scale, int64_t num_ids,
                 int64_t dim, bool unique) {
  const acc_t<Src> factor = static_cast<acc_t<Src>>(scale);
  const int64_t bytes = dim * int64_t{2 * sizeof(Dst) + sizeof(Src)};
  if (unique) {
    parallel_items(num_ids, bytes, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < end) prefetch(dst + ids[i + kAhead] * dim, dim * int64_t{sizeof(Dst)});
        add_scaled(dst + ids[i] * dim, src + i * dim, factor, dim);
      }
    });
    return;
  }
  const int64_t parts = num_parts(num_ids * bytes);
  const auto is_mine = [=](int64_t id, int64_t part) {
    const uint64_t spread = (static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15ull) >> 32;
    return parts == 1 || static_cast<int64_t>((spread * parts) >> 32) == part;
  };
  parallel_parts(parts, [=](int64_t part) {
    for (int64_t i = 0; i < num_ids; ++i) {
      const int64_t soon = i + kAhead * parts;
      if (soon < num_ids && is_mine(ids[soon], part)) {
        prefetch(dst + ids[soon] * dim, dim * int64_t{sizeof(Dst)});
      }
      if (is_mine(ids[i], part)) add_scaled(dst + ids[i] * dim, src + i * dim, factor, dim);
    }
  });
}

void scatter_add_rows_(const Tensor& dst, const Tensor& indices, const Tensor& src, double scale) {
  check_scatter(dst, indices, src);
  const Tensor x = dense(src), ids_t = dense(indices);
  const int64_t* ids = data<int64_t>(ids_t);
  const int64_t n = ids_t.numel(), dim = x.size(1);
  const bool unique = check_ids_in_range(ids, n, dst.size(0), "indices").increasing;
  dispatch(x.scalar_type(), [&](auto s) {
    using Src = decltype(s);
    if (dst.scalar_type() == x.scalar_type()) {
      return scatter_add(mutable_data<Src>(dst), ids, data<Src>(x), scale, n, dim, unique);
    }
    if constexpr (is_half_v<Src>) {
      check_dtype(dst, ScalarType::Float, "dst");
      scatter_add(mutable_data<float>(dst), ids, data<Src>(x), scale, n, dim, unique);
    } else {
      check_dtype(dst, x.scalar_type(), "dst");
    }
  });
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("scatter_rows_", TORCH_BOX(&commlib::scatter_rows_));
  m.impl("scatter_add_rows_", TORCH_BOX(&commlib::scatter_add_rows_));
}
