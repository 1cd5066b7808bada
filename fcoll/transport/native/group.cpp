#include "group.h"

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>
#include <utility>

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
  if (behind_jobs()) make_jobs();
  FlightRecorder::before_call();
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
  uint64_t flight = flights_.begin(call);
  complete_all();
  fcoll::run(ring_, call, static_cast<const uint8_t*>(in), static_cast<uint8_t*>(out));
  flights_.end(flight);
}

void Group::all_to_all(const Call& call, const void* in, void* out, const size_t* in_bytes,
                       const size_t* out_bytes) {
  if (in_bytes[rank()] != out_bytes[rank()])
    throw Error(Error::mismatch, rank(), "all_to_all_single: " + name_of(rank()) + " sends itself " +
                                             std::to_string(in_bytes[rank()]) + " bytes and expects " +
                                             std::to_string(out_bytes[rank()]));
  auto turn = enter();
  auto sum = [&](const size_t* bytes) { return std::accumulate(bytes, bytes + size(), uint64_t(0)); };
  uint64_t flight = flights_.begin(call, sum(in_bytes), sum(out_bytes));
  complete_all();
  fcoll::all_to_all(ring_, call, static_cast<const uint8_t*>(in), static_cast<uint8_t*>(out),
                    in_bytes, out_bytes);
  flights_.end(flight);
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

void Group::later(Background::Job job) { add_job(flights_.stack(), std::move(job)); }

void Group::add_job(std::shared_ptr<void> stack, Background::Job job) {
  background_.add([stack = std::move(stack), job = std::move(job)] {
    FlightRecorder::Issued issued(stack);
    job();
  });
}

bool Group::run_or_later(const Call& call, const void* in, void* out, double patience_us,
                         Background::Job rest) {
  auto stack = flights_.stack();  // not with the turn: it may take Python's lock
  auto turn = enter();
  uint64_t flight = flights_.begin(call);
  complete_all();
  Transfer t = begin(ring_, call, static_cast<const uint8_t*>(in), static_cast<uint8_t*>(out));
  if (published_by_all(t.first, patience_us)) {
    fcoll::go_on(ring_, t);
    flights_.end(flight);
    return true;
  }
  t.call.signature = nullptr;  // it is the caller's, and compared with the first chunk
  begun_ = {t, flight};
  flights_.keep_stack(flight, stack);
  add_job(std::move(stack), std::move(rest));  // with the turn: it is the next to have it
  return false;
}

// Nobody needs the processor for it before the peers have come.
void Group::go_on() {
  auto turn = enter();
  auto [t, flight] = *std::exchange(begun_, std::nullopt);
  ring_.expect(t.last, t.call);
  ring_.sleep_until_published(t.first);
  fcoll::go_on(ring_, t);
  flights_.end(flight);
}

// -- the two halves apart -------------------------------------------------------------------------

// Both sides keep at most half a ring unread, so neither waits for the other to read in order to
// publish what the other waits for.
void Group::make_room(size_t slots) {
  while (!pending_.empty() && ring_.last_number() + slots - first_of(pending_.front().call) >= RING / 2)
    complete_oldest();
}

// An argument that an earlier call fills is read when that one is complete: a program may reduce a
// tensor again without having waited.
void Group::complete_argument(const Call& call, const void* in) {
  auto bytes = [&](const Call& of, Kind whole) {
    return of.count * size_of(of.type) * (of.kind == whole ? size() : 1);
  };
  auto* from = static_cast<const uint8_t*>(in);
  auto* until = from + bytes(call, Kind::reduce_scatter);
  uint64_t last = 0;
  for (const auto& started : pending_)
    if (auto* t = std::get_if<Transfer>(&started.call))
      if (t->out < until && from < t->out + bytes(t->call, Kind::all_gather)) last = t->last;
  while (!pending_.empty() && last_of(pending_.front().call) <= last) complete_oldest();
}

bool Group::begins(const Call& call) const { return !in_two_passes(call, size()); }

bool Group::starts(const Call& call) const {
  return chunks_of(call, size()) <= RING / 4 && !in_two_passes(call, size());
}

uint64_t Group::start(const Call& call, const void* in, void* out, double patience_us) {
  if (!starts(call)) {
    run(call, in, out);
    return 0;
  }
  size_t total = chunks_of(call, size());
  auto turn = enter();
  uint64_t flight = flights_.begin(call);
  make_room(total);
  complete_argument(call, in);
  uint64_t first = ring_.take_numbers(total);
  Transfer t{call, first, first + total - 1, static_cast<const uint8_t*>(in),
             static_cast<uint8_t*>(out), OwnPart::in_slots, total > WINDOW};
  ring_.expect(t.last, call);
  for (size_t i = 0; i < total; i++) publish_chunk(ring_, t, i);
  return enqueue(std::move(t), flight, patience_us);
}

uint64_t Group::announce(const Turn&, Call call, uint64_t mine, std::shared_ptr<Reader> reader) {
  call.in_arena = true;
  uint64_t flight = flights_.begin(call);
  make_room(1);
  uint64_t number = ring_.take_numbers(1);
  ring_.expect(number, call);
  ring_.publish(ring_.claim(number), number, call, mine);
  return enqueue(Announcement{call, number, number, mine, std::move(reader)}, flight, 0);
}

void Group::announce_and_wait(const Turn&, Call call, uint64_t mine, Reader* reader) {
  call.in_arena = !call.in_place;
  uint64_t flight = flights_.begin(call);
  complete_all();
  announce_and_read(ring_, call, mine, reader);
  flights_.end(flight);
}

uint64_t Group::start_in_place(Call call, std::shared_ptr<const SharedParts> parts, size_t at) {
  call.in_place = true;
  auto turn = enter();
  if (!sums_in_place_) {
    std::lock_guard lock(summing().mutex);
    summing().groups.push_back(this);
    sums_in_place_ = true;
  }
  uint64_t flight = flights_.begin(call);
  make_room(2);
  uint64_t first = ring_.take_numbers(2);
  InPlace sum{call, first, first + 1, std::move(parts), at};
  ring_.expect(sum.last, call);
  publish_part(ring_, sum);
  return enqueue(std::move(sum), flight, 0);
}

bool Group::published_by_all(uint64_t number, double patience_us) const {
  bool all = ring_.published_by_all(number);
  if (lost_cores_lately()) patience_us = 0;
  for (double stop = now_us() + patience_us; !all && now_us() < stop;)
    for (int i = 0; i < 16 && !(all = ring_.published_by_all(number)); i++) _mm_pause();
  return all;
}

// The ticket is 0 if it is complete on return.
uint64_t Group::enqueue(Pending p, uint64_t flight, double patience_us) {
  uint64_t ticket = last_of(p);
  pending_.push_back({std::move(p), flight, nullptr});
  progress();
  if (patience_us > 0 && !pending_.empty() && published_by_all(ticket, patience_us)) progress();
  if (pending_.empty()) return 0;  // completed in order: the last one, too
  forget_arguments(ring_, pending_.back().call);
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
  using namespace std::chrono_literals;
  // A job completes what was started before it. It may itself wait for a peer that needs this rank
  // to go on from here.
  while (ticket > completed_.load(std::memory_order_acquire) && behind_jobs()) {
    std::this_thread::sleep_for(50us);
    if (check_signals) check_signals();
  }
  if (ticket > completed_.load(std::memory_order_acquire)) finish(enter(), ticket);
}

void Group::finish(const Turn&, uint64_t ticket) {
  while (!pending_.empty() && first_of(pending_.front().call) <= ticket) complete_oldest();
}

bool Group::poll(uint64_t ticket) {
  if (ticket <= completed_.load(std::memory_order_acquire)) return true;
  if (behind_jobs()) return false;  // the jobs complete it
  auto turn = enter();
  progress();
  return ticket <= completed_.load(std::memory_order_acquire);
}

void Group::keep(uint64_t ticket, std::shared_ptr<void> result) {
  std::shared_ptr<void> stack = flights_.stack();
  auto turn = enter();
  for (auto& started : pending_) {
    if (last_of(started.call) != ticket) continue;
    started.result = std::move(result);
    flights_.keep_stack(started.flight, std::move(stack));
  }
}

void Group::complete_oldest() {
  Started& oldest = pending_.front();  // it stays in the list until it is complete
  uint64_t last = last_of(oldest.call);
  ring_.expect(last, call_of(oldest.call));
  advance_all();
  complete(ring_, oldest.call);
  completed_.store(last, std::memory_order_release);
  flights_.end(oldest.flight);
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
