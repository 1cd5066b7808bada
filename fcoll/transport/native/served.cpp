#include "served.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "signature.h"
#include "tensors.h"
#include "warm_blocks.h"

namespace fcoll::served {

using namespace fcoll::tensors;

namespace {

Result started(const GroupPtr& g, const Call& call, const Tensor& x, Tensor out) {
  double patience = g->crowded() ? 0 : PATIENCE_US;
  uint64_t ticket = guarded(
      [&] { return g->start(call, x.const_data_ptr(), out.mutable_data_ptr(), patience); });
  if (ticket) register_finish(g, ticket, out);
  return {std::move(out), ticket != 0};
}

// From here on results are in warm blocks. malloc takes memory from the system for every one of 32
// MiB, and for many of 4, and gives it back.
constexpr size_t WARM_BYTES = 4 * 1024 * 1024;

// An allocator, and not only memory with a deleter, so that a result can be resized as any tensor.
struct WarmAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    WarmBlocks::Block block = bytes < WARM_BYTES ? WarmBlocks::Block{} : warm_blocks().take(bytes);
    if (!block.data) return c10::GetAllocator(c10::kCPU)->allocate(bytes);  // or its error
    return {block.data, new WarmBlocks::Block(block), &give_back, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  static void give_back(void* context) {
    std::unique_ptr<WarmBlocks::Block> block(static_cast<WarmBlocks::Block*>(context));
    warm_blocks().give_back(*block);
  }
};

}  // namespace

Tensor empty(const Tensor& like, at::IntArrayRef sizes) {
  static WarmAllocator& warm = *new WarmAllocator;
  at::ScalarType dtype = like.scalar_type();
  if (size_t(c10::multiply_integers(sizes)) * like.element_size() < WARM_BYTES)
    return Tensor(at::detail::empty_cpu(sizes, dtype));
  c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  return Tensor(at::detail::empty_generic(sizes, &warm, cpu, dtype, std::nullopt));
}

namespace {

// Are parts along dim laid out one after the other in a tensor of this shape?
bool one_after_the_other(at::IntArrayRef shape, int64_t dim) {
  return c10::multiply_integers(shape.slice(0, dim)) == 1;
}

}  // namespace

Result all_reduce(const GroupPtr& g, const Tensor& input, Op op, bool grad) {
  if (!reduces(input, op) || input.numel() == 0) return {};
  Tensor x = input.contiguous();
  Signature s = sign("all_reduce", x, {.op = int64_t(op), .grad = grad});
  Call call = Call::all_reduce(x.numel(), type_of(x), op);
  return started(g, call.signed_by(s), x, empty(x, x.sizes()));
}

Result all_gather(const GroupPtr& g, const Tensor& input, int64_t dim) {
  if (dim < 0 || dim >= std::max<int64_t>(input.dim(), 1) || input.numel() == 0) return {};
  Tensor x = input.dim() ? input.contiguous() : input.reshape(1);
  at::DimVector shape(x.sizes());
  shape[dim] *= g->size();
  Signature s = sign("all_gather_into_tensor", input, {.dim = dim});
  Call call = Call::all_gather(x.nbytes()).signed_by(s);
  if (one_after_the_other(x.sizes(), dim)) return started(g, call, x, empty(x, shape));
  at::DimVector stacked(x.sizes());
  stacked.insert(stacked.begin(), g->size());
  Tensor parts = empty(x, stacked);
  guarded([&] { g->run(call, x.const_data_ptr(), parts.mutable_data_ptr()); });
  return {parts.movedim(0, dim).reshape(shape).contiguous()};  // along a dim of size 1 it is a view
}

Result reduce_scatter(const GroupPtr& g, const Tensor& input, Op op, int64_t dim) {
  if (dim < 0 || dim >= input.dim() || input.numel() == 0 || input.size(dim) % g->size() ||
      !reduces(input, op))
    return {};
  at::DimVector shape(input.sizes());
  shape[dim] /= g->size();
  Tensor x = one_after_the_other(shape, dim)
                 ? input.contiguous()
                 : input.unflatten(dim, {g->size(), -1}).movedim(dim, 0).contiguous();
  Signature s = sign("reduce_scatter_tensor", input, {.op = int64_t(op), .dim = dim});
  Call call = Call::reduce_scatter(x.numel() / g->size(), type_of(x), op);
  return started(g, call.signed_by(s), x, empty(x, shape));
}

Result broadcast(const GroupPtr& g, const Tensor& input, int64_t src) {
  if (src < 0 || src >= g->size() || input.numel() == 0) return {};
  Tensor out = g->rank() == src ? input.clone(at::MemoryFormat::Contiguous)
                                : empty(input, input.sizes());
  Signature s = sign("broadcast", input, {.root = src});
  Call call = Call::broadcast(out.nbytes(), src);
  return started(g, call.signed_by(s), out, out);
}

void exchange(Group& g, const Tensor& out, const Tensor& x, at::IntArrayRef out_splits,
              at::IntArrayRef in_splits, const Signature& s) {
  int n = g.size();
  auto row_bytes = [](const Tensor& t) {
    return t.size(0) ? t.nbytes() / t.size(0)
                     : size_t(c10::multiply_integers(t.sizes().slice(1)) * t.element_size());
  };
  auto bytes = [&](const Tensor& t, at::IntArrayRef splits) {
    std::vector<size_t> sizes(n, t.nbytes() / n);
    for (size_t i = 0; i < splits.size(); i++) sizes[i] = splits[i] * row_bytes(t);
    return sizes;
  };
  auto out_bytes = bytes(out, out_splits), in_bytes = bytes(x, in_splits);
  guarded([&] {
    g.all_to_all(Call::all_to_all(row_bytes(x)).signed_by(s), x.const_data_ptr(),
                 out.mutable_data_ptr(), in_bytes.data(), out_bytes.data());
  });
}

Result all_to_all(const GroupPtr& g, const Tensor& input, at::IntArrayRef out_splits,
                  at::IntArrayRef in_splits) {
  auto fits = [&](at::IntArrayRef splits) {
    return splits.size() == size_t(g->size()) &&
           std::all_of(splits.begin(), splits.end(), [](int64_t s) { return s >= 0; });
  };
  if (!input.dim() || c10::multiply_integers(input.sizes().slice(1)) == 0) return {};
  at::DimVector shape(input.sizes());
  if (out_splits.empty() && in_splits.empty()) {
    if (shape[0] % g->size()) return {};
  } else {
    if (!fits(out_splits) || !fits(in_splits) || c10::sum_integers(in_splits) != shape[0] ||
        out_splits[g->rank()] != in_splits[g->rank()])
      return {};
    shape[0] = c10::sum_integers(out_splits);
  }
  Tensor x = input.contiguous();
  Tensor out = empty(x, shape);
  exchange(*g, out, x, out_splits, in_splits, sign("all_to_all_single", input, {.own_dim = 0}));
  return {out};
}

}  // namespace fcoll::served
