#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/chunk.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Functional.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <torch/library.h>

#include <unordered_map>

#include "arena.h"
#include "compiled.h"
#include "kernels.h"
#include "served.h"
#include "signature.h"
#include "tensors.h"

using namespace fcoll;
using namespace fcoll::tensors;
using at::Tensor;

namespace {

using served::GroupPtr;

// A graph from a cache may be the first to use its group in this process. Only a collective may
// connect it: all ranks make them in the same order.
GroupPtr connected(const std::string& name) {
  if (auto group = served::group_named(name)) return group;
  static auto connect = c10::Dispatcher::singleton()
                            .findSchemaOrThrow("fcoll_pg::connect", "")
                            .typed<bool(c10::string_view)>();
  return connect.call(name) ? served::group_named(name) : nullptr;
}

// A tensor in memory of an arena, which it holds.
Tensor tensor_at(const uint8_t* data, std::shared_ptr<void> hold, at::IntArrayRef size,
                 at::IntArrayRef stride, at::ScalarType dtype) {
  return at::from_blob(const_cast<uint8_t*>(data), size, stride, [hold = std::move(hold)](void*) {},
                       at::TensorOptions().dtype(dtype));
}

// What each kind of collective reads of the ranks' parts.
struct Reads {
  Kind kind;
  bool slices;  // of each part the share of this rank, not all of it
};
const std::unordered_map<std::string, Reads> READS = {
    {"all_reduce", {Kind::all_reduce, false}},
    {"all_gather_into_tensor", {Kind::all_gather, false}},
    {"reduce_scatter_tensor", {Kind::reduce_scatter, true}},
};

// A call with what the ranks compare of it, which it points to.
struct Signed {
  Signature signature;
  Call call;
  Signed(const Tensor& own, const std::string& collective, const std::string& reduce_op, int64_t dim) {
    Op op = reduce_op.empty() ? Op::sum : op_of(reduce_op);
    int64_t shown = reduce_op.empty() ? -1 : int64_t(op);
    signature = sign(collective, own, {.op = shown, .dim = dim});
    call = {READS.at(collective).kind, type_of(own), op, 0, uint64_t(own.numel())};
    call.signed_by(signature);
  }
};

// The parts of a collective as tensors: all of each, or this rank's share of each.
std::vector<Tensor> tensors_of(Group& group, const Tensor& own, bool slices, const Parts& parts) {
  auto size = own.sizes().vec();
  size_t skip = 0;
  if (slices) {
    size[0] /= group.size();
    skip = own.nbytes() / group.size() * group.rank();
  }
  std::vector<Tensor> tensors;
  for (int r = 0; r < group.size(); r++)
    tensors.push_back(
        tensor_at(parts.data[r] + skip, parts.hold, size, own.strides(), own.scalar_type()));
  return tensors;
}

std::vector<Tensor> by_process_group(const Tensor& own, bool slices, const std::string& name) {
  using Gather = Tensor(const Tensor&, int64_t, c10::string_view, int64_t, at::OptionalSymIntArrayRef);
  static auto gather = c10::Dispatcher::singleton()
                           .findSchemaOrThrow("fcoll_pg::all_gather_into_tensor", "")
                           .typed<Gather>();
  auto group = c10d::resolve_process_group(name);
  int64_t n = group->getSize();
  Tensor all = c10d::wait_tensor(gather.call(own, n, name, 0, std::nullopt));
  auto parts = all.chunk(n);
  if (slices)
    for (auto& part : parts) part = part.chunk(n)[group->getRank()];
  return parts;
}

const uint8_t* bytes_of(const Tensor& x) { return static_cast<const uint8_t*>(x.const_data_ptr()); }

}  // namespace

