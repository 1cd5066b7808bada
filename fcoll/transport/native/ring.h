// A ring of slots for each rank of a group, in memory that all of them map. Free of torch.
//
// A collective is two halves. *Publish* writes this rank's part into its next slot and raises the
// slot's sequence number; *await* waits for a peer's number, after which its part can be read. A slot
// is written again RING sequence numbers later, when every peer has said (`done`) that it has read
// it: so no barrier follows, and several collectives can be under way at once.
//
// Larger messages travel in chunks through a window that stays in the cache that near cores share.
// What far cores are to read is stored past the caches, and so are the largest results.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "peers.h"
#include "wait.h"

namespace fcoll {

constexpr int RING = 64;
constexpr size_t SLOT_BYTES = 64 * 1024;

struct Slot {
  std::atomic<uint64_t> seq;
  uint64_t packed, count, extra;
  uint64_t at;  // of the data in the rank's memory, if that is in the window
  uint64_t digest;
  uint8_t pad[16];
  uint8_t data[];  // on a cache line of its own, for streaming stores
};
static_assert(sizeof(Slot) == 64);

// The beginning of a rank's memory; its slots and its window follow.
struct Segment {
  alignas(64) std::atomic<uint64_t> done;  // this rank has read all parts up to here
  alignas(64) std::atomic<uint64_t> beacon;  // written now and then: how long does it take to read?
  alignas(64) std::atomic<uint64_t> pings[MAX_RANKS];  // for each peer (round_trip_ns)
  // Of the calls in the slots; read only when calls differ, so they stay in the owner's cache.
  alignas(64) Signature signatures[RING];
};

constexpr size_t CONTROL = 16384;
static_assert(sizeof(Segment) <= CONTROL);
constexpr size_t STRIDE = (sizeof(Slot) + SLOT_BYTES + 4095) / 4096 * 4096;
// Places for the chunks of large messages: as many as push each other out of the reader's own cache,
// whose copy would have to be taken back, but not out of the shared one. An all-reduce of 4 MiB, near:
// 1,050 us with 4 places, 450 to 600 with 8 to 32, 750 with 64.
constexpr size_t WINDOW = 16;
constexpr size_t WINDOW_AT = CONTROL + RING * STRIDE;
constexpr size_t RING_BYTES = WINDOW_AT + WINDOW * SLOT_BYTES;

// What is read by far cores is stored past the caches from here on (Ring::copy_out).
constexpr size_t FAR_BYTES = 2 * 1024;

// A slot is taken back from the readers' caches before the call that writes it, if it is this small.
// 2 ranks, medians: all_reduce of 64 B in 0.19 us instead of 0.31 (far) and 0.09 instead of 0.11
// (near), all_gather of 1 KiB in 0.39 instead of 0.71 and 0.13 instead of 0.20. From 2 KiB it costs
// more than it saves: 0.77 instead of 0.72.
constexpr size_t FETCHED_SLOT_BYTES = 1024;
// So much of a far peer's part is fetched at once before it is read, if it is of this size: 8 KiB in
// 0.98 us instead of 1.13, 32 KiB in 2.79 instead of 2.95. Smaller ones are fetched by the loads
// themselves, larger ones by the processor, which sees them coming: 128 KiB took 9.8 us instead of 8.9.
// Near it is no gain: 8 KiB in 0.36 instead of 0.35.
constexpr size_t FETCH_FROM_BYTES = 4 * 1024, FETCH_TO_BYTES = 32 * 1024, FETCHED_BYTES = 8 * 1024;

enum class Distance { measured, near, far };

class Ring {
 public:
  Ring(int rank, int n, double timeout_s);
  ~Ring();

  // How the peers find this rank's memory. Without a file descriptor if it could not be made.
  Address address() const { return peers_.address(); }
  // Map the peers' memories. Empty if each is the one with its token, else the reason.
  std::string join(const std::vector<Address>&);
  void close_fd() { peers_.close_fd(); }  // once all have joined
  void set_timeout(double seconds) { timeout_s_ = seconds; }
  void leave();  // the peers need not wait for this rank any more

