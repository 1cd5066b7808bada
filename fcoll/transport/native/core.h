// Collectives between the processes of one host over shared memory. Free of torch, so that it can
// be tested and sanitized alone.
//
// Every rank of a group owns a segment (a memfd) that all its peers map: a control block and a ring
// of slots. A collective is two halves. *Publish* writes this rank's part into its next slot and
// raises the slot's sequence number; *consume* waits for the peers' numbers and reads their parts.
// A slot is written again RING sequence numbers later, when every peer has said (`done`) that it
// has read it: so no barrier follows, and several collectives can be under way at once.
//
// Larger messages travel in chunks through a window that stays in the cache that near cores share.
// What far cores are to read is stored past the caches, and so are the largest results.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace fcoll {

constexpr int RING = 64;
constexpr size_t SLOT_BYTES = 64 * 1024;
constexpr int MAX_RANKS = 64;

// Beside each enum its values as errors show them: the table's and torch's names.
enum class Kind : uint8_t {
  all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, barrier
};
constexpr const char* KIND_NAMES[] = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor",
                                      "all_to_all_single", "broadcast", "barrier"};
enum class Op : uint8_t { sum, avg, product, min, max, band, bor, bxor };
constexpr const char* OP_NAMES[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
enum class Type : uint8_t { f32, f64, f16, bf16, i8, i16, i32, i64, u8, c64, c128, boolean, bytes };
constexpr const char* TYPE_NAMES[] = {"float32", "float64", "float16", "bfloat16", "int8",
                                      "int16", "int32", "int64", "uint8", "complex64",
                                      "complex128", "bool", "bytes"};

size_t size_of(Type);

// All that the ranks must agree on in a call, as numbers. The digest is of all of them and is what
// ranks compare; the first words are kept for the message when they differ.
struct Signature {
  static constexpr int WORDS = 14, NAME = 48;
  uint64_t digest = 0;  // 0: nothing to compare but what a Call has
  int64_t size = 0;     // words kept
  char row[NAME] = {};  // the collective's name
  int64_t words[WORDS];

  void add(int64_t word) {
    // each step is one to one, so that one word that differs always shows
    digest = (digest ^ uint64_t(word)) * 0x9E3779B97F4A7C15;
    digest ^= digest >> 29;
    if (size < WORDS) words[size++] = word;
  }
};

// Of calls that only the core's own tests and loops make.
inline const Signature UNSIGNED{};

// A signature for people; the part that knows tensors provides it.
extern std::string (*describe)(const Signature&);

// What a rank says of the call it makes: its peers must say the same.
struct Call {
  Kind kind = Kind::barrier;
  Type type = Type::bytes;
  Op op = Op::sum;
  uint8_t root = 0;
  uint64_t count = 0;  // elements of the argument; of one row, where parts may be uneven
  bool in_arena = false;  // a slot says where the data is, instead of carrying it
  const Signature* signature = nullptr;  // read only while the call is published
  uint64_t digest = 0;

  Call& signed_by(const Signature& s) {
    signature = s.digest ? &s : nullptr;
    digest = s.digest;
    return *this;
  }

  uint64_t packed() const {
    return uint64_t(kind) | uint64_t(type) << 8 | uint64_t(op) << 16 | uint64_t(root) << 24 |
           uint64_t(in_arena) << 32;
  }
  static Call unpack(uint64_t packed, uint64_t count);
  std::string show() const;
};

struct Error : std::runtime_error {
  enum What { mismatch, peer_died, timeout, closed, forked };
  What kind;
  int rank;  // the peer it is about, or -1
  Error(What kind, int rank, const std::string& message)
      : std::runtime_error(message), kind(kind), rank(rank) {}
};

struct Segment;
struct Slot;

class Group {
 public:
  Group(int rank, int n, double timeout_s);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // What the peers need in order to map this rank's segment.
  int fd() const { return fd_; }
  uint64_t token() const { return token_; }
  // Map the peers' segments. Empty if each is the one with its token, else the reason.
  std::string join(const std::vector<int>& pids, const std::vector<int>& fds,
                   const std::vector<uint64_t>& tokens);

  int rank() const { return rank_; }
  int size() const { return n_; }
  bool crowded() const { return crowded_; }

  // Each returns when the result is there. Buffers are contiguous and do not overlap, except that
  // in and out may be the same for all_reduce.
  void all_reduce(const void* in, void* out, size_t count, Type, Op, const Signature& = UNSIGNED);
  void all_gather(const void* in, void* out, size_t bytes, const Signature& = UNSIGNED);
  // in: n parts of `count` elements.
  void reduce_scatter(const void* in, void* out, size_t count, Type, Op, const Signature& = UNSIGNED);
  // n parts each, one after the other, of the given sizes in bytes; row_bytes, what a part is
  // counted in, must be the same on all ranks.
  void all_to_all(const void* in, void* out, const size_t* in_bytes, const size_t* out_bytes,
                  size_t row_bytes, const Signature& = UNSIGNED);
  void broadcast(void* buf, size_t bytes, int root, const Signature& = UNSIGNED);
  void barrier();

  // The two halves apart. `start` publishes. If the peers have published too, or do so within
  // `patience_us`, it fills `out` and returns 0; else it returns a ticket, and `finish` fills `out`,
  // and that of all tickets before it. What takes more than a quarter of the ring is done at
  // once. For all kinds but all_to_all, whose length only its senders know. count: of one part, for
  // reduce_scatter; bytes, for all_gather and broadcast, whose in and out are the same.
  uint64_t start(const Call&, const void* in, void* out, double patience_us);
  void finish(uint64_t ticket);

  // The same of a collective whose data is in the ranks' arenas: `mine` is where this rank's part
  // is, and the peers' answers, by rank, are in `where` once it is complete.
  uint64_t announce(Call, uint64_t mine, uint64_t* where, double patience_us);
  void meet(Call, uint64_t mine, uint64_t* where);

  // Core-to-core round trip with a peer in ns: the median of many. Both call it.
  double round_trip_ns(int peer);

 private:
  struct Pending {
    uint64_t first, last;  // sequence numbers
    Call call;
    const uint8_t* in;  // null once the caller may have changed it
    uint8_t* out;
    bool large = false;      // its chunks are more than the window has places
    bool keeps_own = false;  // its own part in its slots too, for when `in` has changed
  };

  void enter();
  // My slot, once every peer is done with what is in it. Data goes into it, or into the window.
  Slot* claim(uint64_t seq, bool in_window = false);
  uint8_t* data(int rank, const Slot*, bool large) const;
  void publish(Slot*, uint64_t seq, const Call&, uint64_t extra = 0);
  void until_read(uint64_t seq);
  const Slot* await(int peer, uint64_t seq, const Call&);
  std::string shown(int rank, uint64_t seq, const Call&) const;
  void done(uint64_t seq);
  void look_how_far(uint64_t seq);
  void copy_out(void* to, const void* from, size_t bytes);
  bool published_by_all(const Pending&) const;
  void complete_all() { while (!pending_.empty()) complete_oldest(); }
  void complete_oldest();
  size_t per_slot(const Call&) const;  // elements of `count` that one slot carries
  size_t chunks(const Call&) const;
  void put(const Pending&, size_t chunk);
  void take(const Pending&, size_t chunk);
  void take_copy(int peer, const Pending&, size_t chunk, uint8_t* to);
  void run(const Call&, const void* in, void* out);
  struct Exchange;
  size_t meet(const Exchange&, const size_t* out_bytes);
  void take_part(int peer, const Exchange&, size_t chunk, uint8_t* out, const size_t* out_bytes);
  void two_shot(const uint8_t* in, uint8_t* out, const Call&);

  void wait(int peer, const std::atomic<uint64_t>& word, uint64_t least);  // until word >= least
  void sleep(int peer, const std::atomic<uint64_t>& word, uint64_t least, double start_us);
  void look_at_peer(int peer, double waited_s);
  [[noreturn]] void fail(Error::What, int peer, const std::string&);

  int rank_, n_, fd_ = -1;
  uint64_t token_ = 0;
  double timeout_s_;
  bool crowded_;  // more ranks than cores: a peer may need this core to get on
  int born_;      // the fork generation it was made in
  uint64_t seq_ = 0;
  uint64_t window_[16] = {};  // the last number that was published in each place of the window
  int far_ = 0;  // above 0: the peers' cores are far, as they were found lately
  uint64_t free_until_ = RING;  // up to here, every slot has been read by all
  std::vector<Segment*> segments_;
  std::vector<int> pids_, pidfds_;
  std::vector<uint64_t> beacons_;  // the peers', as they were read last
  std::deque<Pending> pending_;
  std::string broken_;
  std::mutex mutex_;
};

// -- kernels.cpp ----------------------------------------------------------------------------------

// out[i] = op over r of parts[r][i], in rank order; narrow floats are added up in f32. out may be
// one of the parts.
void reduce(void* out, const void* const* parts, int n, size_t count, Type, Op);
void copy(void* to, const void* from, size_t bytes);
// The same, storing the result past the caches.
void reduce_streaming(void* out, const void* const* parts, int n, size_t count, Type, Op);
void copy_streaming(void* to, const void* from, size_t bytes);

}  // namespace fcoll
