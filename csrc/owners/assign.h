// Who sums each row ("minimal", ours). A row held by k ranks needs k+n-2 messages at least; that is
// reached when its owner is one of its holders: k-1 rows come in, n-1 sums go out. A row with one
// holder may also be owned by any other rank (a relay): the holder sends it once, the relay n-2
// times, which is n-1 again. So
//     sent(r)     = held(r) + (n-2) owned(r)
//     received(r) = U - sole(r) + sum over shared rows owned by r of (k-2)
// whoever owns what, and only the spread over ranks is left to choose; among equals by shared rows
// owned so far, since with two ranks (n-2 = 0) nothing else keeps both busy in both exchanges.
// Integers only: every rank must come to the same assignment whatever its processor.
#pragma once

#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

#include "owners/holders.h"

namespace commlib {

struct Loads {
  std::vector<int64_t> sent, received, shared;  // messages; shared rows owned
};

// Smaller is better: first the busier direction, then both together. 30 bits are enough for the
// second, which only breaks ties.
inline int64_t load_key(const Loads& load, int64_t rank, int64_t add_sent, int64_t add_received) {
  const int64_t sent = load.sent[rank] + add_sent;
  const int64_t received = load.received[rank] + add_received;
  const int64_t both = sent + received;
  constexpr int64_t kMost = (int64_t{1} << 30) - 1;
  return ((sent > received ? sent : received) << 30) | (both < kMost ? both : kMost);
}

// Least loaded holder of one row; then the one that owns fewer shared rows, then the lower rank.
inline int32_t least_loaded(const Holders& holders, int64_t row, const Loads& load,
                            int64_t add_sent, int64_t add_received) {
  int32_t best = -1;
  int64_t best_key = 0;
  for (int64_t w = 0; w < holders.words_per_row; ++w)
    for (uint64_t left = holders.mask[row * holders.words_per_row + w]; left != 0;
         left &= left - 1) {
      const int64_t rank = w * 64 + __builtin_ctzll(left);
      const int64_t key = load_key(load, rank, add_sent, add_received);
      if (best < 0 || key < best_key ||
          (key == best_key && load.shared[rank] < load.shared[best])) {
        best = static_cast<int32_t>(rank);
        best_key = key;
      }
    }
  return best;
}

// Moves sole rows from the ranks that send most to those that send least, while that lowers the
// busiest rank: never below what it receives anyway, nor below the mean.
inline void relay_sole_rows(const Holders& holders, Loads& load, std::vector<int32_t>& owner) {
  const int64_t num_ranks = holders.num_ranks;
  std::vector<std::vector<int64_t>> sole(num_ranks);
  for (size_t row = 0; row < owner.size(); ++row)
    if (holders.count[row] == 1) sole[owner[row]].push_back(static_cast<int64_t>(row));
  int64_t total = 0, floor = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    total += load.sent[rank];
    floor = std::max(floor, load.received[rank]);
  }
  floor = std::max(floor, (total + num_ranks - 1) / num_ranks);
  const int64_t quantum = num_ranks - 2;
  using Entry = std::pair<int64_t, int64_t>;  // load, rank
  std::priority_queue<Entry> busiest;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> idlest;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    busiest.emplace(load.sent[rank], rank);
    idlest.emplace(load.sent[rank], rank);
  }
  while (!busiest.empty()) {
    const auto [most, giver] = busiest.top();
    if (most != load.sent[giver]) {
      busiest.pop();
      continue;
    }
    while (idlest.top().first != load.sent[idlest.top().second]) idlest.pop();
    const auto [least, taker] = idlest.top();
    if (most <= floor || most - least <= quantum || sole[giver].empty()) return;
    owner[sole[giver].back()] = static_cast<int32_t>(taker);
    sole[giver].pop_back();
    load.sent[giver] -= quantum;
    load.sent[taker] += quantum;
    for (const int64_t rank : {giver, taker}) {
      busiest.emplace(load.sent[rank], rank);
      idlest.emplace(load.sent[rank], rank);
    }
  }
}

// Owner of each row of the union: sole rows stay with their holder, shared rows, fewest holders
// first, go to the least loaded holder, then relays even out what is left.
inline std::vector<int32_t> assign_owners(const Holders& holders) {
  const int64_t num_ranks = holders.num_ranks;
  const int64_t num_union = static_cast<int64_t>(holders.rows.size());
  std::vector<int32_t> owner(num_union);
  Loads load{holders.held, std::vector<int64_t>(num_ranks, num_union),
             std::vector<int64_t>(num_ranks, 0)};
  std::vector<int64_t> first(num_ranks + 2, 0);  // counting sort by holders
  for (const int32_t count : holders.count) ++first[count + 1];
  for (int64_t k = 1; k < num_ranks + 2; ++k) first[k] += first[k - 1];
  std::vector<int64_t> order(num_union);
  for (int64_t row = 0; row < num_union; ++row) order[first[holders.count[row]]++] = row;
  for (const int64_t row : order) {
    const int64_t k = holders.count[row];
    const int64_t add_received = k - 2;  // a sole row is not received: k-2 = -1
    const int32_t rank = least_loaded(holders, row, load, num_ranks - 2, add_received);
    owner[row] = rank;
    load.sent[rank] += num_ranks - 2;
    load.received[rank] += add_received;
    load.shared[rank] += k > 1;
  }
  if (num_ranks > 2) relay_sole_rows(holders, load, owner);
  return owner;
}

}  // namespace commlib
