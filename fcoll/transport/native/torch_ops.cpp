// The core as torch ops. `fcoll_native::*` are its primitives on tensors; the kernels of `fcoll::*`
// for CPU tensors take this path where the group has one and call `fcoll_pg::*`, the process
// group's, where not.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/Functional.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include <ATen/ops/empty.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kernels.h"
#include "served.h"
#include "signature.h"
#include "tensors.h"
#include "warm_blocks.h"

namespace {

namespace served = fcoll::served;
using at::Tensor;
using fcoll::Call;
using fcoll::Op;
using fcoll::served::group_named;
using fcoll::served::group_of;
using fcoll::served::GroupPtr;
using fcoll::served::Result;
using namespace fcoll::tensors;
using Text = c10::string_view;

// -- primitives: contiguous tensors, complete on return -------------------------------------------

// The signature of the call that a primitive is made for, in a tensor; an empty one is none.
Tensor sign_call(Text row, at::TensorList xs, at::IntArrayRef facts, at::IntArrayRef more) {
  fcoll::Signature s = served::signature_of(row, xs, facts, more);
  Tensor made = at::empty({sizeof s / sizeof(int64_t)}, at::kLong);
  std::memcpy(made.mutable_data_ptr(), &s, sizeof s);
  return made;
}

fcoll::Signature signature_in(const Tensor& given) {
  fcoll::Signature s;
  if (given.numel()) std::memcpy(&s, given.const_data_ptr(), sizeof s);
  return s;
}

void all_reduce_(const Tensor& buf, const std::string& op, int64_t handle, const Tensor& signature) {
  auto g = group_of(handle);
  guarded([&] {
    auto s = signature_in(signature);
    g->run(Call::all_reduce(buf.numel(), type_of(buf), op_of(op)).signed_by(s), buf.const_data_ptr(),
           buf.mutable_data_ptr());
  });
}

void all_gather_(const Tensor& out, const Tensor& x, int64_t handle, const Tensor& signature) {
  auto g = group_of(handle);
  guarded([&] {
    auto s = signature_in(signature);
    g->run(Call::all_gather(x.nbytes()).signed_by(s), x.const_data_ptr(), out.mutable_data_ptr());
  });
}

void reduce_scatter_(const Tensor& out, const Tensor& x, const std::string& op, int64_t handle,
                     const Tensor& signature) {
  auto g = group_of(handle);
  guarded([&] {
    auto s = signature_in(signature);
    g->run(Call::reduce_scatter(out.numel(), type_of(x), op_of(op)).signed_by(s), x.const_data_ptr(),
           out.mutable_data_ptr());
  });
}

void exchange_(const Tensor& out, const Tensor& x, at::IntArrayRef out_splits,
               at::IntArrayRef in_splits, int64_t handle, const Tensor& signature) {
  served::exchange(*group_of(handle), out, x, out_splits, in_splits, signature_in(signature));
}

void broadcast_(const Tensor& buf, int64_t src, int64_t handle, const Tensor& signature) {
  auto g = group_of(handle);
  guarded([&] {
    auto s = signature_in(signature);
    void* data = buf.mutable_data_ptr();
    g->run(Call::broadcast(buf.nbytes(), src).signed_by(s), data, data);
  });
}

void barrier(int64_t handle) {
  auto g = group_of(handle);
  guarded([&] { g->run(Call::barrier(), nullptr, nullptr); });
}

double round_trip_ns(int64_t peer, int64_t handle) {
  auto g = group_of(handle);
  return guarded([&] { return g->round_trip_ns(peer); });
}

// -- fcoll::* on CPU tensors ------------------------------------------------------------------------
//
// Each falls back to the process group's kernel, which also checks its arguments, for whatever is
// not plainly served here.

using Sizes = at::OptionalSymIntArrayRef;

template <class... Args>
Tensor by_process_group(const char* name, const Args&... args) {
  static thread_local std::unordered_map<const char*, c10::OperatorHandle> known;
  auto found = known.find(name);
  if (found == known.end())
    found = known.emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
  return found->second.typed<Tensor(Args...)>().call(args...);
}

// The result if the group has shared memory and it serves the call, else none.
template <class Serve>
Tensor served_on(Text group_name, Serve serve) {
  auto g = group_named(std::string(group_name));
  return g ? serve(g).out : Tensor();
}

template <class Serve>
Tensor reduced_on(Text group_name, Text reduce_op, Serve serve) {
  auto op = OPS.find(std::string(reduce_op));
  if (op == OPS.end()) return {};
  return served_on(group_name, [&](const GroupPtr& g) { return serve(g, op->second); });
}

Tensor all_reduce(const Tensor& input, Text reduce_op, Text group_name, Text grad) {
  bool known = grad == "sum" || grad == "identity";
  Tensor out = reduced_on(group_name, reduce_op, [&](const GroupPtr& g, Op op) {
    return known ? served::all_reduce(g, input, op, grad == "identity") : Result();
  });
  if (out.defined()) return out;
  return by_process_group<const Tensor&>("fcoll_pg::all_reduce", input, reduce_op, group_name, grad);
}

Tensor all_gather_into_tensor(const Tensor& input, int64_t group_size, Text group_name,
                              int64_t dim, Sizes sizes) {
  Tensor out = served_on(group_name, [&](const GroupPtr& g) {
    bool even = g->size() == group_size && !sizes;
    return even ? served::all_gather(g, input, dim) : Result();
  });
  if (out.defined()) return out;
  return by_process_group<const Tensor&>("fcoll_pg::all_gather_into_tensor", input, group_size,
                                         group_name, dim, sizes);
}

Tensor reduce_scatter_tensor(const Tensor& input, Text reduce_op, int64_t group_size,
                             Text group_name, int64_t dim, Sizes sizes) {
  Tensor out = reduced_on(group_name, reduce_op, [&](const GroupPtr& g, Op op) {
    bool even = g->size() == group_size && !sizes;
    return even ? served::reduce_scatter(g, input, op, dim) : Result();
  });
  if (out.defined()) return out;
  return by_process_group<const Tensor&>("fcoll_pg::reduce_scatter_tensor", input, reduce_op,
                                         group_size, group_name, dim, sizes);
}

Tensor broadcast(const Tensor& input, int64_t src, Text group_name) {
  Tensor out = served_on(
      group_name, [&](const GroupPtr& g) { return served::broadcast(g, input, src); });
  if (out.defined()) return out;
  return by_process_group<const Tensor&>("fcoll_pg::broadcast", input, src, group_name);
}

// Sizes as plain numbers: there are no others where a kernel runs.
std::vector<int64_t> numbers(c10::SymIntArrayRef sizes) {
  std::vector<int64_t> v;
  for (const auto& s : sizes) v.push_back(s.expect_int());
  return v;
}

// No splits at all would be even ones to the core: where they are given, they are never none.
Result all_to_all_with(const GroupPtr& g, const Tensor& input, c10::SymIntArrayRef out_splits,
                       c10::SymIntArrayRef in_splits) {
  if (out_splits.empty() || in_splits.empty()) return {};
  return served::all_to_all(g, input, numbers(out_splits), numbers(in_splits));
}

Tensor all_to_all_single(const Tensor& input, c10::SymIntArrayRef out_splits,
                         c10::SymIntArrayRef in_splits, Text group_name) {
  Tensor out = served_on(group_name, [&](const GroupPtr& g) {
    return all_to_all_with(g, input, out_splits, in_splits);
  });
  if (out.defined()) return out;
  return by_process_group<const Tensor&>("fcoll_pg::all_to_all_single", input, out_splits,
                                         in_splits, group_name);
}

// -- _c10d_functional::* on CPU tensors, while fcoll.accelerate_c10d() is in force -----------------

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

// A group as torch's ops are given it: its name, an object of Python's, or one of a graph's.
ProcessGroup process_group(const c10::IValue& given) {
  if (given.isString()) return c10d::resolve_process_group(given.toStringRef());
  if (!given.isCapsule()) return given.toCustomClass<c10d::ProcessGroup>();
  return c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(given.toCapsule());
}

// A reduce op as torch's all_reduce is given it: its name; from torch 2.15 on a name or an object.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
using GivenOp = std::string;

const std::string& name_of(const std::string& op) { return op; }
const std::string& as_torchs(const std::string& op) { return op; }
#else
using GivenOp = const c10::IValue&;
using TorchsOp = c10d::ReduceOp;

const std::pair<const char*, TorchsOp::RedOpType> TORCHS_OPS[] = {
    {"sum", TorchsOp::SUM}, {"avg", TorchsOp::AVG},   {"product", TorchsOp::PRODUCT},
    {"min", TorchsOp::MIN}, {"max", TorchsOp::MAX},   {"band", TorchsOp::BAND},
    {"bor", TorchsOp::BOR}, {"bxor", TorchsOp::BXOR},
};

c10::intrusive_ptr<TorchsOp> as_torchs(const c10::IValue& given) {
  if (given.isString()) {
    for (auto& [name, type] : TORCHS_OPS)
      if (given.toStringRef() == name) return c10::make_intrusive<TorchsOp>(type);
    TORCH_CHECK(false, "Unrecognized reduce_op: ", given.toStringRef());
  }
  if (!given.isCapsule()) return given.toCustomClass<TorchsOp>();
  return c10::static_intrusive_pointer_cast<TorchsOp>(given.toCapsule());
}

// Empty if it has none: a sum with a factor.
std::string name_of(const c10::IValue& given) {
  if (given.isString()) return given.toStringRef();
  auto op = as_torchs(given);
  for (auto& [name, type] : TORCHS_OPS)
    if (op->op_ == type) return name;
  return "";
}
#endif

// The name by which fcoll knows a group; empty if it stands for another one, or if the group has none
// (one that is written in Python has no backend to ask).
std::string name_of(const ProcessGroup& group) {
  try {
    std::string name = group->getGroupName();
    return c10d::resolve_process_group(name) == group ? name : "";
  } catch (const c10::Error&) {
    return "";
  }
}

// The group's shared memory, connected if this is its first use; none if it has none.
GroupPtr shared_memory_of(const ProcessGroup& group) {
  std::string name = name_of(group);
  if (name.empty()) return nullptr;
  if (auto known = group_named(name, group.get())) return known;
  static auto connect = c10::Dispatcher::singleton()
                            .findSchemaOrThrow("fcoll_pg::connect", "")
                            .typed<bool(Text)>();
  return connect.call(name) ? group_named(name, group.get()) : nullptr;
}

Tensor c10d_all_reduce(const Tensor& input, GivenOp op, const c10::IValue& given) {
  auto group = process_group(given);
  if (name_of(op).empty() || !shared_memory_of(group))
    return c10d::all_reduce(input, as_torchs(op), group);
  return all_reduce(input, name_of(op), group->getGroupName(), "sum");
}

Tensor& c10d_all_reduce_(Tensor& input, GivenOp op, const c10::IValue& given) {
  auto group = process_group(given);
  auto g = shared_memory_of(group);
  auto found = OPS.find(name_of(op));
  if (!g || found == OPS.end() || !reduces(input, found->second) || !input.is_contiguous())
    return c10d::all_reduce_(input, as_torchs(op), group);
  auto s = sign("all_reduce", input, {.op = int64_t(found->second)});
  guarded([&] {
    g->run(Call::all_reduce(input.numel(), type_of(input), found->second).signed_by(s),
           input.const_data_ptr(), input.mutable_data_ptr());
  });
  return input;
}

Tensor c10d_all_gather(const Tensor& input, int64_t n, const c10::IValue& given) {
  auto group = process_group(given);
  if (!shared_memory_of(group)) return c10d::all_gather_into_tensor(input, n, group);
  return all_gather_into_tensor(input, n, group->getGroupName(), 0, std::nullopt);
}

Tensor& c10d_all_gather_out(Tensor& input, int64_t n, const c10::IValue& given, Tensor& out) {
  auto group = process_group(given);
  auto g = shared_memory_of(group);
  if (!g || g->size() != n || !input.is_contiguous() || !out.is_contiguous() ||
      out.numel() != input.numel() * n || out.scalar_type() != input.scalar_type())
    return c10d::all_gather_into_tensor_out(input, n, group, out);
  auto s = sign("all_gather_into_tensor", input, {.dim = 0});
  guarded([&] {
    g->run(Call::all_gather(input.nbytes()).signed_by(s), input.const_data_ptr(),
           out.mutable_data_ptr());
  });
  return out;
}

Tensor c10d_reduce_scatter(const Tensor& input, std::string op, int64_t n, const c10::IValue& given) {
  auto group = process_group(given);
  if (!shared_memory_of(group)) return c10d::reduce_scatter_tensor(input, op, n, group);
  return reduce_scatter_tensor(input, op, n, group->getGroupName(), 0, std::nullopt);
}

Tensor c10d_broadcast(const Tensor& input, int64_t src, const c10::IValue& given) {
  auto group = process_group(given);
  if (!shared_memory_of(group)) return c10d::broadcast(input, src, group);
  return broadcast(input, src, group->getGroupName());
}

Tensor c10d_all_to_all(const Tensor& input, c10::SymIntArrayRef out_splits,
                       c10::SymIntArrayRef in_splits, const c10::IValue& given) {
  auto group = process_group(given);
  auto g = shared_memory_of(group);
  if (g && int(out_splits.size()) == g->size() && out_splits.size() == in_splits.size()) {
    auto sent = in_splits[g->rank()], expected = out_splits[g->rank()];
    if (sent != expected)
      raise("CollectiveMismatch", g->rank(),
            c10::str("all_to_all_single: rank ", g->rank(), " sends itself ", sent,
                     " rows and expects ", expected));
  }
  Tensor out = g ? all_to_all_with(g, input, out_splits, in_splits).out : Tensor();
  return out.defined() ? out : c10d::all_to_all_single(input, out_splits, in_splits, group);
}

std::unique_ptr<torch::Library> accelerated;

void accelerate(bool on) {
  accelerated.reset();
  if (!on) return;
  accelerated = std::make_unique<torch::Library>(torch::Library::IMPL, "_c10d_functional",
                                                 c10::DispatchKey::CPU, "fcoll", 0);
  accelerated->impl("all_reduce", &c10d_all_reduce);
  accelerated->impl("all_reduce_", &c10d_all_reduce_);
  accelerated->impl("all_gather_into_tensor", &c10d_all_gather);
  accelerated->impl("all_gather_into_tensor_out", &c10d_all_gather_out);
  accelerated->impl("reduce_scatter_tensor", &c10d_reduce_scatter);
  accelerated->impl("broadcast", &c10d_broadcast);
  accelerated->impl("all_to_all_single", &c10d_all_to_all);
}

// -- loops for benchmarks: no Python between two calls ------------------------------------------------

// What no collective of these bytes by copies is faster than: one sync of the ranks, and two copies by
// each within its own memory.
void bound(fcoll::Group& g, const Tensor& in, std::vector<uint8_t>& room) {
  size_t bytes = in.nbytes();
  fcoll::copy(room.data(), in.const_data_ptr(), bytes);
  g.run(Call::barrier(), nullptr, nullptr);
  fcoll::copy(room.data() + bytes, room.data(), bytes);
}

std::vector<double> loop(const std::string& kind, const Tensor& in, const Tensor& out, int64_t rounds,
                         int64_t handle) {
  using namespace std::chrono;
  auto g = group_of(handle);
  std::vector<double> us(rounds);
  size_t n = g->size(), bytes = in.nbytes();
  std::vector<size_t> parts(n, bytes / n);
  std::vector<uint8_t> room(kind == "bound" ? 2 * bytes : 0);
  for (auto& t : us) {
    auto start = steady_clock::now();
    guarded([&] {
      const void* from = in.const_data_ptr();
      void* to = out.mutable_data_ptr();
      if (kind == "all_reduce") g->run(Call::all_reduce(in.numel(), type_of(in), Op::sum), from, to);
      else if (kind == "all_gather") g->run(Call::all_gather(bytes), from, to);
      else if (kind == "reduce_scatter")
        g->run(Call::reduce_scatter(out.numel(), type_of(in), Op::sum), from, to);
      else if (kind == "all_to_all")
        g->all_to_all(Call::all_to_all(1), from, to, parts.data(), parts.data());
      else if (kind == "broadcast") g->run(Call::broadcast(bytes, 0), to, to);
      else if (kind == "bound") bound(*g, in, room);
      else g->run(Call::barrier(), nullptr, nullptr);
    });
    t = duration<double, std::micro>(steady_clock::now() - start).count();
  }
  return us;
}

// x.contiguous() of a tensor that is not, in a warm block if it is large.
Tensor contiguous(const Tensor& x) { return served::empty(x, x.sizes()).copy_(x); }

int64_t warm_bytes() { return fcoll::warm_blocks().kept_bytes(); }
void empty_cache() { fcoll::warm_blocks().release(); }

}  // namespace

