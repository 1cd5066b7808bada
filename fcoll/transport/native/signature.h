// A call on tensors as the numbers that ranks compare (Signature, call.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "call.h"

namespace fcoll::tensors {

// What a row's other arguments are; -1 where it has none.
struct Facts {
  int64_t op = -1, root = -1, dim = -1, other_dim = -1;
  int64_t grad = 0;     // 1: identity
  int64_t own_dim = -1;  // sizes along it are each rank's own, and not compared
};

inline Signature head(std::string_view row, const Facts& f, int64_t tensors) {
  Signature s;
  row.copy(s.row, Signature::NAME - 1);
  for (char c : row) s.digest = (s.digest ^ uint8_t(c)) * 0x100000001B3;
  for (int64_t word : {f.op, f.root, f.dim, f.other_dim, f.grad, tensors}) s.add(word);
  return s;
}

inline void add_tensor(Signature& s, const at::Tensor& x, int64_t own_dim) {
  s.add(int64_t(x.scalar_type()));
  s.add(x.dim());
  for (int64_t d = 0; d < x.dim(); d++) s.add(d == own_dim ? -1 : x.sizes()[d]);
}

inline Signature sign(std::string_view row, const at::Tensor& x, const Facts& facts) {
  Signature s = head(row, facts, 1);
  add_tensor(s, x, facts.own_dim);
  return s;
}

inline Signature sign(std::string_view row, at::ArrayRef<at::Tensor> xs, const Facts& facts) {
  Signature s = head(row, facts, int64_t(xs.size()));
  for (const auto& x : xs) add_tensor(s, x, facts.own_dim);
  return s;
}

}  // namespace fcoll::tensors
