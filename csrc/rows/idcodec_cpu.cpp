// encode_ids / decode_ids: sorted unique ids as LEB128 varints of their gaps; the first gap is the
// first id itself.
#include <torch/csrc/stable/library.h>

#include "common/parallel.h"
#include "common/tensor.h"
#include "rows/idcodec.h"

namespace commlib {
namespace {

Tensor encode_ids(const Tensor& indices) {
  check_ids(indices, "indices");
  const Tensor ids_t = dense(indices);
  const int64_t* ids = data<int64_t>(ids_t);
  const int64_t n = ids_t.numel();
  int64_t bytes = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t previous = i > 0 ? ids[i - 1] : 0;
    COMMLIB_CHECK(ids[i] >= 0 && (i == 0 || ids[i] > previous), "ValueError", "indices[", i,
                  "] = ", ids[i], " after ", previous,
                  "; indices must be non-negative, sorted and unique");
    bytes += varint_size(static_cast<uint64_t>(ids[i] - previous));
  }
  Tensor out = make(ids_t, {bytes}, ScalarType::Byte);
  uint8_t* at = mutable_data<uint8_t>(out);
  for (int64_t i = 0; i < n; ++i) {
    at = put_varint(static_cast<uint64_t>(ids[i] - (i > 0 ? ids[i - 1] : 0)), at);
  }
  return out;
}

Tensor decode_ids(const Tensor& bytes, int64_t count) {
  check_dim(bytes, 1, "data");
  check_dtype(bytes, ScalarType::Byte, "data");
  const Tensor b = dense(bytes);
  const uint8_t* begin = data<uint8_t>(b);
  const uint8_t* end = begin + b.numel();
  COMMLIB_CHECK(count >= 0 && count <= b.numel(), "ValueError", "count = ", count,
                " ids cannot lie in ", b.numel(), " bytes of data");
  Tensor out = make(b, {count}, ScalarType::Long);
  int64_t* ids = mutable_data<int64_t>(out);
  const uint8_t* at = begin;
  uint64_t id = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t gap = 0;
    const uint8_t* next = get_varint(at, end, &gap);
    COMMLIB_CHECK(next != nullptr, "ValueError", "data[", at - begin,
                  ":] is not a varint of at most 63 bits (id ", i, " of ", count,
                  "): truncated or overlong");
    id += gap;
    COMMLIB_CHECK((gap > 0 || i == 0) && id < (uint64_t{1} << 63), "ValueError", "data: id ", i,
                  " has gap ", gap, "; ids must increase and stay below 2^63");
    ids[i] = static_cast<int64_t>(id);
    at = next;
  }
  COMMLIB_CHECK(at == end, "ValueError", "data has ", end - at, " bytes left after count = ", count,
                " ids");
  return out;
}

}  // namespace
}  // namespace commlib

STABLE_TORCH_LIBRARY_IMPL(commlib, CPU, m) {
  m.impl("encode_ids", TORCH_BOX(&commlib::encode_ids));
  m.impl("decode_ids", TORCH_BOX(&commlib::decode_ids));
}
