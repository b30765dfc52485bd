// The schema of every op of commlib, and nothing else. Implementations register themselves in
// <family>/x_cpu.cpp; shapes, dtypes and errors are documented in commlib/ops.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(commlib, m) {
  // rows
  m.def("scan_rows(Tensor dense) -> Tensor");
  m.def("bitmap_count(Tensor bitmap) -> Tensor");
  m.def("bitmap_to_indices(Tensor bitmap, int num_rows) -> Tensor");
  m.def("indices_to_bitmap(Tensor indices, int num_rows) -> Tensor");
  m.def("bitmap_or(Tensor bitmaps) -> Tensor");
  m.def("gather_rows(Tensor src, Tensor indices, ScalarType? dtype=None) -> Tensor");
  m.def("gather_rows_out(Tensor src, Tensor indices, Tensor(a!) out) -> ()");
  m.def("scatter_rows_(Tensor(a!) dst, Tensor indices, Tensor src) -> ()");
  m.def("scatter_add_rows_(Tensor(a!) dst, Tensor indices, Tensor src, float scale=1.0) -> ()");
  m.def("scale_cast_rows(Tensor src, float scale, ScalarType dtype) -> Tensor");
  m.def("coalesce_rows(Tensor indices, Tensor values, int num_rows) -> (Tensor, Tensor)");
  m.def("unique_ids(Tensor ids, int num_rows, int drop=-1) -> Tensor");
  m.def("encode_ids(Tensor indices) -> Tensor");
  m.def("decode_ids(Tensor data, int count) -> Tensor");
  // sketch
  m.def("murmur3_32(Tensor keys, int seed) -> Tensor");
  m.def(
      "sketch_encode(Tensor indices, Tensor values, int num_hashes, int num_buckets, int seed, "
      "float scale=1.0) -> Tensor");
  m.def(
      "sketch_decode(Tensor sketch, Tensor indices, int seed, str decoder, float scale=1.0, "
      "ScalarType? dtype=None) -> Tensor");
  m.def("sketch_peel(Tensor sketch, Tensor indices, int seed) -> (Tensor, Tensor)");
  m.def("quantize_rows(Tensor values, int bits) -> Tensor");
  m.def("dequantize_rows(Tensor packed, int dim, int bits) -> Tensor");
  // owners
  m.def("balanced_owner(Tensor rows, int num_ranks) -> (Tensor, Tensor)");
  m.def("balanced_row(Tensor owner, Tensor index_within, int num_ranks) -> Tensor");
  m.def("unite_rows(Tensor indices, Tensor counts, int num_rows) -> (Tensor, Tensor)");
  m.def("minimal_owner(Tensor indices, Tensor counts, int num_rows) -> (Tensor, Tensor)");
  m.def(
      "minimal_route(Tensor indices, Tensor counts, int num_rows, int rank) -> (Tensor, Tensor, "
      "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor, Tensor, Tensor, Tensor)");
}
