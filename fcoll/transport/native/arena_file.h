// A rank's arena as a file: lanes and spare places, mapped as they are used. Free of torch.
#pragma once

#include <array>
#include <map>
#include <optional>

#include "memory.h"
#include "ring.h"

namespace fcoll {

class ArenaFile {
 public:
  static constexpr size_t PLACE = 8 << 20;  // the largest part, in bytes
  static constexpr size_t LANES = 256, LANE = 3 * PLACE;  // room for one part beside any other
  // For parts that programs hold, and for those that are announced and not read by all ranks yet:
  // of these there are at most a ring.
  static constexpr size_t HELD_SPARES = 63, SPARES = HELD_SPARES + RING + 1;
  static constexpr size_t SPARES_AT = LANES * LANE, BYTES = SPARES_AT + SPARES * PLACE;

  ArenaFile() : own_(std::in_place, BYTES, Pages::as_used) {}
  // A peer's, which is opened when something of it is mapped: it takes no file descriptor.
  explicit ArenaFile(const Address& peers) : address_(peers) { SharedFile checked(peers); }
  ~ArenaFile();
  ArenaFile(const ArenaFile&) = delete;
  ArenaFile& operator=(const ArenaFile&) = delete;

  Address address() const { return own_ ? own_->address() : address_; }
  static bool is_spare(uint64_t offset) { return offset >= SPARES_AT; }
  static uint64_t spare_at(size_t spare) { return SPARES_AT + spare * PLACE; }
  static size_t spare_of(uint64_t offset) { return (offset - SPARES_AT) / PLACE; }

  uint8_t* at(uint64_t offset);  // null if it cannot be mapped
  // Where in the file a pointer into it is; nothing if it is elsewhere.
  std::optional<uint64_t> offset_of(const uint8_t* data) const;
  // Of this rank's: takes the memory from the system, so that no write can fail later; false if
  // there is none.
  bool reserve(uint64_t offset, size_t bytes);
  bool read(uint64_t offset, void* to, size_t bytes) const;  // mapped or not; false if it fails
  bool write(uint64_t offset, const void* from, size_t bytes);

 private:
  struct Window {
    uint64_t at;
    size_t bytes, index;
  };
  static Window window_of(uint64_t offset);

  std::optional<SharedFile> own_;
  Address address_;  // of a peer's
  std::array<uint8_t*, LANES + SPARES> mapped_{};  // by lane, then by spare place
  std::array<size_t, LANES + SPARES> reserved_{};  // bytes from the beginning of each
  std::map<const uint8_t*, Window> by_address_;
};

}  // namespace fcoll
