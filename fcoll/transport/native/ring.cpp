#include "ring.h"

#include <immintrin.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "kernels.h"
#include "wait.h"

namespace fcoll {

// -- joining --------------------------------------------------------------------------------------

Ring::Ring(int rank, int n, double timeout_s)
    : rank_(rank), n_(n), timeout_s_(timeout_s), limit_s_(timeout_s), born_(fork_count()), peers_(rank, n), segments_(n),
      beacons_(n) {
  try {
    peers_.make_own(RING_BYTES, Pages::mapped);
  } catch (const std::exception& e) {
    broken_ = e.what();  // join says so
    return;
  }
  segments_[rank] = reinterpret_cast<Segment*>(peers_.data(rank));
  own_ = &peers_.status(rank);
  own_->state.store(State::active);
}

Ring::~Ring() { leave(); }

void Ring::leave() {
  if (!own_ || born_ != fork_count()) return;
  State was = State::active;  // a rank that stopped for an error goes on saying which
  own_->state.compare_exchange_strong(was, State::left);
  open_ = false;
}

std::string Ring::join(const std::vector<Address>& addresses) {
  if (!own_) return "no shared memory could be made (" + broken_ + ")";
  for (int r = 0; r < n_; r++) {
    if (r == rank_) continue;
    try {
      peers_.add(r, addresses[r], Pages::mapped);
    } catch (const std::exception& e) {
      return e.what();
    }
    segments_[r] = reinterpret_cast<Segment*>(peers_.data(r));
  }
  crowded_ = peers_.crowded();
  return "";
}

void Ring::throw_forked() const {
  throw Error(Error::forked, -1, "the process has been forked since the group was made");
}

void Ring::throw_closed() const {
  throw Error(Error::closed, -1,
              broken_.empty() ? name_of(rank_) + " left the group: it was destroyed"
                              : "the group was closed by an earlier error: " + broken_);
}

// -- waiting --------------------------------------------------------------------------------------

void Ring::wait_long(int peer, const std::atomic<uint64_t>& word, uint64_t least, Patience patience) {
  if (patience == Patience::awake) patience = awake(crowded_);
  try {
    wait_until(
        word, peers_.status(peer).sleepers, patience,
        [&] { return word.load(std::memory_order_acquire) >= least; },
        [&](double waited_us) { return look(peer, waited_us); });
  } catch (const Error& e) {
    fail(e);
  } catch (...) {  // a signal
    close({Error::closed, rank_, name_of(rank_) + " was interrupted in a collective"});
    throw;
  }
}

namespace {
// As gloo says it, as long as that can be read.
std::string shown_time(double seconds) {
  return seconds < 10 ? std::to_string(int(seconds * 1e3)) + "ms" : std::to_string(int(seconds)) + " s";
}
}  // namespace

// Why it is for nothing to wait for the peer; it may itself be waiting for another one.
std::optional<Error> Ring::look(int peer, double waited_us) const {
  for (int r = 0; r < n_; r++)
    if (r != rank_)
      if (auto failure = peers_.status(r).failure()) return failure;
  if (!open_) return Error(Error::closed, rank_, name_of(rank_) + " left the group meanwhile");
  if (waited_us * 1e-6 > limit_s_)
    return Error(Error::timeout, peer, "Timed out waiting " + shown_time(limit_s_) + " for " +
                                           name_of(peer) + ", which has not made the call");
  for (int r = 0; r < n_; r++) {
    if (r == rank_) continue;
    bool died = peers_.dead(r);
    if (!died && peers_.status(r).state.load(std::memory_order_acquire) != State::left) continue;
    // One that had done all it had to do in this call before it went is not missed.
    if (r != peer && segments_[r]->done.load(std::memory_order_acquire) >= expected_) continue;
    const char* how = died ? " died" : " left the group (it destroyed it, or is exiting)";
    return Error(Error::peer_died, r, name_of(r) + how);
  }
  return std::nullopt;
}

void Ring::fail(const Error& e) {
  close(e);
  throw e;
}

void Ring::close(const Error& e) {
  broken_ = e.what();
  open_ = false;
  own_->fail(e);
}

// -- near and far ---------------------------------------------------------------------------------

namespace {
// To read a line that a peer has just written takes 40 to 90 ns where the round trip of the cores is
// 120 to 180, and 160 to 190 where it is 530 to 560.
constexpr double FAR_NS = 120;
constexpr uint64_t LOOK_EVERY = 4;
constexpr int SURE = 3;  // looks that it takes to change one's mind: a look may be interrupted

uint64_t ticks() {
  _mm_lfence();
  uint64_t now = __rdtsc();
  _mm_lfence();
  return now;
}

double ticks_per_ns() {
  static const double found = [] {
    double start_us = now_us(), us;
    uint64_t start = ticks();
    while ((us = now_us() - start_us) < 50) _mm_pause();
    return (ticks() - start) / (us * 1e3);
  }();
  return found;
}
}  // namespace

// A beacon that its owner has not written since the last look is in this core's cache: it says nothing.
void Ring::look_how_far(uint64_t seq) {
  if (distance_ != Distance::measured) {
    far_ = distance_ == Distance::far;
    return;
  }
  if (seq % LOOK_EVERY) return;
  uint64_t longest = 0;
  for (int r = 0; r < n_; r++) {
    if (r == rank_) continue;
    uint64_t start = ticks();
    uint64_t seen = segments_[r]->beacon.load(std::memory_order_acquire);
    uint64_t took = ticks() - start;
    if (std::exchange(beacons_[r], seen) != seen) longest = std::max(longest, took);
  }
  if (!longest) return;
  bool far = longest > FAR_NS * ticks_per_ns();
  far_ = std::clamp(far_ + (far ? 1 : -1), -SURE, SURE);
}

// A far core has data sooner from memory than from this core's cache: an all-reduce of 8 KiB in 2 us
// instead of 5, of 64 KiB in 10 instead of 30, of 4 MiB in 600 instead of 2,300. A near core does
// not: 64 KiB in 11 instead of 5.
void Ring::copy_out(void* to, const void* from, size_t bytes) const {
  if (!far() || bytes < FAR_BYTES) return copy(to, from, bytes);
  copy_streaming(to, from, bytes);
  _mm_sfence();  // before what says that it is there
}

double Ring::round_trip_ns(int peer) {
  constexpr int rounds = 2000;
  std::vector<double> times(rounds);
  auto &mine = segments_[rank_]->pings[peer], &theirs = segments_[peer]->pings[rank_];
  uint64_t base = mine.load();  // both count the same rounds with each other
  bool first = rank_ < peer, crowded = std::exchange(crowded_, false);  // spin: only these two wait
  expect(0, Call());
  for (int i = 1; i <= rounds; i++) {
    double start = now_us();
    if (first) mine.store(base + i, std::memory_order_release);
    wait(peer, theirs, base + i);
    if (!first) mine.store(base + i, std::memory_order_release);
    times[i - 1] = (now_us() - start) * 1e3;
  }
  crowded_ = crowded;
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[rounds / 2];
}

// -- publish and await ----------------------------------------------------------------------------

const Slot* Ring::slot(int rank, uint64_t seq) const {
  auto base = reinterpret_cast<uint8_t*>(segments_[rank]);
  return reinterpret_cast<const Slot*>(base + CONTROL + seq % RING * STRIDE);
}

// The peers have read what this rank published up to seq.
void Ring::until_read(uint64_t seq) {
  for (int r = 0; r < n_; r++) {
    if (r != rank_) wait(r, segments_[r]->done, seq);
  }
}

Slot* Ring::claim(uint64_t seq, bool in_window) {
  if (seq > free_until_) {
    until_read(seq - RING);
    uint64_t least = UINT64_MAX;
    for (int r = 0; r < n_; r++)
      if (r != rank_) least = std::min(least, segments_[r]->done.load(std::memory_order_acquire));
    free_until_ = least + RING;
  }
  auto* mine = const_cast<Slot*>(slot(rank_, seq));
  mine->at = 0;
  if (in_window) {
    size_t place = seq % WINDOW;
    until_read(window_[place]);
    window_[place] = seq;
    mine->at = WINDOW_AT + place * SLOT_BYTES;
  }
  return mine;
}

bool Ring::can_claim(uint64_t seq, bool in_window) const {
  uint64_t read = seq > free_until_ ? seq - RING : 0;
  if (in_window) read = std::max(read, window_[seq % WINDOW]);
  for (int r = 0; r < n_; r++)
    if (r != rank_ && segments_[r]->done.load(std::memory_order_acquire) < read) return false;
  return true;
}

void Ring::publish(Slot* slot, uint64_t seq, const Call& call, uint64_t extra) {
  slot->packed = call.packed();
  slot->count = call.count;
  slot->extra = extra;
  slot->digest = call.digest;
  if (call.signature) segments_[rank_]->signatures[seq % RING] = *call.signature;
  if (seq % LOOK_EVERY == 0) segments_[rank_]->beacon.store(seq, std::memory_order_relaxed);
  slot->seq.store(seq, std::memory_order_release);
  wake(slot->seq, own_->sleepers);
}

void Ring::sleep_until_published(uint64_t seq) {
  for (int r = 0; r < n_; r++)
    if (r != rank_ && !published(r, seq)) wait_long(r, slot(r, seq)->seq, seq, Patience::asleep);
}

bool Ring::published(int peer, uint64_t seq) const {
  return slot(peer, seq)->seq.load(std::memory_order_acquire) >= seq;
}

bool Ring::published_by_all(uint64_t seq) const {
  for (int r = 0; r < n_; r++)
    if (r != rank_ && !published(r, seq)) return false;
  return true;
}

bool Ring::read_by_all(uint64_t seq) const {
  for (int r = 0; r < n_; r++)
    if (segments_[r]->done.load(std::memory_order_acquire) < seq) return false;
  return true;
}

const Slot* Ring::await(int peer, uint64_t seq, const Call& call) {
  const Slot* theirs = slot(peer, seq);
  wait(peer, theirs->seq, seq);
  if (theirs->packed != call.packed() || theirs->count != call.count ||
      theirs->digest != call.digest) {
    Call other = Call::unpack(theirs->packed, theirs->count);
    other.digest = theirs->digest;
    fail({Error::mismatch, peer, name_of(rank_) + " calls " + shown(rank_, seq, call) + " where " +
                                     name_of(peer) + " calls " + shown(peer, seq, other)});
  }
  return theirs;
}

// A call in full, if its signature is the one in the slot's place.
std::string Ring::shown(int rank, uint64_t seq, const Call& call) const {
  const Signature& s = segments_[rank]->signatures[seq % RING];
  if (!describe || !call.digest || s.digest != call.digest) return call.show();
  return (call.in_arena ? "compiled " : "") + describe(s) + (call.in_place ? " in place" : "");
}

void Ring::fetch(const uint8_t* theirs, size_t bytes) const {
  if (!far() || bytes < FETCH_FROM_BYTES || bytes > FETCH_TO_BYTES) return;
  for (size_t i = 0; i < std::min(bytes, FETCHED_BYTES); i += 64) __builtin_prefetch(theirs + i);
}

// Not by __builtin_prefetch, which needs a newer processor to be compiled for; others ignore it.
void Ring::fetch_next_slot(size_t bytes) const {
  if (bytes > FETCHED_SLOT_BYTES) return;
  auto* next = reinterpret_cast<const uint8_t*>(slot(rank_, seq_ + 1));
  for (size_t i = 0; i < sizeof(Slot) + bytes; i += 64) asm volatile("prefetchw %0" : : "m"(next[i]));
}

void Ring::done(uint64_t seq) {
  Segment* own = segments_[rank_];
  own->done.store(seq, std::memory_order_release);
  wake(own->done, own_->sleepers);
}

}  // namespace fcoll
