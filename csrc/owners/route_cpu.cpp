// The union of the ranks' rows, who owns each row of it, and what one rank sends and receives.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "common/tensor.h"
#include "owners/assign.h"
#include "owners/holders.h"
#include "owners/route.h"

namespace commlib {
namespace {

Holders holders_of(const Tensor& indices, const Tensor& counts, int64_t num_rows) {
  check_ids(indices, "indices");
  check_ids(counts, "counts");
  const Tensor ids = dense(indices), sizes = dense(counts);
  const int64_t* in = data<int64_t>(ids);
  const int64_t* count = data<int64_t>(sizes);
  const std::vector<int64_t> per_rank(count, count + sizes.numel());
  COMMLIB_CHECK(!per_rank.empty(), "ValueError", "counts is empty; it needs one number a rank");
  int64_t i = 0;
  for (size_t rank = 0; rank < per_rank.size(); ++rank) {
    COMMLIB_CHECK(per_rank[rank] >= 0 && per_rank[rank] <= ids.numel() - i, "ValueError", "counts[",
                  rank, "] = ", per_rank[rank], " does not fit the ", ids.numel(), " indices");
    for (int64_t last = -1, end = i + per_rank[rank]; i < end; last = in[i++])
      COMMLIB_CHECK(in[i] > last && in[i] < num_rows, "ValueError", "indices[", i, "] = ", in[i],
                    " of rank ", rank,
                    " is not sorted, not unique or not below num_rows = ", num_rows);
  }
  COMMLIB_CHECK(i == ids.numel(), "ValueError", "counts sum to ", i, " but there are ", ids.numel(),
                " indices");
  return find_holders(in, per_rank, num_rows);
}

template <class T>
Tensor to_tensor(const Tensor& like, const std::vector<T>& values) {
  static_assert(sizeof(T) == 8 || sizeof(T) == 4);
  Tensor out = make(like, {static_cast<int64_t>(values.size())},
                    sizeof(T) == 8 ? ScalarType::Long : ScalarType::Int);
  if (!values.empty()) std::memcpy(mutable_data<T>(out), values.data(), values.size() * sizeof(T));
  return out;
}

std::tuple<Tensor, Tensor> unite_rows(const Tensor& indices, const Tensor& counts,
                                      int64_t num_rows) {
  const Holders holders = holders_of(indices, counts, num_rows);
  return {to_tensor(indices, holders.rows), to_tensor(indices, holders.position)};
}

std::tuple<Tensor, Tensor> minimal_owner(const Tensor& indices, const Tensor& counts,
                                         int64_t num_rows) {
  const Holders holders = holders_of(indices, counts, num_rows);
  return {to_tensor(indices, holders.rows), to_tensor(indices, assign_owners(holders))};
}

using RouteTensors =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
               Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

RouteTensors minimal_route(const Tensor& indices, const Tensor& counts, int64_t num_rows,
                           int64_t rank) {
  const Holders holders = holders_of(indices, counts, num_rows);
  COMMLIB_CHECK(rank >= 0 && rank < holders.num_ranks, "ValueError", "rank = ", rank,
                " is not one of ", holders.num_ranks, " ranks");
  const Route route = make_route(holders, assign_owners(holders), rank);
  const auto tensor = [&](const std::vector<int64_t>& values) {
    return to_tensor(indices, values);
  };
  return {tensor(holders.rows),     tensor(route.spread_src), tensor(route.spread_counts),
          tensor(route.spread_dst), tensor(route.owned),      tensor(route.push_src),
          tensor(route.push_send),  tensor(route.push_recv),  tensor(route.push_dst),
          tensor(route.own_src),    tensor(route.own_dst),    tensor(route.pull_src),
          tensor(route.pull_send),  tensor(route.pull_recv),  tensor(route.pull_dst),
          tensor(route.kept_src),   tensor(route.kept_dst)};
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("unite_rows", TORCH_BOX(&commlib::unite_rows));
  m.impl("minimal_owner", TORCH_BOX(&commlib::minimal_owner));
  m.impl("minimal_route", TORCH_BOX(&commlib::minimal_route));
}
