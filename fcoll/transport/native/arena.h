// Memory in which the ranks of a group read each other's data in place. Free of torch.
//
// A compiled graph computes its contribution to a collective straight into its arena; a collective
// is then only the news that it is there, and whatever follows reads all the parts.
//
// The arena is cut into lanes. What is in a lane is needed until the next use of the lane by the
// same program: the compiler gives two collectives one lane only if all reads of the first come
// before the claim of the second. A lane has room for several parts, used in turn. So nobody waits
// for peers that still read: room is used again only after the rank has met its peers over another
// part, which they announce when they have read this one. Two would do. But what is written where a
// peer's own cache still has what it read there has to be taken back from it first.
//
// That holds as long as the ranks use the same lanes. Their programs may differ in what they compute
// between the same collectives, and read a part later than others: then, from the first collective
// for which they disagree, parts go through spare places and are copied out at once.
//
// Only lanes that are used are mapped. Where a process has no more room for a mapping, it reads and
// writes the file instead; where some rank has no file, or a part is larger than a place, the parts
// travel through the ring.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <vector>

#include "group.h"
#include "memory.h"

namespace fcoll {

// A rank's arena: a file, and those of its lanes and spare places that are mapped in this process.
class ArenaFile {
 public:
  static constexpr size_t PLACE = 8 << 20;  // the largest part, in bytes
  static constexpr size_t LANES = 256, LANE = 3 * PLACE;  // room for one part beside any other
  // More than there can be collectives in flight: one that was announced is not overwritten.
  static constexpr size_t SPARES = 64;
  static_assert(SPARES > RING / 2);
  static constexpr size_t SPARES_AT = LANES * LANE, BYTES = SPARES_AT + SPARES * PLACE;

  ArenaFile() : file_(BYTES) {}
  explicit ArenaFile(const Address& peers) : file_(peers) {}
  ~ArenaFile();

  Address address() const { return file_.address(); }
  uint8_t* at(uint64_t offset);  // null if it cannot be mapped
  // Where in the file a pointer into it is; nothing if it is elsewhere.
  std::optional<uint64_t> offset_of(const uint8_t* data) const;
  void read(uint64_t offset, void* to, size_t bytes) const;
  void write(uint64_t offset, const void* from, size_t bytes);  // mapped or not

 private:
  struct Window {
    uint64_t at;
    size_t bytes;
  };
  static Window window_of(uint64_t offset);

  SharedFile file_;
  std::array<uint8_t*, LANES + SPARES> mapped_{};  // by lane, then by spare place
  std::map<const uint8_t*, Window> by_address_;
};

// Every rank's part of a collective, by rank. `stay`: they may be read later too, until the lane is
// used again; else only at once.
struct Parts {
  std::vector<const uint8_t*> data;
  bool stay = false;
};

class Arena {
 public:
  explicit Arena(Group& group);

  // Memory for this rank's part of the next collective in a lane; null if there is none, or if the
  // ranks disagree on the lanes: then the part is made elsewhere, and copied.
  uint8_t* claim(size_t lane, size_t bytes);
  // Says that the part is written, and gives every rank's once all of them are. The first call
  // opens the peers' arenas.
  Parts meet(const Call&, const uint8_t* mine, size_t bytes);
  // The same in two halves, for several at once. A program that fails between them never collects:
  // what was announced in a place is abandoned when the place is used again.
  uint64_t announce(const Call&, const uint8_t* mine, size_t bytes);
  Parts collect(uint64_t announced);

  std::shared_ptr<ArenaFile> file(int rank) const { return files_[rank]; }

 private:
  struct Announced {
    uint64_t id;
    uint64_t mine;  // offset
    size_t bytes;
    uint64_t ticket;
    std::array<uint64_t, MAX_RANKS> where;
    std::vector<uint8_t> travelled;  // the parts, if they came through the ring
  };
  struct Range {
    uint64_t begin = 0, end = 0;
  };

  void join(const Call&);
  bool by_ring(size_t bytes) const { return !shared_ || bytes > ArenaFile::PLACE; }
  void gather(const Call&, const uint8_t* mine, size_t bytes, std::vector<uint8_t>& all);
  Parts parts_in(const std::vector<uint8_t>& all, size_t bytes) const;
  uint64_t place(const uint8_t* mine, size_t bytes);
  Parts find(const uint64_t* where, size_t bytes);
  void abandon(uint64_t mine);

  Group& group_;
  int born_;
  bool joined_ = false, shared_ = true, same_lanes_ = true;
  size_t spares_ = 0;
  std::vector<std::shared_ptr<ArenaFile>> files_;
  std::array<Range, ArenaFile::LANES> met_{};  // of each lane, where the ranks met last
  std::vector<std::unique_ptr<Announced>> announced_;
  uint64_t last_id_ = 0;
  std::vector<uint8_t> travelled_;  // parts that came through the ring
  std::vector<std::vector<uint8_t>> copies_;  // of parts that cannot be mapped
};

}  // namespace fcoll
