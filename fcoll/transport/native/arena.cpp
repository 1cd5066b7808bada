#include "arena.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "kernels.h"

namespace fcoll {

namespace {

// What a rank says of its part: the place in its file, and the lane that it claimed for it.
constexpr int LANE_SHIFT = 40;
static_assert(ArenaFile::BYTES < uint64_t(1) << LANE_SHIFT);

uint64_t said(uint64_t offset, int lane) { return offset | uint64_t(lane + 1) << LANE_SHIFT; }
uint64_t offset_in(uint64_t where) { return where & ((uint64_t(1) << LANE_SHIFT) - 1); }
int lane_in(uint64_t where) { return int(where >> LANE_SHIFT) - 1; }

size_t address_space_left() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  size_t used = pages * SharedFile::PAGE;
  return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
}

// As many parts as fill a core's own cache, in pages of their own.
size_t room_for(size_t bytes) {
  constexpr size_t CACHE = 1 << 20;
  return std::clamp<size_t>(CACHE / std::max<size_t>(bytes, 1), 2, 8) *
         round_up(bytes, SharedFile::PAGE);
}

// Memory of a process's own for all ranks' parts, on cache lines as tensors are.
std::shared_ptr<uint8_t> memory_for(int n, size_t bytes) {
  auto* made = static_cast<uint8_t*>(std::aligned_alloc(64, std::max<size_t>(n * round_up(bytes, 64), 64)));
  if (!made) throw std::bad_alloc();
  return {made, std::free};
}

}  // namespace

Arena::Arena(Group& group) : group_(group), files_(group.size()) {
  // What is left of a limit is for the program: mappings would take it away from malloc.
  constexpr size_t MUCH = size_t(4) << 30;
  shared_ = address_space_left() >= MUCH;
  try {
    files_[group.rank()] = std::make_shared<ArenaFile>();
  } catch (const std::runtime_error&) {
    shared_ = false;  // the others learn of it when they join
  }
}

// -- this rank's parts ----------------------------------------------------------------------------

Claimed Arena::claim(size_t lane, size_t bytes) {
  auto turn = group_.enter();
  if (by_ring(bytes)) return {};
  if (lane >= ArenaFile::LANES) return claim_spare(NO_LANE, bytes);
  Lane& in = lanes_[lane];
  // What was announced here before: then it is known whether the ranks agree on the lane, and that
  // the peers have read what was here before that.
  group_.finish(turn, in.last);
  if (in.user != std::this_thread::get_id() && !in.held.expired()) return claim_spare(NO_LANE, bytes);
  in.user = std::this_thread::get_id();
  if (in.agreed < 2) return claim_spare(int(lane), bytes);
  // Next to where they met last, or at the beginning: never in it.
  auto [begin, end] = in.met;
  uint64_t at = round_up(end, SharedFile::PAGE);
  if (at + bytes > room_for(bytes)) at = begin >= bytes ? 0 : at;
  ArenaFile& own = *files_[group_.rank()];
  uint64_t offset = lane * ArenaFile::LANE + at;
  if (!own.reserve(offset, bytes)) return {};
  return {own.at(offset), hold_lane(in)};
}

// What tensors in a lane hold: the files, which stay mapped, and the lane.
std::shared_ptr<void> Arena::hold_lane(Lane& lane) {
  if (auto held = lane.held.lock()) return held;
  auto made = std::make_shared<std::vector<std::shared_ptr<ArenaFile>>>(files_);
  lane.held = made;
  return made;
}

Claimed Arena::claim_spare(int lane, size_t bytes) {
  size_t held = std::count_if(spares_.begin(), spares_.end(),
                              [](const Spare& s) { return !s.held.expired(); });
  if (held >= ArenaFile::HELD_SPARES) return {};
  size_t found = free_spare();
  ArenaFile& own = *files_[group_.rank()];
  uint64_t offset = ArenaFile::spare_at(found);
  uint8_t* data = own.reserve(offset, bytes) ? own.at(offset) : nullptr;
  if (!data) return {};
  auto hold = std::make_shared<std::shared_ptr<ArenaFile>>(files_[group_.rank()]);
  spares_[found] = {lane, 0, hold};
  return {data, hold};
}

// The first that nobody holds, with nothing in it that some rank has yet to read.
size_t Arena::free_spare() {
  for (size_t i = 0; i < ArenaFile::SPARES; i++)
    if (spares_[i].held.expired() && group_.read_by_all(spares_[i].last)) return i;
  throw Error(Error::closed, group_.rank(), "no spare place is free");  // see ArenaFile::SPARES
}

// What this rank says of its part, which is about to be announced. It is copied into a spare place
// if it was made elsewhere.
uint64_t Arena::place(const Turn& turn, const uint8_t* mine, size_t bytes) {
  ArenaFile& own = *files_[group_.rank()];
  uint64_t number = group_.next_number();
  auto offset = own.offset_of(mine);
  if (offset && !ArenaFile::is_spare(*offset)) {
    int lane = int(*offset / ArenaFile::LANE);
    lanes_[lane].last = number;
    return said(*offset, lane);
  }
  if (offset) {
    Spare& spare = spares_[ArenaFile::spare_of(*offset)];
    spare.last = number;
    if (spare.lane != NO_LANE) lanes_[spare.lane].last = number;
    return said(*offset, spare.lane);
  }
  size_t found = free_spare();
  spares_[found] = {NO_LANE, number, {}};
  if (!own.write(ArenaFile::spare_at(found), mine, bytes))
    group_.fail(turn, {Error::closed, group_.rank(),
                       name_of(group_.rank()) + " has no memory for a part of " +
                           std::to_string(bytes) + " bytes"});
  return said(ArenaFile::spare_at(found), NO_LANE);
}

