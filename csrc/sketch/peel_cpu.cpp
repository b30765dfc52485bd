// sketch_peel: with the union's ids known, take rows out of the sketch one by one, each from a
// bucket that holds nothing else any more. What never gets alone is decoded by the median.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <vector>

#include "common/parallel.h"
#include "common/rowmath.h"
#include "common/tensor.h"
#include "sketch/estimate.h"
#include "sketch/place.h"

namespace commlib {
namespace {

struct Step {
  int64_t row;  // position in the union
  int table;    // the table whose bucket holds this row alone
};

// The order of peeling: a queue that starts with all buckets of one row in flat order (table,
// bucket). Needs ids only. A bucket is its number of rows and the XOR of their positions.
std::vector<Step> plan(const Place* places, int64_t n, int num_hashes, int64_t num_buckets) {
  struct Bucket {
    int64_t count = 0;
    int64_t row_xor = 0;
  };
  std::vector<Bucket> buckets(static_cast<size_t>(num_hashes * num_buckets));
  const auto at = [&](int j, int64_t i) -> Bucket& {
    return buckets[j * num_buckets + bucket(places[j * n + i])];
  };
  for (int j = 0; j < num_hashes; ++j) {
    for (int64_t i = 0; i < n; ++i) {
      ++at(j, i).count;
      at(j, i).row_xor ^= i;
    }
  }
  std::vector<Step> queue, steps;
  for (int j = 0; j < num_hashes; ++j) {
    for (int64_t k = 0; k < num_buckets; ++k) {
      const Bucket& b = buckets[j * num_buckets + k];
      if (b.count == 1) queue.push_back({b.row_xor, j});
    }
  }
  for (size_t head = 0; head < queue.size(); ++head) {
    const Step step = queue[head];
    if (at(step.table, step.row).count != 1) continue;  // peeled through another bucket
    steps.push_back(step);
    for (int j = 0; j < num_hashes; ++j) {
      Bucket& b = at(j, step.row);
      b.row_xor ^= step.row;
      if (--b.count == 1) queue.push_back({b.row_xor, j});
    }
  }
  return steps;
}

// Takes the rows of `steps` out of `work`, a copy of the sketch. Columns are independent, so
// threads divide them and every column sees the same order.
template <class A>
void take_out(const Lookup<A>& lookup, A* work, const std::vector<Step>& steps, A* out) {
  const int64_t dim = lookup.dim, width = int64_t{sizeof(A)};
  const int64_t total = lookup.num_hashes * lookup.num_buckets * dim * width;
  const int64_t parts = std::min(num_parts(total), std::max<int64_t>(1, dim * width / 256));
  const auto place = [&](int j, int64_t i) { return lookup.places[j * lookup.num_rows + i]; };
  const auto row_of = [&](int j, int64_t i) {
    return work + (j * lookup.num_buckets + bucket(place(j, i))) * dim;
  };
  parallel_parts(parts, [&](int64_t part) {
    const int64_t first = dim * part / parts, count = dim * (part + 1) / parts - first;
    for (size_t s = 0; s < steps.size(); ++s) {
      const auto [row, table] = steps[s];
      if (s + kAhead < steps.size()) {
        const int64_t soon = steps[s + kAhead].row;
        prefetch(out + soon * dim + first, count * width);
        for (int j = 0; j < lookup.num_hashes; ++j)
          prefetch(row_of(j, soon) + first, count * width);
      }
      A* value = out + row * dim + first;
      const A* alone = row_of(table, row) + first;
      set_row(value, alone, negative(place(table, row)) ? A{-1} : A{1}, count);
      for (int j = 0; j < lookup.num_hashes; ++j) {
        if (j == table) continue;
        const A factor = negative(place(j, row)) ? A{1} : A{-1};
        add_row(row_of(j, row) + first, static_cast<const A*>(value), factor, count);
      }
    }
  });
}

template <class A>
void decode_rest(const Lookup<A>& lookup, const bool* peeled, A* out) {
  parallel_items(lookup.num_rows, lookup.dim * int64_t{sizeof(A)}, [=](int64_t begin, int64_t end) {
    const A* rows[kMaxHashes];
    A signs[kMaxHashes];
    for (int64_t i = begin; i < end; ++i) {
      if (peeled[i]) continue;
      lookup.find(i, rows, signs);
      median_row(rows, signs, lookup.num_hashes, A{1}, out + i * lookup.dim, lookup.dim);
    }
  });
}

std::tuple<Tensor, Tensor> sketch_peel(const Tensor& sketch, const Tensor& indices, int64_t seed) {
  check_dim(sketch, 3, "sketch");
  check_ids(indices, "indices");
  check_sketch_size(sketch.size(0), sketch.size(1), seed);
  const Tensor s = dense(sketch), ids = dense(indices);
  if (s.scalar_type() != ScalarType::Double) check_dtype(s, ScalarType::Float, "sketch");
  const int64_t n = ids.numel(), dim = s.size(2), num_buckets = s.size(1);
  const int num_hashes = static_cast<int>(s.size(0));
  const auto places = place_rows(data<int64_t>(ids), n, num_hashes, num_buckets, seed);
  const std::vector<Step> steps = plan(places.get(), n, num_hashes, num_buckets);
  Tensor work = make(s, {num_hashes, num_buckets, dim}, s.scalar_type());
  torch::stable::copy_(work, s);
  Tensor out = make(s, {n, dim}, s.scalar_type());
  Tensor peeled = make(s, {n}, ScalarType::Bool);
  bool* flags = mutable_data<bool>(peeled);
  std::fill(flags, flags + n, false);
  for (const Step& step : steps) flags[step.row] = true;
  const auto run = [&](auto a) {
    using A = decltype(a);
    const Lookup<A> lookup{data<A>(s), places.get(), n, num_hashes, num_buckets, dim};
    take_out(lookup, mutable_data<A>(work), steps, mutable_data<A>(out));
    decode_rest(lookup, flags, mutable_data<A>(out));
  };
  s.scalar_type() == ScalarType::Double ? run(double{}) : run(float{});
  return {out, peeled};
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("sketch_peel", TORCH_BOX(&commlib::sketch_peel));
}
