// One buffer of each rank of a group, mapped by all of them, with a pad of signals a rank: what
// torch's SymmetricMemory is made of. Free of torch.
//
// A signal is a word of 0 or 1 in the pad of the rank that waits for it, at
// [channel * n + sender], as in torch's other backends: kernels of users may use the words too.
//
// A barrier that failed on one rank may have let others through: from then on barriers and
// collectives are closed on all ranks, until they make new buffers together.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "peers.h"

namespace fcoll {

// What a rank is about to do with the memory: its peers must say the same. Numbers of the caller's.
struct Said {
  uint64_t kind, type, op, offset, count;
  bool operator==(const Said&) const = default;
};

class SharedBuffers {
 public:
  SharedBuffers(int rank, int n, double timeout_ms, std::shared_ptr<Memory> buffer, size_t pad_bytes);

  Address buffer() const { return buffers_[rank_]->address(); }
  Address pad() const { return pads_.address(); }
  // Map the peers' memories. All ranks return, or all throw: a rank that cannot tells the others.
  void join(const std::vector<Address>& buffers, const std::vector<Address>& pads);

  int rank() const { return rank_; }
  int size() const { return n_; }
  size_t bytes() const { return buffers_[rank_]->bytes(); }
  std::vector<void*>& buffer_ptrs() { return buffer_ptrs_; }
  std::vector<void*>& pad_ptrs() { return pad_ptrs_; }
  const std::vector<std::shared_ptr<Process>>& processes() const { return pads_.processes(); }
  bool closed() const { return pads_.failure().has_value(); }  // by an error on any rank

  // timeout_ms 0: the group's.
  void barrier(int channel, double timeout_ms);
  // A signal that was not sent or did not come in time changes nothing: it may be tried again.
  void put_signal(int to, int channel, double timeout_ms);
  void wait_signal(int from, int channel, double timeout_ms);

  // A collective on the buffers begins with enter(), which compares what the ranks are about to do,
  // and ends with sync(). Both are barriers, on a channel that no user's signals disturb.
  void enter(const char* what, const Said&, std::string (*show)(const Said&));
  void sync(const char* what);

 private:
  using Word = std::atomic<uint32_t>;
  struct Site {  // the call that waits, for messages
    const char* what;
    int channel;
    double timeout_ms;
    bool closable = true;  // of barriers, not of single signals
    std::string show() const;
  };

  Word& word(int owner, int channel, int from) const;
  Said& said(int rank) const;
  Status& status(int rank) const { return pads_.status(rank); }
  Site site(const char* what, int channel, double timeout_ms) const;
  void check(int rank, int channel) const;
  void check_not_forked() const;
  void check_open() const;
  void pass_barrier(const Site&);
  void put(int to, const Site&);
  void take(int from, const Site&, int pending);
  void map_peers(const std::vector<Address>& buffers, const std::vector<Address>& pads);
  void await_joined();
  int after(int k) const { return (rank_ + k) % n_; }
  Error died(int rank, const Site&) const;
  std::optional<Error> late(int rank, const Site&, double waited_us) const;

  int rank_, n_;
  double timeout_ms_;
  size_t pad_bytes_;
  bool crowded_;
  int born_;
  std::vector<std::shared_ptr<Memory>> buffers_;
  Peers pads_;
  std::vector<void*> buffer_ptrs_, pad_ptrs_;
};

}  // namespace fcoll
