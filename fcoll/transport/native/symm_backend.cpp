// torch's own SymmetricMemory on CPU tensors: registers the allocator behind
// `torch.distributed._symmetric_memory`, and kernels for the `symm_mem::*` ops that mean something
// there. A collective reads and writes the peers' buffers in place.
#include <torch/library.h>

#include "kernels.h"
#include "symm_allocator.h"

namespace {

namespace symm = c10d::symmetric_memory;
using at::Tensor;
using fcoll::Op;
using fcoll::Said;
using fcoll::backend::Allocator;
using fcoll::backend::need;
using fcoll::backend::Place;
using fcoll::tensors::guarded;
using fcoll::tensors::type_of;
using std::string;

c10::intrusive_ptr<Allocator>& allocator() {
  static auto& made = *new c10::intrusive_ptr<Allocator>(c10::make_intrusive<Allocator>());
  return made;
}

// At load, so that symm_mem.empty works on CPU from then on; unless somebody else serves it: then
// set_backend("fcoll") chooses this one.
const bool registered = [] {
  symm::register_availability("fcoll", allocator());
  if (!symm::has_allocator(c10::DeviceType::CPU))
    symm::register_allocator(c10::DeviceType::CPU, allocator());
  return true;
}();

// -- collectives on symmetric tensors: ranks read and write each other's buffers ------------------

struct OpKind {
  const char* name;
  fcoll::Kind kind;
};
enum Which {
  ONE_SHOT,
  ONE_SHOT_COPY,
  TWO_SHOT,
  TWO_SHOT_OUT,
  SCATTER,
  SCATTER_LAST,
  GATHER,
  REDUCE
};
constexpr OpKind KINDS[] = {
    {"one_shot_all_reduce", fcoll::Kind::all_reduce},
    {"one_shot_all_reduce_copy", fcoll::Kind::all_reduce},
    {"two_shot_all_reduce_", fcoll::Kind::all_reduce},
    {"two_shot_all_reduce_out", fcoll::Kind::all_reduce},
    {"reduce_scatter_out", fcoll::Kind::reduce_scatter},
    {"reduce_scatter_out, split_last_dim", fcoll::Kind::reduce_scatter},
    {"multimem_all_gather_out", fcoll::Kind::all_gather},
    {"multimem_one_shot_reduce_out", fcoll::Kind::all_reduce},
};

// A call with a root says it together with its op, as (root + 1) * ROOT.
constexpr uint64_t ROOT = 256;

string show(const Said& said) {
  Op op = Op(said.op % ROOT);
  fcoll::Call call{KINDS[said.kind].kind, fcoll::Type(said.type), op, 0, said.count};
  string root = said.op < ROOT ? "" : " to rank " + std::to_string(said.op / ROOT - 1);
  return string(KINDS[said.kind].name) + ": " + call.show() + root + " at byte " +
         std::to_string(said.offset);
}

// One call on a tensor in symmetric memory, from its first barrier on.
class Running {
 public:
  Running(Which which, const Tensor& x, const string& group_name, size_t count, Op op,
          int64_t root = -1)
      : what_(KINDS[which].name) {
    place_ = allocator()->meet(x.storage().mutable_data(), group_name);
    need(place_.peers != nullptr, what_, ": the tensor is not in symmetric memory: "
         "allocate it by torch.distributed._symmetric_memory.empty");
    place_.offset += x.storage_offset() * x.element_size();
    uint64_t op_and_root = uint64_t(op) + uint64_t(root + 1) * ROOT;
    Said said{which, uint64_t(type_of(x)), op_and_root, place_.offset, count};
    place_.peers->enter(what_, said, show);
  }

  int rank() const { return place_.peers->rank(); }
  int size() const { return place_.peers->size(); }
  uint8_t* of(int rank) const {
    return static_cast<uint8_t*>(place_.peers->buffer_ptrs()[rank]) + place_.offset;
  }
  // Every rank's bytes from `at` on, in rank order.
  std::vector<const void*> parts(size_t at = 0) const {
    std::vector<const void*> parts;
    for (int r = 0; r < size(); r++) parts.push_back(of(r) + at);
    return parts;
  }
  void sync() const { place_.peers->sync(what_); }

