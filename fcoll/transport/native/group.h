// A group of processes on one host that make the same collectives in the same order. Free of torch,
// so that it can be tested and sanitized alone.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "background.h"
#include "flight_recorder.h"
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
  void yield_cores() { ring_.yield_cores(); }
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
  bool starts(const Call&) const;  // or is it done at once?
  bool begins(const Call&) const;  // can it be run_or_later?
  // Have all peers published by then? It spins.
  bool published_by_all(uint64_t number, double patience_us) const;
  void finish(uint64_t ticket);
  // Is it filled? Does what can be done without waiting.
  bool poll(uint64_t ticket);
  // What a call fills is let go of when it is filled, not sooner; at once if it is.
  void keep(uint64_t ticket, std::shared_ptr<void> result);

  // The same of an all-reduce in place, of the parts that lie `at` so many bytes in their memories.
  // A part must not be touched before `finish`.
  uint64_t start_in_place(Call, std::shared_ptr<const SharedParts>, size_t at);

  // Calls that the program goes on without: the job makes them, on a thread of the group unless one
  // that waits for it does so first. Later calls on the group wait for it, except for those that it
  // makes itself.
  void later(Background::Job job);
  // Makes a call that does not start apart if all peers come to it within `patience_us`. Else it is
  // begun, and `rest()` is a job, in which go_on() makes the rest of it.
  bool run_or_later(const Call&, const void* in, void* out, double patience_us, Background::Job rest);
  void go_on();
  // Makes them, or waits while another thread does.
  void make_jobs_until(const std::function<bool()>& reached) { background_.help_until(reached); }
  void make_jobs() { make_jobs_until([&] { return background_.empty(); }); }
  bool in_job() const { return background_.inside(); }
  bool behind_jobs() const { return !background_.empty() && !in_job(); }

  void set_timeout(double seconds);  // of the calls from now on

  // The last calls, the oldest first; of any thread, also of one that is in a call.
  std::vector<Flight> flights() const { return flights_.flights(); }
  FlightRecorder& messages() { return messages_; }  // between two ranks, which are made elsewhere

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
  void add_job(std::shared_ptr<void> stack, Background::Job);
  void make_room(size_t slots);
  void complete_argument(const Call&, const void* in);
  uint64_t enqueue(Pending, uint64_t flight, double patience_us);
  void progress();
  void complete_oldest();
  void complete_all() { while (!pending_.empty()) complete_oldest(); }
  void advance_all();

  Ring ring_;
  double timeout_s_;
  struct Started {
    Pending call;
    uint64_t flight;  // its number in the records
    std::shared_ptr<void> result;  // what it fills, where the caller may let go of that
  };
  std::deque<Started> pending_;  // not complete
  std::atomic<uint64_t> completed_{0};  // the last number that is complete
  std::vector<std::shared_ptr<void>> released_;  // results that are filled, until the turn ends
  std::atomic<bool> taken_{false};  // the turn
  FlightRecorder flights_;
  FlightRecorder messages_;
  bool sums_in_place_ = false;
  std::once_flag arena_made_;
  std::unique_ptr<Arena> arena_;
  struct Begun {
    Transfer call;
    uint64_t flight;
  };
  std::optional<Begun> begun_;  // until its job goes on with it
  Background background_;  // its jobs hold the group
};

}  // namespace fcoll
