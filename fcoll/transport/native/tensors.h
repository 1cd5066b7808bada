// Between torch's terms and the core's: dtypes, reduce ops, errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>

#include "call.h"

namespace fcoll::tensors {

inline Type type_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return Type::f32;
    case at::kDouble: return Type::f64;
    case at::kHalf: return Type::f16;
    case at::kBFloat16: return Type::bf16;
    case at::kChar: return Type::i8;
    case at::kShort: return Type::i16;
    case at::kInt: return Type::i32;
    case at::kLong: return Type::i64;
    case at::kByte: return Type::u8;
    case at::kComplexFloat: return Type::c64;
    case at::kComplexDouble: return Type::c128;
    case at::kBool: return Type::boolean;
    default: return Type::bytes;
  }
}

inline Type type_of(const at::Tensor& x) { return type_of(x.scalar_type()); }

inline const std::unordered_map<std::string, Op> OPS = {
    {"sum", Op::sum}, {"avg", Op::avg},   {"product", Op::product}, {"min", Op::min},
    {"max", Op::max}, {"band", Op::band}, {"bor", Op::bor},         {"bxor", Op::bxor},
};

inline Op op_of(const std::string& name) {
  auto found = OPS.find(name);
  TORCH_CHECK_VALUE(found != OPS.end(), "fcoll: no reduce op ", name);
  return found->second;
}

// Are these elements reduced here, and does the op mean something for them?
inline bool reduces(const at::Tensor& x, Op op) {
  Type type = type_of(x);
  if (type == Type::bytes) return false;
  bool bits = op == Op::band || op == Op::bor || op == Op::bxor;
  if (type == Type::c64 || type == Type::c128)
    return op == Op::sum || op == Op::avg || op == Op::product;
  if (type <= Type::bf16) return !bits;
  return op != Op::avg;
}

// Throws the exception of Python's that an error is: a class of errors.py, and the rank it names or
// -1. Without Python's extension it is a std::runtime_error, of whose message Python makes that
// exception.
[[noreturn]] void raise(const std::string& cls, int rank, const std::string& what);
[[noreturn]] void raise(const Error&);

// How Python's extension throws an error with that message; it may return, and throw nothing.
using Raise = void (*)(const std::string& message);
void raise_by(Raise);

template <class F>
auto guarded(F f) {
  try {
    return f();
  } catch (const Error& e) {
    raise(e);
  }
}

}  // namespace fcoll::tensors