// -- all ranks' parts -----------------------------------------------------------------------------

// All ranks are told the same, in the same order: they judge alike which lanes they agree on.
Parts Arena::read(const uint64_t* where, size_t bytes) {
  int n = group_.size(), lane = lane_in(where[0]);
  auto all = [&](auto holds) { return std::all_of(where, where + n, holds); };
  bool spare = ArenaFile::is_spare(offset_in(where[0]));
  if (!spare && all([&](uint64_t w) { return w == where[0]; })) return in_lane(where[0], bytes);
  if (all([&](uint64_t w) { return ArenaFile::is_spare(offset_in(w)) && lane_in(w) == lane; })) {
    if (lane != NO_LANE && ++lanes_[lane].agreed == 2) lanes_[lane].met = {};
  } else {
    disagreements_++;
    for (int r = 0; r < n; r++)
      if (lane_in(where[r]) != NO_LANE) lanes_[lane_in(where[r])].agreed = 0;
  }
  return copied(where, bytes);
}

Parts Arena::in_lane(uint64_t where, size_t bytes) {
  Lane& lane = lanes_[lane_in(where)];
  uint64_t offset = offset_in(where), begin = offset % ArenaFile::LANE;
  lane.met = {begin, begin + bytes};
  Parts parts{{}, hold_lane(lane)};
  for (auto& file : files_) parts.data.push_back(file->at(offset));
  if (std::all_of(parts.data.begin(), parts.data.end(), [](auto* part) { return part; }))
    return parts;
  std::vector<uint64_t> everywhere(group_.size(), where);
  return copied(everywhere.data(), bytes);
}

Parts Arena::copied(const uint64_t* where, size_t bytes) {
  int n = group_.size();
  auto memory = memory_for(n, bytes);
  Parts parts{{}, memory};
  for (int r = 0; r < n; r++) {
    uint8_t* to = memory.get() + r * round_up(bytes, 64);
    if (const uint8_t* part = files_[r]->at(offset_in(where[r])))
      copy(to, part, bytes);
    else if (!files_[r]->read(offset_in(where[r]), to, bytes))
      throw Error(Error::peer_died, r, name_of(r) + " is gone: its part cannot be read");
    parts.data.push_back(to);
  }
  return parts;
}

Parts Arena::gather(const Turn& turn, const Call& call, const uint8_t* mine, size_t bytes) {
  int n = group_.size();
  auto memory = memory_for(n, bytes);
  Call gathers = Call::all_gather(bytes).signed_by(call.signature ? *call.signature : UNSIGNED);
  group_.run(turn, gathers, mine, memory.get());
  Parts parts{{}, memory};
  for (int r = 0; r < n; r++) parts.data.push_back(memory.get() + r * bytes);
  return parts;
}

Parts Arena::meet(const Call& call, const uint8_t* mine, size_t bytes) {
  auto turn = group_.enter();
  if (!joined_) join(turn, call);
  if (by_ring(bytes)) return gather(turn, call, mine, bytes);
  Announced here(*this, bytes);
  group_.announce_and_wait(turn, call, place(turn, mine, bytes), &here);
  return std::move(here.parts);
}

std::shared_ptr<Arena::Announced> Arena::announce(const Call& call, const uint8_t* mine, size_t bytes) {
  auto turn = group_.enter();
  if (!joined_) join(turn, call);
  auto made = std::make_shared<Announced>(*this, bytes);
  if (by_ring(bytes))
    made->parts = gather(turn, call, mine, bytes);
  else
    made->ticket = group_.announce(turn, call, place(turn, mine, bytes), made);
  std::erase_if(announced_, [](const auto& entry) { return entry.second.expired(); });
  announced_[made->id] = made;
  return made;
}

std::shared_ptr<Arena::Announced> Arena::find(uint64_t id) {
  auto turn = group_.enter();
  auto found = announced_.find(id);
  return found == announced_.end() ? nullptr : found->second.lock();
}

Parts Arena::collect(Announced& announced) {
  if (announced.ticket) group_.finish(announced.ticket);
  return announced.parts;
}

// The ranks open each other's files and agree on what follows: all use them, or none.
void Arena::join(const Turn& turn, const Call& call) {
  int n = group_.size(), rank = group_.rank();
  group_.announce_and_wait(turn, call, 0);  // who calls something else hears of this call
  std::vector<Address> addresses(n);
  Address own = files_[rank] ? files_[rank]->address() : Address();
  group_.run(turn, Call::all_gather(sizeof own), &own, addresses.data());
  uint8_t ok = shared_;
  for (int r = 0; r < n && ok; r++) {
    if (r == rank) continue;
    try {
      files_[r] = std::make_shared<ArenaFile>(addresses[r]);
    } catch (const std::exception&) {
      ok = 0;
    }
  }
  std::vector<uint8_t> all_ok(n);
  group_.run(turn, Call::all_gather(1), &ok, all_ok.data());
  shared_ = std::all_of(all_ok.begin(), all_ok.end(), [](uint8_t is) { return is; });
  joined_ = true;
}

}  // namespace fcoll