TORCH_LIBRARY(fcoll_native, m) {
  m.def("open(int rank, int n, float timeout_s) -> int[]", &served::open_group);
  m.def("join(int handle, int[] pids, int[] fds, int[] tokens) -> str", &served::join_group);
  m.def("bind(str name, int handle) -> ()", &served::bind_group);
  m.def("yield_cores(int handle) -> ()", &served::yield_cores);
  m.def("fail(int handle, str why) -> ()", &served::fail_group);
  m.def("close(int handle) -> ()", &served::close_group);
  m.def("barrier(int handle) -> ()", &barrier);
  m.def("round_trip_ns(int peer, int handle) -> float", &round_trip_ns);
  // The kernels of fcoll::* again, for callers that know that autograd and modes have no part in it.
  m.def("all_reduce(Tensor input, str reduce_op, str group_name, str grad='sum') -> Tensor",
        &all_reduce);
  m.def("all_gather_into_tensor(Tensor input, int group_size, str group_name, int dim=0,"
        " SymInt[]? sizes=None) -> Tensor", &all_gather_into_tensor);
  m.def("reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name, int dim=0,"
        " SymInt[]? sizes=None) -> Tensor", &reduce_scatter_tensor);
  m.def("broadcast(Tensor input, int src, str group_name) -> Tensor", &broadcast);
  m.def("all_to_all_single(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes,"
        " str group_name) -> Tensor", &all_to_all_single);
  m.def("sign(str row, Tensor[] tensors, int[] facts, int[] more) -> Tensor", &sign_call);
  m.def("all_reduce_(Tensor(a!) buf, str op, int handle, Tensor signature) -> ()", &all_reduce_);
  m.def("all_gather_(Tensor(a!) out, Tensor x, int handle, Tensor signature) -> ()", &all_gather_);
  m.def("reduce_scatter_(Tensor(a!) out, Tensor x, str op, int handle, Tensor signature) -> ()",
        &reduce_scatter_);
  m.def("exchange_(Tensor(a!) out, Tensor x, int[] out_splits, int[] in_splits, int handle,"
        " Tensor signature) -> ()", &exchange_);
  m.def("broadcast_(Tensor(a!) buf, int src, int handle, Tensor signature) -> ()", &broadcast_);
  m.def("accelerate(bool on) -> ()", &accelerate);
  m.def("contiguous(Tensor input) -> Tensor", &contiguous);
  m.def("warm_bytes() -> int", &warm_bytes);
  m.def("empty_cache() -> ()", &empty_cache);
  m.def("loop(str kind, Tensor input, Tensor(a!) out, int rounds, int handle) -> float[]", &loop);
}

TORCH_LIBRARY_IMPL(fcoll, CPU, m) {
  m.impl("all_reduce", &all_reduce);
  m.impl("all_gather_into_tensor", &all_gather_into_tensor);
  m.impl("reduce_scatter_tensor", &reduce_scatter_tensor);
  m.impl("broadcast", &broadcast);
  m.impl("all_to_all_single", &all_to_all_single);
}
