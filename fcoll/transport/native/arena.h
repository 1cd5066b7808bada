// Memory in which the ranks of a group read each other's data in place. Free of torch.
//
// A compiled graph computes its contribution to a collective straight into its arena; a collective
// is then only the news that it is there (Group::meet), and whatever follows reads all the parts.
//
// The arena is cut into lanes. What is in a lane is needed until the next use of the lane by the
// same program: the compiler gives two collectives one lane only if all reads of the first come
// before the claim of the second. Every lane has several places, used in turn. So nobody waits for
// peers that still read: a place is claimed again only after the rank has met its peers over
// another, which they announce when they have read this one. Two would do. But what is written where
// a peer's own cache still has what it read there has to be taken back from it first.
//
// That holds as long as the ranks use the same lanes. Their programs may differ in what they compute
// between the same collectives, and read a part later than others: then, from the first collective
// for which they disagree, parts go through spare lanes and are copied out at once.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "peers.h"

namespace fcoll {

class Arena {
 public:
  static constexpr size_t LANES = 512, SPARE = 256;  // lanes, and how many of them are spare
  static constexpr size_t PLACES = 8;
  static constexpr size_t PLACE = 8 << 20;  // bytes. Pages that are never touched take no memory

  explicit Arena(Group& group);

  // This rank's part of the next collective in a lane; null if the ranks disagree on the lanes, or
  // there are not so many: then the part is made elsewhere, and copied.
  uint8_t* claim(size_t lane, size_t bytes);
  // A copy of what is elsewhere, in a spare lane.
  const uint8_t* copied(const uint8_t* data, size_t bytes);
  // Says that the part is written, and gives every rank's, by rank, once all of them are; true if
  // they may be read later, false if only at once. The first call maps the peers' arenas.
  bool meet(const Call&, const uint8_t* mine, std::vector<uint8_t*>& parts);
  // The same in two halves, for several at once. A program that fails between them never collects:
  // what was announced in a place is abandoned when the place is used again.
  uint64_t announce(const Call&, const uint8_t* mine);
  bool collect(uint64_t announced, std::vector<uint8_t*>& parts);

  bool has(const uint8_t* data) const;  // is it in this rank's own?
  std::shared_ptr<Memory> memory(int rank) const { return memories_[rank]; }

 private:
  struct Announced {
    uint64_t id;
    const uint8_t* mine;
    uint64_t ticket;
    std::array<uint64_t, MAX_RANKS> where;
  };

  void join(const Call&);
  void abandon(const uint8_t* mine);
  uint64_t turn(const uint8_t* mine);
  bool find(const uint64_t* where, std::vector<uint8_t*>& parts);

  Group& group_;
  int born_;
  bool joined_ = false, agreed_ = true;
  size_t spares_ = 0;
  std::vector<std::shared_ptr<Memory>> memories_;
  std::array<uint8_t, LANES> met_{};  // the place of each lane over which the ranks met last
  std::vector<std::unique_ptr<Announced>> announced_;
  uint64_t last_id_ = 0;
};

}  // namespace fcoll
