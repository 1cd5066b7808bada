// A group of processes on one host that make the same collectives in the same order. Free of torch,
// so that it can be tested and sanitized alone.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "collectives.h"
#include "ring.h"

namespace fcoll {

class Arena;
class SharedParts;

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

  // The same of a collective whose data is in the ranks' arenas: `mine` is where this rank's part
  // is, and all ranks' answers are in `where` once it is complete.
  uint64_t announce(Call, uint64_t mine, uint64_t* where);
  void announce_and_wait(Call, uint64_t mine, uint64_t* where);

  // The same of an all-reduce in place, of the parts that lie `at` so many bytes in their memories.
  // A part must not be touched before `finish`.
  uint64_t start_in_place(Call, std::shared_ptr<const SharedParts>, size_t at);

  // Core-to-core round trip with a peer in ns: the median of many. Both call it.
  double round_trip_ns(int peer);

  // No rank can make a call on the group any more: for what this rank cannot go on with.
  void close(const std::string& why);

 private:
  using Pending = std::variant<Transfer, Announcement, InPlace>;

  // Only one thread at a time is in a call.
  std::unique_lock<std::mutex> enter();
  void await_turn(std::unique_lock<std::mutex>&);
  void make_room(size_t slots);
  uint64_t enqueue(const Pending&, double patience_us);
  bool published_by_all(uint64_t last) const;
  void share_out_published();
  void complete_oldest();
  void complete_all() { while (!pending_.empty()) complete_oldest(); }

  Ring ring_;
  double timeout_s_;
  std::deque<Pending> pending_;  // started, and not complete
  std::mutex turn_;
  std::once_flag arena_made_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace fcoll
