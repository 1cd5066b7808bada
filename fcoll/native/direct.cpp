// Large parts are not copied into the ring: their address is published, and the peers read them
// from their owner's memory (process_vm_readv), each straight to where it wants them. The owner's
// call returns when all have.
//
// A read proves what it has read. It fetches the owner's token too, in the same system call, which
// works on one address space throughout: no other process that was given the pid, and no other
// program in the same process, has the token at that place. And it looks afterwards whether the
// owner still waits: one that has given up may have changed its memory.
#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstring>

#include "core.h"
#include "segment.h"

namespace fcoll {

namespace {
// An exiting process loses its memory a little before its pidfd says so.
constexpr int EXIT_MS = 200;
}  // namespace

bool Group::read(int peer, void* to, uint64_t address, size_t bytes) {
  uint64_t token_at = segments_[peer]->token_at, token = 0;
#ifdef FCOLL_TEST_THREADS  // so that ThreadSanitizer sees it
  std::memcpy(to, reinterpret_cast<const void*>(address), bytes);
  std::memcpy(&token, reinterpret_cast<const void*>(token_at), sizeof token);
#else
  iovec here[] = {{to, bytes}, {&token, sizeof token}};
  iovec there[] = {{reinterpret_cast<void*>(address), bytes},
                   {reinterpret_cast<void*>(token_at), sizeof token}};
  ssize_t moved = process_vm_readv(pids_[peer], here, 2, there, 2, 0);
  if (moved != ssize_t(bytes + sizeof token)) return false;
#endif
  return token == segments_[peer]->token;
}

void Group::say_what_it_reads() {
  bool all = true;
  uint64_t token;
  for (int r = 0; r < n_; r++)
    all = all && (r == rank_ || read(r, &token, segments_[r]->token_at, sizeof token));
  segments_[rank_]->reads.store(all ? 1 : 2, std::memory_order_release);
}

void Group::fetch(int peer, void* to, uint64_t address, size_t bytes) {
  if (bytes == 0) return;
  bool there = read(peer, to, address, bytes);  // at once: parts of 2 GiB do not come this way
  const Segment* s = segments_[peer];
  if (s->state.load(std::memory_order_acquire) == broken)
    fail(Error::What(s->error_kind), s->error_rank, s->error);
  if (there) return;
  std::string who = "rank " + std::to_string(peer);
  pollfd p{pidfds_[peer], POLLIN, 0};
  if (poll(&p, 1, EXIT_MS) > 0) fail(Error::peer_died, peer, who + " died");
  fail(Error::closed, peer, who + "'s tensor could not be read: was it freed during the call?");
}

// Is this rank's part to be read from its own memory? Each rank decides that for itself.
bool Group::by_address(const void* in, size_t bytes) {
  if (peers_read_ < 0) {
    peers_read_ = 1;
    for (int r = 0; r < n_; r++) {
      auto& word = segments_[r]->reads;
      if (r != rank_) wait(r, word, 1);
      if (word.load() != 1) peers_read_ = 0;
    }
  }
  if (!peers_read_) return false;
#ifndef FCOLL_TEST_THREADS
  // Not all memory can be read so, a device's mapping for one: this rank sees that first. Once for
  // a buffer that comes again: it takes 0.7 to 1.1 us, an all-to-all of 512 KiB about 21.
  if (in == readable_ && bytes <= readable_bytes_) return true;
  uint8_t ends[2];
  auto begin = const_cast<uint8_t*>(static_cast<const uint8_t*>(in));
  iovec here{ends, 2}, there[] = {{begin, 1}, {begin + bytes - 1, 1}};
  if (process_vm_readv(pids_[rank_], &here, 1, there, 2, 0) != 2) return false;
  readable_ = in;
  readable_bytes_ = bytes;
  return true;
#else
  return true;
#endif
}

// The peers have read what this rank published up to seq: the caller may have its memory back.
void Group::until_read(uint64_t seq) {
  for (int r = 0; r < n_; r++) {
    if (r != rank_) wait(r, segments_[r]->done, seq);
  }
}

}  // namespace fcoll
