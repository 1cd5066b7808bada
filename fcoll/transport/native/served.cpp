#include "served.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "signature.h"
#include "tensors.h"
#include "warm_blocks.h"

namespace fcoll::served {

using namespace fcoll::tensors;

// How long an eager call waits for late peers before it returns a result that is under way.
constexpr double PATIENCE_US = 5;

// -- groups by handle and by name -----------------------------------------------------------------

namespace {

std::mutex& registry_mutex = *[] {
  auto* made = new std::mutex;
  hold_over_forks(*made);
  return made;
}();
std::unordered_map<int64_t, GroupPtr> groups;
// A name may be given to another process group later: the one it stood for goes with it.
struct Named {
  GroupPtr group;
  const void* process_group;
};
std::unordered_map<std::string, Named> by_name;
int64_t next_handle = 1;

}  // namespace

GroupPtr group_of(int64_t handle) {
  std::lock_guard lock(registry_mutex);
  auto found = groups.find(handle);
  TORCH_CHECK(found != groups.end(), "fcoll: this group has been destroyed");
  return found->second;
}

GroupPtr group_named(const std::string& name, const void* process_group) {
  std::lock_guard lock(registry_mutex);
  auto found = by_name.find(name);
  if (found == by_name.end()) return nullptr;
  const void* known = found->second.process_group;
  if (process_group && process_group != known) return nullptr;
  try {
    return c10d::resolve_process_group(name).get() == known ? found->second.group : nullptr;
  } catch (const c10::Error&) {  // there is no such group any more: Python says so
    return nullptr;
  }
}

std::vector<int64_t> open_group(int64_t rank, int64_t n, double timeout_s) {
  auto group = std::make_shared<Group>(rank, n, timeout_s);
  std::lock_guard lock(registry_mutex);
  int64_t handle = next_handle++;
  groups[handle] = group;
  Address at = group->address();
  return {handle, at.fd, int64_t(at.token)};
}

std::string join_group(int64_t handle, at::IntArrayRef pids, at::IntArrayRef fds,
                       at::IntArrayRef tokens) {
  std::vector<Address> addresses;
  for (size_t r = 0; r < pids.size(); r++)
    addresses.push_back({int32_t(pids[r]), int32_t(fds[r]), uint64_t(tokens[r]), RING_BYTES});
  return group_of(handle)->join(addresses);
}

void bind_group(const std::string& name, int64_t handle) {
  auto group = group_of(handle);
  std::lock_guard lock(registry_mutex);
  by_name[name] = {group, c10d::resolve_process_group(name).get()};
}

void close_group(int64_t handle) {
  std::lock_guard lock(registry_mutex);
  auto found = groups.find(handle);
  if (found == groups.end()) return;
  std::erase_if(by_name, [&](const auto& entry) { return entry.second.group == found->second; });
  groups.erase(found);
}

// -- one tensor -----------------------------------------------------------------------------------

namespace {

// The second half of a collective: found by wait_tensor in torch's registry of works. It holds the
// result, which a later call may fill on the way to its own.
struct Finish : c10d::Work {
  Finish(GroupPtr group, uint64_t ticket, Tensor out)
      : group(std::move(group)), ticket(ticket), out(std::move(out)) {}
  bool wait(std::chrono::milliseconds) override {
    guarded([&] { group->finish(ticket); });
    return true;
  }
  GroupPtr group;
  uint64_t ticket;
  Tensor out;
};

Result started(const GroupPtr& g, const Call& call, const Tensor& x, Tensor out) {
  double patience = g->crowded() ? 0 : PATIENCE_US;
  uint64_t ticket = guarded(
      [&] { return g->start(call, x.const_data_ptr(), out.mutable_data_ptr(), patience); });
  if (ticket) c10d::register_work(out, c10::make_intrusive<Finish>(g, ticket, out));
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

// A new contiguous tensor, without the dispatcher: a third of at::empty's time.
Tensor empty(const Tensor& like, at::IntArrayRef sizes) {
  static WarmAllocator& warm = *new WarmAllocator;
  at::ScalarType dtype = like.scalar_type();
  if (size_t(c10::multiply_integers(sizes)) * like.element_size() < WARM_BYTES)
    return Tensor(at::detail::empty_cpu(sizes, dtype));
  c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  return Tensor(at::detail::empty_generic(sizes, &warm, cpu, dtype, std::nullopt));
}

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
  return {parts.movedim(0, dim).reshape(shape)};
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

// -- signatures ----------------------------------------------------------------------------------

namespace {

std::string dtype_name(at::ScalarType dtype) {
  Type type = type_of(dtype);
  return type == Type::bytes ? c10::toString(dtype) : TYPE_NAMES[size_t(type)];
}

std::string description(const Signature& s) {
  int64_t op = s.words[0], root = s.words[1], dim = s.words[2], tensors = s.words[5];
  std::string text = std::string(s.row) + "(";
  int at = 6;
  if (tensors > 1) text += std::to_string(tensors) + " tensors, the first ";
  if (tensors > 0 && s.size >= at + 2) {
    text += dtype_name(at::ScalarType(s.words[at])) + " [";
    for (int64_t d = 0; d < s.words[at + 1] && at + 2 + d < s.size; d++) {
      int64_t size = s.words[at + 2 + d];
      text += (d ? ", " : "") + (size < 0 ? std::string("own size") : std::to_string(size));
    }
    text += "]";
  }
  if (op >= 0) text += std::string(", ") + OP_NAMES[op];
  if (root >= 0) text += ", root " + std::to_string(root);
  if (dim >= 0) text += ", dim " + std::to_string(dim);
  if (s.words[3] >= 0) text += " and " + std::to_string(s.words[3]);
  if (s.words[4]) text += ", grad=identity";
  // so that calls which differ only in what is not shown (sizes, a permutation) look different
  char mark[16];
  std::snprintf(mark, sizeof mark, " #%04x", unsigned(s.digest >> 48));
  return text + ")" + mark;
}

const bool provided = (describe = &description, true);

}  // namespace

Signature signature_of(c10::string_view row, at::TensorList xs, at::IntArrayRef facts,
                       at::IntArrayRef more) {
  Facts f{facts[0], facts[1], facts[2], facts[3], facts[4], facts[5]};
  Signature s = sign({row.data(), row.size()}, xs, f);
  for (int64_t word : more) s.add(word);
  return s;
}

// -- lists ----------------------------------------------------------------------------------------

namespace {

// The positions of the tensors of each dtype, in the order of first appearance.
std::vector<std::vector<size_t>> by_dtype(const std::vector<Tensor>& xs) {
  std::vector<std::vector<size_t>> same;
  std::map<at::ScalarType, size_t> place;
  for (size_t i = 0; i < xs.size(); i++) {
    auto [at, is_new] = place.emplace(xs[i].scalar_type(), same.size());
    if (is_new) same.emplace_back();
    same[at->second].push_back(i);
  }
  return same;
}

// Many tensors as one: `rows` rows, in each of which they lie side by side.
struct Packed {
  std::vector<Tensor> parts;  // contiguous
  size_t rows;
  Tensor flat;

  Packed(std::vector<Tensor> tensors, size_t rows) : parts(std::move(tensors)), rows(rows) {
    int64_t numel = 0;
    for (auto& x : parts) numel += x.numel();
    flat = empty(parts[0], {numel});
  }
  // For every row of every part: its place in the flat tensor, the part, its place there, bytes.
  template <class Move>
  void each(Move move) const {
    auto* at = static_cast<uint8_t*>(flat.mutable_data_ptr());
    for (size_t row = 0; row < rows; row++)
      for (const auto& x : parts) {
        size_t bytes = x.nbytes() / rows;
        if (bytes) move(at, x, row * bytes, bytes);
        at += bytes;
      }
  }
  void pack() const {
    each([](uint8_t* flat, const Tensor& x, size_t at, size_t bytes) {
      std::memcpy(flat, static_cast<const uint8_t*>(x.const_data_ptr()) + at, bytes);
    });
  }
  void unpack() const {
    each([](uint8_t* flat, const Tensor& x, size_t at, size_t bytes) {
      std::memcpy(static_cast<uint8_t*>(x.mutable_data_ptr()) + at, flat, bytes);
    });
  }
};

// The results, dtype after dtype: the inputs are packed in `in_rows` rows, `run` fills `out_rows`,
// which are unpacked into the results. Dim 0 grows or shrinks as the number of rows does.
template <class Run>
std::vector<Tensor> coalesced(const std::vector<Tensor>& xs, size_t in_rows, size_t out_rows,
                              Run run) {
  std::vector<Tensor> outs(xs.size());
  for (const auto& same : by_dtype(xs)) {
    std::vector<Tensor> ins, made;
    for (size_t i : same) {
      ins.push_back(xs[i].contiguous());
      at::DimVector shape(xs[i].sizes());
      if (in_rows != out_rows) {
        if (shape.empty()) shape.push_back(1);
        shape[0] = shape[0] * int64_t(out_rows) / int64_t(in_rows);
      }
      outs[i] = empty(xs[i], shape);
      made.push_back(outs[i]);
    }
    Packed in(std::move(ins), in_rows), out(std::move(made), out_rows);
    in.pack();
    run(in.flat, out.flat);
    out.unpack();
  }
  return outs;
}

// All along dim 0; the dims follow the tensors, as the long way has them.
Signature sign_with_dims(std::string_view row, const std::vector<Tensor>& xs, const Facts& facts) {
  Signature s = sign(row, xs, facts);
  for (size_t i = 0; i < xs.size(); i++) s.add(0);
  return s;
}

bool all_reduce_here(const std::vector<Tensor>& xs, Op op) {
  return std::all_of(xs.begin(), xs.end(), [&](const Tensor& x) { return reduces(x, op); });
}

}  // namespace

std::vector<Tensor> all_reduce_coalesced(const GroupPtr& g, const std::vector<Tensor>& xs, Op op,
                                         bool grad) {
  if (!all_reduce_here(xs, op)) return {};
  Signature s = sign("all_reduce_coalesced", xs, {.op = int64_t(op), .grad = grad});
  return coalesced(xs, 1, 1, [&](const Tensor& in, const Tensor& out) {
    guarded([&] {
      g->run(Call::all_reduce(in.numel(), type_of(in), op).signed_by(s), in.const_data_ptr(),
             out.mutable_data_ptr());
    });
  });
}

std::vector<Tensor> all_gather_coalesced(const GroupPtr& g, const std::vector<Tensor>& xs) {
  Signature s = sign_with_dims("all_gather_into_tensor_coalesced", xs, {});
  return coalesced(xs, 1, g->size(), [&](const Tensor& in, const Tensor& out) {
    guarded([&] {
      g->run(Call::all_gather(in.nbytes()).signed_by(s), in.const_data_ptr(), out.mutable_data_ptr());
    });
  });
}

std::vector<Tensor> reduce_scatter_coalesced(const GroupPtr& g, const std::vector<Tensor>& xs,
                                             Op op) {
  bool even = std::all_of(xs.begin(), xs.end(), [&](const Tensor& x) {
    return x.dim() && x.size(0) % g->size() == 0;
  });
  if (!even || !all_reduce_here(xs, op)) return {};
  Signature s = sign_with_dims("reduce_scatter_tensor_coalesced", xs, {.op = int64_t(op)});
  return coalesced(xs, g->size(), 1, [&](const Tensor& in, const Tensor& out) {
    guarded([&] {
      g->run(Call::reduce_scatter(out.numel(), type_of(in), op).signed_by(s), in.const_data_ptr(),
             out.mutable_data_ptr());
    });
  });
}

}  // namespace fcoll::served
