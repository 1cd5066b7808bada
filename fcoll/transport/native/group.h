// A group of processes on one host that make the same collectives in the same order. Free of torch,
// so that it can be tested and sanitized alone.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "pending.h"
#include "ring.h"

namespace fcoll {

class Arena;

class Group {
 public:
  Group(int rank, int n, double timeout_s);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // What the peers need in order to map this rank's memory.
  Address address() const { return ring_.address(); }
  // Map the peers' memories. Empty if each is the one with its token, else the reason.
  std::string join(const std::vector<Address>& addresses) { return ring_.join(addresses); }
  void close_fd() { ring_.close_fd(); }  // once all have joined

  int rank() const { return ring_.rank(); }
  int size() const { return ring_.size(); }
  bool crowded() const { return ring_.crowded(); }
  void assume(Distance distance) { ring_.assume(distance); }
  Arena& arena();  // where the ranks read each other's data in place

  // Returns when the result is there. Buffers are contiguous and do not overlap, except that in and
  // out may be the same for all_reduce, and are for broadcast.
  void run(const Call&, const void* in, void* out);
  // n parts each, one after the other, of the given sizes in bytes.
  void all_to_all(const Call&, const void* in, void* out, const size_t* in_bytes,
                  const size_t* out_bytes);

  // The two halves apart. `start` publishes. If the peers have published too, or do so within
  // `patience_us`, it fills `out` and returns 0; else it returns a ticket, and `finish` fills `out`,
  // and that of all tickets before it. What takes more than a quarter of the ring is done at
  // once. For all kinds but all_to_all, whose length only its senders know.
  uint64_t start(const Call&, const void* in, void* out, double patience_us);
  void finish(uint64_t ticket);
  // Is it filled? Does what can be done without waiting.
  bool poll(uint64_t ticket);
  // What a call fills is let go of when it is filled, not sooner; at once if it is.
  void keep(uint64_t ticket, std::shared_ptr<void> result);

  // The same of an all-reduce in place, of the parts that lie `at` so many bytes in their memories.
  // A part must not be touched before `finish`.
  uint64_t start_in_place(Call, std::shared_ptr<const SharedParts>, size_t at);

  void set_timeout(double seconds);  // of the calls from now on

  // Core-to-core round trip with a peer in ns: the median of many. Both call it.
  double round_trip_ns(int peer);

  // No rank can make a call on the group any more: for what this rank cannot go on with.
  [[noreturn]] void close(const std::string& why);
  // This rank makes no more calls. What the peers have published is completed.
  void leave();

  // One thread at a time is in a call on a group: the one that has its turn. What takes a Turn as
  // an argument is part of a call that has it.
  class Turn {
   public:
    explicit Turn(Group& group) : group_(group) {}
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Group& group_;
  };
  [[nodiscard]] Turn enter();
  void run(const Turn&, const Call&, const void* in, void* out);
  void finish(const Turn&, uint64_t ticket);
  // An announcement of where this rank's part is, `mine` as a number; the reader gets all ranks'.
  uint64_t announce(const Turn&, Call, uint64_t mine, std::shared_ptr<Reader>);
  void announce_and_wait(const Turn&, Call, uint64_t mine, Reader* = nullptr);
  uint64_t next_number() const { return ring_.last_number() + 1; }
  bool read_by_all(uint64_t number) const { return ring_.read_by_all(number); }
  [[noreturn]] void fail(const Turn&, const Error& e) { ring_.fail(e); }

  // For a thread that waits elsewhere: does what peers may be waiting for, if no other has the turn.
  void advance_if_free();

 private:
  void await_turn();
  void make_room(size_t slots);
  uint64_t enqueue(Pending, double patience_us);
  void progress();
  void complete_oldest();
  void complete_all() { while (!pending_.empty()) complete_oldest(); }
  void advance_all();

  Ring ring_;
  double timeout_s_;
  struct Started {
    Pending call;
    std::shared_ptr<void> result;  // what it fills, where the caller may let go of that
  };
  std::deque<Started> pending_;  // not complete
  std::atomic<uint64_t> completed_{0};  // the last number that is complete
  std::vector<std::shared_ptr<void>> released_;  // results that are filled, until the turn ends
  std::atomic<bool> taken_{false};  // the turn
  bool sums_in_place_ = false;
  std::once_flag arena_made_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace fcoll
