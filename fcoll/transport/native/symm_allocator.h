// torch's SymmetricMemoryAllocator for CPU tensors, over memory that the processes of a host share.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "shared_buffers.h"
#include "tensors.h"

namespace fcoll::backend {

namespace symm = c10d::symmetric_memory;
using std::string;
using tensors::guarded;
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using WeakProcessGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;

// Is the call right? All that is said of a wrong one is its message.
template <class... Parts>
void need(bool right, const Parts&... message) {
  if (!right) tensors::raise("BadSymmetricCall", -1, c10::str(message...));
}

// -- rendezvous: the ranks tell each other through the group's store where their memory is --------

// What this process knows of a group from its earlier rendezvous.
struct Lobby {
  explicit Lobby(const ProcessGroup& group) : group(group), born(fork_count()) {}
  WeakProcessGroup group;  // when it is gone, its name and address may be another one's
  int born;
  uint64_t visits = 0;
  std::vector<std::shared_ptr<Process>> processes;
  std::shared_ptr<SharedBuffers> refused;  // kept for the peers that have yet to read why
};

struct Visit {
  string prefix;  // of the keys in the store
  std::vector<std::shared_ptr<Process>> known;
};

struct Card {
  Address buffer, pad;
};

// Never freed: memory may be let go of while the process exits.
inline std::mutex& mutex = *[] {
  auto* made = new std::mutex;
  hold_over_forks(*made);
  return made;
}();
inline auto& lobbies = *new std::map<const c10d::ProcessGroup*, Lobby>;

inline Lobby& lobby_of(const ProcessGroup& group) {
  std::erase_if(lobbies, [](const auto& entry) { return entry.second.group.expired(); });
  return lobbies.try_emplace(group.get(), group).first->second;
}

inline c10::intrusive_ptr<c10d::Backend::Options> options_of(const ProcessGroup& group) {
  try {
    return group->getBackend(c10::DeviceType::CPU)->getBackendOptions();
  } catch (const c10::Error&) {  // it has no backend for CPU tensors, or one without options
    return nullptr;
  }
}

inline bool is_fake(const ProcessGroup& group) {
  constexpr auto CPU = c10::DeviceType::CPU;
  return group->hasBackendForDeviceType(CPU) && group->getBackend(CPU)->getBackendName() == "fake";
}

inline double timeout_ms_of(const ProcessGroup& group) {
  auto options = options_of(group);
  return double((options ? options->timeout : group->getStore()->getTimeout()).count());
}

inline Visit visit(const ProcessGroup& group) {
  std::lock_guard lock(mutex);
  Lobby& lobby = lobby_of(group);
  if (lobby.born != fork_count())  // the parent's connection to the store: not to be used
    throw Error(Error::forked, -1, "the process has been forked since the group was made");
  lobby.refused.reset();
  string prefix = "fcoll_symm/";
  // split_group gives sibling groups one name, and so one store.
  if (auto options = options_of(group))
    for (uint64_t rank : options->global_ranks_in_group) prefix += std::to_string(rank) + "_";
  return {prefix + "/" + std::to_string(lobby.visits++) + "/", lobby.processes};
}

inline void post(c10d::Store& store, const string& key, const Card& card) {
  auto bytes = reinterpret_cast<const uint8_t*>(&card);
  store.set(key, std::vector<uint8_t>(bytes, bytes + sizeof card));
}

inline void await_cards(c10d::Store& store, const std::vector<string>& keys, const Visit& visit,
                        int rank, double timeout_ms) {
  using namespace std::chrono;
  using namespace std::chrono_literals;
  auto start = steady_clock::now();
  // Not Store::wait: that would hold the store's lock, and see no peer die.
  for (auto nap = 20us; !store.check(keys); nap = std::min(nap * 2, 2000us)) {
    std::this_thread::sleep_for(nap);
    bool late = duration<double, std::milli>(steady_clock::now() - start).count() > timeout_ms;
    for (int r = 0; r < int(keys.size()); r++) {
      bool dead = r < int(visit.known.size()) && visit.known[r] && !visit.known[r]->alive();
      if ((!dead && !late) || store.check({keys[r]})) continue;
      string who = "rank " + std::to_string(r), me = "rank " + std::to_string(rank);
      if (dead)
        throw Error(Error::peer_died, r, who + " died; " + me + " waited for it in rendezvous");
      throw Error(Error::timeout, r, me + " waited " + std::to_string(int64_t(timeout_ms)) +
                                         " ms for " + who + " in rendezvous");
    }
  }
}

inline std::vector<Card> read_cards(c10d::Store& store, const std::vector<string>& keys) {
  std::vector<Card> cards(keys.size());
  for (size_t r = 0; r < keys.size(); r++) {
    auto bytes = store.get(keys[r]);
    TORCH_CHECK(bytes.size() == sizeof(Card), "fcoll: rendezvous: the store has other data");
    std::memcpy(&cards[r], bytes.data(), sizeof(Card));
  }
  return cards;
}

// All ranks see the same cards, so all throw or none.
inline void compare(const std::vector<Card>& cards, int rank) {
  for (int r = 0; r < int(cards.size()); r++) {
    string who = "rank " + std::to_string(r);
    TORCH_CHECK(cards[r].pad.fd >= 0, "fcoll: rendezvous: ", who, " could not make a signal pad");
    auto differs = [&](const char* what, uint64_t mine, uint64_t theirs) {
      if (mine == theirs) return;
      throw Error(Error::mismatch, r, "rendezvous of " + string(what) + " of " +
                                          std::to_string(mine) + " bytes on rank " +
                                          std::to_string(rank) + ", " + std::to_string(theirs) +
                                          " bytes on " + who);
    };
    differs("a tensor", cards[rank].buffer.bytes, cards[r].buffer.bytes);
    differs("a signal pad", cards[rank].pad.bytes, cards[r].pad.bytes);
  }
}

inline std::shared_ptr<SharedBuffers> make_peers(const ProcessGroup& group,
                                         std::shared_ptr<Memory> buffer) {
  need(!is_fake(group), "rendezvous: a fake group has no peers");
  Visit now = visit(group);
  int rank = group->getRank(), n = group->getSize();
  double timeout_ms = timeout_ms_of(group);
  auto store = group->getStore();
  std::vector<string> keys;
  for (int r = 0; r < n; r++) keys.push_back(now.prefix + std::to_string(r));

  std::shared_ptr<SharedBuffers> peers;
  try {
    size_t pad_bytes = symm::get_signal_pad_size();
    peers = std::make_shared<SharedBuffers>(rank, n, timeout_ms, std::move(buffer), pad_bytes);
  } catch (...) {
    post(*store, keys[rank], {});  // the peers need not wait for the timeout
    throw;
  }
  post(*store, keys[rank], {peers->buffer(), peers->pad()});
  await_cards(*store, keys, now, rank, timeout_ms);
  auto cards = read_cards(*store, keys);
  std::vector<Address> buffers, pads;
  for (const Card& card : cards) buffers.push_back(card.buffer), pads.push_back(card.pad);
  try {
    compare(cards, rank);
    peers->join(buffers, pads);
  } catch (...) {
    std::lock_guard lock(mutex);
    lobby_of(group).refused = peers;
    throw;
  }
  store->deleteKey(keys[rank]);  // all have read it
  std::lock_guard lock(mutex);
  lobby_of(group).processes = peers->processes();
  return peers;
}

// -- torch's classes ------------------------------------------------------------------------------

class Handle final : public symm::SymmetricMemory {
 public:
  Handle(std::shared_ptr<SharedBuffers> peers, size_t offset) : peers_(std::move(peers)), offset_(offset) {}

