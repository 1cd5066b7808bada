#include "collectives.h"

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "arena.h"
#include "group.h"
#include "kernels.h"
#include "wait.h"

namespace fcoll {

namespace {

// From here two passes over a share beat one over all parts.
constexpr size_t TWO_SHOT_BYTES = 16 * 1024;
constexpr int TWO_SHOT_RANKS = 4;

// A share of a sum in place goes past the caches from here on, near cores or far.
constexpr size_t IN_PLACE_STREAM_BYTES = 1024 * 1024;

// Elements of `count` that one slot carries.
size_t per_slot(const Call& call, int n) {
  size_t parts = call.kind == Kind::reduce_scatter ? n : 1;  // a slot has a piece for each rank
  return SLOT_BYTES / parts / 64 * 64 / size_of(call.type);
}

// A large one goes past the caches: see kernels.h.
void reduce_result(void* out, const void* const* parts, int n, size_t count, const Call& call) {
  bool large = call.count * size_of(call.type) >= STREAM_BYTES;
  (large ? reduce_streaming : reduce)(out, parts, n, count, call.type, call.op);
}

// One chunk of a peer's part, `to` being the place of its first.
void take_copy(Ring& ring, int peer, const Transfer& t, size_t chunk, uint8_t* to) {
  const Slot* slot = ring.await(peer, t.first + chunk, t.call);
  size_t room = per_slot(t.call, ring.size()), at = chunk * room;
  copy_result(to + at, ring.data(peer, slot, t.large), std::min(room, t.call.count - at),
              t.call.count);
}

}  // namespace

size_t chunks_of(const Call& call, int n) {
  return std::max<size_t>(1, ceil_div(call.count, per_slot(call, n)));
}

bool in_two_passes(const Call& call, int n) {
  return call.kind == Kind::all_reduce && n >= TWO_SHOT_RANKS &&
         call.count * size_of(call.type) >= TWO_SHOT_BYTES;
}

void publish_chunk(Ring& ring, const Transfer& t, size_t chunk) {
  const Call& call = t.call;
  int rank = ring.rank(), n = ring.size();
  bool keeps_own = t.own == Own::from_slots;
  Slot* slot = ring.claim(t.first + chunk, t.large && !keeps_own);
  uint8_t* to = ring.data(rank, slot, t.large);
  size_t size = size_of(call.type), room = per_slot(call, n), at = chunk * room;
  size_t length = std::min(room, call.count - at);
  switch (call.kind) {
    case Kind::reduce_scatter:
      for (int r = 0; r < n; r++)
        if (r != rank || keeps_own)
          ring.copy_out(to + r * room * size, t.in + (r * call.count + at) * size, length * size);
      break;
    case Kind::broadcast:
      if (rank == call.root) ring.copy_out(to, t.in + at, length);
      break;
    case Kind::barrier:
      break;
    default:
      ring.copy_out(to, t.in + at * size, length * size);
  }
  ring.publish(slot, t.first + chunk, call);
}

void complete_chunk(Ring& ring, const Transfer& t, size_t chunk) {
  const Call& call = t.call;
  int rank = ring.rank(), n = ring.size();
  uint64_t seq = t.first + chunk;
  size_t size = size_of(call.type), room = per_slot(call, n), at = chunk * room;
  size_t length = std::min(room, call.count - at);
  auto part = [&](int r) -> const uint8_t* {
    return ring.data(r, r == rank ? ring.slot(r, seq) : ring.await(r, seq, call), t.large);
  };
  const void* parts[MAX_RANKS];
  switch (call.kind) {
    case Kind::all_reduce:
      for (int r = 0; r < n; r++) parts[r] = r == rank && t.in ? t.in + at * size : part(r);
      reduce_result(t.out + at * size, parts, n, length, call);
      break;
    case Kind::reduce_scatter: {
      const uint8_t* own = t.in ? t.in + (rank * call.count + at) * size : nullptr;
      for (int r = 0; r < n; r++)
        parts[r] = r == rank && own ? own : part(r) + rank * room * size;
      reduce_result(t.out + at * size, parts, n, length, call);
      break;
    }
    case Kind::all_gather:
      for (int k = 0; k < n; k++) {
        int r = (rank + k) % n;
        uint8_t* to = t.out + r * call.count;
        if (r == rank)
          copy_result(to + at, t.in ? t.in + at : part(r), length, call.count, true);
        else
          take_copy(ring, r, t, chunk, to);
      }
      break;
    case Kind::broadcast:
      // all are asked once, by the root too: another may take itself for the root
      for (int r = 0; r < n && chunk == 0; r++)
        if (r != rank && r != call.root) ring.await(r, seq, call);
      if (rank != call.root) take_copy(ring, call.root, t, chunk, t.out);
      break;
    default:  // barrier
      for (int r = 0; r < n; r++)
        if (r != rank) ring.await(r, seq, call);
  }
  ring.done(seq);
  if (length * size >= FAR_BYTES) ring.look_how_far(seq);
}

// -- whole calls ----------------------------------------------------------------------------------

namespace {

void two_shot(Ring& ring, const Call& call, const uint8_t* in, uint8_t* out) {
  int rank = ring.rank(), n = ring.size();
  size_t size = size_of(call.type);
  size_t share = SLOT_BYTES / n / 64 * 64 / size;  // of a chunk, a rank's
  size_t chunk = share * n;
  ring.expect(ring.last_number() + 2 * ceil_div(call.count, chunk));
  for (size_t at = 0; at < call.count; at += chunk) {
    size_t total = std::min(chunk, call.count - at);
    size_t each = std::min(share, ceil_div(ceil_div(total, n), 64 / size) * (64 / size));
    auto begin = [&](int r) { return std::min(r * each, total); };
    auto length = [&](int r) { return begin(r + 1) - begin(r); };
    const uint8_t* from = in + at * size;
    uint8_t* to = out + at * size;

    uint64_t parts = ring.take_numbers(2), sums = parts + 1;
    Slot* slot = ring.claim(parts);
    for (int r = 0; r < n; r++)
      if (r != rank)
        ring.copy_out(slot->data + begin(r) * size, from + begin(r) * size, length(r) * size);
    ring.publish(slot, parts, call);
    const void* sources[MAX_RANKS];
    size_t mine = begin(rank) * size;
    for (int r = 0; r < n; r++)
      sources[r] = (r == rank ? from : ring.await(r, parts, call)->data) + mine;
    Slot* summed = ring.claim(sums);
    bool past = ring.far() && length(rank) * size >= FAR_BYTES;
    (past ? reduce_streaming : reduce)(summed->data, sources, n, length(rank), call.type, call.op);
    if (past) _mm_sfence();
    ring.publish(summed, sums, call);
    for (int i = 0; i < n; i++) {
      int r = (rank + i) % n;
      const Slot* from_r = r == rank ? summed : ring.await(r, sums, call);
      copy(to + begin(r) * size, from_r->data, length(r) * size);
    }
    ring.done(sums);
    ring.look_how_far(sums);
  }
}

}  // namespace

void run(Ring& ring, const Call& call, const uint8_t* in, uint8_t* out) {
  if (in_two_passes(call, ring.size())) return two_shot(ring, call, in, out);
  size_t total = chunks_of(call, ring.size());
  uint64_t first = ring.take_numbers(total);
  Transfer t{call, first, first + total - 1, in, out};
  t.large = total > WINDOW;
  ring.expect(t.last);
  publish_chunk(ring, t, 0);
  for (size_t i = 0; i < total; i++) {
    if (i + 1 < total) publish_chunk(ring, t, i + 1);  // while peers read this one
    complete_chunk(ring, t, i);
  }
  if (t.large) _mm_sfence();  // streaming stores are seen by all threads from here on
}

// -- data in arenas -------------------------------------------------------------------------------

void publish(Ring& ring, const Announcement& a, uint64_t mine) {
  a.where[ring.rank()] = mine;
  ring.publish(ring.claim(a.seq), a.seq, a.call, mine);
}

void complete(Ring& ring, const Announcement& a) {
  for (int r = 0; r < ring.size(); r++)
    if (r != ring.rank()) a.where[r] = ring.await(r, a.seq, a.call)->extra;
  ring.done(a.seq);
}

// -- in place -------------------------------------------------------------------------------------

void share_out(Ring& ring, InPlace& sum) {
  int rank = ring.rank(), n = ring.size();
  const Call& call = sum.call;
  size_t size = size_of(call.type), line = 64 / size;  // whole lines: each written by one rank
  size_t each = round_up(ceil_div(call.count, n), line);
  size_t begin = std::min(rank * each, call.count), length = std::min(each, call.count - begin);
  const void* parts[MAX_RANKS];
  for (int r = 0; r < n; r++) {
    if (r != rank) ring.await(r, sum.first, call);
    parts[r] = sum.parts->of(r) + sum.at + begin * size;
  }
  bool past = length * size >= (ring.far() ? FAR_BYTES : IN_PLACE_STREAM_BYTES);
  alignas(64) uint8_t block[4096];  // stays in L1
  const void* from[MAX_RANKS];
  for (size_t i = 0, step = sizeof block / size; i < length; i += step) {
    size_t m = std::min(step, length - i);
    for (int r = 0; r < n; r++) from[r] = static_cast<const uint8_t*>(parts[r]) + i * size;
    reduce(block, from, n, m, call.type, call.op);
    for (int r = 0; r < n; r++)
      (past ? copy_streaming : copy)(const_cast<void*>(from[r]), block, m * size);
  }
  if (past) _mm_sfence();  // before what says that it is there
  ring.publish(ring.claim(sum.last), sum.last, call);
  sum.shared_out = true;
}

void complete(Ring& ring, InPlace& sum) {
  if (!sum.shared_out) share_out(ring, sum);
  for (int r = 0; r < ring.size(); r++)
    if (r != ring.rank()) ring.await(r, sum.last, sum.call);
  ring.done(sum.last);
  if (sum.call.count * size_of(sum.call.type) >= FAR_BYTES) ring.look_how_far(sum.last);
}

// -- groups ----------------------------------------------------------------------------------------


Group::Group(int rank, int n, double timeout_s) : ring_(rank, n, timeout_s), timeout_s_(timeout_s) {}

Group::~Group() = default;

Arena& Group::arena() {
  std::call_once(arena_made_, [&] { arena_ = std::make_unique<Arena>(*this); });
  return *arena_;
}

std::unique_lock<std::mutex> Group::enter() {
  ring_.check_not_forked();  // the child may find the lock taken by a thread that it does not have
  std::unique_lock lock(turn_, std::try_to_lock);
  if (!lock.owns_lock()) await_turn(lock);
  ring_.check_open();
  return lock;
}

// Another thread of this process is in a call on the group.
void Group::await_turn(std::unique_lock<std::mutex>& lock) {
  using namespace std::chrono_literals;
  for (double start = now_us(); !lock.try_lock();) {
    std::this_thread::sleep_for(200us);  // not in lock(), which no signal ends
    if (check_signals) check_signals();
    if (now_us() - start > timeout_s_ * 1e6)
      throw Error(Error::timeout, rank(), "another thread of " + name_of(rank()) +
                                              " has been in a call on the group for " +
                                              std::to_string(int(timeout_s_)) + " s");
  }
}

void Group::close(const std::string& why) {
  ring_.fail({Error::closed, rank(), name_of(rank()) + " cannot go on: " + why});
}

// -- whole calls ----------------------------------------------------------------------------------

void Group::run(const Call& call, const void* in, void* out) {
  auto turn = enter();
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

double Group::round_trip_ns(int peer) {
  auto turn = enter();
  return ring_.round_trip_ns(peer);
}

// -- the two halves apart -------------------------------------------------------------------------

namespace {

uint64_t first_of(const Transfer& t) { return t.first; }
uint64_t first_of(const Announcement& a) { return a.seq; }
uint64_t first_of(const InPlace& s) { return s.first; }
uint64_t last_of(const Transfer& t) { return t.last; }
uint64_t last_of(const Announcement& a) { return a.seq; }
uint64_t last_of(const InPlace& s) { return s.last; }

template <class Pending>
uint64_t first(const Pending& p) {
  return std::visit([](const auto& of) { return first_of(of); }, p);
}

template <class Pending>
uint64_t last(const Pending& p) {
  return std::visit([](const auto& of) { return last_of(of); }, p);
}

void complete(Ring& ring, const Transfer& t) {
  for (size_t i = 0; i <= t.last - t.first; i++) complete_chunk(ring, t, i);
}

// The caller's argument and signature are not to be read any more.
void forget_arguments(Transfer& t) { t.in = nullptr, t.call.signature = nullptr; }
void forget_arguments(Announcement& a) { a.call.signature = nullptr; }
void forget_arguments(InPlace& s) { s.call.signature = nullptr; }

}  // namespace

// Both sides keep at most half a ring unread, so neither waits for the other to read in order to
// publish what the other waits for.
void Group::make_room(size_t slots) {
  while (!pending_.empty() && ring_.last_number() + slots - first(pending_.front()) >= RING / 2)
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
             static_cast<uint8_t*>(out), Own::from_slots, total > WINDOW};
  ring_.expect(t.last);
  for (size_t i = 0; i < total; i++) publish_chunk(ring_, t, i);
  return enqueue(t, patience_us);
}

uint64_t Group::announce(Call call, uint64_t mine, uint64_t* where) {
  call.in_arena = true;
  auto turn = enter();
  make_room(1);
  Announcement a{call, ring_.take_numbers(1), where};
  ring_.expect(a.seq);
  publish(ring_, a, mine);
  return enqueue(a, 0);
}

void Group::announce_and_wait(Call call, uint64_t mine, uint64_t* where) {
  call.in_arena = !call.in_place;
  auto turn = enter();
  complete_all();
  Announcement a{call, ring_.take_numbers(1), where};
  ring_.expect(a.seq);
  publish(ring_, a, mine);
  complete(ring_, a);
}

uint64_t Group::start_in_place(Call call, std::shared_ptr<const SharedParts> parts, size_t at) {
  call.in_place = true;
  auto turn = enter();
  make_room(2);
  uint64_t first = ring_.take_numbers(2);
  InPlace sum{call, first, first + 1, std::move(parts), at};
  ring_.expect(sum.last);
  ring_.publish(ring_.claim(first), first, call);
  forget_arguments(sum);
  pending_.push_back(std::move(sum));
  share_out_published();
  return first + 1;
}

// Makes the shares for which all parts are there: a peer need not wait for them later. A slot for it is
// free: who has published a part of this call has read what is half a ring older (make_room).
void Group::share_out_published() {
  for (auto& p : pending_)
    if (auto* sum = std::get_if<InPlace>(&p))
      if (!sum->shared_out && published_by_all(sum->first)) share_out(ring_, *sum);
}

uint64_t Group::enqueue(const Pending& p, double patience_us) {
  pending_.push_back(p);
  uint64_t until = last(p);
  bool all = published_by_all(until);
  if (!all && patience_us > 0) {
    for (double stop = now_us() + patience_us; !all && now_us() < stop;)
      for (int i = 0; i < 16 && !(all = published_by_all(until)); i++) _mm_pause();
  }
  if (all) {
    complete_all();
    return 0;
  }
  std::visit([](auto& started) { forget_arguments(started); }, pending_.back());
  return until;
}

bool Group::published_by_all(uint64_t last) const {
  for (int r = 0; r < size(); r++)
    if (r != rank() && !ring_.published(r, last)) return false;
  return true;
}

void Group::finish(uint64_t ticket) {
  auto turn = enter();
  while (!pending_.empty() && first(pending_.front()) <= ticket) complete_oldest();
}

void Group::complete_oldest() {
  Pending& p = pending_.front();  // it stays in the list until it is complete
  ring_.expect(last(p));
  if (std::holds_alternative<InPlace>(p)) share_out_published();
  std::visit([&](auto& started) { complete(ring_, started); }, p);
  pending_.pop_front();
}

}  // namespace fcoll
