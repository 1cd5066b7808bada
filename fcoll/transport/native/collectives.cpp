#include "collectives.h"

#include <immintrin.h>

#include <algorithm>

#include "kernels.h"
#include "wait.h"

namespace fcoll {

namespace {

// From here two passes over a share beat one over all parts.
constexpr size_t TWO_SHOT_BYTES = 16 * 1024;
constexpr int TWO_SHOT_RANKS = 4;

// Elements of `count` that one slot carries.
size_t per_slot(const Call& call, int n) {
  size_t parts = call.kind == Kind::reduce_scatter ? n : 1;  // a slot has a piece for each rank
  return SLOT_BYTES / parts / 64 * 64 / size_of(call.type);
}

// Bytes from a rank's piece of a slot to the next one's.
size_t stride_of(const Transfer& t, int n) {
  size_t size = size_of(t.call.type);
  return t.first == t.last ? round_up(t.call.count * size, 64) : per_slot(t.call, n) * size;
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
  size_t length = std::min(room, t.call.count - at);
  const uint8_t* from = ring.data(peer, slot, t.large);
  ring.fetch(from, length);
  copy_result(to + at, from, length, t.call.count);
}

}  // namespace

size_t chunks_of(const Call& call, int n) {
  return std::max<size_t>(1, ceil_div(call.count, per_slot(call, n)));
}

bool in_two_passes(const Call& call, int n) {
  return call.kind == Kind::all_reduce && n >= TWO_SHOT_RANKS &&
         call.count * size_of(call.type) >= TWO_SHOT_BYTES;
}

void publish_chunk(Ring& ring, const Transfer& t, size_t chunk, bool in_window) {
  const Call& call = t.call;
  int rank = ring.rank(), n = ring.size();
  bool keeps_own = t.own == OwnPart::in_slots;
  uint64_t seq = t.first + chunk;
  Slot* slot = ring.claim(seq, in_window && t.large && !keeps_own);
  uint8_t* to = ring.data(rank, slot, t.large);
  size_t size = size_of(call.type), room = per_slot(call, n), at = chunk * room;
  size_t length = std::min(room, call.count - at);
  switch (call.kind) {
    case Kind::reduce_scatter:
      for (int r = 0; r < n; r++)
        if (r != rank)
          ring.copy_out(to + r * stride_of(t, n), t.in + (r * call.count + at) * size, length * size);
      break;
    case Kind::broadcast:
      if (rank == call.root) ring.copy_out(to, t.in + at, length);
      break;
    case Kind::barrier:
      break;
    default:
      ring.copy_out(to, t.in + at * size, length * size);
  }
  ring.publish(slot, seq, call);
}

void keep_own(Ring& ring, const Transfer& t) {
  if (t.call.kind != Kind::reduce_scatter || !t.in) return;
  int rank = ring.rank(), n = ring.size();
  size_t size = size_of(t.call.type), room = per_slot(t.call, n), mine = rank * stride_of(t, n);
  for (uint64_t seq = t.first; seq <= t.last; seq++) {
    size_t at = (seq - t.first) * room, length = std::min(room, t.call.count - at);
    uint8_t* to = ring.data(rank, ring.slot(rank, seq), t.large) + mine;
    copy(to, t.in + (rank * t.call.count + at) * size, length * size);
  }
}

void complete_chunk(Ring& ring, const Transfer& t, size_t chunk) {
  const Call& call = t.call;
  int rank = ring.rank(), n = ring.size();
  uint64_t seq = t.first + chunk;
  size_t size = size_of(call.type), room = per_slot(call, n), at = chunk * room;
  size_t length = std::min(room, call.count - at);
  size_t mine = call.kind == Kind::reduce_scatter ? rank * stride_of(t, n) : 0;
  auto part = [&](int r) -> const uint8_t* {
    if (r == rank) return ring.data(r, ring.slot(r, seq), t.large) + mine;
    const uint8_t* theirs = ring.data(r, ring.await(r, seq, call), t.large) + mine;
    ring.fetch(theirs, length * size);
    return theirs;
  };
  const void* parts[MAX_RANKS];
  switch (call.kind) {
    case Kind::all_reduce:
      for (int r = 0; r < n; r++) parts[r] = r == rank && t.in ? t.in + at * size : part(r);
      reduce_result(t.out + at * size, parts, n, length, call);
      break;
    case Kind::reduce_scatter: {
      const uint8_t* own = t.in ? t.in + (rank * call.count + at) * size : nullptr;
      for (int r = 0; r < n; r++) parts[r] = r == rank && own ? own : part(r);
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
  bool pieces = call.kind == Kind::reduce_scatter;
  if (t.first == t.last) ring.fetch_next_slot(pieces ? n * stride_of(t, n) : length * size);
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
  ring.expect(ring.last_number() + 2 * ceil_div(call.count, chunk), call);
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
  go_on(ring, begin(ring, call, in, out));
}

Transfer begin(Ring& ring, const Call& call, const uint8_t* in, uint8_t* out) {
  size_t total = chunks_of(call, ring.size());
  uint64_t first = ring.take_numbers(total);
  Transfer t{call, first, first + total - 1, in, out};
  t.large = total > WINDOW;
  ring.expect(t.last, call);
  publish_chunk(ring, t, 0);
  return t;
}

namespace {
// A late peer finds all that the window holds; where cores are lost for long, all that the ring does.
// On a quiet host that would be more than the caches hold: 25 MiB took up to 4 times as long.
void publish_ahead(Ring& ring, const Transfer& t, size_t chunk, size_t& published, size_t total) {
  while (published < total && !ring.published_by_all(t.first + chunk)) {
    uint64_t seq = t.first + published;
    bool in_window = ring.can_claim(seq, t.large);
    if (!in_window && !(lost_cores_lately() && ring.can_claim(seq, false))) return;
publish_chunk(ring, t, published++, in_window);
  }
}
}  // namespace

void go_on(Ring& ring, const Transfer& t) {
  size_t total = t.last - t.first + 1, published = 1;
  for (size_t i = 0; i < total; i++) {
    if (published == i + 1 && published < total) publish_chunk(ring, t, published++);  // while peers read
    publish_ahead(ring, t, i, published, total);
    complete_chunk(ring, t, i);
  }
  if (t.large) _mm_sfence();  // streaming stores are seen by all threads from here on
}

}  // namespace fcoll
