// The collectives on a ring: what a rank puts into its slots, and what it takes from its peers'.
#pragma once

#include "ring.h"

namespace fcoll {

// Where a rank's own part is read from when the result is made. In the slots, since the caller may
// change the argument, of a call that is not complete on return.
enum class OwnPart { in_argument, in_slots };

// A collective whose parts travel in the slots first..last, a chunk in each.
struct Transfer {
  Call call;
  uint64_t first, last;
  const uint8_t* in;  // null once the caller may have changed it
  uint8_t* out;
  OwnPart own = OwnPart::in_argument;
  bool large = false;  // more chunks than the window has places: some rank may use the window
};

size_t chunks_of(const Call&, int n);
// Does the call need all ranks twice, first for their parts and then for their sums?
bool in_two_passes(const Call&, int n);

void publish_chunk(Ring&, const Transfer&, size_t chunk, bool in_window = true);
// Puts what no peer reads, this rank's own pieces, into the slots too: the argument may change now.
void keep_own(Ring&, const Transfer&);
// Wait for the peers' parts of a chunk, and make the result of them.
void complete_chunk(Ring&, const Transfer&, size_t chunk);

// Whole calls; they return when the result is there. Buffers are contiguous and do not overlap,
// except that in and out may be the same for all_reduce.
void run(Ring&, const Call&, const uint8_t* in, uint8_t* out);
// The same in two steps, of what does not take two passes: the first chunk is published, which says
// that this rank has come; then all the rest.
Transfer begin(Ring&, const Call&, const uint8_t* in, uint8_t* out);
void go_on(Ring&, const Transfer&);
// n parts each, one after the other, of the given sizes in bytes.
void all_to_all(Ring&, const Call&, const uint8_t* in, uint8_t* out, const size_t* in_bytes,
                const size_t* out_bytes);

}  // namespace fcoll
