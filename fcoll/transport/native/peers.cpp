#include "peers.h"

#include <stdexcept>

namespace fcoll {

void Peers::add(int r, const Address& at, Pages pages) {
  // Opened before the token is read: what it watches is the process that holds the token.
  try {
    processes_[r] = Process::of(at.pid);
  } catch (const std::runtime_error& e) {
    throw std::runtime_error(name_of(r) + " " + e.what());
  }
  try {
    memories_[r] = Memory::open(at, pages);
  } catch (const std::runtime_error& e) {
    throw std::runtime_error(name_of(r) + "'s memory cannot be mapped (" + e.what() + ")");
  }
  processes_[r]->watch(status(r).presence);
}

std::optional<Error> Peers::failure() const {
  for (int k = 0; k < size(); k++)
    if (auto failed = status((rank_ + k) % size()).failure()) return failed;
  return std::nullopt;
}

// Pinned to one core each, they have them all.
bool Peers::crowded() const {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int r = 0; r < size(); r++) CPU_OR(&all, &all, &status(r).cpus);
  return size() > CPU_COUNT(&all);
}

}  // namespace fcoll