  std::vector<void*> get_buffer_ptrs() override { return peers_->buffer_ptrs(); }
  std::vector<void*> get_signal_pad_ptrs() override { return peers_->pad_ptrs(); }
  void** get_buffer_ptrs_dev() override { return peers_->buffer_ptrs().data(); }
  void** get_signal_pad_ptrs_dev() override { return peers_->pad_ptrs().data(); }
  size_t get_buffer_size() override { return peers_->bytes(); }
  size_t get_offset() override { return offset_; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return peers_->rank(); }
  int get_world_size() override { return peers_->size(); }
  c10::Device get_device() override { return c10::DeviceType::CPU; }
  bool world_within_direct_access() override { return true; }

  void barrier(int channel, size_t timeout_ms) override {
    call([&] { peers_->barrier(channel, double(timeout_ms)); });
  }
  void put_signal(int to, int channel, size_t timeout_ms) override {
    call([&] { peers_->put_signal(to, channel, double(timeout_ms)); });
  }
  void wait_signal(int from, int channel, size_t timeout_ms) override {
    call([&] { peers_->wait_signal(from, channel, double(timeout_ms)); });
  }

 private:
  template <class F>
  static void call(F f) {
    try {
      guarded(f);
    } catch (const std::invalid_argument& e) {  // no such rank or channel
      need(false, e.what());
    }
  }

