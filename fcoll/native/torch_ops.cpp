// The core as torch ops. `fcoll_native::*` are its primitives on tensors; the kernels of `fcoll::*`
// for CPU tensors take this path where the group has one and call `fcoll_pg::*`, the process
// group's, where not.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Functional.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <shared_mutex>
#include <unordered_map>

#include "core.h"
#include "tensors.h"

namespace {

using at::Tensor;
using fcoll::Call;
using fcoll::Group;
using fcoll::Kind;
using fcoll::Op;
using fcoll::Type;
using namespace fcoll::tensors;

// How long an eager call waits for late peers before it returns a result that is under way.
constexpr double PATIENCE_US = 5;

// -- groups by handle and by name -----------------------------------------------------------------

std::shared_mutex registry_mutex;
std::unordered_map<int64_t, std::shared_ptr<Group>> groups;
// A name may be given to another process group later: the one it stood for goes with it.
struct Named {
  std::shared_ptr<Group> group;
  const void* process_group;
};
std::unordered_map<std::string, Named> by_name;
int64_t next_handle = 1;

std::shared_ptr<Group> group_of(int64_t handle) {
  std::shared_lock lock(registry_mutex);
  auto found = groups.find(handle);
  TORCH_CHECK(found != groups.end(), "fcoll: this group has been destroyed");
  return found->second;
}

std::shared_ptr<Group> group_named(const std::string& name) {
  std::shared_lock lock(registry_mutex);
  auto found = by_name.find(name);
  if (found == by_name.end()) return nullptr;
  try {
    bool same = c10d::resolve_process_group(name).get() == found->second.process_group;
    return same ? found->second.group : nullptr;
  } catch (const c10::Error&) {  // there is no such group any more: Python says so
    return nullptr;
  }
}

std::vector<int64_t> open_group(int64_t rank, int64_t n, double timeout_s) {
  auto group = std::make_shared<Group>(rank, n, timeout_s);
  std::unique_lock lock(registry_mutex);
  int64_t handle = next_handle++;
  groups[handle] = group;
  return {handle, group->fd(), int64_t(group->token())};
}

std::string join_group(int64_t handle, at::IntArrayRef pids, at::IntArrayRef fds,
                       at::IntArrayRef tokens) {
  return group_of(handle)->join({pids.begin(), pids.end()}, {fds.begin(), fds.end()},
                                {tokens.begin(), tokens.end()});
}

void bind_group(const std::string& name, int64_t handle) {
  auto group = group_of(handle);
  std::unique_lock lock(registry_mutex);
  by_name[name] = {group, c10d::resolve_process_group(name).get()};
}

void close_group(int64_t handle) {
  std::unique_lock lock(registry_mutex);
  auto found = groups.find(handle);
  if (found == groups.end()) return;
  std::erase_if(by_name, [&](const auto& entry) { return entry.second.group == found->second; });
  groups.erase(found);
}

// -- primitives: contiguous tensors, complete on return -------------------------------------------

void all_reduce_(const Tensor& buf, const std::string& op, int64_t handle) {
  auto g = group_of(handle);
  guarded([&] {
    g->all_reduce(buf.const_data_ptr(), buf.mutable_data_ptr(), buf.numel(), type_of(buf), op_of(op));
  });
}

void all_gather_(const Tensor& out, const Tensor& x, int64_t handle) {
  auto g = group_of(handle);
  guarded([&] { g->all_gather(x.const_data_ptr(), out.mutable_data_ptr(), x.nbytes()); });
}

void reduce_scatter_(const Tensor& out, const Tensor& x, const std::string& op, int64_t handle) {
  auto g = group_of(handle);
  guarded([&] {
    g->reduce_scatter(x.const_data_ptr(), out.mutable_data_ptr(), out.numel(), type_of(x), op_of(op));
  });
}

void exchange(Group& g, const Tensor& out, const Tensor& x, at::IntArrayRef out_splits,
              at::IntArrayRef in_splits) {
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
    g.all_to_all(x.const_data_ptr(), out.mutable_data_ptr(), in_bytes.data(), out_bytes.data(),
                 row_bytes(x));
  });
}

void exchange_(const Tensor& out, const Tensor& x, at::IntArrayRef out_splits,
               at::IntArrayRef in_splits, int64_t handle) {
  exchange(*group_of(handle), out, x, out_splits, in_splits);
}

