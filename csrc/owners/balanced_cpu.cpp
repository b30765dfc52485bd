// balanced_owner and its inverse.
#include <torch/csrc/stable/library.h>

#include "common/ids.h"
#include "common/parallel.h"
#include "common/tensor.h"
#include "owners/balanced.h"

namespace commlib {
namespace {

constexpr int64_t kNoLimit = INT64_MAX;

void check_ranks(int64_t num_ranks) {
  COMMLIB_CHECK(num_ranks >= 1 && num_ranks < (int64_t{1} << 31), "ValueError",
                "num_ranks = ", num_ranks, " is outside [1, 2^31)");
}

std::tuple<Tensor, Tensor> balanced_owner(const Tensor& rows, int64_t num_ranks) {
  check_ids(rows, "rows");
  check_ranks(num_ranks);
  const Tensor ids = dense(rows);
  const int64_t* in = data<int64_t>(ids);
  const int64_t n = ids.numel();
  check_ids_in_range(in, n, kNoLimit, "rows");
  Tensor owner = make(ids, {n}, ScalarType::Long), within = make(ids, {n}, ScalarType::Long);
  int64_t* out_owner = mutable_data<int64_t>(owner);
  int64_t* out_within = mutable_data<int64_t>(within);
  parallel_items(n, 24, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      out_within[i] = index_within_of(in[i], num_ranks);
      out_owner[i] = owner_of(in[i], out_within[i], num_ranks);
    }
  });
  return {owner, within};
}

Tensor balanced_row(const Tensor& owner, const Tensor& index_within, int64_t num_ranks) {
  check_ids(owner, "owner");
  check_ids(index_within, "index_within");
  check_ranks(num_ranks);
  check_same_size(owner.size(0), "len(owner)", index_within.size(0), "len(index_within)");
  const Tensor o = dense(owner), w = dense(index_within);
  const int64_t n = o.numel();
  const int64_t *in_owner = data<int64_t>(o), *in_within = data<int64_t>(w);
  check_ids_in_range(in_owner, n, num_ranks, "owner");
  check_ids_in_range(in_within, n, kNoLimit / num_ranks, "index_within");
  Tensor rows = make(o, {n}, ScalarType::Long);
  int64_t* out = mutable_data<int64_t>(rows);
  parallel_items(n, 24, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = row_of(in_owner[i], in_within[i], num_ranks);
  });
  return rows;
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("balanced_owner", TORCH_BOX(&commlib::balanced_owner));
  m.impl("balanced_row", TORCH_BOX(&commlib::balanced_row));
}
