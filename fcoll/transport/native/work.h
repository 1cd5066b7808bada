// A call of torch.distributed on shared memory: complete, or under way until someone waits for it.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "served.h"
#include "tensors.h"

namespace fcoll::backend {

class Work final : public c10d::Work {
 public:
  // A profile shows the call by its title, from here on until it is complete.
  Work(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
       uint64_t number)
      : c10d::Work(rank, type, title, inputs), number_(number) {}

  void complete(std::vector<at::Tensor> outputs) {
    outputs_ = std::move(outputs);
    finish();
  }
  void under_way(served::GroupPtr group, uint64_t ticket, std::vector<at::Tensor> outputs) {
    outputs_ = std::move(outputs);
    group_ = std::move(group);
    ticket_ = ticket;
  }

  // Looks whether the peers' parts are there: who asks in a loop gets to an end.
  bool isCompleted() override {
    if (c10d::Work::isCompleted()) return true;
    try {
      if (!tensors::guarded([&] { return group_->poll(ticket_); })) return false;
      finish();
    } catch (...) {
      finish(std::current_exception());
    }
    return true;
  }

  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    if (!c10d::Work::isCompleted()) {
      std::optional<py::gil_scoped_release> released;  // getFuture() is called with it
      if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
      try {
        tensors::guarded([&] { group_->finish(ticket_); });
      } catch (...) {
        finishAndThrow(std::current_exception());
      }
      finish();
    }
    if (!isSuccess()) std::rethrow_exception(exception());
    return true;
  }
  void synchronize() override {}

  // Complete when it is given out: nobody but who waits finishes a call.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait();
    std::lock_guard lock(future_made_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
      future_->markCompleted(c10::IValue(outputs_));
    }
    return future_;
  }

  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }

 private:
  uint64_t number_;
  std::vector<at::Tensor> outputs_;
  served::GroupPtr group_;  // null if it was complete at once
  uint64_t ticket_ = 0;
  std::mutex future_made_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace fcoll::backend
