// What one rank sends and receives once the owners are known: positions and counts, no values.
// Each rank computes its own half of every exchange, and the halves fit without a message.
#pragma once

#include <cstdint>
#include <vector>

#include "owners/holders.h"

namespace commlib {

// Three exchanges: `spread`, rows that nobody else holds and that stay with their holder, to
// everyone at once; `push`, the other rows to their owners; `pull`, their sums to everyone.
struct Route {
  std::vector<int64_t> spread_src;     // own rows to spread, as positions in the own list
  std::vector<int64_t> spread_counts;  // [n] how many each rank spreads
  std::vector<int64_t> spread_dst;     // where all spread rows go, by holder, as union positions
  std::vector<int64_t> owned;          // [O] union positions of the rows this rank sums, ascending
  std::vector<int64_t> push_src;       // own rows to send, by owner, as positions in the own list
  std::vector<int64_t> push_send;      // [n]
  std::vector<int64_t> push_recv;      // [n]
  std::vector<int64_t> push_dst;       // received rows, by sender, as positions in `owned`
  std::vector<int64_t> own_src;    // own rows that are summed here: position in the own list ...
  std::vector<int64_t> own_dst;    // ... and in `owned`
  std::vector<int64_t> pull_src;   // sums to send, by receiver, as positions in `owned`
  std::vector<int64_t> pull_send;  // [n]
  std::vector<int64_t> pull_recv;  // [n]
  std::vector<int64_t> pull_dst;   // received sums, by owner, as union positions
  std::vector<int64_t> kept_src;   // own sole rows that another rank relays: own list ...
  std::vector<int64_t> kept_dst;   // ... and union positions; nobody sends these back
};

inline int32_t sole_holder(const Holders& holders, int64_t row) {
  if (holders.count[row] != 1) return -1;
  for (int64_t w = 0;; ++w)
    if (const uint64_t bits = holders.mask[row * holders.words_per_row + w])
      return static_cast<int32_t>(w * 64 + __builtin_ctzll(bits));
}

// Positions of `items` grouped by `key` in [0, n), order kept within a group; sizes into `sizes`.
template <typename Key>
std::vector<int64_t> group(const std::vector<int64_t>& items, int64_t num_keys,
                           std::vector<int64_t>& sizes, const Key& key) {
  sizes.assign(num_keys, 0);
  for (const int64_t item : items) ++sizes[key(item)];
  std::vector<int64_t> next(num_keys, 0);
  for (int64_t k = 1; k < num_keys; ++k) next[k] = next[k - 1] + sizes[k - 1];
  std::vector<int64_t> out(items.size());
  for (const int64_t item : items) out[next[key(item)]++] = item;
  return out;
}

// The one holder of each row, or -1 where there are several.
inline std::vector<int32_t> sole_holders(const Holders& holders) {
  std::vector<int32_t> sole(holders.rows.size());
  for (size_t row = 0; row < sole.size(); ++row)
    sole[row] = sole_holder(holders, static_cast<int64_t>(row));
  return sole;
}

inline void route_spread(const std::vector<int32_t>& owner, const std::vector<int32_t>& sole,
                         int64_t num_ranks, Route& route) {
  std::vector<int64_t> rows;
  for (size_t row = 0; row < owner.size(); ++row)
    if (owner[row] == sole[row]) rows.push_back(static_cast<int64_t>(row));
  route.spread_dst =
      group(rows, num_ranks, route.spread_counts, [&](int64_t row) { return owner[row]; });
}

inline void route_pull(const std::vector<int32_t>& owner, const std::vector<int32_t>& sole,
                       int64_t num_ranks, int64_t rank, Route& route) {
  route.pull_send.assign(num_ranks, 0);
  for (int64_t receiver = 0; receiver < num_ranks; ++receiver) {
    if (receiver == rank) continue;
    for (size_t slot = 0; slot < route.owned.size(); ++slot)
      if (sole[route.owned[slot]] != receiver) {
        route.pull_src.push_back(static_cast<int64_t>(slot));
        ++route.pull_send[receiver];
      }
  }
  std::vector<int64_t> arriving;
  for (size_t row = 0; row < owner.size(); ++row)
    if (owner[row] != rank && sole[row] != rank && owner[row] != sole[row])
      arriving.push_back(static_cast<int64_t>(row));
  route.pull_dst =
      group(arriving, num_ranks, route.pull_recv, [&](int64_t row) { return owner[row]; });
}

inline Route make_route(const Holders& holders, const std::vector<int32_t>& owner, int64_t rank) {
  Route route;
  const int64_t num_ranks = holders.num_ranks;
  const int64_t num_union = static_cast<int64_t>(holders.rows.size());
  const std::vector<int32_t> sole = sole_holders(holders);
  std::vector<int64_t> slot(num_union, -1);  // union position -> position in `owned`
  for (int64_t row = 0; row < num_union; ++row)
    if (owner[row] == rank && sole[row] != rank) {
      slot[row] = static_cast<int64_t>(route.owned.size());
      route.owned.push_back(row);
    }

  std::vector<int64_t> leaving;
  route.push_recv.assign(num_ranks, 0);
  int64_t start = 0, own_start = 0;
  for (int64_t sender = 0; sender < num_ranks; ++sender) {
    const int64_t end = start + holders.held[sender];
    if (sender == rank) own_start = start;
    for (int64_t i = start; i < end; ++i) {
      const int64_t row = holders.position[i];
      if (owner[row] == sole[row]) {
        if (sender == rank) route.spread_src.push_back(i - start);
      } else if (sender != rank) {
        if (slot[row] < 0) continue;
        route.push_dst.push_back(slot[row]);
        ++route.push_recv[sender];
      } else if (slot[row] >= 0) {
        route.own_src.push_back(i - start);
        route.own_dst.push_back(slot[row]);
      } else {
        leaving.push_back(i - start);
        if (sole[row] == rank) {
          route.kept_src.push_back(i - start);
          route.kept_dst.push_back(row);
        }
      }
    }
    start = end;
  }
  const auto owner_of_own = [&](int64_t i) { return owner[holders.position[own_start + i]]; };
  route.push_src = group(leaving, num_ranks, route.push_send, owner_of_own);
  route_spread(owner, sole, num_ranks, route);
  route_pull(owner, sole, num_ranks, rank, route);
  return route;
}

}  // namespace commlib
