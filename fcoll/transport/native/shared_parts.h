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
  // Without memory if there is none: the peers learn of it when they join.
  explicit SharedParts(size_t bytes);


  uint8_t* own() const { return own_ ? own_->data() : nullptr; }
  uint8_t* of(int rank) const { return memories_[rank]->data(); }
  // Map the peers' memories: true on all ranks, or on none. All make the call after it.
  bool join(Group&, Call);

 private:
  std::shared_ptr<Memory> own_;
  std::vector<std::shared_ptr<Memory>> memories_;  // by rank
};

}  // namespace fcoll
