// A message between two ranks, which gloo carries and the group's flight records list.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "served.h"
#include "signature.h"

namespace fcoll::backend {

class Message final : public c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Future = c10::ivalue::Future;

  // It is in the records before `carry` gives it to gloo. `peer` is -1 if any rank may send it.
  template <class Carry>
  static WorkPtr issue(const served::GroupPtr& group, c10d::OpType type, const char* title,
                       const std::vector<at::Tensor>& tensors, int peer, Carry carry) {
    uint64_t number = 0;
    if (tensors.size() == 1) {
      const char* row = type == c10d::OpType::SEND ? "send" : "recv";
      Signature s = tensors::sign(row, tensors[0], {.root = peer});
      auto stack = group->messages().stack();
      number = group->messages().begin(Call::barrier().signed_by(s));
      group->messages().keep_stack(number, std::move(stack));
    }
    auto made = c10::make_intrusive<Message>(group, type, title, tensors, number);
    made->carried_ = carry();
    return made;
  }

  Message(served::GroupPtr group, c10d::OpType type, const char* title,
          const std::vector<at::Tensor>& tensors, uint64_t number)
      : c10d::Work(-1, type, title, tensors), group_(std::move(group)), number_(number) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    group_->messages().wait(number_);
    try {
      bool done = carried_->wait(timeout);
      settle();
      return done;
    } catch (...) {  // it stays in the records as one that is waited for
      finish(std::current_exception());
      throw;
    }
  }
  bool isCompleted() override {
    bool done = carried_->isCompleted();
    if (done) settle();
    return done;
  }
  bool isSuccess() const override { return carried_->isSuccess(); }
  std::exception_ptr exception() const override { return carried_->exception(); }
  int sourceRank() const override { return carried_->sourceRank(); }
  std::vector<at::Tensor> result() override { return carried_->result(); }
  void synchronize() override { carried_->synchronize(); }
  void abort() override { carried_->abort(); }
  c10::intrusive_ptr<Future> getFuture() override { return carried_->getFuture(); }
  uint64_t getSequencenumber() const override { return carried_->getSequencenumber(); }

 private:
  void settle() {
    group_->messages().end(number_);
    finish();
  }

  served::GroupPtr group_;
  uint64_t number_;  // in the records
  WorkPtr carried_;
};

}  // namespace fcoll::backend