 private:
  const char* what_;
  Place place_;
};

void check(Which which, const Tensor& x, const Tensor& out) {
  const char* what = KINDS[which].name;
  need(x.is_contiguous() && out.is_contiguous(), what, ": tensors must be contiguous");
  need(x.scalar_type() == out.scalar_type() && x.device() == out.device(), what,
       ": got ", x.scalar_type(), " on ", x.device(), " and ", out.scalar_type(),
       " on ", out.device());
}

Op check_op(Which which, const Tensor& x, const string& reduce_op) {
  need(fcoll::tensors::OPS.count(reduce_op), KINDS[which].name, ": no reduce op ", reduce_op);
  Op op = fcoll::tensors::op_of(reduce_op);
  need(fcoll::tensors::reduces(x, op), KINDS[which].name, ": ", reduce_op,
       " has no meaning for ", x.scalar_type());
  return op;
}

void check_sizes(Which which, const Tensor& got, at::IntArrayRef want) {
  need(got.sizes() == want, KINDS[which].name, ": got a tensor of ", got.sizes(),
       ", it needs ", want);
}

bool overlap(const Tensor& a, const Tensor& b) {
  auto from = [](const Tensor& x) { return static_cast<const uint8_t*>(x.const_data_ptr()); };
  return from(a) < from(b) + b.nbytes() && from(b) < from(a) + a.nbytes();
}

void check_one_shot(Which which, const Tensor& buffer, const Tensor& local, const Tensor& out) {
  check(which, buffer, local);
  check(which, local, out);
  check_sizes(which, out, local.sizes());
  need(local.numel() <= buffer.numel(), KINDS[which].name, ": ", local.numel(),
       " elements do not fit into a buffer of ", buffer.numel());
  need(!overlap(buffer, out), KINDS[which].name,
       ": peers read the buffer while out is written: they must not overlap");
}

// Reads `local`'s bytes of every rank's buffer; they are `local`'s, copied there, or there already.
Tensor one_shot(Which which, const Tensor& buffer, const Tensor& local, const string& reduce_op,
                const string& group_name, const Tensor& out) {
  check_one_shot(which, buffer, local, out);
  Op op = check_op(which, buffer, reduce_op);
  if (!local.is_same(buffer))
    fcoll::copy(buffer.mutable_data_ptr(), local.const_data_ptr(), local.nbytes());
  guarded([&] {
    Running run(which, buffer, group_name, local.numel(), op);
    fcoll::reduce(out.mutable_data_ptr(), run.parts().data(), run.size(), local.numel(),
                  type_of(buffer), op);
    run.sync();
  });
  return out;
}

// Only the root's `out` is written.
Tensor one_shot_reduce_out(const Tensor& input, const string& reduce_op, int64_t root,
                           const string& group_name, const Tensor& out) {
  check_one_shot(REDUCE, input, input, out);
  Op op = check_op(REDUCE, input, reduce_op);
  int n = c10d::resolve_process_group(group_name)->getSize();
  need(root >= 0 && root < n, KINDS[REDUCE].name, ": no rank ", root, " in a group of ", n);
  guarded([&] {
    Running run(REDUCE, input, group_name, input.numel(), op, root);
    if (run.rank() == root)
      fcoll::reduce(out.mutable_data_ptr(), run.parts().data(), run.size(), input.numel(),
                    type_of(input), op);
    run.sync();
  });
  return out;
}

Tensor one_shot_all_reduce_out(const Tensor& input, const string& op, const string& group,
                               const Tensor& out) {
  return one_shot(ONE_SHOT, input, input, op, group, out);
}

Tensor one_shot_all_reduce(const Tensor& input, const string& op, const string& group) {
  return one_shot(ONE_SHOT, input, input, op, group, at::empty_like(input));
}

Tensor one_shot_all_reduce_copy_out(const Tensor& buffer, const Tensor& local, const string& op,
                                    const string& group, const Tensor& out) {
  return one_shot(ONE_SHOT_COPY, buffer, local, op, group, out);
}

Tensor one_shot_all_reduce_copy(const Tensor& buffer, const Tensor& local, const string& op,
                                const string& group) {
  return one_shot(ONE_SHOT_COPY, buffer, local, op, group, at::empty_like(local));
}

// Each rank reduces its share of the elements for all.
struct Shares {
  size_t count, size, each;
  Shares(size_t count, size_t size, size_t n) : count(count), size(size) {
    size_t line = 64 / size;  // whole cache lines: each written by one rank
    each = ((count + n - 1) / n + line - 1) / line * line;
  }
  size_t begin(int r) const { return std::min(r * each, count) * size; }  // in bytes
  size_t bytes(int r) const { return begin(r + 1) - begin(r); }
};

Tensor two_shot_all_reduce_(const Tensor& input, const string& reduce_op,
                            const string& group_name) {
  check(TWO_SHOT, input, input);
  Op op = check_op(TWO_SHOT, input, reduce_op);
  guarded([&] {
    Running run(TWO_SHOT, input, group_name, input.numel(), op);
    Shares shares(input.numel(), input.element_size(), run.size());
    size_t begin = shares.begin(run.rank()), bytes = shares.bytes(run.rank());
    uint8_t* own = run.of(run.rank()) + begin;
    fcoll::reduce(own, run.parts(begin).data(), run.size(), bytes / shares.size, type_of(input),
                  op);
    for (int k = 1; k < run.size(); k++)
      fcoll::copy(run.of((run.rank() + k) % run.size()) + begin, own, bytes);
    run.sync();
  });
  return input;
}

// Leaves this rank's share of the result in its input, as on CUDA.
Tensor two_shot_all_reduce_out(const Tensor& input, const string& reduce_op,
                               const string& group_name, const Tensor& out) {
  check(TWO_SHOT_OUT, input, out);
  check_sizes(TWO_SHOT_OUT, out, input.sizes());
  need(!overlap(input, out), "two_shot_all_reduce_out: input and out overlap: use "
       "two_shot_all_reduce_");
  Op op = check_op(TWO_SHOT_OUT, input, reduce_op);
  guarded([&] {
    Running run(TWO_SHOT_OUT, input, group_name, input.numel(), op);
    Shares shares(input.numel(), input.element_size(), run.size());
    size_t begin = shares.begin(run.rank()), count = shares.bytes(run.rank()) / shares.size;
    fcoll::reduce(run.of(run.rank()) + begin, run.parts(begin).data(), run.size(), count,
                  type_of(input), op);
    run.sync();
    auto to = static_cast<uint8_t*>(out.mutable_data_ptr());
    for (int k = 0; k < run.size(); k++) {
      int r = (run.rank() + k) % run.size();
      fcoll::copy(to + shares.begin(r), run.of(r) + shares.begin(r), shares.bytes(r));
    }
    run.sync();
  });
  return out;
}

Tensor reduce_scatter_out(const Tensor& input, const string& group_name, bool split_last_dim,
                          const Tensor& out) {
  Which which = split_last_dim ? SCATTER_LAST : SCATTER;
  check(which, input, out);
  need(split_last_dim ? input.dim() > 0 : input.dim() == 1, KINDS[which].name,
       ": got an input of ", input.dim(), " dimensions");
  Op op = check_op(which, input, "sum");
  int n = c10d::resolve_process_group(group_name)->getSize();
  auto sizes = input.sizes().vec();
  int64_t last = sizes.back();
  need(last % n == 0, KINDS[which].name, ": ", last, " is not divisible by ", n);
  sizes.back() /= n;
  check_sizes(which, out, sizes);
  need(!overlap(input, out), KINDS[which].name, ": input and out overlap");
  guarded([&] {
    Running run(which, input, group_name, input.numel(), op);
    size_t row = input.element_size() * last, width = row / n;
    auto to = static_cast<uint8_t*>(out.mutable_data_ptr());
    for (size_t i = 0; i < out.nbytes() / std::max<size_t>(width, 1); i++)
      fcoll::reduce(to + i * width, run.parts(i * row + run.rank() * width).data(), n, last / n,
                    type_of(input), op);
    run.sync();
  });
  return out;
}

// `out` is the tensor in symmetric memory.
Tensor multimem_all_gather_out(const Tensor& input, const string& group_name, const Tensor& out) {
  check(GATHER, input, out);
  auto sizes = input.sizes().vec();
  need(!sizes.empty(), "multimem_all_gather_out: the input has no dimension");
  sizes[0] *= c10d::resolve_process_group(group_name)->getSize();
  check_sizes(GATHER, out, sizes);
  guarded([&] {
    Running run(GATHER, out, group_name, input.numel(), Op::sum);
    const void* from = input.const_data_ptr();
    for (int k = 0; k < run.size(); k++) {
      void* to = run.of((run.rank() + k) % run.size()) + run.rank() * input.nbytes();
      if (to != from) fcoll::copy(to, from, input.nbytes());
    }
    run.sync();
  });
  return out;
}

// -- the rest -------------------------------------------------------------------------------------

std::vector<Tensor> get_remote_tensors(const Tensor& x, const string& group_name) {
  need(x.is_contiguous(), "get_remote_tensors: the tensor must be contiguous");
  Place place = guarded([&] { return allocator()->meet(x.storage().mutable_data(), group_name); });
  need(place.peers != nullptr, "get_remote_tensors: the tensor is not in symmetric memory");
  size_t offset = place.offset + x.storage_offset() * x.element_size();
  std::vector<Tensor> tensors;
  for (void* base : place.peers->buffer_ptrs()) {
    auto keep = [peers = place.peers](void*) {};  // the mapping lives as long as the tensor
    tensors.push_back(at::from_blob(static_cast<uint8_t*>(base) + offset, x.sizes(), keep,
                                    x.options()));
  }
  return tensors;
}

// The words are torch's, too: programs look for them.
uint32_t* words(const char* what, const Tensor& x, int64_t offset, int64_t val, int64_t count) {
  need(x.dim() == 1 && x.is_contiguous() && x.scalar_type() == at::kUInt32, what,
       ": input must be a flat, contiguous uint32 tensor");
  need(offset >= 0, what, ": offset must be greater than or equal to 0, got ", offset);
  need(count > 0, what, ": count must be a positive integer, got ", count);
  need(val >= 0 && val <= UINT32_MAX, what, ": val must be in the range of [0, ", UINT32_MAX,
       "] (uint32_t), got ", val);
  need(count <= x.numel() - offset, what, ": offset + count (", offset, " + ", count,
       ") exceeded the numel of the input (", x.numel(), ")");
  return static_cast<uint32_t*>(x.mutable_data_ptr()) + offset;
}

Tensor memset32_(const Tensor& x, int64_t offset, int64_t val, int64_t count) {
  std::fill_n(words("memset32_", x, offset, val, count), count, uint32_t(val));
  return x;
}

Tensor stream_write_value32_(const Tensor& x, int64_t offset, int64_t val) {
  uint32_t* word = words("stream_write_value32_", x, offset, val, 1);
  std::atomic_ref(*word).store(uint32_t(val));  // after all that was written before
  return x;
}

// Boxed: an unboxed kernel must have the C++ signature of the op's kernels for other devices to the
// letter (`string` or `const string&`), which differ between builds of torch; else loading aborts.
template <auto* kernel>
class Boxed final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    c10::impl::make_boxed_from_unboxed_functor<Functor, false>::call(&functor_, op, keys, stack);
  }

 private:
  using Pointer = c10::CompileTimeFunctionPointer<std::remove_pointer_t<decltype(kernel)>, kernel>;
  using Functor = typename c10::impl::WrapFunctionIntoFunctor<Pointer>::type;
  Functor functor_;
};

