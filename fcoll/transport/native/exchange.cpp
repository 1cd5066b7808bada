// all_to_all on a ring: parts of different sizes, which only their senders know.
#include <immintrin.h>

#include <algorithm>

#include "collectives.h"
#include "kernels.h"

namespace fcoll {

namespace {

size_t longest_of(int owner, int n, const size_t* sends) {
  size_t longest = 0;
  for (int r = 0; r < n; r++)
    if (r != owner) longest = std::max(longest, sends[r]);
  return longest;
}

// Where a rank's slots have what, which depends on the longest part that it sends: the sizes of its
// parts and of its peers', then a piece of the part for each rank but itself. Small parts lie close,
// the smallest without regard to cache lines: on 2 ranks 32 bytes are in one with the sizes.
struct Places {
  size_t longest, head, piece;  // bytes

  Places(int n, size_t longest) : longest(longest) {
    size_t line = longest <= 64 ? 16 : 64;  // what each begins at
    head = round_up(2 * n * sizeof(size_t), line);
    piece = longest <= FETCHED_SLOT_BYTES ? round_up(std::max<size_t>(longest, 1), line)
                                          : (SLOT_BYTES - head) / std::max(1, n - 1) / 64 * 64;
  }
  // Not inlined: where it is called, the call is a branch, and no data that what follows waits for.
  __attribute__((noinline)) static Places others(int n, size_t longest) { return {n, longest}; }

  size_t of(int rank, int owner) const { return head + (rank - (rank > owner)) * piece; }
  size_t length(size_t bytes, size_t chunk) const {
    return bytes > chunk * piece ? std::min(piece, bytes - chunk * piece) : 0;
  }
  size_t chunks() const { return std::max<size_t>(1, ceil_div(longest, piece)); }
};
static_assert(2 * MAX_RANKS * sizeof(size_t) + (MAX_RANKS - 1) * FETCHED_SLOT_BYTES <= SLOT_BYTES);

// What the ranks of an all_to_all have in common: where the parts begin.
struct Exchange {
  const Call& call;
  int rank, n;
  uint64_t first;
  size_t from[MAX_RANKS + 1], to[MAX_RANKS + 1];  // where in the buffers
  size_t longest[MAX_RANKS];  // of the parts that each rank sends, once that is known
  Places own;  // of this rank's slots

  Exchange(const Call& call, const Ring& ring, const size_t* in_bytes, const size_t* out_bytes)
      : call(call), rank(ring.rank()), n(ring.size()), first(ring.last_number() + 1),
        own(n, longest_of(rank, n, in_bytes)) {
    from[0] = to[0] = 0;
    for (int r = 0; r < n; r++) from[r + 1] = from[r] + in_bytes[r], to[r + 1] = to[r] + out_bytes[r];
  }
  // A peer's parts are mostly as long as this rank's. Then where they lie does not depend on what the
  // peer says, and the processor fetches both at once: 2 KiB in 0.46 us instead of 0.67.
  Places places(int r) const {
    return longest[r] == own.longest ? own : Places::others(n, longest[r]);
  }
};

void publish_chunk(Ring& ring, const Exchange& x, size_t chunk, const uint8_t* in,
                   const size_t* in_bytes, const size_t* out_bytes) {
  size_t chunks = x.own.chunks();
  Slot* slot = ring.claim(x.first + chunk, chunk > 0 && chunks > WINDOW);  // the first: see data()
  uint8_t* room = ring.data(x.rank, slot, chunk > 0);
  if (chunk == 0) {
    copy(room, in_bytes, x.n * sizeof(size_t));
    copy(room + x.n * sizeof(size_t), out_bytes, x.n * sizeof(size_t));
  }
  for (int r = 0; r < x.n; r++)
    if (r != x.rank)
      ring.copy_out(room + x.own.of(r, x.rank), in + x.from[r] + chunk * x.own.piece,
                    x.own.length(in_bytes[r], chunk));
  ring.publish(slot, x.first + chunk, x.call, chunks);
}

// Compares what each rank sends with what its receiver expects. All ranks see the sizes of all, so
// that all raise, or none. Only a sender knows how long its parts are: the result is the most chunks
// that any sends, so that all count the same.
size_t agree_on_chunks(Ring& ring, Exchange& x, const size_t* in_bytes,
                       const size_t* out_bytes) {
  size_t most = x.own.chunks();
  const size_t *sent[MAX_RANKS], *expected[MAX_RANKS];
  for (int r = 0; r < x.n; r++) {
    if (r == x.rank) {
      sent[r] = in_bytes, expected[r] = out_bytes;
      continue;
    }
    const Slot* slot = ring.await(r, x.first, x.call);
    sent[r] = reinterpret_cast<const size_t*>(slot->data), expected[r] = sent[r] + x.n;
    x.longest[r] = longest_of(r, x.n, sent[r]);
    most = std::max<size_t>(most, slot->extra);
  }
  for (int from = 0; from < x.n; from++)
    for (int to = 0; to < x.n; to++)
      if (sent[from][to] != expected[to][from])
        ring.fail({Error::mismatch, from,
                   "all_to_all_single: " + name_of(from) + " sends " +
                       std::to_string(sent[from][to]) + " bytes to " + name_of(to) +
                       ", whose output_splits expect " + std::to_string(expected[to][from])});
  return most;
}

void take_part(Ring& ring, int peer, const Exchange& x, size_t chunk, uint8_t* out,
               const size_t* out_bytes) {
  uint8_t* to = out + x.to[peer];
  size_t bytes = out_bytes[peer];
  Places places = x.places(peer);
  if (size_t length = places.length(bytes, chunk)) {
    const Slot* slot = ring.await(peer, x.first + chunk, x.call);
    const uint8_t* from = ring.data(peer, slot, chunk > 0) + places.of(x.rank, peer);
    ring.fetch(from, length);
    copy_result(to + chunk * places.piece, from, length, bytes);
  }
}

}  // namespace

void all_to_all(Ring& ring, const Call& call, const uint8_t* in, uint8_t* out, const size_t* in_bytes,
                const size_t* out_bytes) {
  Exchange x(call, ring, in_bytes, out_bytes);
  int rank = x.rank, n = x.n;
  ring.expect(x.first, call);  // how many more there are, only the senders know
  publish_chunk(ring, x, 0, in, in_bytes, out_bytes);
  copy_result(out + x.to[rank], in + x.from[rank], in_bytes[rank], in_bytes[rank], true);
  size_t sent = x.own.chunks(), all = agree_on_chunks(ring, x, in_bytes, out_bytes);
  ring.take_numbers(all);
  ring.expect(x.first + all - 1, call);
  for (size_t i = 0; i < all; i++) {
    if (i + 1 < sent) publish_chunk(ring, x, i + 1, in, in_bytes, out_bytes);
    for (int k = 1; k < n; k++) take_part(ring, (rank + k) % n, x, i, out, out_bytes);
    if (all == 1) ring.fetch_next_slot(x.own.head + (n - 1) * x.own.piece);
    ring.done(x.first + i);
    if (x.own.longest >= FAR_BYTES) ring.look_how_far(x.first + i);
  }
  if (x.to[n] >= STREAM_OWN_BYTES) _mm_sfence();
}

}  // namespace fcoll
