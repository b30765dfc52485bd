// unique_ids: the sorted unique ids of a tensor of any shape, padding left out.
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <vector>

#include "common/ids.h"
#include "common/parallel.h"
#include "common/tensor.h"
#include "rows/bits.h"
#include "rows/sort.h"

namespace commlib {
namespace {

// Throws IndexError unless every id is in [0, num_rows) or is `drop`; drop = -1 excuses none.
template <class T>
void check_batch(const T* ids, int64_t n, int64_t num_rows, int64_t drop) {
  const auto bad = [=](int64_t id) {
    const bool outside = static_cast<uint64_t>(id) >= static_cast<uint64_t>(num_rows);
    return outside & ((id != drop) | (drop == -1));
  };
  std::atomic<bool> any{false};
  parallel_items(n, 8, [&](int64_t begin, int64_t end) {
    bool found = false;
    for (int64_t i = begin; i < end; ++i) found |= bad(ids[i]);
    if (found) any = true;
  });
  for (int64_t i = 0; any && i < n; ++i) {
    COMMLIB_CHECK(!bad(ids[i]), "IndexError", "ids.flatten()[", i, "] = ", ids[i],
                  " is outside [0, ", num_rows, ")");
  }
}

// By marking a bit per row: the fast way unless rows far outnumber ids.
template <class T>
Tensor unique_by_bitmap(const Tensor& like, const T* ids, int64_t n, int64_t num_rows,
                        int64_t drop) {
  const int64_t num_bytes = (num_rows + 7) / 8;
  const Tensor bitmap = make(like, {num_bytes}, ScalarType::Byte);
  uint8_t* bits = mutable_data<uint8_t>(bitmap);
  std::fill(bits, bits + num_bytes, uint8_t{0});
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = ids[i];
    if (id != drop) bits[id >> 3] = static_cast<uint8_t>(bits[id >> 3] | (1u << (id & 7)));
  }
  Tensor out = make(like, {count_bits(bits, num_bytes)}, ScalarType::Long);
  list_bits(bits, num_bytes, 0, mutable_data<int64_t>(out));
  return out;
}

template <class T>
Tensor unique_by_sort(const Tensor& like, const T* ids, int64_t n, int64_t num_rows, int64_t drop) {
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] != drop) kept.push_back(ids[i]);
  }
  const int64_t count = static_cast<int64_t>(kept.size());
  const auto order = sort_ids(kept.data(), count, num_rows);
  kept.clear();
  for (int64_t i = 0; i < count; ++i) {
    if (i == 0 || order[i].id != order[i - 1].id) kept.push_back(order[i].id);
  }
  Tensor out = make(like, {static_cast<int64_t>(kept.size())}, ScalarType::Long);
  std::copy(kept.begin(), kept.end(), mutable_data<int64_t>(out));
  return out;
}

template <class T>
Tensor unique_of(const Tensor& batch, int64_t num_rows, int64_t drop) {
  const T* ids = data<T>(batch);
  const int64_t n = batch.numel();
  check_batch(ids, n, num_rows, drop);
  return num_rows / 512 <= n ? unique_by_bitmap(batch, ids, n, num_rows, drop)
                             : unique_by_sort(batch, ids, n, num_rows, drop);
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
