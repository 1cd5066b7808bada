// A c10d backend for CPU tensors, so that programs which call torch.distributed in place run on
// shared memory: init_process_group("fcoll"). A gloo backend of the same ranks takes the rest.
//
// Whether a call is served here depends only on what is equal on all ranks when their calls are: the
// dtype, the layout, the reduce op. A call that goes to gloo for one of these is announced in shared
// memory first, so that ranks whose calls differ hear of it. A call with arguments that do not fit
// together (sizes, lists, splits) goes to gloo, too, whose checks raise before anything is sent.
#include "backend.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <atomic>

#include "pieces.h"
#include "work.h"

namespace fcoll::backend {
namespace {

using c10d::OpType;
using tensors::guarded;
using tensors::reduces;
using tensors::type_of;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Python's function that makes the backend of some of a backend's ranks (transport/backend.py).
PyObject* make_split = nullptr;

// -- the backend ----------------------------------------------------------------------------------

class Backend final : public c10d::Backend {
 public:
  Backend(int rank, int size, BackendPtr inner, int64_t handle, double timeout_s, std::string name,
          std::vector<uint64_t> ranks)
      : c10d::Backend(rank, size),
        inner_(std::move(inner)),
        handle_(handle),
        group_(served::group_of(handle)),
        options_(c10::make_intrusive<Options>(
            "fcoll", std::chrono::milliseconds(int64_t(timeout_s * 1e3)))) {
    group_->close_fd();  // all ranks have mapped it
    options_->group_name = std::move(name);
    options_->global_ranks_in_group = std::move(ranks);
    init();
  }
  // Not with Python's lock: gloo's threads end here, and may be in a callback that waits for it.
  ~Backend() override {
    std::optional<py::gil_scoped_release> released;
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
    group_->leave();
    inner_.reset();
  }

  int64_t handle() const { return handle_; }
  const std::string getBackendName() const override { return "fcoll"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return true; }

  // -- in place --

  WorkPtr allreduce(Tensors& xs, const c10d::AllreduceOptions& opts) override {
    if (xs.size() != 1) return inner_->allreduce(xs, opts);
    auto op = op_of(opts.reduceOp);
    if (!is_dense(xs[0]) || !op || !reduces(xs[0], *op)) {
      hand_over("all_reduce", xs[0], op);
      return inner_->allreduce(xs, opts);
    }
    Tensor x = packed(xs[0]);
    Target out(xs[0]);
    Signature s = sign_flat("all_reduce", x, {.op = int64_t(*op)});
    Call call = Call::all_reduce(x.numel(), type_of(x), *op).signed_by(s);
    return transfer({OpType::ALLREDUCE, "fcoll:all_reduce", opts.asyncOp}, call, x, out, xs);
  }

  WorkPtr broadcast(Tensors& xs, const c10d::BroadcastOptions& opts) override {
    if (xs.size() != 1 || !is_rank(opts.rootRank)) return inner_->broadcast(xs, opts);
    if (!is_dense(xs[0])) {
      hand_over("broadcast", xs[0]);
      return inner_->broadcast(xs, opts);
    }
    Target out(xs[0]);
    Tensor x = opts.rootRank == rank_ && !out.direct() ? packed(xs[0]) : out.memory;
    Signature s = sign_flat("broadcast", x, {.root = opts.rootRank});
    Call call = Call::broadcast(x.nbytes(), int(opts.rootRank)).signed_by(s);
    if (opts.rootRank == rank_) out.memory = xs[0];  // nothing is written there
    return transfer({OpType::BROADCAST, "fcoll:broadcast", opts.asyncOp}, call, x, out, xs);
  }

  // The other ranks' tensors stay as they are.
  WorkPtr reduce(Tensors& xs, const c10d::ReduceOptions& opts) override {
    if (xs.size() != 1 || !is_rank(opts.rootRank)) return inner_->reduce(xs, opts);
    auto op = op_of(opts.reduceOp);
    if (!is_dense(xs[0]) || !op || !reduces(xs[0], *op)) {
      hand_over("reduce", xs[0], op);
      return inner_->reduce(xs, opts);
    }
    Tensor x = packed(xs[0]), unused;
    if (opts.rootRank != rank_) unused = served::empty(x, x.sizes());
    Target out(unused.defined() ? unused : xs[0]);
    Signature s = sign_flat("reduce", x, {.op = int64_t(*op), .root = opts.rootRank});
    Call call = Call::all_reduce(x.numel(), type_of(x), *op).signed_by(s);
    return transfer({OpType::REDUCE, "fcoll:reduce", opts.asyncOp}, call, x, out, xs);
  }

