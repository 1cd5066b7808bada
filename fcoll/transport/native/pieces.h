// Tensors of torch.distributed's calls as the core takes them: one piece of memory.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <optional>
#include <vector>

#include "served.h"
#include "signature.h"
#include "tensors.h"

namespace fcoll::backend {

using at::Tensor;
using tensors::Facts;
using Tensors = std::vector<Tensor>;
using Sizes = std::vector<size_t>;

using TorchsOp = c10d::ReduceOp;
static_assert(int(TorchsOp::SUM) == int(Op::sum) && int(TorchsOp::AVG) == int(Op::avg) &&
              int(TorchsOp::PRODUCT) == int(Op::product) && int(TorchsOp::MIN) == int(Op::min) &&
              int(TorchsOp::MAX) == int(Op::max) && int(TorchsOp::BAND) == int(Op::band) &&
              int(TorchsOp::BOR) == int(Op::bor) && int(TorchsOp::BXOR) == int(Op::bxor));

// None for a sum with a factor.
inline std::optional<Op> op_of(const TorchsOp& op) {
  if (op.op_ > TorchsOp::BXOR) return std::nullopt;
  return Op(op.op_);
}

// The same for calls that multiply what they send by the factor: see `sent`.
inline std::optional<Op> op_of(const TorchsOp& op, const Tensor& x) {
  return op.op_ == TorchsOp::PREMUL_SUM && x.is_floating_point() ? Op::sum : op_of(op);
}

// Is it memory with values in it?
inline bool is_dense(const Tensor& x) {
  return x.layout() == at::kStrided && x.device().is_cpu() && x.has_storage() && !x.is_quantized();
}

inline bool are_dense(const Tensors& xs) { return std::all_of(xs.begin(), xs.end(), is_dense); }

inline bool are_like(const Tensors& xs, const Tensor& x) {
  return std::all_of(xs.begin(), xs.end(), [&](const Tensor& each) {
    return each.scalar_type() == x.scalar_type() && each.sizes() == x.sizes() && is_dense(each);
  });
}

inline bool are_of_one_dtype(const Tensors& xs) {
  return std::all_of(xs.begin(), xs.end(),
                     [&](const Tensor& x) { return x.scalar_type() == xs[0].scalar_type(); });
}

inline bool is_packed(const Tensor& x) { return x.is_contiguous() && !x.is_conj() && !x.is_neg(); }

inline Tensor packed(const Tensor& x) {
  if (is_packed(x)) return x;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return x.resolve_conj().resolve_neg().contiguous();
}

// What a rank sends of its tensor: times its own factor, if the op has one.
inline Tensor sent(const Tensor& x, const TorchsOp& op) {
  if (op.op_ != TorchsOp::PREMUL_SUM) return packed(x);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& by = static_cast<const c10d::NCCLPreMulSumSupplement&>(*op.supplement_);
  return packed(at::mul(x, by.tensor_factor.defined() ? by.tensor_factor.item() : by.double_factor));
}

inline bool overlap(const Tensor& x, const Tensor& y) {
  auto* a = static_cast<const char*>(x.const_data_ptr());
  auto* b = static_cast<const char*>(y.const_data_ptr());
  return a < b + y.nbytes() && b < a + x.nbytes();
}

inline bool overlap(const Tensors& xs, const Tensor& y) {
  return std::any_of(xs.begin(), xs.end(), [&](const Tensor& x) { return overlap(x, y); });
}

// Asked for by the variable that NCCL's backend knows.
inline bool checks_nans() {
  static const bool asked = c10::utils::check_env("TORCH_NCCL_NAN_CHECK") == true;
  return asked;
}

inline void refuse_nans(const Tensors& inputs, const char* title) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& x : inputs)
    if (at::isFloatingType(x.scalar_type()) || at::isComplexType(x.scalar_type()))
      TORCH_CHECK_VALUE(!x.isnan().any().item<bool>(), title, ": an input has NaNs, which ",
                        "TORCH_NCCL_NAN_CHECK=1 refuses; nothing has been sent");
}

// Where a result goes: into the tensor itself, or first into a packed one.
struct Target {
  Tensor given;
  Tensor memory;

  // `apart`: not into its memory at once
  explicit Target(const Tensor& x, bool apart = false)
      : given(x), memory(is_packed(x) && !apart ? x : served::empty(x, x.sizes())) {}
  bool direct() const { return memory.is_same(given); }
  void fill() const {
    if (!direct()) copy(given, memory);
  }
  static void copy(const Tensor& to, const Tensor& from) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    to.copy_(from.view(to.sizes()));
  }
};

// A list of tensors as one piece of memory: the one that they lie in, if they do so one after the
// other, else a new one.
struct Piece {
  Tensors parts;
  Tensor made;
  char* data = nullptr;

  // `apart`: in a new one in any case
  explicit Piece(Tensors xs, bool apart = false) : parts(std::move(xs)) {
    if (parts.empty()) return;
    data = static_cast<char*>(parts[0].mutable_data_ptr());
    size_t bytes = 0;
    bool consecutive = !apart;
    for (const auto& x : parts) {
      consecutive = consecutive && is_packed(x) && x.const_data_ptr() == data + bytes;
      bytes += x.nbytes();
    }
    if (consecutive) return;
    int64_t numel = 0;
    for (const auto& x : parts) numel += x.numel();
    made = served::empty(parts[0], {numel});
    data = static_cast<char*>(made.mutable_data_ptr());
  }
  Sizes sizes() const {
    Sizes bytes;
    for (const auto& x : parts) bytes.push_back(x.nbytes());
    return bytes;
  }
  void gather() const {
    each([](const Tensor& part, const Tensor& place) { place.copy_(part.reshape(-1)); });
  }
  void spread() const {
    each([](const Tensor& part, const Tensor& place) { part.copy_(place.view(part.sizes())); });
  }

 private:
  template <class Move>
  void each(Move move) const {
    if (!made.defined()) return;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    int64_t at = 0;
    for (const auto& x : parts) {
      move(x, made.narrow(0, at, x.numel()));
      at += x.numel();
    }
  }
};

// What the ranks compare. c10d has them agree on the number of elements, not on shapes.
inline Signature sign_flat(std::string_view row, const Tensor& x, int64_t numel, const Facts& facts) {
  Signature s = tensors::head(row, facts, 1);
  for (int64_t word : {int64_t(x.scalar_type()), int64_t(1), numel}) s.add(word);
  return s;
}

inline Signature sign_flat(std::string_view row, const Tensor& x, const Facts& facts) {
  return sign_flat(row, x, x.numel(), facts);
}

}  // namespace fcoll::backend
