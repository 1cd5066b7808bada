// Buckets of gradients in memory that all ranks have mapped: they are added up where they lie.
#include <ATen/ops/from_blob.h>

#include <memory>
#include <utility>

#include "buckets.h"
#include "served.h"
#include "shared_parts.h"
#include "signature.h"
#include "tensors.h"

namespace fcoll::buckets {
namespace {

using at::Tensor;
using tensors::guarded;
using tensors::sign;
using tensors::type_of;

// The memory of all buckets of a reducer, in one piece.
class SharedBuckets {
 public:
  SharedBuckets(int64_t handle, size_t bytes)
      : handle_(handle), parts_(std::make_shared<SharedParts>(bytes)) {}

  // A bucket's tensor, `at` so many bytes; None if there is no memory. Each has a storage of its own,
  // by which waits are told apart.
  std::optional<Tensor> tensor(size_t at, int64_t numel, const Tensor& like) const {
    if (!parts_->own()) return std::nullopt;
    auto keep = [parts = parts_](void*) {};
    return at::from_blob(parts_->own() + at, {numel}, keep, like.options().requires_grad(false));
  }

  // Adds a bucket up over the ranks, in place; it is complete when it was waited for. False, on all
  // ranks, if one of them could not map the others' memory. `tag` tells buckets of equal size apart.
  bool sum(const Tensor& x, size_t at, int64_t tag) {
    TORCH_CHECK(!parts_->own() || x.const_data_ptr() == parts_->own() + at,
                "fcoll: the memory of a bucket was moved (share_memory_() of its gradients?): "
                "make the reducer anew");
    py::gil_scoped_release released;
    auto group = served::group_of(handle_);
    Signature s = sign(c10::str("all_reduce tagged ", tag), x, {.op = int64_t(Op::sum)});
    Call call = Call::all_reduce(x.numel(), type_of(x), Op::sum).signed_by(s);
    if (!joined_) joined_ = guarded([&] { return parts_->join(*group, call); });
    if (!*joined_) return false;
    uint64_t ticket = guarded([&] { return group->start_in_place(call, parts_, at); });
    if (ticket) served::register_finish(group, ticket, x);
    x.unsafeGetTensorImpl()->bump_version();
    return true;
  }

 private:
  int64_t handle_;
  std::shared_ptr<SharedParts> parts_;
  std::optional<bool> joined_;
};

// A function and not a method, so that profiles can time it: (buckets, at, x, group's name, tag) -> x,
// or NotImplemented.
py::object sum_in_place(SharedBuckets& buckets, size_t at, const Tensor& x, const std::string&,
                        int64_t tag) {
  if (!buckets.sum(x, at, tag)) return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  return py::cast(x);
}

}  // namespace

void add_to(py::module_ module) {
  py::class_<SharedBuckets, std::shared_ptr<SharedBuckets>>(module, "SharedBuckets")
      .def(py::init<int64_t, size_t>())
      .def("tensor", &SharedBuckets::tensor);
  module.def("sum_in_place", &sum_in_place);
}

}  // namespace fcoll::buckets
