#include "peers.h"

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
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace fcoll {
namespace {

constexpr uint64_t MAGIC = 0x66636f6c6c73796d;
constexpr char NAME[] = "fcoll-symm";
enum State : uint32_t { joining, joined, refused };
constexpr int OWN_CHANNEL = -1;  // of enter() and sync()

// How long a wait spins before it yields, and yields before it sleeps.
constexpr double SPIN_MS = 0.06, SPIN_CROWDED_MS = 0.0005, YIELD_MS = 1.5;
constexpr long SLEEP_NS = 5'000'000;  // then look whether the peer lives

size_t round_up(size_t a, size_t to) { return (a + to - 1) / to * to; }

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("fcoll: symmetric memory: " + what);
}

[[noreturn]] void fail(const std::string& what, int error) {
  fail(what + ": " + std::strerror(error));
}

std::string name_of(int rank) { return "rank " + std::to_string(rank); }

void futex(const void* word, int op, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, word, op, value, timeout, nullptr, 0);
}

// Returns once ready() is true. look(waited_ms) throws if that will not come.
template <class Ready, class Look>
void wait(const std::atomic<uint32_t>& word, Header* owner, bool crowded, Ready ready, Look look) {
  if (ready()) return;
  double start = now_ms(), spin_until = start + (crowded ? SPIN_CROWDED_MS : SPIN_MS);
  do {
    for (int i = 0; i < 32; i++) {
      if (ready()) return;
      _mm_pause();
    }
  } while (now_ms() < spin_until);
  double yield_until = spin_until + YIELD_MS;
  do {
    if (ready()) return;
    sched_yield();
  } while (now_ms() < yield_until);
  struct Sleeper {  // counted, so that who sets the word need not call the kernel for nobody
    Header* in;
    explicit Sleeper(Header* in) : in(in) { in->sleepers.fetch_add(1); }
    ~Sleeper() { in->sleepers.fetch_sub(1); }
  } sleeper(owner);
  for (;;) {
    uint32_t value = word.load();
    if (ready()) return;
    // Not for long: the word may also be set by a kernel of the user's, which wakes nobody.
    timespec timeout{0, SLEEP_NS};
    futex(&word, FUTEX_WAIT, value, &timeout);
    if (ready()) return;
    look(now_ms() - start);
  }
}

void wake(const std::atomic<uint32_t>& word, Header* owner) {
  if (owner->sleepers.load()) futex(&word, FUTEX_WAKE, INT32_MAX, nullptr);
}

bool exchange(std::atomic<uint32_t>& word, uint32_t from, uint32_t to) {
  // Looked at first: a failing compare-and-swap takes the cache line from the peer all the same.
  return word.load(std::memory_order_relaxed) == from && word.compare_exchange_strong(from, to);
}

std::atomic<int> forks{0};

}  // namespace

int fork_count() {
  static bool once = (pthread_atfork(nullptr, nullptr, [] { forks++; }), true);
  (void)once;
  return forks;
}

// -- memory ---------------------------------------------------------------------------------------

Memory::Memory(size_t bytes) : bytes_(bytes) {
  std::string wish = "cannot allocate " + std::to_string(bytes) + " bytes";
  if (bytes > size_t(INT64_MAX) - 2 * PAGE) fail(wish);
  uint64_t token;
  if (getrandom(&token, sizeof token, 0) != sizeof token) fail("getrandom", errno);
  fd_ = memfd_create(NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0) fail(wish, errno);
  // Sealed: a page that a peer could cut off would be a SIGBUS here.
  if (ftruncate(fd_, length()) != 0 ||
      fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    int why = errno;
    close_fd();
    fail(wish, why);
  }
  map();
  header()->magic = MAGIC;
  header()->token = token;
  header()->bytes = bytes;
}

Memory::Memory(const Address& at) : bytes_(at.bytes) {
  std::string path = "/proc/" + std::to_string(at.pid) + "/fd/" + std::to_string(at.fd);
  std::string other = path + " is not the peer's memory: is it in another container or host?";
  // Not opened blindly: in another container it may be anybody's, and opening some has effects.
  char target[64] = {};
  if (readlink(path.c_str(), target, sizeof target - 1) < 0) fail("cannot read " + path, errno);
  if (std::string(target).rfind(std::string("/memfd:") + NAME, 0) != 0) fail(other);
  fd_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd_ < 0) fail("cannot open " + path, errno);
  struct stat about;
  if (fstat(fd_, &about) == 0 && size_t(about.st_size) == length()) map();
  close_fd();
  const Header* h = header();
  if (base_ && h->magic == MAGIC && h->token == at.token && h->bytes == at.bytes) return;
  if (base_) munmap(base_, length());
  fail(other);
}

