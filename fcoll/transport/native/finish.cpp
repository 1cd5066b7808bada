// The second half of a collective that is under way, as waits find it: by the memory that it fills.
//
// torch's registry of works has one for each thread, so that another thread would find nothing to wait
// for, and go on with what is not there yet. Ours is of the process.
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <mutex>
#include <unordered_map>

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

// Never freed: results may be let go of while the process exits.
struct UnderWay {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, c10::intrusive_ptr<Finish>> by_memory;
  std::atomic<size_t> size{0};
  UnderWay() { hold_over_forks(mutex); }
};

UnderWay& under_way() {
  static auto& made = *new UnderWay;
  return made;
}

// Memory that a collective is to fill: alive until then, though nobody may hold the tensor any more.
// Then no registry need know of it, either: it would keep it for ever if nobody waits.
struct Unfilled {
  Unfilled(c10::Storage memory, c10::intrusive_ptr<Finish> work)
      : memory(std::move(memory)), work(std::move(work)) {
    std::lock_guard lock(under_way().mutex);
    under_way().by_memory[this->memory.unsafeGetStorageImpl()] = this->work;
    under_way().size++;
  }
  ~Unfilled() {
    c10d::unregister_work(work);
    std::lock_guard lock(under_way().mutex);
    auto& known = under_way().by_memory;
    auto found = known.find(memory.unsafeGetStorageImpl());
    if (found != known.end() && found->second == work) known.erase(found);  // else a later call's
    under_way().size--;
  }
  c10::Storage memory;
  c10::intrusive_ptr<Finish> work;
};

}  // namespace

void register_finish(const GroupPtr& group, uint64_t ticket, const Tensor& out) {
  auto work = c10::make_intrusive<Finish>(group, ticket);
  c10d::register_work(out, work);
  tensors::guarded([&] { group->keep(ticket, std::make_shared<Unfilled>(out.storage(), work)); });
}

void wait_for(const Tensor& x) {
  if (!under_way().size.load(std::memory_order_acquire) || !x.has_storage()) return;
  c10::intrusive_ptr<Finish> work;
  {
    std::lock_guard lock(under_way().mutex);
    auto found = under_way().by_memory.find(x.storage().unsafeGetStorageImpl());
    if (found == under_way().by_memory.end()) return;
    work = found->second;
  }
  work->wait(kNoTimeout);
}

}  // namespace fcoll::served
