// quantize_rows and its inverse: 8, 6 or 4 bits an element and a scale a row.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/parallel.h"
#include "common/tensor.h"
#include "sketch/quantize.h"

namespace commlib {
namespace {

#if defined(__x86_64__)
#define COMMLIB_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define COMMLIB_CLONES
#endif

// Largest absolute value; not finite if any element is not. On the bits, where order is that of
// integers and NaN is above infinity, so that the loop needs no care for NaN.
COMMLIB_CLONES float peak(const float* row, int64_t dim) {
  int32_t most = 0;
  for (int64_t i = 0; i < dim; ++i) {
    int32_t bits;
    std::memcpy(&bits, row + i, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float value;
  std::memcpy(&value, &most, 4);
  return value;
}

// Integers of one block of elements, as bytes; a block is packed while it is in L1.
constexpr int64_t kPackBlock = 256;

COMMLIB_CLONES void to_integers(const float* row, uint8_t* out, float inverse, float most,
                                int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float root = std::sqrt(std::fabs(row[i]) * inverse) * most;
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(round_even(std::copysign(root, row[i]))));
  }
}

inline float square(float scale, int32_t integer) {
  const float q = static_cast<float>(integer);
  return scale * (q * std::fabs(q));
}

COMMLIB_CLONES void unpack8(const uint8_t* in, float* row, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) row[i] = square(scale, static_cast<int8_t>(in[i]));
}

// Two integers of 4 bits a byte, four of 6 bits in three bytes; the last ones, where dim is not a
// multiple, one by one.
COMMLIB_CLONES void squeeze4(const uint8_t* in, uint8_t* out, int64_t n) {
  for (int64_t i = 0; i < n / 2; ++i)
    out[i] = static_cast<uint8_t>((in[2 * i] & 15) | in[2 * i + 1] << 4);
  if (n % 2 != 0) out[n / 2] = in[n - 1] & 15;
}

COMMLIB_CLONES void unpack4(const uint8_t* in, float* row, float scale, int64_t n) {
  for (int64_t i = 0; i < n / 2; ++i) {
    row[2 * i] = square(scale, ((in[i] & 15) ^ 8) - 8);
    row[2 * i + 1] = square(scale, ((in[i] >> 4) ^ 8) - 8);
  }
  if (n % 2 != 0) row[n - 1] = square(scale, ((in[n / 2] & 15) ^ 8) - 8);
}

inline uint32_t join6(const uint8_t* in, int64_t count) {
  uint32_t word = 0;
  for (int64_t k = 0; k < count; ++k) word |= (in[k] & 63u) << (6 * k);
  return word;
}

COMMLIB_CLONES void squeeze6(const uint8_t* in, uint8_t* out, int64_t n) {
  for (int64_t i = 0; i < n / 4; ++i) {
    const uint32_t word = join6(in + 4 * i, 4);
    out[3 * i] = static_cast<uint8_t>(word);
    out[3 * i + 1] = static_cast<uint8_t>(word >> 8);
    out[3 * i + 2] = static_cast<uint8_t>(word >> 16);
  }
  const uint32_t word = join6(in + n / 4 * 4, n % 4);
  std::memcpy(out + n / 4 * 3, &word, (n % 4 * 6 + 7) / 8);
}

COMMLIB_CLONES void unpack6(const uint8_t* in, float* row, float scale, int64_t n) {
  const auto value = [scale](int32_t integer) { return square(scale, ((integer & 63) ^ 32) - 32); };
  for (int64_t i = 0; i < n / 4; ++i) {
    const int32_t word = in[3 * i] | in[3 * i + 1] << 8 | in[3 * i + 2] << 16;
    row[4 * i] = value(word);
    row[4 * i + 1] = value(word >> 6);
    row[4 * i + 2] = value(word >> 12);
    row[4 * i + 3] = value(word >> 18);
  }
  uint32_t word = 0;
  std::memcpy(&word, in + n / 4 * 3, (n % 4 * 6 + 7) / 8);
  for (int64_t k = 0; k < n % 4; ++k)
    row[n / 4 * 4 + k] = value(static_cast<int32_t>(word >> 6 * k));
}

void pack_row(const float* row, uint8_t* out, float inverse, float most, int64_t dim,
              int64_t bits) {
  if (bits == 8) return to_integers(row, out, inverse, most, dim);
  uint8_t block[kPackBlock];
  for (int64_t i = 0; i < dim; i += kPackBlock) {
    const int64_t count = std::min(kPackBlock, dim - i);
    to_integers(row + i, block, inverse, most, count);
    (bits == 6 ? squeeze6 : squeeze4)(block, out + i * bits / 8, count);
  }
}

void unpack_row(const uint8_t* in, float* row, float scale, int64_t dim, int64_t bits) {
  (bits == 8 ? unpack8 : bits == 6 ? unpack6 : unpack4)(in, row, scale, dim);
}

// What q |q| is multiplied with; never so large that the largest integer decodes to infinity.
float scale_of(float largest, float most) {
  if (!std::isfinite(largest)) return std::numeric_limits<float>::quiet_NaN();
  const float scale = largest / (most * most);
  return std::isfinite(scale * (most * most)) ? scale : std::nextafter(scale, 0.f);
}

void check_bits(int64_t bits) {
  COMMLIB_CHECK(bits == 8 || bits == 6 || bits == 4, "ValueError", "bits = ", bits,
                " must be 8, 6 or 4");
}

Tensor quantize_rows(const Tensor& values, int64_t bits) {
  check_dim(values, 2, "values");
  check_dtype(values, ScalarType::Float, "values");
  check_bits(bits);
  const Tensor x = dense(values);
  const int64_t dim = x.size(1), width = packed_bytes(dim, bits);
  Tensor packed = make(x, {x.size(0), width}, ScalarType::Byte);
  const float* in = data<float>(x);
  uint8_t* out = mutable_data<uint8_t>(packed);
  const float most = static_cast<float>(largest_integer(bits));
  parallel_items(x.size(0), dim * 4 + width, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* row = in + r * dim;
      uint8_t* to = out + r * width;
      std::memset(to, 0, width);
      const float largest = peak(row, dim), scale = scale_of(largest, most);
      std::memcpy(to, &scale, 4);
      const float inverse = 1.f / largest;
      if (!(std::isfinite(inverse) && scale > 0.f))
        continue;  // zero, too small to divide by, or not finite
      pack_row(row, to + 4, inverse, most, dim, bits);
    }
  });
  return packed;
}

Tensor dequantize_rows(const Tensor& packed, int64_t dim, int64_t bits) {
  check_dim(packed, 2, "packed");
  check_dtype(packed, ScalarType::Byte, "packed");
  check_bits(bits);
  COMMLIB_CHECK(dim >= 0, "ValueError", "dim = ", dim, " is negative");
  const int64_t width = packed_bytes(dim, bits);
  check_same_size(packed.size(1), "packed.shape[1]", width, "the width of dim and bits");
  const Tensor x = dense(packed);
  Tensor values = make(x, {x.size(0), dim}, ScalarType::Float);
  const uint8_t* in = data<uint8_t>(x);
  float* out = mutable_data<float>(values);
  parallel_items(x.size(0), dim * 4 + width, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float scale;
      std::memcpy(&scale, in + r * width, 4);
      unpack_row(in + r * width + 4, out + r * dim, scale, dim, bits);
    }
  });
  return values;
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("quantize_rows", TORCH_BOX(&commlib::quantize_rows));
  m.impl("dequantize_rows", TORCH_BOX(&commlib::dequantize_rows));
}