Memory::~Memory() {
  munmap(base_, length());
  close_fd();
}

// Never without a page of data: an empty tensor needs an address that is no other's.
size_t Memory::length() const { return PAGE + round_up(std::max<size_t>(bytes_, 1), PAGE); }

void Memory::map() {
  void* at = mmap(nullptr, length(), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (at == MAP_FAILED) {
    int why = errno;
    close_fd();
    fail("cannot map " + std::to_string(bytes_) + " bytes", why);
  }
  base_ = static_cast<uint8_t*>(at);
}

void Memory::close_fd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Address Memory::address() const { return {getpid(), fd_, header()->token, bytes_}; }

// -- processes ------------------------------------------------------------------------------------

std::shared_ptr<Process> Process::of(int pid) {
  // Never freed: memory may be let go of while the process exits.
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::unordered_map<int, std::weak_ptr<Process>>;
  std::lock_guard lock(mutex);
  auto& entry = known[pid];
  auto process = entry.lock();
  if (process && process->alive()) return process;
  int pidfd = syscall(SYS_pidfd_open, pid, 0);
  if (pidfd < 0) return nullptr;
  process.reset(new Process(pidfd));
  entry = process;
  return process;
}

Process::~Process() { close(pidfd_); }

bool Process::alive() const {
  pollfd p{pidfd_, POLLIN, 0};
  return poll(&p, 1, 0) <= 0;
}

// -- joining --------------------------------------------------------------------------------------

Peers::Peers(int rank, int n, double timeout_ms, std::shared_ptr<Memory> buffer, size_t pad_bytes)
    : rank_(rank), n_(n), timeout_ms_(timeout_ms), pad_bytes_(pad_bytes), born_(fork_count()),
      buffers_(n), pads_(n), processes_(n) {
  crowded_ = n > sysconf(_SC_NPROCESSORS_ONLN);
  buffers_[rank] = std::move(buffer);
  pads_[rank] = std::make_shared<Memory>(round_up(pad_bytes, 64) + n * sizeof(Word));
}

void Peers::join(const std::vector<Address>& buffers, const std::vector<Address>& pads) {
  Header* own = pads_[rank_]->header();
  try {
    map_peers(buffers, pads);
  } catch (const std::exception& e) {
    std::strncpy(own->refusal, e.what(), sizeof own->refusal - 1);
    own->state.store(refused);
    wake(own->state, own);
    throw;
  }
  own->state.store(joined);
  wake(own->state, own);
  agree();
  pads_[rank_]->close_fd();
  for (int r = 0; r < n_; r++) {
    buffer_ptrs_.push_back(buffers_[r]->data());
    pad_ptrs_.push_back(pads_[r]->data());
  }
}

void Peers::map_peers(const std::vector<Address>& buffers, const std::vector<Address>& pads) {
  auto open = [&](int r, const Address& address) {
    try {
      return std::make_shared<Memory>(address);
    } catch (const std::runtime_error&) {
      if (dead(r)) died(r, site("rendezvous", OWN_CHANNEL, 0));
      throw;
    }
  };
  // Pads first: through them a rank that cannot go on tells the others.
  for (int r = 0; r < n_; r++) {
    if (r == rank_) continue;
    // Opened before the token is read: what it watches is the process that holds the token.
    processes_[r] = Process::of(pads[r].pid);
    if (!processes_[r])
      throw Error(Error::peer_died, r, name_of(r) + " died, or is in another container or host");
    pads_[r] = open(r, pads[r]);
  }
  for (int r = 0; r < n_; r++)
    if (r != rank_) buffers_[r] = open(r, buffers[r]);
}

void Peers::agree() {
  for (int r = 0; r < n_; r++) {
    Header* h = pads_[r]->header();
    Site here = site("rendezvous", OWN_CHANNEL, 0);
    wait(h->state, h, crowded_, [&] { return h->state.load() != joining; },
         [&](double waited_ms) {
           if (dead(r) && h->state.load() == joining) died(r, here);
           unless_late(r, here, waited_ms);
         });
    if (h->state.load() == refused)
      throw std::runtime_error("fcoll: rendezvous failed on " + name_of(r) + ": " + h->refusal);
  }
}

// -- signals --------------------------------------------------------------------------------------

Peers::Word& Peers::word(int owner, int channel, int from) const {
  size_t at = channel == OWN_CHANNEL ? round_up(pad_bytes_, 64) / sizeof(Word)
                                     : size_t(channel) * n_;
  return reinterpret_cast<Word*>(pads_[owner]->data())[at + from];
}

Peers::Site Peers::site(const char* what, int channel, double timeout_ms) const {
  return {what, channel, timeout_ms > 0 ? timeout_ms : timeout_ms_};
}

void Peers::check(int rank, int channel) const {
  if (rank < 0 || rank >= n_)
    throw std::invalid_argument("fcoll: " + name_of(rank) + " is outside the group of " +
                                std::to_string(n_) + " ranks");
  size_t channels = pad_bytes_ / (n_ * sizeof(Word));
  if (channel < 0 || size_t(channel) >= channels)
    throw std::invalid_argument("fcoll: channel " + std::to_string(channel) +
                                " is outside the signal pad of " + std::to_string(channels) +
                                " channels; set_signal_pad_size makes a larger one");
}

std::string Peers::Site::show() const {
  return channel == OWN_CHANNEL ? what : what + (" on channel " + std::to_string(channel));
}

void Peers::died(int rank, const Site& site) const {
  throw Error(Error::peer_died, rank,
              name_of(rank) + " died; " + name_of(rank_) + " waited for it in " + site.show());
}

void Peers::unless_late(int rank, const Site& site, double waited_ms) const {
  if (waited_ms <= site.timeout_ms) return;
  throw Error(Error::timeout, rank,
              name_of(rank_) + " waited " + std::to_string(int64_t(waited_ms)) + " ms for " +
                  name_of(rank) + " in " + site.show());
}

void Peers::unless_forked() const {
  if (born_ != fork_count())
    throw Error(Error::forked, -1, "the process has been forked since the rendezvous");
}

void Peers::put(int to, const Site& site) {
  Word& signal = word(to, site.channel, rank_);
  Header* owner = pads_[to]->header();
  wait(signal, owner, crowded_, [&] { return exchange(signal, 0, 1); },
       [&](double waited_ms) {
         if (dead(to)) died(to, site);
         unless_late(to, site, waited_ms);
       });
  wake(signal, owner);
}

// So many ranks, from this one on, are `pending`: without any of them the wait is for nothing.
void Peers::take(int from, const Site& site, int pending) {
  Word& signal = word(rank_, site.channel, from);
  Header* owner = pads_[rank_]->header();
  auto look = [&](double waited_ms) {
    for (int k = 0; k < pending; k++) {
      int r = (from + k) % n_;  // it may have sent its signal and left: that is no failure
      if (dead(r) && word(rank_, site.channel, r).load() == 0) died(r, site);
    }
    unless_late(from, site, waited_ms);
  };
  wait(signal, owner, crowded_, [&] { return exchange(signal, 1, 0); }, look);
  wake(signal, owner);
}

void Peers::meet(const Site& site) {
  int sent = 0;
  try {
    for (; sent < n_ - 1; sent++) put(after(sent + 1), site);
    for (int k = 1; k < n_; k++) take(after(k), site, n_ - k);
  } catch (...) {
    // Taken back where nobody has seen it, else the next barrier would let a peer through.
    for (int k = 1; k <= sent; k++) exchange(word(after(k), site.channel, rank_), 1, 0);
    throw;
  }
}

void Peers::barrier(int channel, double timeout_ms) {
  unless_forked();
  check(rank_, channel);
  meet(site("barrier", channel, timeout_ms));
}

void Peers::put_signal(int to, int channel, double timeout_ms) {
  unless_forked();
  check(to, channel);
  put(to, site("put_signal", channel, timeout_ms));
}

void Peers::wait_signal(int from, int channel, double timeout_ms) {
  unless_forked();
  check(from, channel);
  take(from, site("wait_signal", channel, timeout_ms), 1);
}

// -- collectives ----------------------------------------------------------------------------------

void Peers::enter(const char* what, const Said& mine, std::string (*show)(const Said&)) {
  unless_forked();
  pads_[rank_]->header()->said = mine;
  meet(site(what, OWN_CHANNEL, 0));
  for (int r = 0; r < n_; r++) {
    Said theirs = pads_[r]->header()->said;
    if (theirs == mine) continue;
    sync(what);  // else a peer that is still comparing could see my next call
    throw Error(Error::mismatch, r, name_of(rank_) + " calls " + show(mine) + " where " +
                                        name_of(r) + " calls " + show(theirs));
  }
}

void Peers::sync(const char* what) { meet(site(what, OWN_CHANNEL, 0)); }

}  // namespace fcoll
