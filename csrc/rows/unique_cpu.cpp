// unique_ids: the sorted unique ids of a tensor of any shape, padding left out.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "common/ids.h"
#include "common/parallel.h"
#include "common/tensor.h"
#include "rows/bits.h"
#include "rows/sort.h"

namespace commlib {
namespace {

Tensor to_tensor(const Tensor& like, const std::vector<int64_t>& values) {
  Tensor out = make(like, {static_cast<int64_t>(values.size())}, ScalarType::Long);
  std::copy(values.begin(), values.end(), mutable_data<int64_t>(out));
  return out;
}

// By marking a bit per row: the fast way unless rows far outnumber ids.
Tensor unique_by_bitmap(const Tensor& like, const std::vector<int64_t>& ids, int64_t num_rows) {
  std::vector<uint8_t> bitmap(static_cast<size_t>((num_rows + 7) / 8), 0);
  const int64_t num_bytes = static_cast<int64_t>(bitmap.size());
  set_bits(ids.data(), static_cast<int64_t>(ids.size()), bitmap.data());
  Tensor out = make(like, {count_bits(bitmap.data(), num_bytes)}, ScalarType::Long);
  list_bits(bitmap.data(), num_bytes, 0, mutable_data<int64_t>(out));
  return out;
}

Tensor unique_by_sort(const Tensor& like, const std::vector<int64_t>& ids, int64_t num_rows) {
  const int64_t n = static_cast<int64_t>(ids.size());
  const auto order = sort_ids(ids.data(), n, num_rows);
  std::vector<int64_t> unique;
  for (int64_t i = 0; i < n; ++i) {
    if (i == 0 || order[i].id != order[i - 1].id) unique.push_back(order[i].id);
  }
  return to_tensor(like, unique);
}

template <class T>
Tensor unique_of(const Tensor& ids_t, int64_t num_rows, int64_t drop) {
  const T* in = data<T>(ids_t);
  const int64_t n = ids_t.numel();
  std::vector<int64_t> ids(static_cast<size_t>(n));
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    ids[kept] = in[i];
    kept += in[i] != drop || drop == -1;
  }
  ids.resize(static_cast<size_t>(kept));
  check_ids_in_range(ids.data(), kept, num_rows, "ids");
  const bool small_table = num_rows / 512 <= kept;
  return small_table ? unique_by_bitmap(ids_t, ids, num_rows)
                     : unique_by_sort(ids_t, ids, num_rows);
}

Tensor unique_ids(const Tensor& ids, int64_t num_rows, int64_t drop) {
  const Tensor x = dense(ids);
  if (x.scalar_type() == ScalarType::Int) return unique_of<int32_t>(x, num_rows, drop);
  check_dtype(x, ScalarType::Long, "ids");
  return unique_of<int64_t>(x, num_rows, drop);
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("unique_ids", TORCH_BOX(&commlib::unique_ids));
}
