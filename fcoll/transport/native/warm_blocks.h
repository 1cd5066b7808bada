// Blocks of memory for large results, of collectives and of stacked ranks, which stay mapped when a
// result is freed. Free of torch.
//
// A fresh block costs page faults: 64 MiB are there after 7 ms in huge pages and after 31 in small
// ones, where an all-reduce of them takes 13. A block that was used before costs nothing.
#pragma once

#include <chrono>
#include <cstddef>
#include <mutex>
#include <vector>

namespace fcoll {

class WarmBlocks {
 public:
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
  };

  // Keeps at most so many bytes of blocks that nobody uses.
  explicit WarmBlocks(size_t most_bytes);

  Block take(size_t bytes);  // of at least so many; data is null where there is no memory
  void give_back(Block);
  void release();  // unmap all that nobody uses
  size_t kept_bytes();

 private:
  using Clock = std::chrono::steady_clock;
  struct Kept {
    Block block;
    Clock::time_point since;
  };

  // Both take what is to be unmapped out of kept_: unmapping takes long, and needs no lock.
  std::vector<Block> too_old(Clock::time_point now);
  std::vector<Block> too_many();

  const size_t most_bytes_;
  std::mutex mutex_;
  std::vector<Kept> kept_;  // the one given back last is the last
};

// Those of this process: FCOLL_WARM_MIB, or 512 MiB; with 0 none is kept.
WarmBlocks& warm_blocks();

}  // namespace fcoll
