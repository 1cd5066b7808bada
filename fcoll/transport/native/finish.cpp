// The second half of a collective that is under way, as wait_tensor finds it.
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "served.h"
#include "tensors.h"

namespace fcoll::served {

namespace {

struct Finish : c10d::Work {
  Finish(GroupPtr group, uint64_t ticket) : group(std::move(group)), ticket(ticket) {}
  bool wait(std::chrono::milliseconds) override {
    tensors::guarded([&] { group->finish(ticket); });
    return true;
  }
  GroupPtr group;
  uint64_t ticket;
};

// Memory that a collective is to fill: alive until then, though nobody may hold the tensor any more.
// Then torch's registry need not know of it, either: it would keep it for ever if nobody waits.
struct Unfilled {
  Unfilled(c10::Storage memory, c10::intrusive_ptr<c10d::Work> work)
      : memory(std::move(memory)), work(std::move(work)) {}
  ~Unfilled() { c10d::unregister_work(work); }
  c10::Storage memory;
  c10::intrusive_ptr<c10d::Work> work;
};

std::atomic<bool> other_threads_issue{false};

bool in_main_thread() {
  static thread_local const bool found = syscall(SYS_gettid) == getpid();
  return found;
}

}  // namespace

bool nothing_under_way() {
  return in_main_thread() && !other_threads_issue.load(std::memory_order_acquire) &&
         !c10d::get_work_registry_size();
}

void issued_in_thread() {
  if (!in_main_thread()) other_threads_issue = true;
}

void register_finish(const GroupPtr& group, uint64_t ticket, const Tensor& out) {
  issued_in_thread();
  auto work = c10::make_intrusive<Finish>(group, ticket);
  c10d::register_work(out, work);
  tensors::guarded([&] { group->keep(ticket, std::make_shared<Unfilled>(out.storage(), work)); });
}

}  // namespace fcoll::served
