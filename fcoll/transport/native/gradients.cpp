// Gradients on their way into buckets: which have arrived, and their copies.
//
// fcoll/training/arrivals.py is the same in Python; there the events are explained. A gradient is
// copied when it arrives: it is in the cache, and the memory it leaves serves the next one.
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradients.h"

namespace fcoll::gradients {
namespace {

using at::Tensor;
using torch::autograd::variable_list;
using Numbers = std::vector<int64_t>;

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// -- copies ---------------------------------------------------------------------------------------

// A dense tensor in ordinary memory, with nothing to it that its memory does not show.
bool is_plain(const Tensor& x) {
  const c10::DispatchKeySet plain({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView,
                                   c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU});
  auto keys = x.key_set();
  return keys.has(c10::DispatchKey::CPU) && (keys.raw_repr() & ~plain.raw_repr()) == 0 &&
         (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble) && !x.requires_grad();
}

// May the elements be copied in the order of their memory? A view of a bucket has no gaps.
bool same_layout(const Tensor& x, const Tensor& view) {
  return is_plain(x) && x.scalar_type() == view.scalar_type() && x.sizes() == view.sizes() &&
         x.strides() == view.strides();
}

template <class T>
void scaled(T* to, const T* from, int64_t n, T scale) {
  if (scale == T(1)) {
    if (to != from) std::memcpy(to, from, n * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < n; i++) to[i] = from[i] * scale;
}

void copy(const Tensor& to, const Tensor& from, double scale) {
  if (to.scalar_type() == at::kFloat)
    scaled(to.mutable_data_ptr<float>(), from.const_data_ptr<float>(), to.numel(), float(scale));
  else
    scaled(to.mutable_data_ptr<double>(), from.const_data_ptr<double>(), to.numel(), scale);
}

// -- arrivals -------------------------------------------------------------------------------------

enum Event { PASS, FULL, REFUSED, LATE };

class Arrivals : public std::enable_shared_from_this<Arrivals> {
 public:
  Arrivals(std::vector<Tensor> params, py::function tell)
      : params_(std::move(params)), tell_(std::move(tell)) {
    auto n = params_.size();
    left_.resize(n), ready_ns_.resize(n), used_.resize(n), copied_.resize(n);
    ready_in_.assign(n, -1);
    for (const Tensor& p : params_) dtypes_.push_back(p.scalar_type());
  }
  ~Arrivals() {
    remove();
    py::gil_scoped_acquire gil;  // a hook in a thread of autograd's may be the last to let go of it
    tell_ = py::function();
  }

  void listen();
  void remove();

  // The buckets: of each parameter its own, and its view of it (None: it is not copied here).
  void into(Numbers bucket_of, std::vector<std::optional<Tensor>> views, bool share) {
    bucket_of_ = std::move(bucket_of), views_ = std::move(views), share_ = share;
  }

  void arm(Numbers pending, Numbers left, bool counts) {
    pending_ = std::move(pending), left_ = std::move(left), counts_ = counts;
    armed_ = true;
    next_ = 0, task_ = -1, passes_ = 0;
    order_.clear();
    started_ns_ = now_ns();
    ready_in_.assign(params_.size(), -1);
    copied_.assign(params_.size(), 0);
  }

  bool disarm() {
    armed_ = false;
    return std::exchange(begun_, false);
  }

  // The first parameter whose dtype is not what it was, or -1.
  int64_t changed() const {
    for (size_t i = 0; i < params_.size(); i++)
      if (params_[i].scalar_type() != dtypes_[i]) return int64_t(i);
    return -1;
  }

  bool give_back(int64_t bucket);

  void mark(int64_t index) {
    left_.at(index) = 0;
    complete(index);
  }

  void arrive(int64_t index);

  Numbers not_copied(int64_t bucket) const {
    Numbers found;
    for (size_t i = 0; i < params_.size(); i++)
      if (bucket_of_[i] == bucket && !copied_[i]) found.push_back(i);
    return found;
  }

  py::dict seen() const;

  double scale = 1.0;
  bool copies = false;
  bool late = false;

  void forget_used() { used_.assign(params_.size(), 0); }

 private:
  void tell(Event event, int64_t index) {
    py::gil_scoped_acquire gil;
    try {
      tell_(int(event), index);
    } catch (py::error_already_set& error) {
      error.restore();
      python_error raised;
      raised.persist();
      throw raised;
    }
  }
  void complete(int64_t index);
  bool copied_in(int64_t index);

  std::vector<Tensor> params_;
  std::vector<at::ScalarType> dtypes_;
  py::function tell_;
  std::vector<std::pair<c10::intrusive_ptr<torch::autograd::Node>, uintptr_t>> hooks_;
  std::recursive_mutex mutex_;  // backward passes in two threads are a mistake, not a crash
  std::vector<std::optional<Tensor>> views_;
  bool share_ = false, armed_ = false, counts_ = false, begun_ = false;
  Numbers bucket_of_, pending_, left_, ready_in_, ready_ns_, used_, copied_, order_;
  int64_t next_ = 0, started_ns_ = 0, passes_ = 0;
  int task_ = -1;
};

void Arrivals::arrive(int64_t index) {
  std::lock_guard lock(mutex_);
  begun_ = true;
  if (params_[index].grad().defined()) used_[index] = 1;
  if (!armed_) {
    if (std::exchange(late, false)) tell(LATE, index);
    return;
  }
  order_.push_back(index);
  if (!counts_) return;
  if (int task = torch::autograd::get_current_graph_task_id(); task != task_) {
    task_ = task;
    passes_++;
    tell(PASS, index);
  }
  if (left_[index] == 0) return tell(REFUSED, index);
  if (--left_[index] == 0) complete(index);
}

void Arrivals::complete(int64_t index) {
  ready_in_[index] = passes_ - 1;
  ready_ns_[index] = now_ns() - started_ns_;
  if (copies) copied_[index] = copied_in(index);
  pending_.at(bucket_of_.at(index))--;
  while (next_ < int64_t(pending_.size()) && pending_[next_] == 0) tell(FULL, next_++);
}

bool Arrivals::copied_in(int64_t index) {
  if (!views_.at(index)) return false;
  const Tensor& view = *views_[index];
  Tensor& grad = params_[index].mutable_grad();
  if (!grad.defined()) {
    std::memset(view.mutable_data_ptr(), 0, view.nbytes());
    return true;
  }
  if (!same_layout(grad, view)) return false;
  copy(view, grad, scale);
  if (share_ && !grad.is_same(view)) grad = view;
  return true;
}

struct Hook : torch::autograd::FunctionPostHook {
  Hook(std::weak_ptr<Arrivals> arrivals, int64_t index) : arrivals(std::move(arrivals)), index(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (auto found = arrivals.lock()) found->arrive(index);
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK(false,
                "fcoll: compiled autograd cannot run a reducer's hooks. Compile the step itself with "
                "fcoll.DataParallel, or set torch._dynamo.config.optimize_ddp = \"python_reducer\".");
  }
  std::weak_ptr<Arrivals> arrivals;
  int64_t index;
};

void Arrivals::listen() {
  for (size_t i = 0; i < params_.size(); i++) {
    auto node = torch::autograd::impl::grad_accumulator(params_[i]);
    auto key = node->add_post_hook(std::make_unique<Hook>(weak_from_this(), i));
    hooks_.emplace_back(std::move(node), key);
  }
}

void Arrivals::remove() {
  for (auto& [node, key] : std::exchange(hooks_, {})) node->del_post_hook(key);
}

py::dict Arrivals::seen() const {
  using namespace py::literals;
  return py::dict("begun"_a = begun_, "order"_a = order_, "ready_in"_a = ready_in_,
                  "ready_ns"_a = ready_ns_, "used"_a = used_);
}

// -- in torch's profiles --------------------------------------------------------------------------

// A collective from its start to its wait, as torch's process groups show theirs.
class Recorded {
 public:
  Recorded(const std::string& name, const Tensor& x) : record_(at::RecordScope::USER_SCOPE) {
    if (!record_.isActive()) return;
    record_._setAsync();
    std::vector<c10::IValue> inputs{x};
    record_.before(name, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
  }
  void end() { record_.end(); }

 private:
  at::RecordFunction record_;
};

// -- back -----------------------------------------------------------------------------------------

// Give each parameter its part of a bucket: a copy, or, shared, the view that it has already.
// False, and nothing done, if there is a gradient that is not plain.
bool Arrivals::give_back(int64_t bucket) {
  std::vector<size_t> members;
  for (size_t i = 0; i < params_.size(); i++) {
    if (bucket_of_[i] != bucket) continue;
    const Tensor& grad = params_[i].grad();
    if (!views_[i] || !grad.defined()) return false;
    if (share_ ? !grad.is_same(*views_[i]) : !same_layout(grad, *views_[i])) return false;
    members.push_back(i);
  }
  if (share_) return true;
  py::gil_scoped_release released;
  for (size_t i : members) {
    copy(params_[i].grad(), *views_[i], 1.0);
    params_[i].grad().unsafeGetTensorImpl()->bump_version();
  }
  return true;
}

}  // namespace

void add_to(py::module_ module) {
  py::class_<Arrivals, std::shared_ptr<Arrivals>>(module, "Arrivals")
      .def(py::init<std::vector<Tensor>, py::function>())
      .def("listen", &Arrivals::listen)
      .def("remove", &Arrivals::remove)
      .def("into", &Arrivals::into)
      .def("arm", &Arrivals::arm)
      .def("disarm", &Arrivals::disarm)
      .def("changed", &Arrivals::changed)
      .def("give_back", &Arrivals::give_back)
      .def("mark", &Arrivals::mark)
      .def("not_copied", &Arrivals::not_copied)
      .def("seen", &Arrivals::seen)
      .def("forget_used", &Arrivals::forget_used)
      .def_readwrite("scale", &Arrivals::scale)
      .def_readwrite("copies", &Arrivals::copies)
      .def_readwrite("late", &Arrivals::late);
  py::class_<Recorded, std::shared_ptr<Recorded>>(module, "Recorded")
      .def(py::init<std::string, Tensor>())
      .def("end", &Recorded::end);
}

}  // namespace fcoll::gradients
