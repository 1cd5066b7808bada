// What the ranks of a group see of each other in shared memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core.h"

namespace fcoll {

struct Slot {
  std::atomic<uint64_t> seq;
  uint64_t packed, count, extra;
  uint64_t at;  // of the data in the segment, if that is in the window
  uint64_t digest;
  uint8_t pad[16];
  uint8_t data[];  // on a cache line of its own, for streaming stores
};

enum State : uint32_t { alive, broken, left };

struct Segment {
  uint64_t magic, token;
  alignas(64) std::atomic<uint64_t> done;  // this rank has read all parts up to here
  alignas(64) std::atomic<uint32_t> sleepers;  // peers in a futex wait on a word of this segment
  alignas(64) std::atomic<uint32_t> state;
  alignas(64) std::atomic<uint64_t> beacon;  // written now and then: how long does it take to read?
  alignas(64) std::atomic<uint64_t> ping;
  int error_kind, error_rank;  // why this rank's state is broken
  char error[512];
  // Of the calls in the slots; read only when calls differ, so they stay in the owner's cache.
  alignas(64) Signature signatures[RING];
};

constexpr uint64_t MAGIC = 0x66636f6c6c303031;
constexpr size_t CONTROL = 16384;
constexpr size_t STRIDE = (sizeof(Slot) + SLOT_BYTES + 4095) / 4096 * 4096;
// Places for the chunks of large messages: as many as push each other out of the reader's own cache,
// whose copy would have to be taken back, but not out of the shared one. An all-reduce of 4 MiB, near:
// 1,050 us with 4 places, 450 to 600 with 8 to 32, 750 with 64.
constexpr size_t WINDOW = 16;
constexpr size_t WINDOW_AT = CONTROL + RING * STRIDE;
constexpr size_t SEGMENT_BYTES = WINDOW_AT + WINDOW * SLOT_BYTES;
static_assert(sizeof(Segment) <= CONTROL && sizeof(Slot) == 64);

inline Slot* slot_of(Segment* segment, uint64_t seq) {
  auto base = reinterpret_cast<uint8_t*>(segment);
  return reinterpret_cast<Slot*>(base + CONTROL + seq % RING * STRIDE);
}

inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

}  // namespace fcoll
