// A c10d backend for CPU tensors, so that programs which call torch.distributed in place run on
// shared memory: init_process_group("fcoll"). A gloo backend of the same ranks takes the rest.
//
// Whether a call is served here depends only on what is equal on all ranks when their calls are: the
// dtype, the layout, the reduce op. A call that goes to gloo for one of these is announced in shared
// memory first, so that ranks whose calls differ hear of it. A call with arguments that do not fit
// together (sizes, lists, splits) goes to gloo, too, whose checks raise before anything is sent.
#include "backend.h"

#include <ATen/EmptyTensor.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <array>
#include <atomic>

#include "message.h"
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

// What profiles show of a call is the name of the backend that the program asked for, which may be
// gloo's (fcoll.as_gloo), and the call's.
using Titles = std::array<std::string, size_t(OpType::UNKNOWN)>;

Titles titles_of(const std::string& backend) {
  Titles made;
  for (auto [type, name] : std::initializer_list<std::pair<OpType, const char*>>{
           {OpType::ALLREDUCE, "all_reduce"},
           {OpType::ALLREDUCE_COALESCED, "all_reduce"},
           {OpType::BROADCAST, "broadcast"},
           {OpType::REDUCE, "reduce"},
           {OpType::ALLGATHER, "all_gather"},
           {OpType::_ALLGATHER_BASE, "_all_gather_base"},
           {OpType::ALLGATHER_COALESCED, "all_gather"},
           {OpType::COALESCED, "all_gather"},
           {OpType::GATHER, "gather"},
           {OpType::SCATTER, "scatter"},
           {OpType::REDUCE_SCATTER, "reduce_scatter"},
           {OpType::_REDUCE_SCATTER_BASE, "_reduce_scatter_base"},
           {OpType::REDUCE_SCATTER_TENSOR_COALESCED, "reduce_scatter"},
           {OpType::ALLTOALL, "all_to_all"},
           {OpType::ALLTOALL_BASE, "all_to_all"},
           {OpType::BARRIER, "barrier"},
           {OpType::SEND, "send"},
           {OpType::RECV, "recv"},
           {OpType::RECVANYSOURCE, "recvAnySource"}})
    made[size_t(type)] = backend + ":" + name;
  return made;
}

// Python's function that makes the backend of some of a backend's ranks (transport/backend.py).
PyObject* make_split = nullptr;

// -- the backend ----------------------------------------------------------------------------------