namespace fcoll::compiled {

Tensor claim(std::string group_name, int64_t lane, at::IntArrayRef size, at::IntArrayRef stride,
             at::ScalarType dtype, at::Device device) {
  GroupPtr group = served::group_named(group_name);
  size_t bytes = c10::elementSize(dtype);
  for (auto s : size) bytes *= s;
  Claimed claimed = guarded([&] { return group ? group->arena().claim(lane, bytes) : Claimed(); });
  if (!claimed.data) return at::empty_strided(size, stride, at::TensorOptions().dtype(dtype));
  return tensor_at(claimed.data, claimed.hold, size, stride, dtype);
}

std::vector<Tensor> meet(const Tensor& own, std::string collective, std::string reduce_op,
                         std::string group_name, int64_t dim) {
  Reads reads = READS.at(collective);
  GroupPtr group = connected(group_name);
  if (!group) return by_process_group(own, reads.slices, group_name);
  Parts parts = guarded([&] {
    Signed made(own, collective, reduce_op, dim);
    return group->arena().meet(made.call, bytes_of(own), own.nbytes());
  });
  return tensors_of(*group, own, reads.slices, parts);
}

// Between the two halves the tensor that is returned says which announcement it was, and holds it: a
// program that fails in between lets go of it.
Tensor announce(const Tensor& own, std::string collective, std::string reduce_op,
                std::string group_name, int64_t dim) {
  GroupPtr group = connected(group_name);
  if (!group) return at::empty({1}, own.options().dtype(at::kLong));
  auto announced = guarded([&] {
    Signed made(own, collective, reduce_op, dim);
    return group->arena().announce(made.call, bytes_of(own), own.nbytes());
  });
  auto* id = reinterpret_cast<const uint8_t*>(&announced->id);
  return tensor_at(id, announced, {1}, {1}, at::kLong);
}

std::vector<Tensor> collect(const Tensor& token, const Tensor& own, std::string collective,
                            std::string group_name) {
  bool slices = READS.at(collective).slices;
  GroupPtr group = served::group_named(group_name);
  if (!group) return by_process_group(own, slices, group_name);
  Parts parts = guarded([&] {
    auto announced = group->arena().find(uint64_t(*token.const_data_ptr<int64_t>()));
    if (!announced) throw Error(Error::closed, -1, collective + " was never announced");
    return group->arena().collect(*announced);
  });
  return tensors_of(*group, own, slices, parts);
}

Tensor meet_and_reduce(const Tensor& own, std::string collective, std::string reduce_op,
                       std::string group_name, int64_t dim) {
  auto parts = meet(own, collective, reduce_op, group_name, dim);
  Tensor out = at::empty(parts[0].sizes(), own.options());
  std::vector<const void*> data;
  for (const auto& part : parts) data.push_back(part.const_data_ptr());
  reduce(out.mutable_data_ptr(), data.data(), data.size(), out.numel(), type_of(own),
         op_of(reduce_op));
  return out;
}

int64_t lane_disagreements(std::string group_name) {
  GroupPtr group = served::group_named(group_name);
  return group ? int64_t(group->arena().disagreements()) : 0;
}

Tensor symmetric_empty(std::string group_name, int64_t alloc_id, at::IntArrayRef size,
                       at::IntArrayRef stride, at::ScalarType dtype, at::Device device) {
  return c10d::symmetric_memory::empty_strided_p2p(
      size, stride, dtype, device, group_name,
      alloc_id < 0 ? std::nullopt : std::optional<uint64_t>(alloc_id));
}

}  // namespace fcoll::compiled

using namespace fcoll::compiled;

namespace {

// cpp_wrapper passes lists of SymInts, whatever is in them.
template <auto allocate>
Tensor allocates(std::string group_name, int64_t which, c10::SymIntArrayRef size,
                 c10::SymIntArrayRef stride, at::ScalarType dtype, at::Device device) {
  return allocate(group_name, which, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                  dtype, device);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fcoll_native, m) {
  m.def("claim(str group_name, int lane, SymInt[] size, SymInt[] stride, ScalarType dtype,"
        " Device device) -> Tensor");
  m.def("symmetric_empty(str group_name, int alloc_id, SymInt[] size, SymInt[] stride,"
        " ScalarType dtype, Device device) -> Tensor");
  m.def("lane_disagreements(str group_name) -> int", &lane_disagreements);
  m.def("meet(Tensor own, str collective, str reduce_op, str group_name, int dim) -> Tensor[]");
  m.def("announce(Tensor own, str collective, str reduce_op, str group_name, int dim) -> Tensor");
  m.def("collect(Tensor token, Tensor own, str collective, str group_name) -> Tensor[]");
  m.def("meet_and_reduce(Tensor own, str collective, str reduce_op, str group_name, int dim)"
        " -> Tensor");
}

TORCH_LIBRARY_IMPL(fcoll_native, CompositeExplicitAutograd, m) {
  // They have no tensor that would say which backend's they are.
  m.impl("claim", TORCH_FN(allocates<claim>));
  m.impl("symmetric_empty", TORCH_FN(allocates<symmetric_empty>));
}

TORCH_LIBRARY_IMPL(fcoll_native, CPU, m) {
  m.impl("meet", TORCH_FN(meet));
  m.impl("announce", TORCH_FN(announce));
  m.impl("collect", TORCH_FN(collect));
  m.impl("meet_and_reduce", TORCH_FN(meet_and_reduce));
}
