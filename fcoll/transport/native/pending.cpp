#include "pending.h"

#include <immintrin.h>

#include <algorithm>

#include "kernels.h"

namespace fcoll {

namespace {

// A share of a sum in place goes past the caches from here on, near cores or far.
constexpr size_t IN_PLACE_STREAM_BYTES = 1024 * 1024;

// With its call a rank says where in the memory its part is: a share is written there on all ranks.
void await_part(Ring& ring, int peer, const InPlace& sum) {
  uint64_t theirs = ring.await(peer, sum.first, sum.call)->extra;
  if (theirs == sum.at) return;
  auto shown = [&](int rank, uint64_t at) {
    return name_of(rank) + " calls " + sum.call.show() + " at byte " + std::to_string(at);
  };
  ring.fail({Error::mismatch, peer,
             shown(ring.rank(), sum.at) + " where " + shown(peer, theirs) + " of its buckets"});
}

// Waits for the peers' parts, and writes this rank's share of the sum into all of them.
void share_out(Ring& ring, InPlace& sum) {
  int rank = ring.rank(), n = ring.size();
  const Call& call = sum.call;
  for (int r = 0; r < n; r++)
    if (r != rank) await_part(ring, r, sum);
  size_t size = size_of(call.type), line = 64 / size;  // whole lines: each written by one rank
  size_t each = round_up(ceil_div(call.count, n), line);
  size_t begin = std::min(rank * each, call.count), length = std::min(each, call.count - begin);
  bool past = length * size >= (ring.far() ? FAR_BYTES : IN_PLACE_STREAM_BYTES);
  alignas(64) uint8_t block[4096];  // stays in L1
  const void* from[MAX_RANKS];
  for (size_t i = 0, step = sizeof block / size; i < length; i += step) {
    size_t m = std::min(step, length - i);
    for (int r = 0; r < n; r++) from[r] = sum.parts->of(r) + sum.at + (begin + i) * size;
    reduce(block, from, n, m, call.type, call.op);
    for (int r = 0; r < n; r++)
      (past ? copy_streaming : copy)(const_cast<void*>(from[r]), block, m * size);
  }
  if (past) _mm_sfence();  // before what says that it is there
  ring.publish(ring.claim(sum.last), sum.last, call);
  sum.shared_out = true;
}

// -- a step of each type --------------------------------------------------------------------------

bool is_ready(const Ring& ring, const Transfer& t) { return ring.published_by_all(t.last); }
bool is_ready(const Ring& ring, const Announcement& a) { return ring.published_by_all(a.last); }
bool is_ready(const Ring& ring, const InPlace& s) {
  return s.shared_out && ring.published_by_all(s.last);
}

void step(Ring&, const Transfer&) {}
void step(Ring&, const Announcement&) {}
// A slot for the share is free: who has published a part of this call has read what is half a ring
// older (Group::make_room).
void step(Ring& ring, InPlace& s) {
  if (!s.shared_out && ring.published_by_all(s.first)) share_out(ring, s);
}

void finish(Ring& ring, const Transfer& t) {
  for (size_t i = 0; i <= t.last - t.first; i++) complete_chunk(ring, t, i);
}

void finish(Ring& ring, const Announcement& a, Reader* reader) {
  uint64_t where[MAX_RANKS];
  for (int r = 0; r < ring.size(); r++)
    where[r] = r == ring.rank() ? a.mine : ring.await(r, a.last, a.call)->extra;
  if (reader) reader->read(where);
  ring.fetch_next_slot(0);
  ring.done(a.last);
}
void finish(Ring& ring, const Announcement& a) { finish(ring, a, a.reader.get()); }

void finish(Ring& ring, InPlace& s) {
  if (!s.shared_out) share_out(ring, s);
  for (int r = 0; r < ring.size(); r++)
    if (r != ring.rank()) ring.await(r, s.last, s.call);
  ring.done(s.last);
  if (s.call.count * size_of(s.call.type) >= FAR_BYTES) ring.look_how_far(s.last);
}

}  // namespace

void publish_part(Ring& ring, const InPlace& sum) {
  ring.publish(ring.claim(sum.first), sum.first, sum.call, sum.at);
}

bool ready(const Ring& ring, const Pending& p) {
  return std::visit([&](const auto& of) { return is_ready(ring, of); }, p);
}

void advance(Ring& ring, Pending& p) {
  std::visit([&](auto& of) { step(ring, of); }, p);
}

void complete(Ring& ring, Pending& p) {
  std::visit([&](auto& of) { finish(ring, of); }, p);
}

void forget_arguments(Ring& ring, Pending& p) {
  std::visit([](auto& of) { of.call.signature = nullptr; }, p);
  auto* transfer = std::get_if<Transfer>(&p);
  if (!transfer) return;
  keep_own(ring, *transfer);
  transfer->in = nullptr;
}

void announce_and_read(Ring& ring, const Call& call, uint64_t mine, Reader* reader) {
  uint64_t number = ring.take_numbers(1);
  ring.expect(number, call);
  ring.publish(ring.claim(number), number, call, mine);
  finish(ring, {call, number, number, mine, nullptr}, reader);
}

}  // namespace fcoll
