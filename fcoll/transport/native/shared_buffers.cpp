#include "shared_buffers.h"

#include <unistd.h>

#include <stdexcept>

#include "wait.h"

namespace fcoll {

namespace {

constexpr int OWN_CHANNEL = -1;  // of enter() and sync()

bool exchange(std::atomic<uint32_t>& word, uint32_t from, uint32_t to) {
  // Looked at first: a failing compare-and-swap takes the cache line from the peer all the same.
  return word.load(std::memory_order_relaxed) == from && word.compare_exchange_strong(from, to);
}

}  // namespace

// -- joining --------------------------------------------------------------------------------------

// A pad is the user's words, a word for each rank on the channel of its own, and what it said.
SharedBuffers::SharedBuffers(int rank, int n, double timeout_ms, std::shared_ptr<Memory> buffer,
                             size_t pad_bytes)
    : rank_(rank), n_(n), timeout_ms_(timeout_ms), pad_bytes_(pad_bytes),
      crowded_(n > sysconf(_SC_NPROCESSORS_ONLN)), born_(fork_count()), buffers_(n), pads_(rank, n) {
  buffers_[rank] = std::move(buffer);
  size_t words = round_up(pad_bytes, 64) + round_up(n * sizeof(Word), 64);
  pads_.make_own(words + sizeof(Said), Pages::reserved);
}

void SharedBuffers::join(const std::vector<Address>& buffers, const std::vector<Address>& pads) {
  Status& own = status(rank_);
  try {
    map_peers(buffers, pads);
  } catch (const std::exception& e) {
    own.fail({Error::closed, rank_, "rendezvous failed on " + name_of(rank_) + ": " + e.what()});
    wake(own.state, own.sleepers);
    throw;
  }
  own.state.store(State::active);
  wake(own.state, own.sleepers);
  await_joined();
  pads_.close_fd();
  for (int r = 0; r < n_; r++) {
    buffer_ptrs_.push_back(buffers_[r]->data());
    pad_ptrs_.push_back(pads_.data(r));
  }
  crowded_ = pads_.crowded();
}

void SharedBuffers::map_peers(const std::vector<Address>& buffers, const std::vector<Address>& pads) {
  auto checked = [&](int r, auto open) {
    try {
      open();
    } catch (const std::runtime_error&) {
      if (pads_.dead(r)) throw died(r, site("rendezvous", OWN_CHANNEL, 0));
      throw;
    }
  };
  // Pads first: through them a rank that cannot go on tells the others.
  for (int r = 0; r < n_; r++)
    if (r != rank_) checked(r, [&] { pads_.add(r, pads[r], Pages::as_used); });
  for (int r = 0; r < n_; r++)
    if (r != rank_) checked(r, [&] { buffers_[r] = Memory::open(buffers[r]); });
}

void SharedBuffers::await_joined() {
  Site here = site("rendezvous", OWN_CHANNEL, 0);
  for (int r = 0; r < n_; r++) {
    Status& s = status(r);
    wait_until(
        s.state, s.sleepers, awake(crowded_), [&] { return s.state.load() != State::joining; },
        [&](double waited_us) { return pads_.dead(r) ? died(r, here) : late(r, here, waited_us); });
    if (auto failure = s.failure()) throw *failure;
  }
}

// -- errors ---------------------------------------------------------------------------------------

std::string SharedBuffers::Site::show() const {
  return channel == OWN_CHANNEL ? what : what + (" on channel " + std::to_string(channel));
}

SharedBuffers::Site SharedBuffers::site(const char* what, int channel, double timeout_ms) const {
  return {what, channel, timeout_ms > 0 ? timeout_ms : timeout_ms_};
}

Error SharedBuffers::died(int rank, const Site& site) const {
  return {Error::peer_died, rank,
          name_of(rank) + " died; " + name_of(rank_) + " waited for it in " + site.show()};
}

std::optional<Error> SharedBuffers::late(int rank, const Site& site, double waited_us) const {
  if (waited_us <= site.timeout_ms * 1e3) return std::nullopt;
  return Error(Error::timeout, rank,
               name_of(rank_) + " waited " + std::to_string(int64_t(waited_us / 1e3)) + " ms for " +
                   name_of(rank) + " in " + site.show());
}

void SharedBuffers::check_open() const {
  if (auto failed = pads_.failure())
    throw Error(Error::closed, failed->rank,
                std::string("this memory was closed by an earlier error: ") + failed->what() +
                    ". All ranks must make a new rendezvous of it");
}

void SharedBuffers::check_not_forked() const {
  if (born_ != fork_count())
    throw Error(Error::forked, -1, "the process has been forked since the rendezvous");
}

void SharedBuffers::check(int rank, int channel) const {
  if (rank < 0 || rank >= n_)
    throw std::invalid_argument("fcoll: " + name_of(rank) + " is outside the group of " +
                                std::to_string(n_) + " ranks");
  size_t channels = pad_bytes_ / (n_ * sizeof(Word));
  if (channel < 0 || size_t(channel) >= channels)
    throw std::invalid_argument("fcoll: channel " + std::to_string(channel) +
                                " is outside the signal pad of " + std::to_string(channels) +
                                " channels; set_signal_pad_size makes a larger one");
}

// -- signals --------------------------------------------------------------------------------------

SharedBuffers::Word& SharedBuffers::word(int owner, int channel, int from) const {
  size_t at = channel == OWN_CHANNEL ? round_up(pad_bytes_, 64) / sizeof(Word)
                                     : size_t(channel) * n_;
  return reinterpret_cast<Word*>(pads_.data(owner))[at + from];
}

Said& SharedBuffers::said(int rank) const {
  return *reinterpret_cast<Said*>(pads_.data(rank) + pads_.bytes() - sizeof(Said));
}

void SharedBuffers::put(int to, const Site& site) {
  Word& signal = word(to, site.channel, rank_);
  auto look = [&](double waited_us) -> std::optional<Error> {
    if (pads_.dead(to)) return died(to, site);
    if (auto failed = site.closable ? pads_.failure() : std::nullopt) return failed;
    return late(to, site, waited_us);
  };
  wait_until(signal, status(to).sleepers, awake(crowded_), [&] { return exchange(signal, 0, 1); }, look);
  wake(signal, status(to).sleepers);
}

// So many ranks, from this one on, are `pending`: without any of them the wait is for nothing.
void SharedBuffers::take(int from, const Site& site, int pending) {
  Word& signal = word(rank_, site.channel, from);
  auto look = [&](double waited_us) -> std::optional<Error> {
    for (int k = 0; k < pending; k++) {
      int r = (from + k) % n_;  // it may have sent its signal and left: that is no failure
      if (pads_.dead(r) && word(rank_, site.channel, r).load() == 0) return died(r, site);
    }
    if (auto failed = site.closable ? pads_.failure() : std::nullopt) return failed;
    return late(from, site, waited_us);
  };
  wait_until(signal, status(rank_).sleepers, awake(crowded_), [&] { return exchange(signal, 1, 0); }, look);
  wake(signal, status(rank_).sleepers);
}

void SharedBuffers::pass_barrier(const Site& site) {
  check_not_forked();
  check_open();
  try {
    for (int k = 1; k < n_; k++) put(after(k), site);
    for (int k = 1; k < n_; k++) take(after(k), site, n_ - k);
  } catch (const Error& e) {
    status(rank_).fail(e);  // some of its signals are taken, some are not: nobody can say which
    throw;
  } catch (...) {  // Ctrl-C
    status(rank_).fail({Error::closed, rank_, name_of(rank_) + " was interrupted in " + site.show()});
    throw;
  }
  check_open();
}

void SharedBuffers::barrier(int channel, double timeout_ms) {
  check(rank_, channel);
  pass_barrier(site("barrier", channel, timeout_ms));
}

void SharedBuffers::put_signal(int to, int channel, double timeout_ms) {
  check_not_forked();
  check(to, channel);
  Site here = site("put_signal", channel, timeout_ms);
  here.closable = false;
  put(to, here);
}

void SharedBuffers::wait_signal(int from, int channel, double timeout_ms) {
  check_not_forked();
  check(from, channel);
  Site here = site("wait_signal", channel, timeout_ms);
  here.closable = false;
  take(from, here, 1);
}

// -- collectives ----------------------------------------------------------------------------------

void SharedBuffers::enter(const char* what, const Said& mine, std::string (*show)(const Said&)) {
  said(rank_) = mine;
  pass_barrier(site(what, OWN_CHANNEL, 0));
  for (int r = 0; r < n_; r++) {
    Said theirs = said(r);
    if (theirs == mine) continue;
    sync(what);  // else a peer that is still comparing could see my next call
    throw Error(Error::mismatch, r, name_of(rank_) + " calls " + show(mine) + " where " +
                                        name_of(r) + " calls " + show(theirs));
  }
}

void SharedBuffers::sync(const char* what) { pass_barrier(site(what, OWN_CHANNEL, 0)); }

}  // namespace fcoll