  WorkPtr allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& opts) override {
    if (xs.empty()) return inner_->allreduce_coalesced(xs, opts);
    auto op = op_of(opts.reduceOp);
    if (!op || !are_dense(xs) || !all_reduce_by(xs, *op)) {
      hand_over("all_reduce_coalesced", xs[0], op);
      return inner_->allreduce_coalesced(xs, opts);
    }
    return lists({OpType::ALLREDUCE_COALESCED, "fcoll:all_reduce"}, xs, xs, [&](const Tensors& ins) {
      return served::all_reduce_coalesced(group_, ins, *op);
    });
  }

  // -- gathering --

  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& opts) override {
    if (!fits(out, in, size_)) return inner_->_allgather_base(out, in, opts);
    return gather_into({OpType::_ALLGATHER_BASE, "fcoll:_all_gather_base", opts.asyncOp}, out, in);
  }

  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins,
                    const c10d::AllgatherOptions& opts) override {
    if (ins.size() != 1 || outs.size() != 1 || int(outs[0].size()) != size_ || !is_dense(ins[0]) ||
        !are_like(outs[0], ins[0]))
      return inner_->allgather(outs, ins, opts);
    auto work = started({OpType::ALLGATHER, "fcoll:all_gather"}, ins);
    gather_list(outs[0], ins[0]);
    return completed(work, outs[0]);
  }

  WorkPtr allgather_coalesced(std::vector<Tensors>& outs, Tensors& ins,
                              const c10d::AllgatherOptions& opts) override {
    bool here = int(outs.size()) == size_ && are_dense(ins) &&
                std::all_of(outs.begin(), outs.end(), [&](const Tensors& of_rank) {
                  bool all = of_rank.size() == ins.size();
                  for (size_t i = 0; all && i < ins.size(); i++) all = are_like({of_rank[i]}, ins[i]);
                  return all;
                });
    if (!here) return inner_->allgather_coalesced(outs, ins, opts);
    auto work = started({OpType::ALLGATHER_COALESCED, "fcoll:all_gather"}, ins);
    Tensors all;
    for (size_t i = 0; i < ins.size(); i++) {
      Tensors of_input;
      for (const auto& of_rank : outs) of_input.push_back(of_rank[i]);
      gather_list(of_input, ins[i]);
      all.insert(all.end(), of_input.begin(), of_input.end());
    }
    return completed(work, all);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::AllgatherOptions& opts) override {
    if (!fit(outs, ins, size_)) return inner_->allgather_into_tensor_coalesced(outs, ins, opts);
    return lists({OpType::COALESCED, "fcoll:all_gather"}, outs, ins, [&](const Tensors& xs) {
      return served::all_gather_coalesced(group_, xs);
    });
  }

  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& opts) override {
    bool root = opts.rootRank == rank_;
    bool here = ins.size() == 1 && is_rank(opts.rootRank) && is_dense(ins[0]) &&
                (root ? outs.size() == 1 && int(outs[0].size()) == size_ && are_like(outs[0], ins[0])
                      : outs.empty());
    if (!here) return inner_->gather(outs, ins, opts);
    auto work = started({OpType::GATHER, "fcoll:gather"}, ins);
    const Tensors none, &all = root ? outs[0] : none;
    Tensor x = packed(ins[0]);
    Piece to(all, overlap(all, x));
    Sizes sent(size_, 0), received(size_, root ? x.nbytes() : 0);
    sent[opts.rootRank] = x.nbytes();
    Signature s = sign_flat("gather", x, {.root = opts.rootRank});
    exchange(s, x, x.const_data_ptr(), to.data, sent, received);
    to.spread();
    return completed(work, all);
  }

  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& opts) override {
    bool root = opts.rootRank == rank_;
    bool here = outs.size() == 1 && is_rank(opts.rootRank) && is_dense(outs[0]) &&
                (root ? ins.size() == 1 && int(ins[0].size()) == size_ && are_like(ins[0], outs[0])
                      : ins.empty());
    if (!here) return inner_->scatter(outs, ins, opts);
    const Tensors none, &all = root ? ins[0] : none;
    auto work = started({OpType::SCATTER, "fcoll:scatter"}, all);
    Piece from(all);
    from.gather();
    Target out(outs[0], overlap(all, outs[0]));
    Sizes sent(size_, root ? outs[0].nbytes() : 0), received(size_, 0);
    received[opts.rootRank] = outs[0].nbytes();
    Signature s = sign_flat("scatter", outs[0], {.root = opts.rootRank});
    exchange(s, outs[0], from.data, out.memory.mutable_data_ptr(), sent, received);
    out.fill();
    return completed(work, outs);
  }

  // -- reducing to parts --

  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in,
                               const c10d::ReduceScatterOptions& opts) override {
    if (!fits(in, out, size_)) return inner_->_reduce_scatter_base(out, in, opts);
    auto op = op_of(opts.reduceOp);
    if (!op || !reduces(in, *op)) {
      hand_over("reduce_scatter_tensor", in, op);
      return inner_->_reduce_scatter_base(out, in, opts);
    }
    Tensor x = packed(in);
    Target target(out, overlap(x, out) && !is_part(out, x));
    Signature s = sign_flat("reduce_scatter_tensor", x, {.op = int64_t(*op), .dim = 0});
    Call call = Call::reduce_scatter(out.numel(), type_of(x), *op).signed_by(s);
    return transfer({OpType::_REDUCE_SCATTER_BASE, "fcoll:_reduce_scatter_base", opts.asyncOp}, call, x,
                    target, {out});
  }

  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                         const c10d::ReduceScatterOptions& opts) override {
    if (outs.size() != 1 || ins.size() != 1 || int(ins[0].size()) != size_ || !is_dense(outs[0]) ||
        !are_like(ins[0], outs[0]))
      return inner_->reduce_scatter(outs, ins, opts);
    auto op = op_of(opts.reduceOp);
    if (!op || !reduces(outs[0], *op)) {
      hand_over("reduce_scatter", outs[0], op);
      return inner_->reduce_scatter(outs, ins, opts);
    }
    auto work = started({OpType::REDUCE_SCATTER, "fcoll:reduce_scatter"}, ins[0]);
    Piece from(ins[0]);
    from.gather();
    Target out(outs[0], overlap(ins[0], outs[0]));
    Signature s = sign_flat("reduce_scatter", outs[0], {.op = int64_t(*op)});
    Call call = Call::reduce_scatter(out.memory.numel(), type_of(out.memory), *op).signed_by(s);
    guarded([&] { group_->run(call, from.data, out.memory.mutable_data_ptr()); });
    out.fill();
    return completed(work, outs);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::ReduceScatterOptions& opts) override {
    bool even = std::all_of(ins.begin(), ins.end(), [&](const Tensor& x) {
      return x.dim() && x.size(0) % size_ == 0;
    });
    if (!even || !fit(ins, outs, size_))
      return inner_->reduce_scatter_tensor_coalesced(outs, ins, opts);
    auto op = op_of(opts.reduceOp);
    if (!op || !all_reduce_by(ins, *op)) {
      hand_over("reduce_scatter_tensor_coalesced", ins[0], op);
      return inner_->reduce_scatter_tensor_coalesced(outs, ins, opts);
    }
    return lists({OpType::REDUCE_SCATTER_TENSOR_COALESCED, "fcoll:reduce_scatter"}, outs, ins,
                 [&](const Tensors& xs) { return served::reduce_scatter_coalesced(group_, xs, *op); });
  }

  // -- exchanging --

  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& opts) override {
    auto sent = bytes_of(in, in_splits), received = bytes_of(out, out_splits);
    if (!sent || !received || in.scalar_type() != out.scalar_type())
      return inner_->alltoall_base(out, in, out_splits, in_splits, opts);
    auto work = started({OpType::ALLTOALL_BASE, "fcoll:all_to_all"}, {in});
    Tensor x = packed(in);
    Target target(out, overlap(x, out));
    exchange(sign_flat("all_to_all_single", in, -1, {}), x, x.const_data_ptr(),
             target.memory.mutable_data_ptr(), *sent, *received);
    target.fill();
    return completed(work, {out});
  }

  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& opts) override {
    bool here = int(outs.size()) == size_ && int(ins.size()) == size_ && are_dense(outs) &&
                are_dense(ins);
    for (int r = 0; here && r < size_; r++)
      here = ins[r].scalar_type() == ins[0].scalar_type() &&
             outs[r].scalar_type() == ins[0].scalar_type();
    if (!here) return inner_->alltoall(outs, ins, opts);
    auto work = started({OpType::ALLTOALL, "fcoll:all_to_all"}, ins);
    bool apart = std::any_of(ins.begin(), ins.end(), [&](const Tensor& x) { return overlap(outs, x); });
    Piece from(ins), to(outs, apart);
    from.gather();
    exchange(sign_flat("all_to_all", ins[0], -1, {}), ins[0], from.data, to.data, from.sizes(),
             to.sizes());
    to.spread();
    return completed(work, outs);
  }

  // -- nothing to move --

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    Target out(nothing_);
    return transfer({OpType::BARRIER, "fcoll:barrier", opts.asyncOp}, Call::barrier(), nothing_, out,
                    {});
  }

  // -- gloo's --

  WorkPtr allreduce_sparse(Tensors& xs, const c10d::AllreduceOptions& opts) override {
    return inner_->allreduce_sparse(xs, opts);
  }
  WorkPtr send(Tensors& xs, int to, int tag) override { return inner_->send(xs, to, tag); }
  WorkPtr recv(Tensors& xs, int from, int tag) override { return inner_->recv(xs, from, tag); }
  WorkPtr recvAnysource(Tensors& xs, int tag) override { return inner_->recvAnysource(xs, tag); }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool all) override {
    inner_->monitoredBarrier(opts, all);
  }
  void enableCollectivesTiming() override { inner_->enableCollectivesTiming(); }

  // -- the group --

  void setSequenceNumberForGroup() override { number_ = 0; }
  uint64_t getSequenceNumberForGroup() override { return number_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    group_->set_timeout(timeout.count() * 1e-3);
    inner_->setTimeout(timeout);
  }
  void abort() override {
    served::close_group(handle_);
    inner_->abort();
  }
  void shutdown() override {
    served::close_group(handle_);
    inner_->shutdown();
  }

  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<Options>& opts) override {
    auto mine = std::find(ranks.begin(), ranks.end(), rank_);
    if (mine == ranks.end()) return nullptr;
    std::vector<uint64_t> global;
    const auto& known = options_->global_ranks_in_group;
    for (int r : ranks) global.push_back(known.empty() ? r : known[r]);
    py::gil_scoped_acquire gil;
    auto made = py::reinterpret_borrow<py::object>(make_split)(
        store, int(mine - ranks.begin()), global, opts->timeout.count() * 1e-3, opts->group_name);
    return made.cast<BackendPtr>();
  }

 private:
  struct Title {
    OpType type;
    const char* text;
    bool async = false;  // may it be under way when it returns?
  };

  bool is_rank(int64_t r) const { return r >= 0 && r < size_; }

  static bool all_reduce_by(const Tensors& xs, Op op) {
    return std::all_of(xs.begin(), xs.end(), [&](const Tensor& x) { return reduces(x, op); });
  }

  // Is it this rank's part of the other one, in the same memory?
  bool is_part(const Tensor& x, const Tensor& whole) const {
    auto* own = static_cast<const char*>(whole.const_data_ptr()) + rank_ * x.nbytes();
    return x.const_data_ptr() == own && is_packed(x) && is_packed(whole);
  }

  // Is `whole` n times as long as `part`, of the same dtype?
  static bool fits(const Tensor& whole, const Tensor& part, int n) {
    return is_dense(whole) && is_dense(part) && whole.scalar_type() == part.scalar_type() &&
           whole.numel() == part.numel() * n;
  }
  static bool fit(const Tensors& wholes, const Tensors& parts, int n) {
    bool all = !parts.empty() && wholes.size() == parts.size();
    for (size_t i = 0; all && i < parts.size(); i++) all = fits(wholes[i], parts[i], n);
    return all;
  }

  // The parts of a tensor by splits of its rows, even ones if there are none.
  std::optional<Sizes> bytes_of(const Tensor& x, const std::vector<int64_t>& splits) const {
    if (!is_dense(x) || !x.dim()) return std::nullopt;
    int64_t rows = x.size(0);
    if (splits.empty()) {
      if (rows % size_) return std::nullopt;
      return Sizes(size_, x.nbytes() / size_);
    }
    bool whole = int(splits.size()) == size_ && c10::sum_integers(splits) == rows &&
                 std::all_of(splits.begin(), splits.end(), [](int64_t s) { return s >= 0; });
    if (!whole) return std::nullopt;
    Sizes bytes;
    for (int64_t s : splits) bytes.push_back(rows ? s * (x.nbytes() / rows) : 0);
    return bytes;
  }

  c10::intrusive_ptr<Work> started(const Title& title, const Tensors& inputs) {
    return c10::make_intrusive<Work>(rank_, title.type, title.text, inputs, ++number_);
  }
  static WorkPtr completed(const c10::intrusive_ptr<Work>& work, Tensors outputs) {
    work->complete(std::move(outputs));
    return work;
  }

  // A call whose parts are of one size. `outputs` are what its future has.
  WorkPtr transfer(const Title& title, const Call& call, const Tensor& in, const Target& out,
                   Tensors outputs) {
    auto work = started(title, {in});
    const void* from = in.const_data_ptr();
    void* to = out.memory.mutable_data_ptr();
    if (title.async && out.direct()) {
      double patience = group_->crowded() ? 0 : served::PATIENCE_US;
      uint64_t ticket = guarded([&] { return group_->start(call, from, to, patience); });
      if (ticket) {
        guarded([&] { group_->keep(ticket, std::make_shared<Tensor>(out.memory)); });
        work->under_way(group_, ticket, std::move(outputs));
        return work;
      }
    } else {
      guarded([&] { group_->run(call, from, to); });
      out.fill();
    }
    return completed(work, std::move(outputs));
  }

  WorkPtr gather_into(const Title& title, Tensor& out, const Tensor& in) {
    Tensor x = packed(in);
    Target target(out, overlap(x, out) && !is_part(x, out));
    Signature s = sign_flat("all_gather_into_tensor", x, {.dim = 0});
    return transfer(title, Call::all_gather(x.nbytes()).signed_by(s), x, target, {out});
  }

  void gather_list(const Tensors& outs, const Tensor& in) {
    Tensor x = packed(in);
    Piece to(outs, overlap(outs, x) && x.const_data_ptr() != outs[rank_].const_data_ptr());
    Signature s = sign_flat("all_gather", x, {});
    guarded([&] {
      group_->run(Call::all_gather(x.nbytes()).signed_by(s), x.const_data_ptr(), to.data);
    });
    to.spread();
  }

  // Lists as one message for each dtype.
  template <class Run>
  WorkPtr lists(const Title& title, const Tensors& outs, const Tensors& ins, Run run) {
    auto work = started(title, ins);
    Tensors flat;
    for (const auto& x : ins) flat.push_back(packed(x));
    Tensors made = run(flat);
    for (size_t i = 0; i < outs.size(); i++) Target::copy(outs[i], made[i]);
    return completed(work, outs);
  }

  // Parts of different sizes, which the ranks compare, too.
  void exchange(const Signature& s, const Tensor& like, const void* in, void* out, const Sizes& sent,
                const Sizes& received) {
    guarded([&] {
      group_->all_to_all(Call::all_to_all(like.element_size()).signed_by(s), in, out, sent.data(),
                         received.data());
    });
  }

  // Gloo takes the call, on all ranks: they compare it before.
  void hand_over(const std::string& row, const Tensor& x, std::optional<Op> op = {}) {
    ++number_;
    Signature s = sign_flat(row + " (gloo)", x, {.op = op ? int64_t(*op) : -1});
    guarded([&] { group_->run(Call::barrier().signed_by(s), nullptr, nullptr); });
  }

  BackendPtr inner_;
  int64_t handle_;
  served::GroupPtr group_;
  c10::intrusive_ptr<Options> options_;
  std::atomic<uint64_t> number_{0};  // of the last collective
  Tensor nothing_ = Tensor(at::detail::empty_cpu({0}, at::kByte));
};

BackendPtr make(int rank, int size, const BackendPtr& inner, int64_t handle, double timeout_s,
                const std::string& name, const std::vector<uint64_t>& ranks) {
  return c10::make_intrusive<Backend>(rank, size, inner, handle, timeout_s, name, ranks);
}

}  // namespace

void add_to(py::module_ module) {
  py::object base = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<Backend, c10::intrusive_ptr<Backend>>(module, "Backend", base)
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def_property_readonly("handle", &Backend::handle);
  module.def("make_backend", &make);
  module.def("split_backends_by", [](const py::object& make) {
    make_split = py::object(make).release().ptr();
  });
}

}  // namespace fcoll::backend
