// coalesce_rows: (ids with duplicates, rows) -> (sorted unique ids, summed rows).
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <vector>

#include "common/ids.h"
#include "common/parallel.h"
#include "common/rowmath.h"
#include "common/tensor.h"
#include "rows/sort.h"

namespace commlib {
namespace {

// out[g] = sum of the rows order[start[g]] .. order[start[g+1]-1], one rounding at the end.
template <class T>
void sum_groups(const T* values, const IdAt* order, const std::vector<int64_t>& start, T* out,
                int64_t dim, int64_t num_values) {
  const int64_t groups = static_cast<int64_t>(start.size()) - 1;
  const int64_t rows_per_group = num_values / std::max<int64_t>(1, groups) + 1;
  const int64_t bytes = rows_per_group * dim * int64_t{sizeof(T)};
  parallel_items(groups, bytes, [=, &start](int64_t begin, int64_t end) {
    acc_t<T> sum[kBlock];
    for (int64_t g = begin; g < end; ++g) {
      const int64_t first = start[g], last = start[g + 1];
      T* row = out + g * dim;
      for (int64_t i = first; i < last && i + kAhead < num_values; ++i) {
        prefetch(values + order[i + kAhead].at * dim, dim * int64_t{sizeof(T)});
      }
      if (last - first == 1) {
        std::memcpy(row, values + order[first].at * dim, static_cast<size_t>(dim) * sizeof(T));
        continue;
      }
      for (int64_t d = 0; d < dim; d += kBlock) {
        const int64_t count = std::min(kBlock, dim - d);
        set_row(sum, values + order[first].at * dim + d, acc_t<T>{1}, count);
        for (int64_t i = first + 1; i < last; ++i) {
          add_row(sum, values + order[i].at * dim + d, acc_t<T>{1}, count);
        }
        convert(sum, row + d, count);
      }
    }
  });
}

std::tuple<Tensor, Tensor> coalesce_rows(const Tensor& indices, const Tensor& values,
                                         int64_t num_rows) {
  check_ids(indices, "indices");
  check_dim(values, 2, "values");
  check_same_size(values.size(0), "values.shape[0]", indices.size(0), "len(indices)");
  const Tensor ids_t = dense(indices), x = dense(values);
  const int64_t* ids = data<int64_t>(ids_t);
  const int64_t n = ids_t.numel(), dim = x.size(1);
  if (check_ids_in_range(ids, n, num_rows, "indices").increasing) {
    return {torch::stable::clone(ids_t), torch::stable::clone(x)};
  }
  const auto order = sort_ids(ids, n, num_rows);
  std::vector<int64_t> start;
  for (int64_t i = 0; i < n; ++i) {
    if (i == 0 || order[i].id != order[i - 1].id) start.push_back(i);
  }
  const int64_t groups = static_cast<int64_t>(start.size());
  start.push_back(n);
  Tensor out_ids = make(ids_t, {groups}, ScalarType::Long);
  Tensor out = make(x, {groups, dim}, x.scalar_type());
  int64_t* unique = mutable_data<int64_t>(out_ids);
  for (int64_t g = 0; g < groups; ++g) unique[g] = order[start[g]].id;
  dispatch(x.scalar_type(), [&](auto t) {
    using T = decltype(t);
    sum_groups(data<T>(x), order.get(), start, mutable_data<T>(out), dim, n);
  });
  return {out_ids, out};
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("coalesce_rows", TORCH_BOX(&commlib::coalesce_rows));
}
