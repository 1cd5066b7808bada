// all_to_all on a ring: parts of different sizes, which only their senders know.
#include <immintrin.h>

#include <algorithm>

#include "collectives.h"
#include "kernels.h"

namespace fcoll {

namespace {

// What the ranks of an all_to_all have in common: where the parts begin.
struct Exchange {
  const Call& call;
  int rank, n;
  uint64_t first;
  size_t head, piece;  // bytes of a slot: the sizes of the sender's and the receiver's parts; one part
  size_t from[MAX_RANKS + 1] = {}, to[MAX_RANKS + 1] = {};  // where in the buffers
  size_t longest = 0;  // of the parts that this rank sends

  Exchange(const Call& call, const Ring& ring, const size_t* in_bytes, const size_t* out_bytes)
      : call(call), rank(ring.rank()), n(ring.size()), first(ring.last_number() + 1) {
    head = ceil_div(2 * n * sizeof(size_t), 64) * 64;
    piece = (SLOT_BYTES - head) / std::max(1, n - 1) / 64 * 64;
    for (int r = 0; r < n; r++) {
      from[r + 1] = from[r] + in_bytes[r], to[r + 1] = to[r] + out_bytes[r];
      if (r != rank) longest = std::max(longest, in_bytes[r]);
    }
  }
  // A slot has a place for each rank but its owner.
  size_t place(int of, int in) const { return head + (of - (of > in)) * piece; }
  size_t length(size_t bytes, size_t chunk) const {
    return bytes > chunk * piece ? std::min(piece, bytes - chunk * piece) : 0;
  }
  size_t chunks() const { return std::max<size_t>(1, ceil_div(longest, piece)); }
};

void publish_chunk(Ring& ring, const Exchange& x, size_t chunk, const uint8_t* in,
                   const size_t* in_bytes, const size_t* out_bytes) {
  size_t chunks = x.chunks();
  Slot* slot = ring.claim(x.first + chunk, chunk > 0 && chunks > WINDOW);  // the first: see data()
  uint8_t* room = ring.data(x.rank, slot, chunk > 0);
  if (chunk == 0) {
    copy(room, in_bytes, x.n * sizeof(size_t));
    copy(room + x.n * sizeof(size_t), out_bytes, x.n * sizeof(size_t));
  }
  for (int r = 0; r < x.n; r++)
    if (r != x.rank)
      ring.copy_out(room + x.place(r, x.rank), in + x.from[r] + chunk * x.piece,
                    x.length(in_bytes[r], chunk));
  ring.publish(slot, x.first + chunk, x.call, chunks);
}

// Compares what each rank sends with what its receiver expects. All ranks see the sizes of all, so
// that all raise, or none. Only a sender knows how long its parts are: the result is the most chunks
// that any sends, so that all count the same.
size_t agree_on_chunks(Ring& ring, const Exchange& x, const size_t* in_bytes,
                       const size_t* out_bytes) {
  size_t most = x.chunks();
  const size_t *sent[MAX_RANKS], *expected[MAX_RANKS];
  for (int r = 0; r < x.n; r++) {
    if (r == x.rank) {
      sent[r] = in_bytes, expected[r] = out_bytes;
      continue;
    }
    const Slot* slot = ring.await(r, x.first, x.call);
    sent[r] = reinterpret_cast<const size_t*>(slot->data), expected[r] = sent[r] + x.n;
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
  if (size_t length = x.length(bytes, chunk)) {
    const Slot* slot = ring.await(peer, x.first + chunk, x.call);
    const uint8_t* from = ring.data(peer, slot, chunk > 0) + x.place(x.rank, peer);
    copy_result(to + chunk * x.piece, from, length, bytes);
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
  size_t sent = x.chunks(), all = agree_on_chunks(ring, x, in_bytes, out_bytes);
  ring.take_numbers(all);
  ring.expect(x.first + all - 1, call);
  for (size_t i = 0; i < all; i++) {
    if (i + 1 < sent) publish_chunk(ring, x, i + 1, in, in_bytes, out_bytes);
    for (int k = 1; k < n; k++) take_part(ring, (rank + k) % n, x, i, out, out_bytes);
    ring.done(x.first + i);
    if (x.longest >= FAR_BYTES) ring.look_how_far(x.first + i);
  }
  if (x.to[n] >= STREAM_OWN_BYTES) _mm_sfence();
}

}  // namespace fcoll
