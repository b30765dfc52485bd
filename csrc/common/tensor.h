// Checks and shorthands on torch::stable::Tensor that every op shares.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "common/check.h"
#include "common/dtype.h"
#include "common/memory.h"

namespace commlib {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Bytes of an element of any dtype that an op returns.
inline int64_t width_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::Float:
      return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    default:
      return 1;
  }
}

// An uninitialised tensor on the device of `like`.
inline Tensor make(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  const std::vector<int64_t> sizes(shape);
  Tensor out = torch::stable::new_empty(like, {sizes.data(), sizes.size()}, dtype);
  if (out.is_cpu() && out.numel() > 0) {
    advise_huge(out.mutable_data_ptr(), out.numel() * width_of(dtype));
  }
  return out;
}

inline Tensor dense(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

inline void check_dim(const Tensor& t, int64_t dim, const char* name) {
  COMMLIB_CHECK(t.dim() == dim, "ValueError", name, " has ", t.dim(), " dimensions, needs ", dim);
}

inline void check_dtype(const Tensor& t, ScalarType dtype, const char* name) {
  COMMLIB_CHECK(t.scalar_type() == dtype, "TypeError", name, " has dtype ",
                torch::headeronly::toString(t.scalar_type()), ", needs ",
                torch::headeronly::toString(dtype));
}

inline void check_ids(const Tensor& t, const char* name) {
  check_dim(t, 1, name);
  check_dtype(t, ScalarType::Long, name);
}

inline void check_same_size(int64_t a, const char* a_name, int64_t b, const char* b_name) {
  COMMLIB_CHECK(a == b, "ValueError", a_name, " is ", a, " but ", b_name, " is ", b,
                "; they must be equal");
}

inline void check_inplace(const Tensor& t, const char* name) {
  COMMLIB_CHECK(t.is_contiguous(), "ValueError", name,
                " is written in place and must be contiguous");
}

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Calls f(T{}) with the C++ type of a floating dtype.
template <class F>
auto dispatch(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Double:
      return f(double{});
    case ScalarType::Float:
      return f(float{});
    case ScalarType::Half:
      return f(f16{});
    case ScalarType::BFloat16:
      return f(bf16{});
    default:
      fail("TypeError", "dtype ", torch::headeronly::toString(dtype),
           " is not one of float32, float64, float16, bfloat16");
  }
}

inline ScalarType acc_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

}  // namespace commlib
