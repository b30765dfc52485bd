// Who holds each row of the union. In: every rank's sorted unique ids, one list after the other.
// Out: the sorted union, for each given id its position there, and one bit set of ranks a row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace commlib {

struct Holders {
  int64_t num_ranks = 0;
  int64_t words_per_row = 0;      // 64 ranks a word
  std::vector<int64_t> rows;      // [U] the union, sorted
  std::vector<int64_t> position;  // [sum R] where each given id stands in `rows`
  std::vector<uint64_t> mask;     // [U * words_per_row]
  std::vector<int32_t> count;     // [U] how many ranks hold the row
  std::vector<int64_t> held;      // [n] rows that each rank holds
};

// A bitmap over all V rows costs V/64 words; beyond this many words per id, sorting is cheaper.
constexpr int64_t kMaxBitmapWordsPerId = 16;

inline void unite_by_bitmap(const int64_t* ids, int64_t num_ids, int64_t num_rows, Holders& out) {
  const int64_t num_words = (num_rows + 63) / 64;
  std::vector<uint64_t> bits(num_words, 0);
  for (int64_t i = 0; i < num_ids; ++i) bits[ids[i] >> 6] |= uint64_t{1} << (ids[i] & 63);
  std::vector<int64_t> before(num_words);
  int64_t total = 0;
  for (int64_t w = 0; w < num_words; ++w) {
    before[w] = total;
    total += __builtin_popcountll(bits[w]);
  }
  out.rows.resize(total);
  int64_t next = 0;
  for (int64_t w = 0; w < num_words; ++w)
    for (uint64_t left = bits[w]; left != 0; left &= left - 1)
      out.rows[next++] = w * 64 + __builtin_ctzll(left);
  for (int64_t i = 0; i < num_ids; ++i) {
    const uint64_t below = (uint64_t{1} << (ids[i] & 63)) - 1;
    out.position[i] = before[ids[i] >> 6] + __builtin_popcountll(bits[ids[i] >> 6] & below);
  }
}

inline void unite_by_sort(const int64_t* ids, int64_t num_ids, Holders& out) {
  out.rows.assign(ids, ids + num_ids);
  std::sort(out.rows.begin(), out.rows.end());
  out.rows.erase(std::unique(out.rows.begin(), out.rows.end()), out.rows.end());
  for (int64_t i = 0; i < num_ids; ++i)
    out.position[i] = std::lower_bound(out.rows.begin(), out.rows.end(), ids[i]) - out.rows.begin();
}

inline Holders find_holders(const int64_t* ids, const std::vector<int64_t>& counts,
                            int64_t num_rows) {
  Holders out;
  out.num_ranks = static_cast<int64_t>(counts.size());
  out.words_per_row = (out.num_ranks + 63) / 64;
  out.held = counts;
  int64_t num_ids = 0;
  for (const int64_t count : counts) num_ids += count;
  out.position.resize(num_ids);
  if (num_rows / 64 <= kMaxBitmapWordsPerId * num_ids)
    unite_by_bitmap(ids, num_ids, num_rows, out);
  else
    unite_by_sort(ids, num_ids, out);
  const int64_t num_union = static_cast<int64_t>(out.rows.size());
  out.mask.assign(num_union * out.words_per_row, 0);
  out.count.assign(num_union, 0);
  int64_t i = 0;
  for (int64_t rank = 0; rank < out.num_ranks; ++rank)
    for (const int64_t end = i + counts[rank]; i < end; ++i) {
      const int64_t row = out.position[i];
      out.mask[row * out.words_per_row + (rank >> 6)] |= uint64_t{1} << (rank & 63);
      ++out.count[row];
    }
  return out;
}

}  // namespace commlib
