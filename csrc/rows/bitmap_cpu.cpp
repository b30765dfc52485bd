// Packed bitmaps, one bit per row, row i at byte i>>3 bit i&7: count, list, build, OR.
#include <torch/csrc/stable/library.h>

#include <numeric>

#include "common/ids.h"
#include "common/parallel.h"
#include "common/tensor.h"
#include "rows/bits.h"

namespace commlib {
namespace {

constexpr int64_t kChunk = 16 * 1024;  // bytes of bitmap per unit of work

const Tensor checked(const Tensor& bitmap, int64_t dim, const char* name) {
  check_dim(bitmap, dim, name);
  check_dtype(bitmap, ScalarType::Byte, name);
  return dense(bitmap);
}

// Set bits of every chunk, as a running sum: result[c] bits lie before chunk c.
std::vector<int64_t> count_chunks(const uint8_t* bytes, int64_t n) {
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  std::vector<int64_t> before(static_cast<size_t>(chunks) + 1, 0);
  parallel_items(chunks, kChunk, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      before[c + 1] = count_bits(bytes + c * kChunk, std::min(kChunk, n - c * kChunk));
    }
  });
  std::partial_sum(before.begin(), before.end(), before.begin());
  return before;
}

Tensor bitmap_count(const Tensor& bitmap) {
  const Tensor b = checked(bitmap, 1, "bitmap");
  Tensor out = make(b, {}, ScalarType::Long);
  *mutable_data<int64_t>(out) = count_chunks(data<uint8_t>(b), b.numel()).back();
  return out;
}

Tensor bitmap_to_indices(const Tensor& bitmap, int64_t num_rows) {
  const Tensor b = checked(bitmap, 1, "bitmap");
  const int64_t n = b.numel();
  COMMLIB_CHECK(num_rows >= 0 && n == (num_rows + 7) / 8, "ValueError", "bitmap has ", n,
                " bytes, but num_rows = ", num_rows, " needs ceil(num_rows / 8)");
  const uint8_t* bytes = data<uint8_t>(b);
  COMMLIB_CHECK(num_rows % 8 == 0 || (bytes[n - 1] >> (num_rows % 8)) == 0, "ValueError",
                "bitmap has bits set past num_rows = ", num_rows);
  const std::vector<int64_t> before = count_chunks(bytes, n);
  Tensor indices = make(b, {before.back()}, ScalarType::Long);
  int64_t* out = mutable_data<int64_t>(indices);
  parallel_items(static_cast<int64_t>(before.size()) - 1, kChunk, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const int64_t at = c * kChunk;
      list_bits(bytes + at, std::min(kChunk, n - at), 8 * at, out + before[c]);
    }
  });
  return indices;
}

Tensor indices_to_bitmap(const Tensor& indices, int64_t num_rows) {
  check_ids(indices, "indices");
  COMMLIB_CHECK(num_rows >= 0, "ValueError", "num_rows = ", num_rows, " must not be negative");
  const Tensor ids = dense(indices);
  const int64_t* in = data<int64_t>(ids);
  const int64_t n = ids.numel();
  const IdOrder order = check_ids_in_range(in, n, num_rows, "indices");
  Tensor bitmap = make(ids, {(num_rows + 7) / 8}, ScalarType::Byte);
  uint8_t* out = mutable_data<uint8_t>(bitmap);
  const int64_t num_bytes = bitmap.numel();
  if (!order.increasing) {
    std::fill(out, out + num_bytes, uint8_t{0});
    set_bits(in, n, out);
    return bitmap;
  }
  // Sorted: each thread owns a range of bytes and finds its ids by binary search.
  parallel_items(num_bytes, 8, [&](int64_t begin, int64_t end) {
    std::fill(out + begin, out + end, uint8_t{0});
    const int64_t* first = std::lower_bound(in, in + n, 8 * begin);
    const int64_t* last = std::lower_bound(first, in + n, 8 * end);
    set_bits(first, last - first, out);
  });
  return bitmap;
}

Tensor bitmap_or(const Tensor& bitmaps) {
  const Tensor b = checked(bitmaps, 2, "bitmaps");
  const int64_t k = b.size(0), n = b.size(1);
  Tensor bitmap = make(b, {n}, ScalarType::Byte);
  uint8_t* __restrict out = mutable_data<uint8_t>(bitmap);
  const uint8_t* in = data<uint8_t>(b);
  parallel_items(n, k + 1, [=](int64_t begin, int64_t end) {
    constexpr int64_t kBytes = 8192;  // stays in L1 while k bitmaps pass
    for (int64_t at = begin; at < end; at += kBytes) {
      const int64_t stop = std::min(end, at + kBytes);
      std::fill(out + at, out + stop, uint8_t{0});
      for (int64_t j = 0; j < k; ++j) {
        const uint8_t* row = in + j * n;
        for (int64_t i = at; i < stop; ++i) out[i] |= row[i];
      }
    }
  });
  return bitmap;
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("bitmap_count", TORCH_BOX(&commlib::bitmap_count));
  m.impl("bitmap_to_indices", TORCH_BOX(&commlib::bitmap_to_indices));
  m.impl("indices_to_bitmap", TORCH_BOX(&commlib::indices_to_bitmap));
  m.impl("bitmap_or", TORCH_BOX(&commlib::bitmap_or));
}
