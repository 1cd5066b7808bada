// Memory of each rank of a group, mapped by all of them, in which parts of collectives stay: sums are
// made where they lie. Free of torch.
#pragma once

#include <memory>
#include <vector>

#include "memory.h"

namespace fcoll {

class Group;

class SharedParts {
 public:
  // Without memory if there is none: the peers learn of it when they join. `id`: the same on all
  // ranks, and another for each of a group's.
  explicit SharedParts(size_t bytes, uint64_t id = 0);

  uint64_t id() const { return id_; }

  uint8_t* own() const { return own_ ? own_->data() : nullptr; }
  uint8_t* of(int rank) const { return memories_[rank]->data(); }
  // Map the peers' memories: true on all ranks, or on none. All make the call after it.
  bool join(Group&, Call);

 private:
  uint64_t id_;
  std::shared_ptr<Memory> own_;
  std::vector<std::shared_ptr<Memory>> memories_;  // by rank
};

}  // namespace fcoll
