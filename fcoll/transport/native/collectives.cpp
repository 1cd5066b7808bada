// The collectives: what a rank puts into its slots, and what it takes from its peers'.
#include <immintrin.h>

#include <algorithm>
#include <chrono>

#include "core.h"
#include "segment.h"

namespace fcoll {

namespace {

// From here two passes over a share beat one over all parts.
constexpr size_t TWO_SHOT_BYTES = 16 * 1024;
constexpr int TWO_SHOT_RANKS = 4;
// From here on results are stored past the caches. Streaming an all-reduce of 4 MiB made no
// difference beyond the noise. Reading parts from their owner's memory instead (process_vm_readv)
// lost to the window: all_gather of 64 KiB 9.6 us instead of 5.7, of 4 MiB 740 instead of 590.
constexpr size_t STREAM_BYTES = 8 * 1024 * 1024;
// A rank's own part is copied past the caches from here on: an all_gather of 4 MiB in 600 to 870 us,
// without in 770 to 1,230; but an all_to_all whose own part is 2 MiB in 340 to 390, without in 280 to 380.
constexpr size_t STREAM_OWN_BYTES = 4 * 1024 * 1024;

// What is read by far cores is stored past the caches from here on (see copy_out).
constexpr size_t FAR_BYTES = 2 * 1024;

double now_us() {
  using namespace std::chrono;
  return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

bool two_passes(const Call& call, int n) {
  return call.kind == Kind::all_reduce && n >= TWO_SHOT_RANKS && !call.in_arena &&
         call.count * size_of(call.type) >= TWO_SHOT_BYTES;
}

// Results that would push what is in the caches out of them go past them.
void copy_result(void* to, const void* from, size_t bytes, size_t of, bool own = false) {
  bool large = of >= (own ? STREAM_OWN_BYTES : STREAM_BYTES);
  large ? copy_streaming(to, from, bytes) : copy(to, from, bytes);
}

void reduce_result(void* out, const void* const* parts, int n, size_t count, const Call& call) {
  bool large = call.count * size_of(call.type) >= STREAM_BYTES;
  (large ? reduce_streaming : reduce)(out, parts, n, count, call.type, call.op);
}

}  // namespace

// Copy to where the peers read. A far core has data sooner from memory than from this core's cache: an
// all-reduce of 8 KiB in 2 us instead of 5, of 64 KiB in 10 instead of 30, of 4 MiB in 600 instead of
// 2,300. A near core does not: 64 KiB in 11 instead of 5.
void Group::copy_out(void* to, const void* from, size_t bytes) {
  if (far_ <= 0 || bytes < FAR_BYTES) return copy(to, from, bytes);
  copy_streaming(to, from, bytes);
  _mm_sfence();  // before what says that it is there
}

size_t Group::per_slot(const Call& call) const {
  if (call.in_arena) return std::max<size_t>(1, call.count);
  size_t parts = call.kind == Kind::reduce_scatter ? n_ : 1;  // a slot has a piece for each rank
  return SLOT_BYTES / parts / 64 * 64 / size_of(call.type);
}

size_t Group::chunks(const Call& call) const {
  return std::max<size_t>(1, ceil_div(call.count, per_slot(call)));
}

// Publish one chunk of this rank's contribution.
void Group::put(const Pending& p, size_t chunk) {
  const Call& call = p.call;
  Slot* slot = claim(p.first + chunk, p.large && !p.keeps_own);
  if (call.in_arena)
    return publish(slot, p.first, call, *reinterpret_cast<const uint64_t*>(p.in));
  uint8_t* to = data(rank_, slot, p.large);
  size_t size = size_of(call.type), room = per_slot(call), at = chunk * room;
  size_t length = std::min(room, call.count - at);
  switch (call.kind) {
    case Kind::reduce_scatter:
      for (int r = 0; r < n_; r++)
        if (r != rank_ || p.keeps_own)
          copy_out(to + r * room * size, p.in + (r * call.count + at) * size, length * size);
      break;
    case Kind::broadcast:
      if (rank_ == call.root) copy_out(to, p.in + at, length);
      break;
    case Kind::barrier:
      break;
    default:
      copy_out(to, p.in + at * size, length * size);
  }
  publish(slot, p.first + chunk, call);
}

// Wait for the peers' parts of one chunk and make the result of them. This rank's own is read from
// its slot if the caller may have changed it since (p.in is null).
void Group::take(const Pending& p, size_t chunk) {
  const Call& call = p.call;
  uint64_t seq = p.first + chunk;
  if (call.in_arena) {
    for (int r = 0; r < n_; r++)
      if (r != rank_) reinterpret_cast<uint64_t*>(p.out)[r] = await(r, seq, call)->extra;
    return done(seq);
  }
  size_t size = size_of(call.type), room = per_slot(call), at = chunk * room;
  size_t length = std::min(room, call.count - at);
  auto part = [&](int r) -> const uint8_t* {
    return data(r, r == rank_ ? slot_of(segments_[r], seq) : await(r, seq, call), p.large);
  };
  const void* parts[MAX_RANKS];
  switch (call.kind) {
    case Kind::all_reduce:
      for (int r = 0; r < n_; r++) parts[r] = r == rank_ && p.in ? p.in + at * size : part(r);
      reduce_result(p.out + at * size, parts, n_, length, call);
      break;
    case Kind::reduce_scatter: {
      const uint8_t* own = p.in ? p.in + (rank_ * call.count + at) * size : nullptr;
      for (int r = 0; r < n_; r++)
        parts[r] = r == rank_ && own ? own : part(r) + rank_ * room * size;
      reduce_result(p.out + at * size, parts, n_, length, call);
      break;
    }
    case Kind::all_gather:
      for (int k = 0; k < n_; k++) {
        int r = (rank_ + k) % n_;
        uint8_t* to = p.out + r * call.count;
        if (r == rank_)
          copy_result(to + at, p.in ? p.in + at : part(r), length, call.count, true);
        else
          take_copy(r, p, chunk, to);
      }
      break;
    case Kind::broadcast:
      // all are asked once, by the root too: another may take itself for the root
      for (int r = 0; r < n_ && chunk == 0; r++)
        if (r != rank_ && r != call.root) await(r, seq, call);
      if (rank_ != call.root) take_copy(call.root, p, chunk, p.out);
      break;
    default:  // barrier
      for (int r = 0; r < n_; r++)
        if (r != rank_) await(r, seq, call);
  }
  done(seq);
  if (length * size >= FAR_BYTES) look_how_far(seq);
}

// One chunk of a peer's part, `to` being the place of its first.
void Group::take_copy(int peer, const Pending& p, size_t chunk, uint8_t* to) {
  const Slot* slot = await(peer, p.first + chunk, p.call);
  size_t room = per_slot(p.call), at = chunk * room;
  copy_result(to + at, data(peer, slot, p.large), std::min(room, p.call.count - at), p.call.count);
}

void Group::run(const Call& call, const void* in, void* out) {
  std::lock_guard lock(mutex_);
  enter();
  complete_all();
  auto from = static_cast<const uint8_t*>(in);
  auto to = static_cast<uint8_t*>(out);
  if (two_passes(call, n_)) return two_shot(from, to, call);
  size_t total = chunks(call);
  Pending p{seq_ + 1, seq_ + total, call, from, to};
  p.large = total > WINDOW;
  seq_ += total;
  put(p, 0);
  for (size_t i = 0; i < total; i++) {
    if (i + 1 < total) put(p, i + 1);  // while peers read this one
    take(p, i);
  }
  if (p.large) _mm_sfence();  // streaming stores are seen by all threads from here on
}

void Group::two_shot(const uint8_t* in, uint8_t* out, const Call& call) {
  size_t size = size_of(call.type);
  size_t share = SLOT_BYTES / n_ / 64 * 64 / size;  // of a chunk, a rank's
  size_t chunk = share * n_;
  for (size_t at = 0; at < call.count; at += chunk) {
    size_t total = std::min(chunk, call.count - at);
    size_t each = std::min(share, ceil_div(ceil_div(total, n_), 64 / size) * (64 / size));
    auto begin = [&](int r) { return std::min(r * each, total); };
    auto length = [&](int r) { return begin(r + 1) - begin(r); };
    const uint8_t* from = in + at * size;
    uint8_t* to = out + at * size;

    uint64_t parts = ++seq_, sums = ++seq_;
    Slot* slot = claim(parts);
    for (int r = 0; r < n_; r++)
      if (r != rank_)
        copy_out(slot->data + begin(r) * size, from + begin(r) * size, length(r) * size);
    publish(slot, parts, call);
    const void* sources[MAX_RANKS];
    size_t mine = begin(rank_) * size;
    for (int r = 0; r < n_; r++)
      sources[r] = (r == rank_ ? from : await(r, parts, call)->data) + mine;
    Slot* summed = claim(sums);
    bool past = far_ > 0 && length(rank_) * size >= FAR_BYTES;
    (past ? reduce_streaming : reduce)(summed->data, sources, n_, length(rank_), call.type, call.op);
    if (past) _mm_sfence();
    publish(summed, sums, call);
    for (int i = 0; i < n_; i++) {
      int r = (rank_ + i) % n_;
      const Slot* from_r = r == rank_ ? summed : await(r, sums, call);
      copy(to + begin(r) * size, from_r->data, length(r) * size);
    }
    done(sums);
    look_how_far(sums);
  }
}

void Group::all_reduce(const void* in, void* out, size_t count, Type type, Op op,
                       const Signature& s) {
  run(Call{Kind::all_reduce, type, op, 0, count}.signed_by(s), in, out);
}

void Group::all_gather(const void* in, void* out, size_t bytes, const Signature& s) {
  run(Call{Kind::all_gather, Type::bytes, Op::sum, 0, bytes}.signed_by(s), in, out);
}

void Group::reduce_scatter(const void* in, void* out, size_t count, Type type, Op op,
                           const Signature& s) {
  run(Call{Kind::reduce_scatter, type, op, 0, count}.signed_by(s), in, out);
}

void Group::broadcast(void* buf, size_t bytes, int root, const Signature& s) {
  run(Call{Kind::broadcast, Type::bytes, Op::sum, uint8_t(root), bytes}.signed_by(s), buf, buf);
}

void Group::barrier() { run({}, nullptr, nullptr); }

// What the ranks of an all_to_all have in common: where the parts begin.
struct Group::Exchange {
  Call call;
  uint64_t first;
  size_t head, piece;  // bytes of a slot: the sizes of the sender's parts; one part
  size_t from[MAX_RANKS + 1], to[MAX_RANKS + 1];  // where in the buffers
  // A slot has a place for each rank but its owner.
  size_t place(int of, int in) const { return head + (of - (of > in)) * piece; }
  size_t length(size_t bytes, size_t chunk) const {
    return bytes > chunk * piece ? std::min(piece, bytes - chunk * piece) : 0;
  }
};

void Group::all_to_all(const void* in, void* out, const size_t* in_bytes, const size_t* out_bytes,
                       size_t row_bytes, const Signature& s) {
  std::lock_guard lock(mutex_);
  enter();
  complete_all();
  Exchange x;
  x.call = Call{Kind::all_to_all, Type::bytes, Op::sum, 0, row_bytes}.signed_by(s);
  x.first = seq_ + 1;
  x.head = ceil_div(n_ * sizeof(size_t), 64) * 64;
  x.piece = (SLOT_BYTES - x.head) / std::max(1, n_ - 1) / 64 * 64;
  x.from[0] = x.to[0] = 0;
  size_t longest = 0;
  for (int r = 0; r < n_; r++) {
    x.from[r + 1] = x.from[r] + in_bytes[r], x.to[r + 1] = x.to[r] + out_bytes[r];
    if (r != rank_) longest = std::max(longest, in_bytes[r]);
  }
  auto from = static_cast<const uint8_t*>(in);
  auto to = static_cast<uint8_t*>(out);
  size_t chunks = std::max<size_t>(1, ceil_div(longest, x.piece));
  auto put = [&](size_t i) {
    Slot* slot = claim(x.first + i, i > 0 && chunks > WINDOW);  // the first: see data()
    uint8_t* room = data(rank_, slot, i > 0);
    copy(room, in_bytes, n_ * sizeof(size_t));
    for (int r = 0; r < n_; r++)
      if (r != rank_)
        copy_out(room + x.place(r, rank_), from + x.from[r] + i * x.piece, x.length(in_bytes[r], i));
    publish(slot, x.first + i, x.call, chunks);
  };
  put(0);
  copy_result(to + x.to[rank_], from + x.from[rank_], in_bytes[rank_], in_bytes[rank_], true);
  size_t sent = chunks, all = std::max(chunks, meet(x, out_bytes));
  seq_ += all;
  for (size_t i = 0; i < all; i++) {
    if (i + 1 < sent) put(i + 1);
    for (int k = 1; k < n_; k++) take_part((rank_ + k) % n_, x, i, to, out_bytes);
    done(x.first + i);
    if (longest >= FAR_BYTES) look_how_far(x.first + i);
  }
  if (x.to[n_] >= STREAM_OWN_BYTES) _mm_sfence();
}

// Compare what the peers send with what this rank expects. Only a sender knows how long its parts
// are: the result is the most chunks that any sends, so that all count the same.
size_t Group::meet(const Exchange& x, const size_t* out_bytes) {
  size_t most = 1;
  for (int r = 0; r < n_; r++) {
    if (r == rank_) continue;
    const Slot* slot = await(r, x.first, x.call);
    auto sizes = reinterpret_cast<const size_t*>(slot->data);
    most = std::max<size_t>(most, slot->extra);
    if (sizes[rank_] != out_bytes[r])
      fail(Error::mismatch, r, "all_to_all_single: rank " + std::to_string(r) + " sends " +
                                   std::to_string(sizes[rank_]) + " bytes to rank " +
                                   std::to_string(rank_) + ", whose output_splits expect " +
                                   std::to_string(out_bytes[r]));
  }
  return most;
}

void Group::take_part(int peer, const Exchange& x, size_t chunk, uint8_t* out,
                      const size_t* out_bytes) {
  uint8_t* to = out + x.to[peer];
  size_t bytes = out_bytes[peer];
  if (size_t length = x.length(bytes, chunk)) {
    const Slot* slot = await(peer, x.first + chunk, x.call);
    const uint8_t* from = data(peer, slot, chunk > 0) + x.place(rank_, peer);
    copy_result(to + chunk * x.piece, from, length, bytes);
  }
}

// -- the two halves apart ---------------------------------------------------------------------

uint64_t Group::start(const Call& call, const void* in, void* out, double patience_us) {
  size_t total = chunks(call);
  if (total > RING / 4 || two_passes(call, n_)) {
    run(call, in, out);
    return 0;
  }
  std::lock_guard lock(mutex_);
  enter();
  // Both sides keep at most half a ring unread, so neither waits for the other to read in order to
  // publish what the other waits for.
  while (!pending_.empty() && seq_ + total - pending_.front().first >= RING / 2) complete_oldest();
  auto from = static_cast<const uint8_t*>(in);
  Pending p{seq_ + 1, seq_ + total, call, from, static_cast<uint8_t*>(out)};
  p.keeps_own = true;
  p.large = total > WINDOW;  // a peer may use the window
  seq_ += total;
  for (size_t i = 0; i < total; i++) put(p, i);
  pending_.push_back(p);
  bool all = published_by_all(p);
  if (!all && patience_us > 0) {
    for (double until = now_us() + patience_us; !all && now_us() < until;)
      for (int i = 0; i < 16 && !(all = published_by_all(p)); i++) _mm_pause();
  }
  if (all) {
    complete_all();
    return 0;
  }
  pending_.back().in = nullptr;
  pending_.back().call.signature = nullptr;  // the caller's, as `in` is
  return seq_;
}

bool Group::published_by_all(const Pending& p) const {
  for (int r = 0; r < n_; r++) {
    if (r == rank_) continue;
    if (slot_of(segments_[r], p.last)->seq.load(std::memory_order_acquire) < p.last) return false;
  }
  return true;
}

void Group::finish(uint64_t ticket) {
  std::lock_guard lock(mutex_);
  bool complete = pending_.empty() || pending_.front().first > ticket;
  if (complete && broken_.empty()) return;
  enter();
  while (!pending_.empty() && pending_.front().first <= ticket) complete_oldest();
}

void Group::complete_oldest() {
  Pending p = pending_.front();  // it stays in the list until it is complete
  for (size_t i = 0; i <= p.last - p.first; i++) take(p, i);
  pending_.pop_front();
}

// -- data in arenas -------------------------------------------------------------------------------

uint64_t Group::announce(Call call, uint64_t mine, uint64_t* where, double patience_us) {
  call.in_arena = true;
  where[rank_] = mine;
  return start(call, &mine, where, patience_us);
}

void Group::meet(Call call, uint64_t mine, uint64_t* where) {
  call.in_arena = true;
  where[rank_] = mine;
  run(call, &mine, where);
}

}  // namespace fcoll