  std::shared_ptr<SharedBuffers> peers_;
  size_t offset_;
};

struct Met {
  WeakProcessGroup group;
  std::shared_ptr<SharedBuffers> peers;
};

struct Allocation {
  std::shared_ptr<Memory> memory;
  std::optional<string> group_name;
  std::map<string, Met> met;
};

struct Place {  // in an allocation, as the ranks of a group share it
  std::shared_ptr<SharedBuffers> peers;
  size_t offset = 0;
};

class Allocator final : public symm::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t bytes, int, const std::optional<string>& group_name) override {
    auto memory = Memory::make(bytes, Pages::as_used);  // as malloc does
    std::lock_guard lock(mutex);
    allocations_[memory->data()] = {memory, group_name, {}};
    return memory->data();
  }

  void free(void* ptr) override {
    std::unique_lock lock(mutex);
    auto gone = allocations_.extract(static_cast<uint8_t*>(ptr));
    lock.unlock();  // unmapping takes a while
  }

  size_t get_alloc_size(void* ptr) override {
    std::lock_guard lock(mutex);
    Allocation* a = covering(ptr);
    TORCH_CHECK(a, "fcoll: the memory was not allocated by symm_mem.empty");
    return a->memory->bytes();
  }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(
      void* ptr, const std::optional<string>& group_name) override {
    Place place = guarded([&] { return meet(ptr, group_name.value_or("")); });
    if (place.peers) return c10::make_intrusive<Handle>(place.peers, place.offset);
    TORCH_WARN("rendezvous of a tensor that is not in symmetric memory: allocate it by "
               "torch.distributed._symmetric_memory.empty");  // None, as with other backends
    return nullptr;
  }

  // Where the pointer is, after a rendezvous if this is the first time with that group.
  Place meet(void* ptr, string group_name) {
    std::shared_ptr<Memory> memory;
    size_t offset = 0;
    ProcessGroup group;
    {
      std::lock_guard lock(mutex);
      Allocation* a = covering(ptr);
      if (!a) return {};
      memory = a->memory;
      offset = static_cast<uint8_t*>(ptr) - memory->data();
      if (group_name.empty()) group_name = a->group_name.value_or("");
      // Not need(): that takes Python's lock, which another thread may hold that waits for this one.
      TORCH_CHECK(!group_name.empty(), "rendezvous: give a group, here or at the allocation");
      group = c10d::resolve_process_group(group_name);
      auto found = a->met.find(group_name);
      // closed buffers are made anew: every rank that asks sees that they are
      if (found != a->met.end() && found->second.group.lock() == group &&
          !found->second.peers->closed())
        return {found->second.peers, offset};
    }
    auto peers = make_peers(group, memory);
    std::lock_guard lock(mutex);
    if (Allocation* a = covering(ptr)) {
      std::erase_if(a->met, [](const auto& entry) { return entry.second.group.expired(); });
      a->met.insert_or_assign(group_name, Met{WeakProcessGroup(group), peers});
    }
    return {peers, offset};
  }

  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::DeviceType::CPU; }
  string name() override { return "fcoll"; }
  bool has_allocation(void* ptr) override {
    std::lock_guard lock(mutex);
    return covering(ptr) != nullptr;
  }

 private:
  Allocation* covering(void* ptr) {
    auto at = static_cast<uint8_t*>(ptr);
    auto next = allocations_.upper_bound(at);
    if (next == allocations_.begin()) return nullptr;
    Allocation& a = std::prev(next)->second;
    size_t length = std::max<size_t>(a.memory->bytes(), 1);  // an empty one has an address too
    return at < a.memory->data() + length ? &a : nullptr;
  }

  std::map<uint8_t*, Allocation> allocations_;
};

}  // namespace fcoll::backend
