// A collective call as the ranks compare it, and what can go wrong with one. Free of torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fcoll {

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
  bool in_place = false;  // the data lies where all ranks have mapped it (shared_parts.h)
  double timeout_s = 0;  // how long to wait for a peer; 0: as long as for all calls on the group
  const Signature* signature = nullptr;  // read only while the call is published
  uint64_t digest = 0;

  static Call all_reduce(uint64_t count, Type type, Op op) {
    return {Kind::all_reduce, type, op, 0, count};
  }
  // count: of the part of one rank
  static Call reduce_scatter(uint64_t count, Type type, Op op) {
    return {Kind::reduce_scatter, type, op, 0, count};
  }
  static Call all_gather(uint64_t bytes) { return {Kind::all_gather, Type::bytes, Op::sum, 0, bytes}; }
  static Call broadcast(uint64_t bytes, int root) {
    return {Kind::broadcast, Type::bytes, Op::sum, uint8_t(root), bytes};
  }
  // row_bytes: what a part is counted in
  static Call all_to_all(uint64_t row_bytes) {
    return {Kind::all_to_all, Type::bytes, Op::sum, 0, row_bytes};
  }
  static Call barrier() { return {}; }

  Call& signed_by(const Signature& s) {
    signature = s.digest ? &s : nullptr;
    digest = s.digest;
    return *this;
  }

  uint64_t packed() const {
    return uint64_t(kind) | uint64_t(type) << 8 | uint64_t(op) << 16 | uint64_t(root) << 24 |
           uint64_t(in_arena) << 32 | uint64_t(in_place) << 33;
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

inline std::string name_of(int rank) { return "rank " + std::to_string(rank); }

}  // namespace fcoll
