// scan_rows: one bit per row of a dense tensor, set if any element has a bit other than its sign.
#include <torch/csrc/stable/library.h>

#include "common/parallel.h"
#include "common/tensor.h"

namespace commlib {
namespace {

template <class U>
U magnitude() {
  return static_cast<U>(static_cast<U>(~U{0}) >> 1);
}

// True if any of n elements is non-zero. Looks at 64 elements at a time and stops at the first hit.
template <class U>
bool any_nonzero(const U* x, int64_t n) {
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    U bits = 0;
    for (int64_t j = 0; j < 64; ++j) bits |= x[i + j];
    if (bits & magnitude<U>()) return true;
  }
  U bits = 0;
  for (; i < n; ++i) bits |= x[i];
  return (bits & magnitude<U>()) != 0;
}

// flags[i] = row i of [n, D] has a non-zero element; D known, so that this vectorises.
template <class U, int64_t D>
void flag_rows(const U* x, uint8_t* flags, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    U bits = 0;
    for (int64_t d = 0; d < D; ++d) bits |= x[i * D + d];
    flags[i] = static_cast<U>(bits << 1) != 0;
  }
}

template <class U>
void flag_rows(const U* x, uint8_t* flags, int64_t n, int64_t dim) {
  switch (dim) {
    case 1:
      return flag_rows<U, 1>(x, flags, n);
    case 2:
      return flag_rows<U, 2>(x, flags, n);
    case 4:
      return flag_rows<U, 4>(x, flags, n);
    case 8:
      return flag_rows<U, 8>(x, flags, n);
    default:
      for (int64_t i = 0; i < n; ++i) flags[i] = any_nonzero(x + i * dim, dim);
  }
}

// Eight bytes of 0 or 1 to one byte, first byte lowest.
uint8_t pack8(const uint8_t* flags) {
  uint64_t word;
  __builtin_memcpy(&word, flags, 8);
  return static_cast<uint8_t>((word * 0x0102040810204080ull) >> 56);
}

template <class U>
void scan(const U* x, uint8_t* bitmap, int64_t num_rows, int64_t dim) {
  const int64_t num_bytes = (num_rows + 7) / 8;
  parallel_items(num_bytes, 8 * dim * int64_t{sizeof(U)}, [=](int64_t begin, int64_t end) {
    constexpr int64_t kBytes = 64;
    uint8_t flags[8 * kBytes];
    for (int64_t at = begin; at < end; at += kBytes) {
      const int64_t bytes = std::min(kBytes, end - at);
      const int64_t rows = std::min(8 * bytes, num_rows - 8 * at);
      flag_rows(x + 8 * at * dim, flags, rows, dim);
      std::fill(flags + rows, flags + 8 * bytes, uint8_t{0});
      for (int64_t b = 0; b < bytes; ++b) bitmap[at + b] = pack8(flags + 8 * b);
    }
  });
}

Tensor scan_rows(const Tensor& dense_rows) {
  check_dim(dense_rows, 2, "dense");
  const int64_t width = dispatch(dense_rows.scalar_type(), [](auto t) { return sizeof(t); });
  const Tensor x = dense(dense_rows);
  const int64_t num_rows = x.size(0), dim = x.size(1);
  Tensor bitmap = make(x, {(num_rows + 7) / 8}, ScalarType::Byte);
  uint8_t* out = mutable_data<uint8_t>(bitmap);
  if (width == 2) {
    scan(data<uint16_t>(x), out, num_rows, dim);
  } else if (width == 4) {
    scan(data<uint32_t>(x), out, num_rows, dim);
  } else {
    scan(data<uint64_t>(x), out, num_rows, dim);
  }
  return bitmap;
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) { m.impl("scan_rows", TORCH_BOX(&commlib::scan_rows)); }
