// Collectives that have started and are not complete: one type for each way their data goes.
//
// Each of them has numbers first..last in the ring, and three steps:
//   ready     nothing that it needs of the peers is missing: to complete it waits for nobody
//   advance   does what it can without waiting; peers may be waiting for that
//   complete  waits for what is missing, and makes the result
#pragma once

#include <memory>
#include <variant>

#include "collectives.h"
#include "shared_parts.h"

namespace fcoll {

// What is done with parts that lie in the ranks' arenas, when all of them are there and before the
// peers may write there again. `where`: what each rank said of its part.
struct Reader {
  virtual ~Reader() = default;
  virtual void read(const uint64_t* where) = 0;
};

// A collective whose parts are in the ranks' arenas: one slot says where this rank's is.
struct Announcement {
  Call call;
  uint64_t first, last;  // the same
  uint64_t mine;  // what this rank says of its part
  std::shared_ptr<Reader> reader;  // null: nobody reads the parts
};

// An all-reduce of parts that lie where all ranks have mapped them. Each rank makes its share of the
// sum and writes it into all the parts. The slot `first` says that this rank's part is written, `last`
// that its share of the sum is in every part.
struct InPlace {
  Call call;
  uint64_t first, last;
  std::shared_ptr<const SharedParts> parts;  // mapped until all shares are written
  size_t at;  // bytes
  bool shared_out = false;
};

using Pending = std::variant<Transfer, Announcement, InPlace>;

inline uint64_t first_of(const Pending& p) {
  return std::visit([](const auto& of) { return of.first; }, p);
}
inline uint64_t last_of(const Pending& p) {
  return std::visit([](const auto& of) { return of.last; }, p);
}

inline const Call& call_of(const Pending& p) {
  return std::visit([](const auto& of) -> const Call& { return of.call; }, p);
}

// Says that this rank's part of the sum is written.
void publish_part(Ring&, const InPlace&);

bool ready(const Ring&, const Pending&);
void advance(Ring&, Pending&);
void complete(Ring&, Pending&);
// The caller's argument and signature are not to be read any more.
void forget_arguments(Ring&, Pending&);

// A whole announcement at once.
void announce_and_read(Ring&, const Call&, uint64_t mine, Reader*);

}  // namespace fcoll
