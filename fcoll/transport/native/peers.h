// Memory that a process opens to its peers on the host, and signals between them. Free of torch.
//
// A rank's memory is a memfd: it has no name that could be left behind, and it is gone with the
// last process that maps it. Peers open it through /proc/<pid>/fd/<fd>.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core.h"

namespace fcoll {

// How a peer finds a memory, and the token that proves that it has found the right one.
struct Address {
  int32_t pid = 0, fd = -1;
  uint64_t token = 0, bytes = 0;
};

// What a rank is about to do with the memory: its peers must say the same. Numbers of the caller's.
struct Said {
  uint64_t kind, type, op, offset, count;
  bool operator==(const Said&) const = default;
};

// The first page of every memory.
struct Header {
  uint64_t magic, token, bytes;
  alignas(64) std::atomic<uint32_t> state;     // of a pad: has its owner mapped its peers?
  alignas(64) std::atomic<uint32_t> sleepers;  // in a futex wait on a word of this memory
  alignas(64) Said said;
  char refusal[256];  // why it has not
};

// One mapping: of a new memfd of this process, or of a peer's. Throws std::runtime_error.
class Memory {
 public:
  explicit Memory(size_t bytes);
  explicit Memory(const Address&);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  uint8_t* data() const { return base_ + PAGE; }
  Header* header() const { return reinterpret_cast<Header*>(base_); }
  size_t bytes() const { return bytes_; }
  Address address() const;
  void close_fd();  // once no other peer will open it

 private:
  static constexpr size_t PAGE = 4096;
  void map();
  size_t length() const;

  size_t bytes_;
  int fd_ = -1;
  uint8_t* base_ = nullptr;
};

// A process that cannot be mistaken for a later one with its pid.
class Process {
 public:
  static std::shared_ptr<Process> of(int pid);  // null if there is none of that pid
  ~Process();
  bool alive() const;

 private:
  explicit Process(int pidfd) : pidfd_(pidfd) {}
  int pidfd_;
};

// Forks that led to this process: what was made before the last of them is a parent's.
int fork_count();

// One memory of each rank of a group, mapped by all of them, and a pad of signals a rank.
//
// A signal is a word of 0 or 1 in the pad of the rank that waits for it, at
// [channel * n + sender], as in torch's other backends: kernels of users may use the words too.
class Peers {
 public:
  Peers(int rank, int n, double timeout_ms, std::shared_ptr<Memory> buffer, size_t pad_bytes);

  Address buffer() const { return buffers_[rank_]->address(); }
  Address pad() const { return pads_[rank_]->address(); }
  // Map the peers' memories. All ranks return, or all throw: a rank that cannot tells the others.
  void join(const std::vector<Address>& buffers, const std::vector<Address>& pads);

  int rank() const { return rank_; }
  int size() const { return n_; }
  size_t bytes() const { return buffers_[rank_]->bytes(); }
  std::vector<void*>& buffer_ptrs() { return buffer_ptrs_; }
  std::vector<void*>& pad_ptrs() { return pad_ptrs_; }
  const std::vector<std::shared_ptr<Process>>& processes() const { return processes_; }

  // timeout_ms 0: the group's.
  void barrier(int channel, double timeout_ms);
  void put_signal(int to, int channel, double timeout_ms);
  void wait_signal(int from, int channel, double timeout_ms);

  // A collective on the buffers begins with enter(), which compares what the ranks are about to do,
  // and ends with sync(). Both are barriers, on a channel that no user's signals disturb.
  void enter(const char* what, const Said&, std::string (*show)(const Said&));
  void sync(const char* what);

 private:
  struct Site {  // the call that waits, for messages
    const char* what;
    int channel;
    double timeout_ms;
    std::string show() const;
  };
  using Word = std::atomic<uint32_t>;

  Word& word(int owner, int channel, int from) const;
  Site site(const char* what, int channel, double timeout_ms) const;
  void check(int rank, int channel) const;
  void meet(const Site&);
  void put(int to, const Site&);
  void take(int from, const Site&, int pending);
  void map_peers(const std::vector<Address>& buffers, const std::vector<Address>& pads);
  void agree();
  int after(int k) const { return (rank_ + k) % n_; }
  bool dead(int rank) const { return processes_[rank] && !processes_[rank]->alive(); }
  [[noreturn]] void died(int rank, const Site&) const;
  void unless_late(int rank, const Site&, double waited_ms) const;
  void unless_forked() const;

  int rank_, n_;
  double timeout_ms_;
  size_t pad_bytes_;
  bool crowded_;
  int born_;
  std::vector<std::shared_ptr<Memory>> buffers_, pads_;
  std::vector<std::shared_ptr<Process>> processes_;  // null: this one
  std::vector<void*> buffer_ptrs_, pad_ptrs_;
};

}  // namespace fcoll
