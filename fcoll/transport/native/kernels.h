// The inner loops: copies and reductions.
#pragma once

#include "call.h"

namespace fcoll {

// out[i] = op over r of parts[r][i], in rank order; narrow floats are added up in f32. out may be
// one of the parts.
void reduce(void* out, const void* const* parts, int n, size_t count, Type, Op);
void copy(void* to, const void* from, size_t bytes);
// The same, storing the result past the caches.
void reduce_streaming(void* out, const void* const* parts, int n, size_t count, Type, Op);
void copy_streaming(void* to, const void* from, size_t bytes);

// The loops for vectors of 16, 32 or 64 bytes, and the widest that this CPU has.
struct Loops {
  void (*reduce)(void* out, const void* const* parts, int n, size_t count, Type, Op);
  void (*copy_streaming)(void* to, const void* from, size_t bytes);
};
Loops loops_of(int vector_bytes);
int vector_bytes();

// From here on results are stored past the caches. Streaming an all-reduce of 4 MiB made no
// difference beyond the noise. Reading parts from their owner's memory instead (process_vm_readv)
// lost to the window: all_gather of 64 KiB 9.6 us instead of 5.7, of 4 MiB 740 instead of 590.
constexpr size_t STREAM_BYTES = 8 * 1024 * 1024;
// A rank's own part is copied past the caches from here on: an all_gather of 4 MiB in 600 to 870 us,
// without in 770 to 1,230; but an all_to_all whose own part is 2 MiB in 340 to 390, without in 280 to 380.
constexpr size_t STREAM_OWN_BYTES = 4 * 1024 * 1024;

// A piece of a result of `of` bytes: one that would push what is in the caches out of them goes past
// them. `own`: it is this rank's own part.
inline void copy_result(void* to, const void* from, size_t bytes, size_t of, bool own = false) {
  if (!bytes) return;
  bool large = of >= (own ? STREAM_OWN_BYTES : STREAM_BYTES);
  large ? copy_streaming(to, from, bytes) : copy(to, from, bytes);
}

}  // namespace fcoll
