#include "core.h"

#include <fcntl.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>

namespace fcoll {

// -- what is in shared memory ---------------------------------------------------------------------

struct Slot {
  std::atomic<uint64_t> seq;
  uint64_t packed, count, extra;
  uint8_t pad[32];
  uint8_t data[];  // on a cache line of its own, for streaming stores
};

enum State : uint32_t { alive, broken, left };

struct Segment {
  uint64_t magic, token;
  alignas(64) std::atomic<uint64_t> done;  // this rank has read all parts up to here
  alignas(64) std::atomic<uint32_t> sleepers;  // peers in a futex wait on a word of this segment
  alignas(64) std::atomic<uint32_t> state;
  alignas(64) std::atomic<uint64_t> ping;
  int error_kind, error_rank;  // why this rank's state is broken
  char error[512];
};

namespace {

constexpr uint64_t MAGIC = 0x66636f6c6c303031;
constexpr size_t CONTROL = 4096;
constexpr size_t STRIDE = (sizeof(Slot) + SLOT_BYTES + 4095) / 4096 * 4096;
constexpr size_t SEGMENT_BYTES = CONTROL + RING * STRIDE;
static_assert(sizeof(Segment) <= CONTROL && sizeof(Slot) == 64);

// How long a wait spins before it yields, and yields before it sleeps.
constexpr double SPIN_US = 60, SPIN_CROWDED_US = 0.5, YIELD_US = 1500;
constexpr long SLEEP_NS = 5'000'000;  // then look whether the peer lives
// From here two passes over a share beat one over all parts.
constexpr size_t TWO_SHOT_BYTES = 16 * 1024;
constexpr int TWO_SHOT_RANKS = 4;

std::atomic<int> fork_generation{0};

void note_forks() {
  static bool once = (pthread_atfork(nullptr, nullptr, [] { fork_generation++; }), true);
  (void)once;
}

double now_us() {
  using namespace std::chrono;
  return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

Segment* map(int fd) {
  void* at = mmap(nullptr, SEGMENT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  return at == MAP_FAILED ? nullptr : static_cast<Segment*>(at);
}

void futex(const void* word, int op, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, word, op, value, timeout, nullptr, 0);
}

#ifdef FCOLL_TEST_THREADS
std::map<uint64_t, Segment*> one_mapping;
#endif

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

}  // namespace

Call Call::unpack(uint64_t p, uint64_t count) {
  return {Kind(p & 255), Type(p >> 8 & 255), Op(p >> 16 & 255), uint8_t(p >> 24 & 255), count};
}

std::string Call::show() const {
  static const char* kinds[] = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor",
                                "all_to_all_single", "broadcast", "barrier"};
  static const char* ops[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
  static const char* types[] = {"float32", "float64", "float16", "bfloat16", "int8",
                                "int16", "int32", "int64", "uint8", "complex64",
                                "complex128", "bool", "bytes"};
  bool reduces = kind == Kind::all_reduce || kind == Kind::reduce_scatter;
  std::string s = std::string(kinds[size_t(kind)]) + "(";
  if (kind != Kind::barrier) s += std::to_string(count) + " " + types[size_t(type)];
  if (kind == Kind::all_to_all) s += " a row";
  if (reduces) s += std::string(", ") + ops[size_t(op)];
  if (kind == Kind::broadcast) s += ", src=" + std::to_string(root);
  return s + ")";
}

// -- joining ----------------------------------------------------------------------------------------

Group::Group(int rank, int n, double timeout_s) : rank_(rank), n_(n), timeout_s_(timeout_s) {
  note_forks();
  born_ = fork_generation;
  cpu_set_t cpus;
  int cores = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
  // pinned to one core each, ranks still have the machine's cores between them
  cores = std::max<int>(cores, sysconf(_SC_NPROCESSORS_ONLN));
  crowded_ = n > cores;
  segments_.assign(n, nullptr);
  pidfds_.assign(n, -1);
  fd_ = memfd_create("fcoll", MFD_CLOEXEC);
  if (fd_ < 0 || ftruncate(fd_, SEGMENT_BYTES) != 0) return;  // join says so
  if (getrandom(&token_, sizeof token_, 0) != sizeof token_) return;
  Segment* own = map(fd_);
  if (!own) return;
  own->magic = MAGIC;
  own->token = token_;
  segments_[rank] = own;
#ifdef FCOLL_TEST_THREADS
  one_mapping[token_] = own;
#endif
}

Group::~Group() {
  bool same_process = born_ == fork_generation;
  for (int r = 0; r < n_; r++) {
    if (!segments_[r]) continue;
    uint32_t was = alive;  // a rank that stopped for an error goes on saying which
    if (r == rank_ && same_process) segments_[r]->state.compare_exchange_strong(was, left);
#ifdef FCOLL_TEST_THREADS
    continue;
#endif
    munmap(segments_[r], SEGMENT_BYTES);
  }
  for (int fd : pidfds_)
    if (fd >= 0) close(fd);
  if (fd_ >= 0) close(fd_);
}

std::string Group::join(const std::vector<int>& pids, const std::vector<int>& fds,
                        const std::vector<uint64_t>& tokens) {
  if (!segments_[rank_]) return "no shared memory could be made (memfd_create, mmap)";
  for (int r = 0; r < n_; r++) {
    if (r == rank_) continue;
    std::string who = "rank " + std::to_string(r);
    // Opened before the token is read: what it watches is the process that holds the token.
    pidfds_[r] = syscall(SYS_pidfd_open, pids[r], 0);
    if (pidfds_[r] < 0) return who + " is no process of this PID namespace";
    std::string path = "/proc/" + std::to_string(pids[r]) + "/fd/" + std::to_string(fds[r]);
    int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return who + "'s memory cannot be opened (another user or container?)";
    struct stat about;
    bool right_size = fstat(fd, &about) == 0 && size_t(about.st_size) == SEGMENT_BYTES;
    Segment* peer = right_size ? map(fd) : nullptr;
    close(fd);
    if (!peer) return who + "'s memory cannot be mapped";
#ifdef FCOLL_TEST_THREADS  // ranks are threads that must see one mapping (tests/native)
    munmap(peer, SEGMENT_BYTES);
    peer = one_mapping[tokens[r]];
#endif
    segments_[r] = peer;
    if (peer->magic != MAGIC || peer->token != tokens[r])
      return who + "'s memory is not what it said (another container?)";
  }
  return "";
}

// -- waiting ------------------------------------------------------------------------------------------

template <class Ready>
void Group::wait(int peer, const void* word, Ready ready) {
  if (ready()) return;
  double start = now_us(), spin_until = start + (crowded_ ? SPIN_CROWDED_US : SPIN_US);
  do {
    for (int i = 0; i < 32; i++) {
      if (ready()) return;
      _mm_pause();
    }
  } while (now_us() < spin_until);
  double yield_until = spin_until + YIELD_US;
  do {
    for (int i = 0; i < 4; i++) {
      if (ready()) return;
      sched_yield();
    }
  } while (now_us() < yield_until);
  Segment* owner = segments_[peer];
  owner->sleepers.fetch_add(1);
  try {
    while (!ready()) {
      // its low half: what the futex compares
      uint32_t value = __atomic_load_n(static_cast<const uint64_t*>(word), __ATOMIC_ACQUIRE);
      if (ready()) break;
      // The publisher does not fence before it looks for sleepers, so a wake can be missed: the
      // sleep is short.
      timespec timeout{0, SLEEP_NS};
      futex(word, FUTEX_WAIT, value, &timeout);
      if (!ready()) look_at_peer(peer, (now_us() - start) * 1e-6);
    }
  } catch (...) {
    owner->sleepers.fetch_sub(1);
    throw;
  }
  owner->sleepers.fetch_sub(1);
}

void Group::look_at_peer(int peer, double waited_s) {
  for (int r = 0; r < n_; r++) {  // any of them: the peer may itself be waiting for a dead one
    if (r == rank_) continue;
    std::string who = "rank " + std::to_string(r);
    uint32_t state = segments_[r]->state.load(std::memory_order_acquire);
    const Segment* s = segments_[r];
    if (state == broken) fail(Error::What(s->error_kind), s->error_rank, s->error);
    pollfd p{pidfds_[r], POLLIN, 0};
    if (poll(&p, 1, 0) > 0) fail(Error::peer_died, r, who + " died");
    if (state == left && r == peer)
      fail(Error::peer_died, r, who + " left the group (it destroyed it, or is exiting)");
  }
  if (waited_s > timeout_s_)
    fail(Error::timeout, peer, "waited " + std::to_string(int(waited_s)) + " s for rank " +
                                   std::to_string(peer) + ", which has not made the call");
}

void Group::fail(Error::What what, int peer, const std::string& message) {
  broken_ = message;
  pending_.clear();
  Segment* own = segments_[rank_];
  own->error_kind = what;
  own->error_rank = peer;
  std::strncpy(own->error, message.c_str(), sizeof own->error - 1);
  own->state.store(broken, std::memory_order_release);
  throw Error(what, peer, message);
}

void Group::enter() {
  if (born_ != fork_generation)
    throw Error(Error::forked, -1, "the process has been forked since the group was made");
  if (!broken_.empty())
    throw Error(Error::closed, -1, "the group was closed by an earlier error: " + broken_);
}

// -- publish and consume --------------------------------------------------------------------------------

namespace {
Slot* slot_of(Segment* segment, uint64_t seq) {
  auto base = reinterpret_cast<uint8_t*>(segment);
  return reinterpret_cast<Slot*>(base + CONTROL + seq % RING * STRIDE);
}

void wake(Segment* own, const void* word) {
  if (own->sleepers.load(std::memory_order_relaxed)) futex(word, FUTEX_WAKE, INT32_MAX, nullptr);
}
}  // namespace

Slot* Group::claim(uint64_t seq) {
  if (seq > free_until_) {
    uint64_t least = UINT64_MAX;
    for (int r = 0; r < n_; r++) {
      if (r == rank_) continue;
      auto& read = segments_[r]->done;
      wait(r, &read, [&] { return read.load(std::memory_order_acquire) + RING >= seq; });
      least = std::min(least, read.load(std::memory_order_acquire));
    }
    free_until_ = least + RING;
  }
  return slot_of(segments_[rank_], seq);
}

void Group::publish(Slot* slot, uint64_t seq, const Call& call, uint64_t extra) {
  slot->packed = call.packed();
  slot->count = call.count;
  slot->extra = extra;
  slot->seq.store(seq, std::memory_order_release);
  wake(segments_[rank_], &slot->seq);
}

const Slot* Group::await(int peer, uint64_t seq, const Call& call) {
  const Slot* slot = slot_of(segments_[peer], seq);
  wait(peer, &slot->seq, [&] { return slot->seq.load(std::memory_order_acquire) >= seq; });
  if (slot->packed != call.packed() || slot->count != call.count) {
    Call other = Call::unpack(slot->packed, slot->count);
    fail(Error::mismatch, peer, "rank " + std::to_string(rank_) + " calls " + call.show() +
                                    " where rank " + std::to_string(peer) + " calls " +
                                    other.show());
  }
  return slot;
}

void Group::done(uint64_t seq) {
  Segment* own = segments_[rank_];
  own->done.store(seq, std::memory_order_release);
  wake(own, &own->done);
}

// -- collectives: what a rank puts into a slot, and what it takes from its peers' ------------------

size_t Group::per_slot(const Call& call) const {
  size_t parts = call.kind == Kind::reduce_scatter ? n_ : 1;  // a slot has a piece for each rank
  return SLOT_BYTES / parts / 64 * 64 / size_of(call.type);
}

// Publish elements [at, at + per_slot) of this rank's contribution.
void Group::put(uint64_t seq, size_t at, const Call& call, const uint8_t* in) {
  Slot* slot = claim(seq);
  size_t size = size_of(call.type), room = per_slot(call);
  size_t length = std::min(room, call.count - at);
  switch (call.kind) {
    case Kind::reduce_scatter:
      for (int r = 0; r < n_; r++)
        copy(slot->data + r * room * size, in + (r * call.count + at) * size, length * size);
      break;
    case Kind::broadcast:
      if (rank_ == call.root) copy(slot->data, in + at, length);
      break;
    case Kind::barrier:
      break;
    default:
      copy(slot->data, in + at * size, length * size);
  }
  publish(slot, seq, call);
}

// Wait for the peers' elements [at, at + per_slot) and make the result of them. `in` is this rank's
// contribution, or null if it is to be read from its slot, since the caller may have changed it.
void Group::take(uint64_t seq, size_t at, const Call& call, const uint8_t* in, uint8_t* out) {
  size_t size = size_of(call.type), room = per_slot(call);
  size_t length = std::min(room, call.count - at);
  const uint8_t* own = slot_of(segments_[rank_], seq)->data;
  const void* parts[MAX_RANKS];
  switch (call.kind) {
    case Kind::all_reduce:
      if (in) own = in + at * size;
      for (int r = 0; r < n_; r++) parts[r] = r == rank_ ? own : await(r, seq, call)->data;
      reduce(out + at * size, parts, n_, length, call.type, call.op);
      break;
    case Kind::reduce_scatter: {
      size_t mine = rank_ * room * size;
      own = in ? in + (rank_ * call.count + at) * size : own + mine;
      for (int r = 0; r < n_; r++) parts[r] = r == rank_ ? own : await(r, seq, call)->data + mine;
      reduce(out + at * size, parts, n_, length, call.type, call.op);
      break;
    }
    case Kind::all_gather:
      for (int k = 0; k < n_; k++) {
        int r = (rank_ + k) % n_;
        const uint8_t* from = r != rank_ ? await(r, seq, call)->data : in ? in + at : own;
        copy(out + r * call.count + at, from, length);
      }
      break;
    case Kind::broadcast:
      if (rank_ != call.root) copy(out + at, await(call.root, seq, call)->data, length);
      break;
    default:  // barrier
      for (int r = 0; r < n_; r++)
        if (r != rank_) await(r, seq, call);
  }
  done(seq);
}

void Group::run(const Call& call, const void* in, void* out) {
  std::lock_guard lock(mutex_);
  enter();
  complete_all();
  auto from = static_cast<const uint8_t*>(in);
  auto to = static_cast<uint8_t*>(out);
  size_t bytes = call.count * size_of(call.type);
  if (call.kind == Kind::all_reduce && n_ >= TWO_SHOT_RANKS && bytes >= TWO_SHOT_BYTES)
    return two_shot(from, to, call);
  size_t room = per_slot(call), chunks = std::max<size_t>(1, ceil_div(call.count, room));
  uint64_t first = seq_ + 1;
  seq_ += chunks;
  put(first, 0, call, from);
  for (size_t i = 0; i < chunks; i++) {
    if (i + 1 < chunks) put(first + i + 1, (i + 1) * room, call, from);  // while peers read this one
    take(first + i, i * room, call, from, to);
  }
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
      if (r != rank_) copy(slot->data + begin(r) * size, from + begin(r) * size, length(r) * size);
    publish(slot, parts, call);
    const void* sources[MAX_RANKS];
    size_t mine = begin(rank_) * size;
    for (int r = 0; r < n_; r++)
      sources[r] = (r == rank_ ? from : await(r, parts, call)->data) + mine;
    Slot* summed = claim(sums);
    reduce(summed->data, sources, n_, length(rank_), call.type, call.op);
    publish(summed, sums, call);
    for (int i = 0; i < n_; i++) {
      int r = (rank_ + i) % n_;
      const Slot* from_r = r == rank_ ? summed : await(r, sums, call);
      copy(to + begin(r) * size, from_r->data, length(r) * size);
    }
    done(sums);
  }
}

void Group::all_reduce(const void* in, void* out, size_t count, Type type, Op op) {
  run({Kind::all_reduce, type, op, 0, count}, in, out);
}

void Group::all_gather(const void* in, void* out, size_t bytes) {
  run({Kind::all_gather, Type::bytes, Op::sum, 0, bytes}, in, out);
}

void Group::reduce_scatter(const void* in, void* out, size_t count, Type type, Op op) {
  run({Kind::reduce_scatter, type, op, 0, count}, in, out);
}

void Group::broadcast(void* buf, size_t bytes, int root) {
  run({Kind::broadcast, Type::bytes, Op::sum, uint8_t(root), bytes}, buf, buf);
}

void Group::barrier() { run({}, nullptr, nullptr); }

void Group::all_to_all(const void* in, void* out, const size_t* in_bytes, const size_t* out_bytes,
                       size_t row_bytes) {
  std::lock_guard lock(mutex_);
  enter();
  complete_all();
  Call call{Kind::all_to_all, Type::bytes, Op::sum, 0, row_bytes};
  // A slot begins with the sizes of the sender's parts, for the receivers to compare with theirs.
  size_t head = ceil_div(n_ * sizeof(size_t), 64) * 64;
  size_t piece = (SLOT_BYTES - head) / n_ / 64 * 64;
  std::vector<const uint8_t*> from(n_);
  std::vector<uint8_t*> to(n_);
  auto f = static_cast<const uint8_t*>(in);
  auto t = static_cast<uint8_t*>(out);
  size_t longest = 0;
  for (int r = 0; r < n_; r++) {
    from[r] = f, to[r] = t;
    f += in_bytes[r], t += out_bytes[r];
    if (r != rank_) longest = std::max(longest, in_bytes[r]);
  }
  auto length = [&](size_t bytes, size_t i) {
    return bytes > i * piece ? std::min(piece, bytes - i * piece) : 0;
  };
  uint64_t first = seq_ + 1;
  auto start = [&](size_t i) {
    Slot* slot = claim(first + i);
    copy(slot->data, in_bytes, n_ * sizeof(size_t));
    for (int r = 0; r < n_; r++)
      if (r != rank_)
        copy(slot->data + head + r * piece, from[r] + i * piece, length(in_bytes[r], i));
    publish(slot, first + i, call, std::max<size_t>(1, ceil_div(longest, piece)));
  };
  start(0);
  copy(to[rank_], from[rank_], in_bytes[rank_]);
  // Only the sender knows how long a part is: all go on until the longest of all has arrived.
  size_t chunks = std::max<size_t>(1, ceil_div(longest, piece));
  for (int r = 0; r < n_; r++) {
    if (r == rank_) continue;
    const Slot* slot = await(r, first, call);
    chunks = std::max<size_t>(chunks, slot->extra);
    size_t sent = reinterpret_cast<const size_t*>(slot->data)[rank_];
    if (sent != out_bytes[r])
      fail(Error::mismatch, r, "all_to_all_single: rank " + std::to_string(r) + " sends " +
                                   std::to_string(sent) + " bytes to rank " +
                                   std::to_string(rank_) + ", whose output_splits expect " +
                                   std::to_string(out_bytes[r]));
  }
  seq_ += chunks;
  for (size_t i = 0; i < chunks; i++) {
    if (i + 1 < chunks) start(i + 1);
    for (int k = 1; k < n_; k++) {
      int r = (rank_ + k) % n_;
      const Slot* slot = await(r, first + i, call);
      copy(to[r] + i * piece, slot->data + head + rank_ * piece, length(out_bytes[r], i));
    }
    done(first + i);
  }
}

// -- the two halves apart -------------------------------------------------------------------------------

uint64_t Group::start(const Call& call, const void* in, void* out, double patience_us) {
  size_t bytes = call.count * size_of(call.type), room = per_slot(call);
  size_t chunks = std::max<size_t>(1, ceil_div(call.count, room));
  bool two_passes = call.kind == Kind::all_reduce && n_ >= TWO_SHOT_RANKS && bytes >= TWO_SHOT_BYTES;
  if (chunks > RING / 4 || two_passes) {
    run(call, in, out);
    return 0;
  }
  std::lock_guard lock(mutex_);
  enter();
  // Both sides keep at most half a ring unread, so neither waits for the other to read in order to
  // publish what the other waits for.
  while (!pending_.empty() && seq_ + chunks - pending_.front().first >= RING / 2) complete_oldest();
  auto from = static_cast<const uint8_t*>(in);
  uint64_t first = seq_ + 1;
  seq_ += chunks;
  for (size_t i = 0; i < chunks; i++) put(first + i, i * room, call, from);
  pending_.push_back({first, seq_, call, from, static_cast<uint8_t*>(out)});
  bool all = published_by_all(pending_.back());
  if (!all && patience_us > 0) {
    for (double until = now_us() + patience_us; !all && now_us() < until;)
      for (int i = 0; i < 16 && !(all = published_by_all(pending_.back())); i++) _mm_pause();
  }
  if (all) {
    complete_all();
    return 0;
  }
  pending_.back().in = nullptr;
  return seq_;
}

bool Group::published_by_all(const Pending& p) const {
  for (int r = 0; r < n_; r++) {
    bool needed = r != rank_ && (p.call.kind != Kind::broadcast || r == p.call.root);
    if (needed && slot_of(segments_[r], p.last)->seq.load(std::memory_order_acquire) < p.last)
      return false;
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
  for (uint64_t seq = p.first; seq <= p.last; seq++)
    take(seq, (seq - p.first) * per_slot(p.call), p.call, p.in, p.out);
  pending_.pop_front();
}

double Group::round_trip_ns(int peer) {
  std::lock_guard lock(mutex_);
  enter();
  constexpr int rounds = 2000;
  std::vector<double> times(rounds);
  auto &mine = segments_[rank_]->ping, &theirs = segments_[peer]->ping;
  uint64_t base = mine.load();
  bool first = rank_ < peer;
  for (int i = 1; i <= rounds; i++) {
    double start = now_us();
    if (first) mine.store(base + i, std::memory_order_release);
    wait(peer, &theirs, [&] { return theirs.load(std::memory_order_acquire) >= base + i; });
    if (!first) mine.store(base + i, std::memory_order_release);
    times[i - 1] = (now_us() - start) * 1e3;
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[rounds / 2];
}

}  // namespace fcoll
