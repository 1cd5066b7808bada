// The ranks of a group as one of them sees the others: a memory of each, mapped, and whether its
// owner lives. Free of torch.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory.h"
#include "process.h"

namespace fcoll {

class Peers {
 public:
  Peers(int rank, int n) : rank_(rank), memories_(n), processes_(n) {}

  // Throws std::runtime_error with the reason.
  void make_own(size_t bytes, Pages pages) { memories_[rank_] = Memory::make(bytes, pages); }
  void add(int r, const Address&, Pages);
  void close_fd() { memories_[rank_]->close_fd(); }  // once all have mapped this rank's memory

  int rank() const { return rank_; }
  int size() const { return int(memories_.size()); }
  bool has(int r) const { return bool(memories_[r]); }
  uint8_t* data(int r) const { return memories_[r]->data(); }
  Status& status(int r) const { return memories_[r]->status(); }
  Address address() const { return has(rank_) ? memories_[rank_]->address() : Address(); }
  size_t bytes() const { return memories_[rank_]->bytes(); }
  const std::vector<std::shared_ptr<Process>>& processes() const { return processes_; }

  bool dead(int r) const { return processes_[r] && !processes_[r]->alive(); }
  // The error of the first rank that failed, from this one on.
  std::optional<Error> failure() const;
  // More ranks than cores on which any of them may run: a peer may need this core.
  bool crowded() const;

 private:
  int rank_;
  std::vector<std::shared_ptr<Memory>> memories_;
  std::vector<std::shared_ptr<Process>> processes_;  // null: this one
};

}  // namespace fcoll
