#include "warm_blocks.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "memory.h"
#include "process.h"

namespace fcoll {

namespace {

constexpr size_t HUGE_PAGE = 2 * 1024 * 1024;
constexpr auto KEPT_FOR = std::chrono::seconds(10);  // a block that no step has used since is free
constexpr size_t DEFAULT_MIB = 512;

// Aligned, so that every page can be a huge one.
WarmBlocks::Block map(size_t bytes) {
  void* made = mmap(nullptr, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return {};
  auto* begin = static_cast<uint8_t*>(made);
  size_t before = round_up(reinterpret_cast<uintptr_t>(begin), HUGE_PAGE) -
                  reinterpret_cast<uintptr_t>(begin);
  if (before) munmap(begin, before);
  if (before < HUGE_PAGE) munmap(begin + before + bytes, HUGE_PAGE - before);
  madvise(begin + before, bytes, MADV_HUGEPAGE);  // a hint
  return {begin + before, bytes};
}

void unmap(const std::vector<WarmBlocks::Block>& blocks) {
  for (auto& block : blocks) munmap(block.data, block.bytes);
}

}  // namespace

WarmBlocks::WarmBlocks(size_t most_bytes) : most_bytes_(most_bytes) { hold_over_forks(mutex_); }

WarmBlocks::Block WarmBlocks::take(size_t bytes) {
  size_t wanted = round_up(std::max<size_t>(bytes, 1), HUGE_PAGE);
  Block best;
  std::vector<Block> old;
  {
    std::lock_guard lock(mutex_);
    // The smallest that is large enough, if little of it is wasted; of equal ones the warmest.
    auto found = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it)
      if (it->block.bytes >= wanted && it->block.bytes <= wanted + wanted / 4 &&
          (found == kept_.end() || it->block.bytes <= found->block.bytes))
        found = it;
    if (found != kept_.end()) {
      best = found->block;
      kept_.erase(found);
    }
    old = too_old(Clock::now());
  }
  unmap(old);
  return best.data ? best : map(wanted);
}

void WarmBlocks::give_back(Block block) {
  std::vector<Block> old, many;
  {
    std::lock_guard lock(mutex_);
    auto now = Clock::now();
    kept_.push_back({block, now});
    old = too_old(now);
    many = too_many();
  }
  unmap(old);
  unmap(many);
}

void WarmBlocks::release() {
  std::vector<Kept> all;
  {
    std::lock_guard lock(mutex_);
    all.swap(kept_);
  }
  for (auto& kept : all) unmap({kept.block});
}

size_t WarmBlocks::kept_bytes() {
  std::lock_guard lock(mutex_);
  return std::accumulate(kept_.begin(), kept_.end(), size_t(0),
                         [](size_t sum, const Kept& kept) { return sum + kept.block.bytes; });
}

std::vector<WarmBlocks::Block> WarmBlocks::too_old(Clock::time_point now) {
  std::vector<Block> out;
  while (!kept_.empty() && now - kept_.front().since > KEPT_FOR) {
    out.push_back(kept_.front().block);
    kept_.erase(kept_.begin());
  }
  return out;
}

std::vector<WarmBlocks::Block> WarmBlocks::too_many() {
  std::vector<Block> out;
  size_t total = 0;
  for (auto& kept : kept_) total += kept.block.bytes;
  while (total > most_bytes_) {
    out.push_back(kept_.front().block);
    total -= kept_.front().block.bytes;
    kept_.erase(kept_.begin());
  }
  return out;
}

WarmBlocks& warm_blocks() {
  // Never destroyed: results may outlive everything else at exit.
  static auto& blocks = *[] {
    const char* given = std::getenv("FCOLL_WARM_MIB");
    size_t mib = given ? std::strtoull(given, nullptr, 10) : DEFAULT_MIB;
    return new WarmBlocks(mib << 20);
  }();
  return blocks;
}

}  // namespace fcoll
