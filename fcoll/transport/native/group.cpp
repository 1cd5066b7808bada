#include "group.h"

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "arena.h"
#include "wait.h"

namespace fcoll {

namespace {

// Groups of this process that sum in place. Never freed: one may go while the process exits.
struct Summing {
  std::mutex mutex;
  std::vector<Group*> groups;
  Summing() { hold_over_forks(mutex); }
};

Summing& summing() {
  static auto& made = *new Summing;
  return made;
}

// A peer that waits for this rank's share of a sum would wait for ever if this rank waits for that
// peer in a call on another group. So a thread that waits makes the shares of all groups.
void advance_everywhere() {
  static thread_local bool inside = false;
  if (inside) return;
  std::unique_lock lock(summing().mutex, std::try_to_lock);
  if (!lock.owns_lock()) return;
  inside = true;
  for (Group* group : summing().groups) {
    try {
      group->advance_if_free();
    } catch (const Error&) {  // the next call on that group raises it
    }
  }
  inside = false;
}

const bool provided = (while_waiting = &advance_everywhere, true);

}  // namespace

Group::Group(int rank, int n, double timeout_s) : ring_(rank, n, timeout_s), timeout_s_(timeout_s) {}

Group::~Group() {
  if (!sums_in_place_) return;
  std::lock_guard lock(summing().mutex);
  std::erase(summing().groups, this);
}

Arena& Group::arena() {
  std::call_once(arena_made_, [&] { arena_ = std::make_unique<Arena>(*this); });
  return *arena_;
}

// -- turns ----------------------------------------------------------------------------------------

Group::Turn Group::enter() {
  ring_.check_not_forked();  // the child may find the turn taken by a thread that it does not have
  if (taken_.exchange(true, std::memory_order_acquire)) await_turn();
  try {
    ring_.check_open();
  } catch (...) {
    taken_.store(false, std::memory_order_release);
    throw;
  }
  return Turn(*this);
}

// Results are let go of without the turn: that may take Python's lock, which another thread may hold
// that waits for the turn.
Group::Turn::~Turn() {
  std::vector<std::shared_ptr<void>> released;
  if (!group_.released_.empty()) released.swap(group_.released_);
  group_.taken_.store(false, std::memory_order_release);
}

// Another thread of this process is in a call on the group.
void Group::await_turn() {
  using namespace std::chrono_literals;
  for (double start = now_us(); taken_.exchange(true, std::memory_order_acquire);) {
    std::this_thread::sleep_for(200us);
    if (check_signals) check_signals();
    if (now_us() - start > timeout_s_ * 1e6)
      throw Error(Error::timeout, rank(), "another thread of " + name_of(rank()) +
                                              " has been in a call on the group for " +
                                              std::to_string(int(timeout_s_)) + " s");
  }
}

void Group::close(const std::string& why) {
  auto turn = enter();
  ring_.fail({Error::closed, rank(), name_of(rank()) + " cannot go on: " + why});
}

void Group::leave() {
  if (!taken_.exchange(true, std::memory_order_acquire)) {
    Turn turn(*this);
    try {
      ring_.check_not_forked();
      ring_.check_open();
      progress();
    } catch (const std::exception&) {  // who waits for a result hears that the group is closed
    }
  }
  ring_.leave();
}

// -- whole calls ----------------------------------------------------------------------------------

void Group::run(const Call& call, const void* in, void* out) { run(enter(), call, in, out); }

void Group::run(const Turn&, const Call& call, const void* in, void* out) {
  complete_all();
  fcoll::run(ring_, call, static_cast<const uint8_t*>(in), static_cast<uint8_t*>(out));
}

void Group::all_to_all(const Call& call, const void* in, void* out, const size_t* in_bytes,
                       const size_t* out_bytes) {
  if (in_bytes[rank()] != out_bytes[rank()])
    throw Error(Error::mismatch, rank(), "all_to_all_single: " + name_of(rank()) + " sends itself " +
                                             std::to_string(in_bytes[rank()]) + " bytes and expects " +
                                             std::to_string(out_bytes[rank()]));
  auto turn = enter();
  complete_all();
  fcoll::all_to_all(ring_, call, static_cast<const uint8_t*>(in), static_cast<uint8_t*>(out),
                    in_bytes, out_bytes);
}

void Group::set_timeout(double seconds) {
  auto turn = enter();
  timeout_s_ = seconds;
  ring_.set_timeout(seconds);
}

double Group::round_trip_ns(int peer) {
  auto turn = enter();
  return ring_.round_trip_ns(peer);
}

// -- the two halves apart -------------------------------------------------------------------------

// Both sides keep at most half a ring unread, so neither waits for the other to read in order to
// publish what the other waits for.
void Group::make_room(size_t slots) {
  while (!pending_.empty() && ring_.last_number() + slots - first_of(pending_.front().call) >= RING / 2)
    complete_oldest();
}

uint64_t Group::start(const Call& call, const void* in, void* out, double patience_us) {
  size_t total = chunks_of(call, size());
  if (total > RING / 4 || in_two_passes(call, size())) {
    run(call, in, out);
    return 0;
  }
  auto turn = enter();
  make_room(total);
  uint64_t first = ring_.take_numbers(total);
  Transfer t{call, first, first + total - 1, static_cast<const uint8_t*>(in),
             static_cast<uint8_t*>(out), OwnPart::in_slots, total > WINDOW};
  ring_.expect(t.last);
  for (size_t i = 0; i < total; i++) publish_chunk(ring_, t, i);
  return enqueue(std::move(t), patience_us);
}

uint64_t Group::announce(const Turn&, Call call, uint64_t mine, std::shared_ptr<Reader> reader) {
  call.in_arena = true;
  make_room(1);
  uint64_t number = ring_.take_numbers(1);
  ring_.expect(number);
  ring_.publish(ring_.claim(number), number, call, mine);
  return enqueue(Announcement{call, number, number, mine, std::move(reader)}, 0);
}

void Group::announce_and_wait(const Turn&, Call call, uint64_t mine, Reader* reader) {
  call.in_arena = !call.in_place;
  complete_all();
  announce_and_read(ring_, call, mine, reader);
}

uint64_t Group::start_in_place(Call call, std::shared_ptr<const SharedParts> parts, size_t at) {
  call.in_place = true;
  auto turn = enter();
  if (!sums_in_place_) {
    std::lock_guard lock(summing().mutex);
    summing().groups.push_back(this);
    sums_in_place_ = true;
  }
  make_room(2);
  uint64_t first = ring_.take_numbers(2);
  InPlace sum{call, first, first + 1, std::move(parts), at};
  ring_.expect(sum.last);
  publish_part(ring_, sum);
  return enqueue(std::move(sum), 0);
}

// The ticket is 0 if it is complete on return.
uint64_t Group::enqueue(Pending p, double patience_us) {
  uint64_t ticket = last_of(p);
  pending_.push_back({std::move(p), nullptr});
  progress();
  if (patience_us > 0 && !pending_.empty()) {
    bool all = false;
    for (double stop = now_us() + patience_us; !all && now_us() < stop;)
      for (int i = 0; i < 16 && !(all = ring_.published_by_all(ticket)); i++) _mm_pause();
    if (all) progress();
  }
  if (pending_.empty()) return 0;  // completed in order: the last one, too
  forget_arguments(pending_.back().call);
  return ticket;
}

// Does all that can be done without waiting for anyone: first what peers may be waiting for, then
// what is complete, in order. That one is published by all says nothing of those before it: a share of
// a sum is published when its rank next makes a call.
void Group::progress() {
  advance_all();
  while (!pending_.empty() && ready(ring_, pending_.front().call)) complete_oldest();
}

void Group::advance_all() {
  for (auto& started : pending_) advance(ring_, started.call);
}

void Group::finish(uint64_t ticket) {
  if (ticket > completed_.load(std::memory_order_acquire)) finish(enter(), ticket);
}

void Group::finish(const Turn&, uint64_t ticket) {
  while (!pending_.empty() && first_of(pending_.front().call) <= ticket) complete_oldest();
}

bool Group::poll(uint64_t ticket) {
  if (ticket <= completed_.load(std::memory_order_acquire)) return true;
  auto turn = enter();
  progress();
  return ticket <= completed_.load(std::memory_order_acquire);
}

void Group::keep(uint64_t ticket, std::shared_ptr<void> result) {
  auto turn = enter();
  for (auto& started : pending_)
    if (last_of(started.call) == ticket) started.result = std::move(result);
}

void Group::complete_oldest() {
  Started& oldest = pending_.front();  // it stays in the list until it is complete
  uint64_t last = last_of(oldest.call);
  ring_.expect(last);
  advance_all();
  complete(ring_, oldest.call);
  completed_.store(last, std::memory_order_release);
  if (oldest.result) released_.push_back(std::move(oldest.result));
  pending_.pop_front();
}

void Group::advance_if_free() {
  ring_.check_not_forked();
  if (taken_.exchange(true, std::memory_order_acquire)) return;
  Turn turn(*this);
  ring_.check_open();
  advance_all();
}

}  // namespace fcoll
