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
#include <utility>

#include "segment.h"

namespace fcoll {

namespace {

// How long a wait spins before it yields, and yields before it sleeps. With more ranks than cores
// it yields at once: 4 ranks on 2 busy cores, 64 B: 2.6 to 4.1 us; 4.7 to 5.0 if it spins for 0.5 us
// before, 8.0 to 8.4 if for 2 us.
constexpr double SPIN_US = 60, YIELD_US = 1500;
constexpr long SLEEP_NS = 5'000'000;  // then look whether the peer lives

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

}  // namespace

std::string (*describe)(const Signature&) = nullptr;

Call Call::unpack(uint64_t p, uint64_t count) {
  return {Kind(p & 255), Type(p >> 8 & 255), Op(p >> 16 & 255), uint8_t(p >> 24 & 255), count,
          bool(p >> 32 & 1)};
}

std::string Call::show() const {
  bool reduces = kind == Kind::all_reduce || kind == Kind::reduce_scatter;
  std::string s = std::string(in_arena ? "compiled " : "") + KIND_NAMES[size_t(kind)] + "(";
  if (kind != Kind::barrier) s += std::to_string(count) + " " + TYPE_NAMES[size_t(type)];
  if (kind == Kind::all_to_all) s += " a row";
  if (reduces) s += std::string(", ") + OP_NAMES[size_t(op)];
  if (kind == Kind::broadcast) s += ", src=" + std::to_string(root);
  return s + ")";
}

// -- joining --------------------------------------------------------------------------------------

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
  beacons_.assign(n, 0);
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
  pids_ = pids;
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

// -- waiting --------------------------------------------------------------------------------------

void Group::wait(int peer, const std::atomic<uint64_t>& word, uint64_t least) {
  auto ready = [&] { return word.load(std::memory_order_acquire) >= least; };
  if (ready()) return;
  double start = now_us(), spin_until = start + (crowded_ ? 0 : SPIN_US);
  while (now_us() < spin_until) {
    for (int i = 0; i < 32; i++) {
      if (ready()) return;
      _mm_pause();
    }
  }
  double yield_until = spin_until + YIELD_US;
  do {
    for (int i = 0; i < 4; i++) {
      if (ready()) return;
      sched_yield();
    }
  } while (now_us() < yield_until);
  sleep(peer, word, least, start);
}

// The rest of a long wait: asleep, but for a look at the peers now and then.
void Group::sleep(int peer, const std::atomic<uint64_t>& word, uint64_t least, double start_us) {
  Segment* owner = segments_[peer];
  owner->sleepers.fetch_add(1);
  try {
    for (uint64_t now; (now = word.load(std::memory_order_acquire)) < least;) {
      // The publisher does not fence before it looks for sleepers, so a wake can be missed: the
      // sleep is short.
      timespec timeout{0, SLEEP_NS};
      futex(&word, FUTEX_WAIT, uint32_t(now), &timeout);  // compares the low half
      if (word.load(std::memory_order_acquire) < least)
        look_at_peer(peer, (now_us() - start_us) * 1e-6);
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
void Group::look_how_far(uint64_t seq) {
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
#ifdef FCOLL_TEST_THREADS  // both ways in turn
  far_ = 0;
  far = seq / LOOK_EVERY % 2;
#endif
  far_ = std::clamp(far_ + (far ? 1 : -1), -SURE, SURE);
}

// -- publish and consume --------------------------------------------------------------------------

namespace {
void wake(Segment* own, const void* word) {
  if (own->sleepers.load(std::memory_order_relaxed)) futex(word, FUTEX_WAKE, INT32_MAX, nullptr);
}
}  // namespace

Slot* Group::claim(uint64_t seq, bool in_window) {
  if (seq > free_until_) {
    until_read(seq - RING);
    uint64_t least = UINT64_MAX;
    for (int r = 0; r < n_; r++)
      if (r != rank_) least = std::min(least, segments_[r]->done.load(std::memory_order_acquire));
    free_until_ = least + RING;
  }
  Slot* slot = slot_of(segments_[rank_], seq);
  slot->at = 0;
  if (in_window) {
    size_t place = seq % WINDOW;
    until_read(window_[place]);
    window_[place] = seq;
    slot->at = WINDOW_AT + place * SLOT_BYTES;
  }
  return slot;
}

// `large`: only then look where they are. The address of small data must not depend on the header:
// the processor fetches both at once then, which is 0.25 us instead of 0.42 for 64 B.
uint8_t* Group::data(int rank, const Slot* slot, bool large) const {
  if (!large || !slot->at) return const_cast<uint8_t*>(slot->data);
  return reinterpret_cast<uint8_t*>(segments_[rank]) + slot->at;
}

// The peers have read what this rank published up to seq.
void Group::until_read(uint64_t seq) {
  for (int r = 0; r < n_; r++) {
    if (r != rank_) wait(r, segments_[r]->done, seq);
  }
}

void Group::publish(Slot* slot, uint64_t seq, const Call& call, uint64_t extra) {
  slot->packed = call.packed();
  slot->count = call.count;
  slot->extra = extra;
  slot->digest = call.digest;
  if (call.signature) segments_[rank_]->signatures[seq % RING] = *call.signature;
  if (seq % LOOK_EVERY == 0) segments_[rank_]->beacon.store(seq, std::memory_order_relaxed);
  slot->seq.store(seq, std::memory_order_release);
  wake(segments_[rank_], &slot->seq);
}

const Slot* Group::await(int peer, uint64_t seq, const Call& call) {
  const Slot* slot = slot_of(segments_[peer], seq);
  wait(peer, slot->seq, seq);
  if (slot->packed != call.packed() || slot->count != call.count || slot->digest != call.digest) {
    Call other = Call::unpack(slot->packed, slot->count);
    other.digest = slot->digest;
    fail(Error::mismatch, peer, "rank " + std::to_string(rank_) + " calls " +
                                    shown(rank_, seq, call) + " where rank " +
                                    std::to_string(peer) + " calls " + shown(peer, seq, other));
  }
  return slot;
}

// A call in full, if its signature is the one in the slot's place.
std::string Group::shown(int rank, uint64_t seq, const Call& call) const {
  const Signature& s = segments_[rank]->signatures[seq % RING];
  if (!describe || !call.digest || s.digest != call.digest) return call.show();
  return (call.in_arena ? "compiled " : "") + describe(s);
}

void Group::done(uint64_t seq) {
  Segment* own = segments_[rank_];
  own->done.store(seq, std::memory_order_release);
  wake(own, &own->done);
}

double Group::round_trip_ns(int peer) {
  std::lock_guard lock(mutex_);
  enter();
  constexpr int rounds = 2000;
  std::vector<double> times(rounds);
  auto &mine = segments_[rank_]->ping, &theirs = segments_[peer]->ping;
  uint64_t base = mine.load();
  bool first = rank_ < peer, crowded = std::exchange(crowded_, false);  // spin: only these two wait
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

}  // namespace fcoll
