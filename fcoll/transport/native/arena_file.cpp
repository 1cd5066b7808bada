#include "arena_file.h"

#include <sys/mman.h>

#include <stdexcept>

#include "kernels.h"

namespace fcoll {

ArenaFile::~ArenaFile() {
  for (const auto& [address, window] : by_address_)
    munmap(const_cast<uint8_t*>(address), window.bytes);
}

ArenaFile::Window ArenaFile::window_of(uint64_t offset) {
  if (is_spare(offset)) return {spare_at(spare_of(offset)), PLACE, LANES + spare_of(offset)};
  return {offset / LANE * LANE, LANE, offset / LANE};
}

uint8_t* ArenaFile::at(uint64_t offset) {
  Window window = window_of(offset);
  uint8_t*& known = mapped_[window.index];
  if (!known) {
    try {
      known = own_ ? own_->map(window.at, window.bytes)
                   : SharedFile(address_).map(window.at, window.bytes);
    } catch (const std::runtime_error&) {  // its owner is gone
    }
    if (!known) return nullptr;
    by_address_[known] = window;
  }
  return known + (offset - window.at);
}

std::optional<uint64_t> ArenaFile::offset_of(const uint8_t* data) const {
  auto next = by_address_.upper_bound(data);
  if (next == by_address_.begin()) return std::nullopt;
  const auto& [address, window] = *std::prev(next);
  if (data >= address + window.bytes) return std::nullopt;
  return window.at + (data - address);
}

bool ArenaFile::reserve(uint64_t offset, size_t bytes) {
  Window window = window_of(offset);
  size_t end = round_up(offset - window.at + bytes, SharedFile::PAGE);
  size_t& have = reserved_[window.index];
  if (end > have) {
    if (!own_->reserve(window.at + have, end - have)) return false;
    have = end;
  }
  return true;
}

bool ArenaFile::read(uint64_t offset, void* to, size_t bytes) const {
  try {
    return own_ ? own_->read(offset, to, bytes) : SharedFile(address_).read(offset, to, bytes);
  } catch (const std::runtime_error&) {
    return false;
  }
}

bool ArenaFile::write(uint64_t offset, const void* from, size_t bytes) {
  if (!reserve(offset, bytes)) return false;
  uint8_t* to = at(offset);
  if (!to) return own_->write(offset, from, bytes);
  copy(to, from, bytes);
  return true;
}

}  // namespace fcoll