template <auto* kernel>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Boxed<kernel>>());
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl("one_shot_all_reduce", boxed<&one_shot_all_reduce>());
  m.impl("one_shot_all_reduce_out", boxed<&one_shot_all_reduce_out>());
  m.impl("one_shot_all_reduce_copy", boxed<&one_shot_all_reduce_copy>());
  m.impl("one_shot_all_reduce_copy_out", boxed<&one_shot_all_reduce_copy_out>());
  m.impl("two_shot_all_reduce_", boxed<&two_shot_all_reduce_>());
  m.impl("two_shot_all_reduce_out", boxed<&two_shot_all_reduce_out>());
  m.impl("reduce_scatter_out", boxed<&reduce_scatter_out>());
  m.impl("multimem_all_gather_out", boxed<&multimem_all_gather_out>());
  // What these do, without multicast: all memory is one host's.
  m.impl("multimem_all_reduce_", boxed<&two_shot_all_reduce_>());
  m.impl("multimem_one_shot_all_reduce", boxed<&one_shot_all_reduce>());
  m.impl("multimem_one_shot_all_reduce_out", boxed<&one_shot_all_reduce_out>());
  m.impl("multimem_one_shot_reduce_out", boxed<&one_shot_reduce_out>());
  m.impl("get_remote_tensors", boxed<&get_remote_tensors>());
  m.impl("memset32_", boxed<&memset32_>());
  m.impl("stream_write_value32_", boxed<&stream_write_value32_>());
}
