// Memory in which the ranks of a group read each other's data in place. Free of torch.
//
// A compiled graph computes its contribution to a collective straight into its arena; a collective
// is then only an announcement where it is, and whatever follows reads all the parts.
//
// Lanes. The arena is cut into lanes. The compiler gives two collectives of a program one lane only
// if all reads of the first come before the claim of the second. A lane has room for several parts,
// used in turn. So nobody waits for peers that still read: room is used again only after the ranks
// have met over another part of the lane, which each announces when it has read this one. Two would
// do. But what is written where a peer's own cache still has what it read there has to be taken back
// from it first.
//
// Spare places. That holds while the ranks use the same lanes, and they may not: one that recompiled
// alone runs another program. With its place a rank announces the lane that it claimed, so that all
// see the same when an announcement is complete, and judge it alike (Arena::read). Unless all parts
// are at one place of one lane they are copied right then, before the ring's number is done, and the
// lanes that were named are not used: parts for them lie in spare places. When all ranks have named
// one lane for two collectives in turn, each from a spare place, nobody reads in it any more, and
// it is used again. (Two: by the second all ranks have completed what came before the first.)
//
// Threads. A lane belongs to the thread that claimed in it last, until all tensors in it are gone.
// Others get spare places that name no lane.
//
// Only what is used is mapped. Where a process has no more room for a mapping, it reads and writes the
// file instead; where some rank has no file, or a part is larger than a place, the parts travel through
// the ring.
#pragma once

#include <array>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "arena_file.h"
#include "group.h"

namespace fcoll {

// Memory for a part, while `hold` lives; null if there is none.
struct Claimed {
  uint8_t* data = nullptr;
  std::shared_ptr<void> hold;
};

// Every rank's part of a collective, by rank, while `hold` lives; in a lane until that is claimed again.
struct Parts {
  std::vector<const uint8_t*> data;
  std::shared_ptr<void> hold;
};

class Arena {
 public:
  explicit Arena(Group& group);

  // Memory for this rank's part of the next collective in a lane. Without it the part is made
  // elsewhere, and copied.
  Claimed claim(size_t lane, size_t bytes);
  // Says that the part is written, and gives every rank's once all of them are. The first call
  // opens the peers' arenas.
  Parts meet(const Call&, const uint8_t* mine, size_t bytes);

  // The same in two halves, for several at once.
  class Announced;
  std::shared_ptr<Announced> announce(const Call&, const uint8_t* mine, size_t bytes);
  Parts collect(Announced&);
  // One that is announced and not collected, by its id; null if nobody holds it any more.
  std::shared_ptr<Announced> find(uint64_t id);

  // How many announcements had parts in different lanes or places.
  uint64_t disagreements() const { return disagreements_; }

 private:
  static constexpr int NO_LANE = -1;
  struct Range {
    uint64_t begin = 0, end = 0;
  };
  struct Lane {
    Range met;  // where the ranks met last
    int agreed = 2;  // collectives since the ranks disagreed on it: used from 2 on
    uint64_t last = 0;  // the number of the last announcement in it
    std::thread::id user;
    std::weak_ptr<void> held;
  };
  struct Spare {
    int lane = NO_LANE;  // for which its part was made
    uint64_t last = 0;  // the number of the last announcement in it
    std::weak_ptr<void> held;
  };
  using Turn = Group::Turn;

  void join(const Turn&, const Call&);
  bool by_ring(size_t bytes) const { return !shared_ || bytes > ArenaFile::PLACE; }
  Parts gather(const Turn&, const Call&, const uint8_t* mine, size_t bytes);
  std::shared_ptr<void> hold_lane(Lane&);
  Claimed claim_spare(int lane, size_t bytes);
  size_t free_spare();
  uint64_t place(const Turn&, const uint8_t* mine, size_t bytes);
  Parts read(const uint64_t* where, size_t bytes);
  Parts in_lane(uint64_t where, size_t bytes);
  Parts copied(const uint64_t* where, size_t bytes);

  Group& group_;
  bool joined_ = false, shared_ = true;
  std::vector<std::shared_ptr<ArenaFile>> files_;
  std::array<Lane, ArenaFile::LANES> lanes_{};
  std::array<Spare, ArenaFile::SPARES> spares_{};
  std::unordered_map<uint64_t, std::weak_ptr<Announced>> announced_;
  uint64_t last_id_ = 0;
  std::atomic<uint64_t> disagreements_{0};
};

class Arena::Announced final : public Reader {
 public:
  Announced(Arena& arena, size_t bytes) : id(++arena.last_id_), arena_(arena), bytes_(bytes) {}
  void read(const uint64_t* where) override { parts = arena_.read(where, bytes_); }

  const uint64_t id;
  uint64_t ticket = 0;
  Parts parts;  // once it is complete

 private:
  Arena& arena_;
  size_t bytes_;
};

}  // namespace fcoll