void broadcast_(const Tensor& buf, int64_t src, int64_t handle) {
  auto g = group_of(handle);
  guarded([&] { g->broadcast(buf.mutable_data_ptr(), buf.nbytes(), src); });
}

void barrier(int64_t handle) {
  auto g = group_of(handle);
  guarded([&] { g->barrier(); });
}

double round_trip_ns(int64_t peer, int64_t handle) {
  auto g = group_of(handle);
  return guarded([&] { return g->round_trip_ns(peer); });
}

// -- results under way ----------------------------------------------------------------------------

// The second half of a collective: found by wait_tensor in torch's registry of works. It holds the
// result, which a later call may fill on the way to its own.
struct Finish : c10d::Work {
  Finish(std::shared_ptr<Group> group, uint64_t ticket, Tensor out)
      : group(std::move(group)), ticket(ticket), out(std::move(out)) {}
  bool wait(std::chrono::milliseconds) override {
    guarded([&] { group->finish(ticket); });
    return true;
  }
  std::shared_ptr<Group> group;
  uint64_t ticket;
  Tensor out;
};

Tensor started(const std::shared_ptr<Group>& g, const Call& call, const Tensor& x, Tensor out) {
  double patience = g->crowded() ? 0 : PATIENCE_US;
  uint64_t ticket = guarded(
      [&] { return g->start(call, x.const_data_ptr(), out.mutable_data_ptr(), patience); });
  if (ticket) c10d::register_work(out, c10::make_intrusive<Finish>(g, ticket, out));
  return out;
}

// -- fcoll::* on CPU tensors ------------------------------------------------------------------------
//
// Each falls back to the process group's kernel, which also checks its arguments, for whatever is
// not plainly served here.

using string = c10::string_view;
using Sizes = at::OptionalSymIntArrayRef;

template <class... Args>
Tensor by_process_group(const char* name, const Args&... args) {
  static thread_local std::unordered_map<const char*, c10::OperatorHandle> known;
  auto found = known.find(name);
  if (found == known.end())
    found = known.emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
  return found->second.typed<Tensor(Args...)>().call(args...);
}

Tensor empty(const Tensor& like, at::IntArrayRef sizes) {
  return at::empty(sizes, like.options().memory_format(at::MemoryFormat::Contiguous));
}

Tensor all_reduce(const Tensor& input, string reduce_op, string group_name, string grad) {
  auto op = OPS.find(std::string(reduce_op));
  auto g = group_named(std::string(group_name));
  if (!g || op == OPS.end() || !reduces(input, op->second) || input.numel() == 0)
    return by_process_group<const Tensor&>("fcoll_pg::all_reduce", input, reduce_op, group_name,
                                           grad);
  Tensor x = input.contiguous();
  Call call{Kind::all_reduce, type_of(x), op->second, 0, uint64_t(x.numel())};
  return started(g, call, x, empty(x, x.sizes()));
}

Tensor all_gather_into_tensor(const Tensor& input, int64_t group_size, string group_name,
                              int64_t dim, Sizes sizes) {
  auto g = group_named(std::string(group_name));
  if (!g || g->size() != group_size || dim != 0 || sizes || input.numel() == 0)
    return by_process_group<const Tensor&>("fcoll_pg::all_gather_into_tensor", input, group_size,
                                           group_name, dim, sizes);
  Tensor x = input.contiguous();
  auto shape = x.dim() ? x.sizes().vec() : std::vector<int64_t>{1};
  shape[0] *= group_size;
  Call call{Kind::all_gather, Type::bytes, Op::sum, 0, x.nbytes()};
  return started(g, call, x, empty(x, shape));
}

Tensor reduce_scatter_tensor(const Tensor& input, string reduce_op, int64_t group_size,
                             string group_name, int64_t dim, Sizes sizes) {
  auto op = OPS.find(std::string(reduce_op));
  auto g = group_named(std::string(group_name));
  if (!g || g->size() != group_size || dim != 0 || sizes || input.numel() == 0 || !input.dim() ||
      input.size(0) % group_size || op == OPS.end() || !reduces(input, op->second))
    return by_process_group<const Tensor&>("fcoll_pg::reduce_scatter_tensor", input, reduce_op,
                                           group_size, group_name, dim, sizes);
  Tensor x = input.contiguous();
  auto shape = x.sizes().vec();
  shape[0] /= group_size;
  Call call{Kind::reduce_scatter, type_of(x), op->second, 0, uint64_t(x.numel() / group_size)};
  return started(g, call, x, empty(x, shape));
}

