// Rows in few bits: per row a float scale, then one small integer an element. Host and device.
//
//     | scale (4 bytes) | D integers of `bits` bits, lowest bits first | zeros up to 4 bytes |
//
// element = scale * q |q| with integers q in [-m, m], m = 2^(bits-1) - 1: the square root is what
// is rounded. That costs rows of normal numbers the same squared error as even steps, and keeps
// small elements to a few percent of themselves, which optimizers that divide by a running size
// need. A row that is not finite keeps a NaN scale, so that all of it decodes to NaN.
#pragma once

#include <cstdint>

#include "common/hash.h"

namespace commlib {

COMMLIB_HD int64_t packed_bytes(int64_t dim, int64_t bits) {
  return 4 + ((dim * bits + 7) / 8 + 3) / 4 * 4;
}

COMMLIB_HD int32_t largest_integer(int64_t bits) { return (1 << (bits - 1)) - 1; }

// Nearest integer, ties to even, for |x| < 2^22: one addition pushes the fraction out.
COMMLIB_HD float round_even(float x) { return (x + 12582912.f) - 12582912.f; }

}  // namespace commlib
