// A call of torch.distributed on shared memory: complete, under way until someone waits for it, or
// made by the group's thread (group.h, later()).
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

// How long a call waits for late peers before it is left to the group's thread, which may have to
// share the caller's core. A step of torch's DDP, 2 ranks on 2 cores: 0.66 to 0.77 of gloo's time with
// 300 us, 0.70 to 0.82 with 0 to 100.
constexpr double ARRIVAL_US = 300;

class Work final : public c10d::Work {
 public:
  using Future = c10::ivalue::Future;

  // A profile shows the call by its title, from here on until it is complete. `outputs` are what its
  // future has.
  Work(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
       std::vector<at::Tensor> outputs, served::GroupPtr group, uint64_t number)
      : c10d::Work(rank, type, title, inputs),
        number_(number),
        outputs_(std::move(outputs)),
        group_(std::move(group)) {}

  void complete() { settle(nullptr); }
  void under_way(uint64_t ticket) { ticket_ = ticket; }
  // The body makes the call, or what is left of it.
  template <class Body>
  Background::Job job(Body body) {
    auto self = c10::intrusive_ptr<Work>::reclaim_copy(this);
    return [self, body = std::move(body)]() mutable { self->make(body); };
  }

  // Looks whether the peers' parts are there: who asks in a loop gets to an end.
  bool isCompleted() override {
    if (c10d::Work::isCompleted()) return true;
    if (!ticket_) return false;
    try {
      if (!tensors::guarded([&] { return group_->poll(ticket_); })) return false;
      settle(nullptr);
    } catch (...) {
      settle(std::current_exception());
    }
    return true;
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (!c10d::Work::isCompleted()) {
      auto released = without_gil();
      if (timeout != kNoTimeout) {
        wait_for(timeout);
      } else if (ticket_) {
        make([&] { group_->finish(ticket_); });
      } else {
        group_->make_jobs_until([&] { return c10d::Work::isCompleted(); });
      }
    }
    if (auto problem = exception()) raise(problem);
    return true;
  }
  void synchronize() override {}

  c10::intrusive_ptr<Future> getFuture() override {
    if (ticket_ && !c10d::Work::isCompleted()) {
      auto released = without_gil();
      if (group_->published_by_all(ticket_, group_->crowded() ? 0 : ARRIVAL_US)) isCompleted();
    }
    c10::intrusive_ptr<Future> future;
    {
      std::lock_guard lock(settling_);
      if (future_) return future_;
      future = future_ = c10::make_intrusive<Future>(c10::ListType::ofTensors());
      if (!settled_) {
        if (ticket_) group_->later(job([group = group_, ticket = ticket_] { group->finish(ticket); }));
        return future;
      }
    }
    mark(future);
    return future;
  }

  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }

 private:
  static std::optional<py::gil_scoped_release> without_gil() {
    bool held = Py_IsInitialized() && PyGILState_Check();
    return held ? std::optional<py::gil_scoped_release>(std::in_place) : std::nullopt;
  }

  // Errors are kept as the core throws them: Python's are made where they are raised, with the line.
  template <class Body>
  void make(Body&& body) {
    try {
      body();
      settle(nullptr);
    } catch (...) {
      settle(std::current_exception());
    }
  }

  void settle(std::exception_ptr problem) {
    c10::intrusive_ptr<Future> future;
    {
      std::lock_guard lock(settling_);
      if (std::exchange(settled_, true)) return;
      finish(problem);
      future = future_;
    }
    if (future) mark(future);
  }

  void mark(const c10::intrusive_ptr<Future>& future) {
    auto problem = exception();
    if (!problem) return future->markCompleted(c10::IValue(outputs_));
    try {
      raise(problem);
    } catch (...) {
      future->setError(std::current_exception());
    }
  }

  static void raise(const std::exception_ptr& problem) {
    tensors::guarded([&] { std::rethrow_exception(problem); });
  }

  void wait_for(std::chrono::milliseconds timeout) {
    auto stop = std::chrono::steady_clock::now() + timeout;
    while (!isCompleted()) {
      if (std::chrono::steady_clock::now() > stop)
        tensors::raise({Error::timeout, -1,
                        "the call is not complete after " + std::to_string(timeout.count()) +
                            " ms; it goes on, and can be waited for again"});
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      if (check_signals) check_signals();
    }
  }

  uint64_t number_;
  std::vector<at::Tensor> outputs_;
  served::GroupPtr group_;
  uint64_t ticket_ = 0;  // it was started, and waits for peers
  std::mutex settling_;
  bool settled_ = false;
  c10::intrusive_ptr<Future> future_;
};

}  // namespace fcoll::backend