Tensor broadcast(const Tensor& input, int64_t src, string group_name) {
  auto g = group_named(std::string(group_name));
  if (!g || src < 0 || src >= g->size() || input.numel() == 0)
    return by_process_group<const Tensor&>("fcoll_pg::broadcast", input, src, group_name);
  Tensor out = g->rank() == src ? input.clone(at::MemoryFormat::Contiguous)
                                : empty(input, input.sizes());
  Call call{Kind::broadcast, Type::bytes, Op::sum, uint8_t(src), out.nbytes()};
  return started(g, call, out, out);
}

// -- _c10d_functional::* on CPU tensors, while fcoll.accelerate_c10d() is in force -----------------

std::string name_given(const c10::IValue& given) {
  return given.isString() ? given.toStringRef()
                          : given.toCustomClass<c10d::ProcessGroup>()->getGroupName();
}

// A group as torch's ops are given it, a name or an object; connected if this is its first use.
std::shared_ptr<Group> group_given(const c10::IValue& given) {
  std::string name = name_given(given);
  if (auto known = group_named(name)) return known;
  static auto connect = c10::Dispatcher::singleton()
                            .findSchemaOrThrow("fcoll_pg::connect", "")
                            .typed<bool(string)>();
  return connect.call(name) ? group_named(name) : nullptr;
}

Tensor c10d_all_reduce(const Tensor& input, std::string op, const c10::IValue& group) {
  auto g = group_given(group);
  if (!g) return c10d::all_reduce(input, op, name_given(group));
  return all_reduce(input, op, name_given(group), "sum");
}

Tensor& c10d_all_reduce_(Tensor& input, std::string op, const c10::IValue& group) {
  auto g = group_given(group);
  auto found = OPS.find(op);
  if (!g || found == OPS.end() || !reduces(input, found->second) || !input.is_contiguous())
    return c10d::all_reduce_(input, op, name_given(group));
  guarded([&] {
    g->all_reduce(input.const_data_ptr(), input.mutable_data_ptr(), input.numel(), type_of(input),
                  found->second);
  });
  return input;
}

Tensor c10d_all_gather(const Tensor& input, int64_t n, const c10::IValue& group) {
  auto g = group_given(group);
  if (!g) return c10d::all_gather_into_tensor(input, n, name_given(group));
  return all_gather_into_tensor(input, n, name_given(group), 0, std::nullopt);
}

Tensor& c10d_all_gather_out(Tensor& input, int64_t n, const c10::IValue& group, Tensor& out) {
  auto g = group_given(group);
  if (!g || g->size() != n || !input.is_contiguous() || !out.is_contiguous() ||
      out.numel() != input.numel() * n || out.scalar_type() != input.scalar_type())
    return c10d::all_gather_into_tensor_out(input, n, name_given(group), out);
  guarded([&] { g->all_gather(input.const_data_ptr(), out.mutable_data_ptr(), input.nbytes()); });
  return out;
}

Tensor c10d_reduce_scatter(const Tensor& input, std::string op, int64_t n, const c10::IValue& group) {
  auto g = group_given(group);
  if (!g) return c10d::reduce_scatter_tensor(input, op, n, name_given(group));
  return reduce_scatter_tensor(input, op, n, name_given(group), 0, std::nullopt);
}

Tensor c10d_broadcast(const Tensor& input, int64_t src, const c10::IValue& group) {
  auto g = group_given(group);
  if (!g) return c10d::broadcast(input, src, name_given(group));
  return broadcast(input, src, name_given(group));
}

