// The collectives on a ring: what a rank puts into its slots, and what it takes from its peers'.
#pragma once

#include "ring.h"
#include "shared_parts.h"

namespace fcoll {

// Where a rank's own part is read from when the result is made.
enum class Own { from_argument, from_slots };  // slots: the caller may have changed the argument since

// A collective whose parts travel in the slots first..last, a chunk in each.
struct Transfer {
  Call call;
  uint64_t first, last;
  const uint8_t* in;  // null once the caller may have changed it
  uint8_t* out;
  Own own = Own::from_argument;
  bool large = false;  // more chunks than the window has places: some rank may use the window
};

// A collective whose parts are in the ranks' arenas: one slot says where this rank's is.
struct Announcement {
  Call call;
  uint64_t seq;
  uint64_t* where;  // by rank
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

size_t chunks_of(const Call&, int n);
// Does the call need all ranks twice, first for their parts and then for their sums?
bool in_two_passes(const Call&, int n);

void publish_chunk(Ring&, const Transfer&, size_t chunk);
// Wait for the peers' parts of a chunk, and make the result of them.
void complete_chunk(Ring&, const Transfer&, size_t chunk);

// Whole calls; they return when the result is there. Buffers are contiguous and do not overlap,
// except that in and out may be the same for all_reduce.
void run(Ring&, const Call&, const uint8_t* in, uint8_t* out);
// n parts each, one after the other, of the given sizes in bytes.
void all_to_all(Ring&, const Call&, const uint8_t* in, uint8_t* out, const size_t* in_bytes,
                const size_t* out_bytes);

void publish(Ring&, const Announcement&, uint64_t mine);
void complete(Ring&, const Announcement&);

// Wait for the peers' parts, and write this rank's share of the sum into all of them.
void share_out(Ring&, InPlace&);
void complete(Ring&, InPlace&);

}  // namespace fcoll