class Backend final : public c10d::Backend {
 public:
  Backend(int rank, int size, BackendPtr inner, int64_t handle, double timeout_s, std::string name,
          std::vector<uint64_t> ranks, bool for_gloo)
      : c10d::Backend(rank, size),
        for_gloo_(for_gloo),
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
    finish_jobs();
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
    auto op = op_of(opts.reduceOp, xs[0]);
    if (!is_dense(xs[0]) || !op || !reduces(xs[0], *op)) {
      hand_over("all_reduce", xs[0], op);
      return inner_->allreduce(xs, opts);
    }
    Tensor x = sent(xs[0], opts.reduceOp);
    Target out(xs[0]);
    Signature s = sign_flat("all_reduce", x, {.op = int64_t(*op)});
    Call call = Call::all_reduce(x.numel(), type_of(x), *op);
    return transfer(title(OpType::ALLREDUCE, opts), call, s, x, out, xs);
  }

  WorkPtr broadcast(Tensors& xs, const c10d::BroadcastOptions& opts) override {
    if (xs.size() != 1 || !is_rank(opts.rootRank) || opts.rootTensor) return inner_->broadcast(xs, opts);
    if (!is_dense(xs[0])) {
      hand_over("broadcast", xs[0]);
      return inner_->broadcast(xs, opts);
    }
    Target out(xs[0]);
    Tensor x = opts.rootRank == rank_ && !out.direct() ? packed(xs[0]) : out.memory;
    Signature s = sign_flat("broadcast", x, {.root = opts.rootRank});
    Call call = Call::broadcast(x.nbytes(), int(opts.rootRank));
    if (opts.rootRank == rank_) out.memory = xs[0];  // nothing is written there
    Title broadcast = title(OpType::BROADCAST, opts);
    broadcast.sends = opts.rootRank == rank_;
    return transfer(broadcast, call, s, x, out, xs);
  }

  // The other ranks' tensors stay as they are.
  WorkPtr reduce(Tensors& xs, const c10d::ReduceOptions& opts) override {
    if (xs.size() != 1 || !is_rank(opts.rootRank) || opts.rootTensor) return inner_->reduce(xs, opts);
    auto op = op_of(opts.reduceOp, xs[0]);
    if (!is_dense(xs[0]) || !op || !reduces(xs[0], *op)) {
      hand_over("reduce", xs[0], op);
      return inner_->reduce(xs, opts);
    }
    Tensor x = sent(xs[0], opts.reduceOp), unused;
    if (opts.rootRank != rank_) unused = served::empty(x, x.sizes());
    Target out(unused.defined() ? unused : xs[0]);
    Signature s = sign_flat("reduce", x, {.op = int64_t(*op), .root = opts.rootRank});
    Call call = Call::all_reduce(x.numel(), type_of(x), *op);
    return transfer(title(OpType::REDUCE, opts), call, s, x, out, xs);
  }

  WorkPtr allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& opts) override {
    if (xs.empty() || !are_of_one_dtype(xs)) return inner_->allreduce_coalesced(xs, opts);
    auto op = op_of(opts.reduceOp);
    if (!op || !are_dense(xs) || !all_reduce_by(xs, *op)) {
      hand_over("all_reduce_coalesced", xs[0], op);
      return inner_->allreduce_coalesced(xs, opts);
    }
    return lists(title(OpType::ALLREDUCE_COALESCED, opts), xs, xs,
                 [group = group_, op](const Tensors& ins) {
                   return served::all_reduce_coalesced(group, ins, *op);
                 });
  }

  // -- gathering --

  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& opts) override {
    if (!fits(out, in, size_)) return inner_->_allgather_base(out, in, opts);
    return gather_into(title(OpType::_ALLGATHER_BASE, opts), out, in);
  }

  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins,
                    const c10d::AllgatherOptions& opts) override {
    if (ins.size() != 1 || outs.size() != 1 || int(outs[0].size()) != size_ || !is_dense(ins[0]) ||
        !are_like(outs[0], ins[0]))
      return inner_->allgather(outs, ins, opts);
    return issue(title(OpType::ALLGATHER, opts), ins, outs[0],
                 [this, outs, ins](double timeout_s) { gather_list(outs[0], ins[0], timeout_s); });
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
    Tensors all;
    for (size_t i = 0; i < ins.size(); i++)
      for (const auto& of_rank : outs) all.push_back(of_rank[i]);
    return issue(title(OpType::ALLGATHER_COALESCED, opts), ins, all,
                 [this, ins, all](double timeout_s) {
                   for (size_t i = 0; i < ins.size(); i++)
                     gather_list({all.begin() + i * size_, all.begin() + (i + 1) * size_}, ins[i],
                                 timeout_s);
                 });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::AllgatherOptions& opts) override {
    if (!fit(outs, ins, size_)) return inner_->allgather_into_tensor_coalesced(outs, ins, opts);
    return lists(title(OpType::COALESCED, opts), outs, ins,
                 [group = group_](const Tensors& xs) {
                   return served::all_gather_coalesced(group, xs);
                 });
  }

  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& opts) override {
    bool root = opts.rootRank == rank_;
    bool here = ins.size() == 1 && is_rank(opts.rootRank) && is_dense(ins[0]) &&
                (root ? outs.size() == 1 && int(outs[0].size()) == size_ && are_like(outs[0], ins[0])
                      : outs.empty());
    if (!here) return inner_->gather(outs, ins, opts);
    Tensors all = root ? outs[0] : Tensors();
    Tensor x = packed(ins[0]);
    Sizes sent(size_, 0), received(size_, root ? x.nbytes() : 0);
    sent[opts.rootRank] = x.nbytes();
    Signature s = sign_flat("gather", x, {.root = opts.rootRank});
    return issue(title(OpType::GATHER, opts), ins, all, [=, this](double timeout_s) {
      Piece to(all, overlap(all, x));
      exchange(s, x, x.const_data_ptr(), to.data, sent, received, timeout_s);
      to.spread();
    });
  }

  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& opts) override {
    bool root = opts.rootRank == rank_;
    bool here = outs.size() == 1 && is_rank(opts.rootRank) && is_dense(outs[0]) &&
                (root ? ins.size() == 1 && int(ins[0].size()) == size_ && are_like(ins[0], outs[0])
                      : ins.empty());
    if (!here) return inner_->scatter(outs, ins, opts);
    Tensors all = root ? ins[0] : Tensors();
    Target out(outs[0], overlap(all, outs[0]));
    Sizes sent(size_, root ? outs[0].nbytes() : 0), received(size_, 0);
    received[opts.rootRank] = outs[0].nbytes();
    Signature s = sign_flat("scatter", outs[0], {.root = opts.rootRank});
    return issue(title(OpType::SCATTER, opts), all, outs, [=, this](double timeout_s) {
      Piece from(all);
      from.gather();
      void* to = out.memory.mutable_data_ptr();
      exchange(s, out.memory, from.data, to, sent, received, timeout_s);
      out.fill();
    });
  }

  // -- reducing to parts --

  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in,
                               const c10d::ReduceScatterOptions& opts) override {
    if (!fits(in, out, size_)) return inner_->_reduce_scatter_base(out, in, opts);
    auto op = op_of(opts.reduceOp, in);
    if (!op || !reduces(in, *op)) {
      hand_over("reduce_scatter_tensor", in, op);
      return inner_->_reduce_scatter_base(out, in, opts);
    }
    Tensor x = sent(in, opts.reduceOp);
    Target target(out, overlap(x, out) && !is_part(out, x));
    Signature s = sign_flat("reduce_scatter_tensor", x, {.op = int64_t(*op), .dim = 0});
    Call call = Call::reduce_scatter(out.numel(), type_of(x), *op);
    return transfer(title(OpType::_REDUCE_SCATTER_BASE, opts), call, s,
                    x, target, {out});
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
    Target out(outs[0], overlap(ins[0], outs[0]));
    Signature s = sign_flat("reduce_scatter", outs[0], {.op = int64_t(*op)});
    Call call = Call::reduce_scatter(out.memory.numel(), type_of(out.memory), *op);
    return issue(title(OpType::REDUCE_SCATTER, opts), ins[0], outs,
                 [=, this, parts = ins[0]](double timeout_s) {
                   Piece from(parts);
                   from.gather();
                   run(call, s, from.data, out.memory.mutable_data_ptr(), timeout_s);
                   out.fill();
                 });
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
    return lists(title(OpType::REDUCE_SCATTER_TENSOR_COALESCED, opts), outs, ins,
                 [group = group_, op](const Tensors& xs) {
                   return served::reduce_scatter_coalesced(group, xs, *op);
                 });
  }

  // -- exchanging --

  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& opts) override {
    auto sent = bytes_of(in, in_splits), received = bytes_of(out, out_splits);
    if (!sent || !received || in.scalar_type() != out.scalar_type())
      return inner_->alltoall_base(out, in, out_splits, in_splits, opts);
    Tensor x = packed(in);
    Target target(out, overlap(x, out));
    Signature s = sign_flat("all_to_all_single", in, -1, {});
    return issue(title(OpType::ALLTOALL_BASE, opts), {in}, {out},
                 [=, this](double timeout_s) {
                   void* to = target.memory.mutable_data_ptr();
                   exchange(s, x, x.const_data_ptr(), to, *sent, *received, timeout_s);
                   target.fill();
                 });
  }

  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& opts) override {
    bool here = int(outs.size()) == size_ && int(ins.size()) == size_ && is_dense(ins[0]) &&
                are_like(ins, ins[0]) && are_like(outs, ins[0]);
    if (!here) return inner_->alltoall(outs, ins, opts);
    bool apart = std::any_of(ins.begin(), ins.end(), [&](const Tensor& x) { return overlap(outs, x); });
    Signature s = sign_flat("all_to_all", ins[0], -1, {});
    return issue(title(OpType::ALLTOALL, opts), ins, outs,
                 [=, this](double timeout_s) {
                   Piece from(ins), to(outs, apart);
                   from.gather();
                   exchange(s, ins[0], from.data, to.data, from.sizes(), to.sizes(), timeout_s);
                   to.spread();
                 });
  }

  // -- nothing to move --

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    Target out(nothing_);
    return transfer(title(OpType::BARRIER, opts), Call::barrier(), UNSIGNED,
                    nothing_, out, {});
  }

  // -- gloo's --

  WorkPtr allreduce_sparse(Tensors& xs, const c10d::AllreduceOptions& opts) override {
    return inner_->allreduce_sparse(xs, opts);
  }
  WorkPtr send(Tensors& xs, int to, int tag) override {
    return message(OpType::SEND, xs, to, [&] { return inner_->send(xs, to, tag); });
  }
  WorkPtr recv(Tensors& xs, int from, int tag) override {
    return message(OpType::RECV, xs, from, [&] { return inner_->recv(xs, from, tag); });
  }
  WorkPtr recvAnysource(Tensors& xs, int tag) override {
    return message(OpType::RECVANYSOURCE, xs, -1, [&] { return inner_->recvAnysource(xs, tag); });
  }
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
    finish_jobs();
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
        store, int(mine - ranks.begin()), global, opts->timeout.count() * 1e-3, opts->group_name,
        for_gloo_);
    return made.cast<BackendPtr>();
  }

 private:
  // They use this object, and peers may be waiting for what they send.
  void finish_jobs() {
    try {
      if (!group_->in_job()) group_->make_jobs();
    } catch (...) {  // interrupted: what is left fails when the group is closed
    }
  }

  struct Title {
    OpType type;
    const char* text;
    bool async;  // may it be under way when it returns?
    double timeout_s;  // 0: the group's
    bool sends = true;  // its inputs, to anyone
  };
  template <class Options>
  Title title(OpType type, const Options& opts) const {
    bool given = opts.timeout != c10d::kUnsetTimeout;
    return {type, shown(type), opts.asyncOp, given ? opts.timeout.count() * 1e-3 : 0};
  }
  const char* shown(OpType type) const {
    static const Titles own = titles_of("fcoll"), gloos = titles_of("gloo");
    return (for_gloo_ ? gloos : own)[size_t(type)].c_str();
  }

  // Gloo, which carries it, shows it by its own name, too.
  template <class Carry>
  WorkPtr message(OpType type, const Tensors& xs, int peer, Carry carry) const {
    return Message::issue(group_, type, for_gloo_ ? nullptr : shown(type), xs, peer, carry);
  }

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

  c10::intrusive_ptr<Work> started(const Title& title, const Tensors& inputs, Tensors outputs) {
    if (title.sends && checks_nans()) refuse_nans(inputs, title.text);
    return c10::make_intrusive<Work>(rank_, title.type, title.text, inputs, std::move(outputs), group_,
                                     ++number_);
  }

  // Makes the call, now or on the group's thread: what the body needs is its own.
  template <class Body>
  WorkPtr issue(const Title& title, const Tensors& inputs, Tensors outputs, Body body) {
    auto work = started(title, inputs, std::move(outputs));
    if (title.async && !group_->in_job()) {
      group_->later(
          work->job([body = std::move(body), timeout_s = title.timeout_s] { body(timeout_s); }));
    } else {
      guarded([&] { body(title.timeout_s); });
      work->complete();
    }
    return work;
  }

  // A call whose parts are of one size. It begins here, not in another thread, where that can be.
  WorkPtr transfer(const Title& title, Call call, const Signature& s, const Tensor& in,
                   const Target& out, Tensors outputs) {
    bool waits = !title.async || group_->in_job();
    if (waits || group_->behind_jobs() || !group_->begins(call))
      return issue(title, {in}, std::move(outputs), [=, this](double timeout_s) {
        run(call, s, in.const_data_ptr(), out.memory.mutable_data_ptr(), timeout_s);
        out.fill();
      });
    auto work = started(title, {in}, std::move(outputs));
    call.timeout_s = title.timeout_s;
    call.signed_by(s);
    if (out.direct() && group_->starts(call)) start(*work, call, in, out.memory);
    else begin(*work, call, in, out);
    return work;
  }

  // A small one: its part is sent, and who waits for it takes the others'.
  void start(Work& work, const Call& call, const Tensor& in, const Tensor& out) {
    double patience = group_->crowded() ? 0 : served::PATIENCE_US;
    guarded([&] {
      uint64_t ticket =
          group_->start(call, in.const_data_ptr(), out.mutable_data_ptr(), patience);
      if (!ticket) return work.complete();
      group_->keep(ticket, std::make_shared<Tensor>(out));
      work.under_way(ticket);
    });
  }

  // A large one: it is made here if the peers come soon, else by the group's thread.
  void begin(Work& work, const Call& call, const Tensor& in, const Target& out) {
    auto rest = work.job([group = group_, in, out] {
      group->go_on();
      out.fill();
    });
    double patience = group_->crowded() ? 0 : ARRIVAL_US;
    guarded([&] {
      if (!group_->run_or_later(call, in.const_data_ptr(), out.memory.mutable_data_ptr(), patience,
                                rest))
        return;
      out.fill();
      work.complete();
    });
  }

  WorkPtr gather_into(const Title& title, Tensor& out, const Tensor& in) {
    Tensor x = packed(in);
    Target target(out, overlap(x, out) && !is_part(x, out));
    Signature s = sign_flat("all_gather_into_tensor", x, {.dim = 0});
    return transfer(title, Call::all_gather(x.nbytes()), s, x, target, {out});
  }

  // -- parts of calls: the core's errors pass --

  void run(Call call, const Signature& s, const void* in, void* out, double timeout_s) const {
    call.timeout_s = timeout_s;
    group_->run(call.signed_by(s), in, out);
  }

  void gather_list(const Tensors& outs, const Tensor& in, double timeout_s) const {
    Tensor x = packed(in);
    Piece to(outs, overlap(outs, x) && x.const_data_ptr() != outs[rank_].const_data_ptr());
    Signature s = sign_flat("all_gather", x, {});
    run(Call::all_gather(x.nbytes()), s, x.const_data_ptr(), to.data, timeout_s);
    to.spread();
  }

  // Lists as one message for each dtype.
  template <class Run>
  WorkPtr lists(const Title& title, const Tensors& outs, const Tensors& ins, Run run) {
    return issue(title, ins, outs, [=](double) {
      Tensors flat;
      for (const auto& x : ins) flat.push_back(packed(x));
      Tensors made = run(flat);
      for (size_t i = 0; i < outs.size(); i++) Target::copy(outs[i], made[i]);
    });
  }

  // Parts of different sizes, which the ranks compare, too.
  void exchange(const Signature& s, const Tensor& like, const void* in, void* out, const Sizes& sent,
                const Sizes& received, double timeout_s) const {
    Call call = Call::all_to_all(like.element_size());
    call.timeout_s = timeout_s;
    group_->all_to_all(call.signed_by(s), in, out, sent.data(), received.data());
  }

  // Gloo takes the call, on all ranks: they compare it before.
  void hand_over(const std::string& row, const Tensor& x, std::optional<Op> op = {}) {
    ++number_;
    Signature s = sign_flat(row + " (gloo)", x, {.op = op ? int64_t(*op) : -1});
    guarded([&] { group_->run(Call::barrier().signed_by(s), nullptr, nullptr); });
  }

  bool for_gloo_;  // the program asked for gloo
  BackendPtr inner_;
  int64_t handle_;
  served::GroupPtr group_;
  c10::intrusive_ptr<Options> options_;
  std::atomic<uint64_t> number_{0};  // of the last collective
  Tensor nothing_ = Tensor(at::detail::empty_cpu({0}, at::kByte));
};

BackendPtr make(int rank, int size, const BackendPtr& inner, int64_t handle, double timeout_s,
                const std::string& name, const std::vector<uint64_t>& ranks, bool for_gloo) {
  return c10::make_intrusive<Backend>(rank, size, inner, handle, timeout_s, name, ranks, for_gloo);
}

}  // namespace

void add_to(py::module_ module) {
  py::module_ c10d = py::module_::import("torch._C._distributed_c10d");
  py::class_<Backend, c10::intrusive_ptr<Backend>> backend(module, "Backend", c10d.attr("Backend"));
  backend.def_property_readonly("options", &Backend::getBackendOptions)
      .def("_set_default_timeout", &Backend::setTimeout, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("handle", &Backend::handle);
  if (py::hasattr(c10d, "ProcessGroupGloo"))  // some programs ask any backend for one
    backend.attr("create_device") = c10d.attr("ProcessGroupGloo").attr("create_device");
  module.def("make_backend", &make);
  module.def("split_backends_by", [](const py::object& make) {
    make_split = py::object(make).release().ptr();
  });
}

}  // namespace fcoll::backend