Tensor c10d_all_to_all(const Tensor& input, c10::SymIntArrayRef out_splits,
                       c10::SymIntArrayRef in_splits, const c10::IValue& group) {
  auto g = group_given(group);
  auto fits = [&](c10::SymIntArrayRef splits) {
    return splits.size() == size_t(g->size()) &&
           std::all_of(splits.begin(), splits.end(), [](const auto& s) { return s >= 0; });
  };
  if (!g || !input.dim() || !fits(out_splits) || !fits(in_splits) ||
      std::accumulate(in_splits.begin(), in_splits.end(), c10::SymInt(0)) != input.size(0))
    return c10d::all_to_all_single(input, out_splits, in_splits, name_given(group));
  auto sizes = [](c10::SymIntArrayRef splits) {
    std::vector<int64_t> v;
    for (const auto& s : splits) v.push_back(s.expect_int());
    return v;
  };
  Tensor x = input.contiguous();
  auto outs = sizes(out_splits), ins = sizes(in_splits);
  auto shape = x.sizes().vec();
  shape[0] = std::accumulate(outs.begin(), outs.end(), int64_t(0));
  Tensor out = empty(x, shape);
  exchange(*g, out, x, outs, ins);
  return out;
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

std::vector<double> loop(const std::string& kind, const Tensor& in, const Tensor& out, int64_t rounds,
                         int64_t handle) {
  using namespace std::chrono;
  auto g = group_of(handle);
  std::vector<double> us(rounds);
  size_t n = g->size(), bytes = in.nbytes();
  std::vector<size_t> parts(n, bytes / n);
  for (auto& t : us) {
    auto start = steady_clock::now();
    guarded([&] {
      const void* from = in.const_data_ptr();
      void* to = out.mutable_data_ptr();
      if (kind == "all_reduce") g->all_reduce(from, to, in.numel(), type_of(in), Op::sum);
      else if (kind == "all_gather") g->all_gather(from, to, bytes);
      else if (kind == "reduce_scatter") g->reduce_scatter(from, to, out.numel(), type_of(in), Op::sum);
      else if (kind == "all_to_all") g->all_to_all(from, to, parts.data(), parts.data(), 1);
      else if (kind == "broadcast") g->broadcast(to, bytes, 0);
      else g->barrier();
    });
    t = duration<double, std::micro>(steady_clock::now() - start).count();
  }
  return us;
}

}  // namespace

TORCH_LIBRARY(fcoll_native, m) {
  m.def("open(int rank, int n, float timeout_s) -> int[]", &open_group);
  m.def("join(int handle, int[] pids, int[] fds, int[] tokens) -> str", &join_group);
  m.def("bind(str name, int handle) -> ()", &bind_group);
  m.def("close(int handle) -> ()", &close_group);
  m.def("barrier(int handle) -> ()", &barrier);
  m.def("round_trip_ns(int peer, int handle) -> float", &round_trip_ns);
  // The kernels of fcoll::* again, for callers that know that autograd and modes have no part in it.
  m.def("all_reduce(Tensor input, str reduce_op, str group_name, str grad) -> Tensor", &all_reduce);
  m.def("all_gather_into_tensor(Tensor input, int group_size, str group_name, int dim,"
        " SymInt[]? sizes) -> Tensor", &all_gather_into_tensor);
  m.def("reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name, int dim,"
        " SymInt[]? sizes) -> Tensor", &reduce_scatter_tensor);
  m.def("broadcast(Tensor input, int src, str group_name) -> Tensor", &broadcast);
  m.def("all_reduce_(Tensor(a!) buf, str op, int handle) -> ()", &all_reduce_);
  m.def("all_gather_(Tensor(a!) out, Tensor x, int handle) -> ()", &all_gather_);
  m.def("reduce_scatter_(Tensor(a!) out, Tensor x, str op, int handle) -> ()", &reduce_scatter_);
  m.def("exchange_(Tensor(a!) out, Tensor x, int[] out_splits, int[] in_splits, int handle) -> ()",
        &exchange_);
  m.def("broadcast_(Tensor(a!) buf, int src, int handle) -> ()", &broadcast_);
  m.def("accelerate(bool on) -> ()", &accelerate);
  m.def("loop(str kind, Tensor input, Tensor(a!) out, int rounds, int handle) -> float[]", &loop);
}

TORCH_LIBRARY_IMPL(fcoll, CPU, m) {
  m.impl("all_reduce", &all_reduce);
  m.impl("all_gather_into_tensor", &all_gather_into_tensor);
  m.impl("reduce_scatter_tensor", &reduce_scatter_tensor);
  m.impl("broadcast", &broadcast);
}
