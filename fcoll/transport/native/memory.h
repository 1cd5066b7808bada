// Memory that a process opens to its peers on the host. Free of torch.
//
// It is a memfd: it has no name that could be left behind, and it is gone with the last process that
// maps it. Peers open it through /proc/<pid>/fd/<fd>, and a random token proves that they have
// found the right one.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "call.h"
#include "process.h"

namespace fcoll {

// How a peer finds a memory, and the token that proves that it has found the right one.
struct Address {
  int32_t pid = 0, fd = -1;
  uint64_t token = 0, bytes = 0;
};

// How the owner of a memory is, for its peers.
enum class State : uint32_t { joining, active, failed, left };

struct Status {
  alignas(64) std::atomic<State> state;
  alignas(64) std::atomic<uint32_t> sleepers;  // who sleeps on a word of this memory (wait.h)
  cpu_set_t cpus;  // where the owner may run
  Presence presence;  // the owner's
  int error_kind, error_rank;  // why it failed
  char error[512];

  void fail(const Error&);
  std::optional<Error> failure() const;  // none unless it failed
};

// When the pages of a memory are taken from the system. One that cannot be had is an error if they are
// reserved, and a SIGBUS where it is first used if not.
enum class Pages {
  mapped,    // at once, and mapped at once: no faults later
  reserved,  // at once
  as_used,   // each at its first use; those that a peer is told of are reserved before
};

// An open memfd of this process or of a peer. Throws std::runtime_error.
class SharedFile {
 public:
  static constexpr size_t PAGE = 4096;

  explicit SharedFile(size_t bytes, Pages = Pages::reserved);
  explicit SharedFile(const Address&);
  ~SharedFile() { close(); }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  size_t bytes() const { return bytes_; }
  Address address() const;
  bool reserve(size_t at, size_t length) const;  // false if there is no memory for it
  // Null if there is no room for it. `at` is a multiple of PAGE, counted from the first page of data.
  uint8_t* map(size_t at, size_t length) const;
  uint8_t* map_whole(Pages) const;  // the header, a page, before the data
  size_t whole() const;
  // Without a mapping; false if it fails.
  bool read(size_t at, void* to, size_t bytes) const;
  bool write(size_t at, const void* from, size_t bytes) const;
  void close();  // once no other peer will open it

 private:
  size_t bytes_;
  uint64_t token_ = 0;
  int fd_ = -1;
};

// One whole memory, mapped: of this process or of a peer. Throws std::runtime_error.
class Memory {
 public:
  static std::shared_ptr<Memory> make(size_t bytes, Pages = Pages::reserved);
  // One of this process's own is not mapped a second time.
  static std::shared_ptr<Memory> open(const Address&, Pages = Pages::as_used);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  uint8_t* data() const { return base_ + SharedFile::PAGE; }
  Status& status() const;
  size_t bytes() const { return file_.bytes(); }
  Address address() const { return file_.address(); }
  void close_fd() { file_.close(); }  // once no other peer will open it

 private:
  Memory(size_t bytes, Pages);
  Memory(const Address&, Pages);

  SharedFile file_;
  uint8_t* base_ = nullptr;
};

inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
inline size_t round_up(size_t a, size_t to) { return ceil_div(a, to) * to; }

}  // namespace fcoll