  int rank() const { return rank_; }
  int size() const { return n_; }
  void yield_cores() { crowded_ = true; }
  bool crowded() const { return crowded_; }  // more ranks than cores: a peer may need this core
  bool far() const { return far_ > 0; }
  void assume(Distance distance) { distance_ = distance; }  // instead of measuring it

  // They throw where no call can be made.
  void check_not_forked() const {
    if (born_ != fork_count()) throw_forked();
  }
  void check_open() const {
    if (!open_.load(std::memory_order_relaxed)) throw_closed();
  }

  // The next sequence numbers; the first of them.
  uint64_t take_numbers(size_t count) { return (seq_ += count) - count + 1; }
  uint64_t last_number() const { return seq_; }
  // What this rank waits for from now on belongs to this call, which ends with this number. A peer
  // that is done with it may go.
  void expect(uint64_t last, const Call& call) {
    expected_ = last;
    limit_s_ = call.timeout_s > 0 ? call.timeout_s : timeout_s_;
  }

  // My slot, once every peer is done with what is in it. Data goes into it, or into the window.
  Slot* claim(uint64_t seq, bool in_window = false);
  bool can_claim(uint64_t seq, bool in_window) const;  // without waiting?
  void publish(Slot*, uint64_t seq, const Call&, uint64_t extra = 0);
  // A peer's slot, once it is published; its call must be the same.
  const Slot* await(int peer, uint64_t seq, const Call&);
  void sleep_until_published(uint64_t seq);  // by all, without spinning before
  bool published(int peer, uint64_t seq) const;
  bool published_by_all(uint64_t seq) const;
  bool read_by_all(uint64_t seq) const;  // are all ranks done with it, this one too?
  const Slot* slot(int rank, uint64_t seq) const;
  // `large`: only then look where they are. The address of small data must not depend on the header:
  // the processor fetches both at once then, which is 0.25 us instead of 0.42 for 64 B.
  uint8_t* data(int rank, const Slot* slot, bool large) const {
    if (!large || !slot->at) return const_cast<uint8_t*>(slot->data);
    return peers_.data(rank) + slot->at;
  }
  void done(uint64_t seq);  // this rank has read the parts up to seq

  // Fetch lines that are about to be read or written, all at once: hints.
  void fetch(const uint8_t* theirs, size_t bytes) const;
  void fetch_next_slot(size_t bytes) const;  // mine, for the next call

  // Copy to where the peers read, past the caches if they are far.
  void copy_out(void* to, const void* from, size_t bytes) const;
  void look_how_far(uint64_t seq);
  // Core-to-core round trip with a peer in ns: the median of many. Both call it.
  double round_trip_ns(int peer);

  [[noreturn]] void fail(const Error&);  // closes it on all ranks

 private:
  void close(const Error&);
  [[noreturn]] void throw_forked() const;
  [[noreturn]] void throw_closed() const;
  void wait(int peer, const std::atomic<uint64_t>& word, uint64_t least) {
    if (word.load(std::memory_order_acquire) < least) wait_long(peer, word, least);
  }
  void wait_long(int peer, const std::atomic<uint64_t>& word, uint64_t least,
                 Patience = Patience::awake);
  std::optional<Error> look(int peer, double waited_us) const;
  void until_read(uint64_t seq);
  std::string shown(int rank, uint64_t seq, const Call&) const;
  int rank_, n_;
  double timeout_s_, limit_s_;  // of all calls; of this one
  bool crowded_ = false;
  int born_;  // the fork generation it was made in
  uint64_t seq_ = 0, expected_ = 0;
  uint64_t window_[WINDOW] = {};  // the last number that was published in each place of the window
  Distance distance_ = Distance::measured;
  int far_ = 0;  // above 0: the peers' cores are far, as they were found lately
  uint64_t free_until_ = RING;  // up to here, every slot has been read by all
  Peers peers_;
  std::vector<Segment*> segments_;
  Status* own_ = nullptr;  // this rank's
  std::vector<uint64_t> beacons_;  // the peers', as they were read last
  std::atomic<bool> open_{true};
  std::string broken_;  // why it is closed; empty after leave()
};

}  // namespace fcoll
