#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <string>

#include "kernels.h"

namespace fcoll {

// -- a rank's file --------------------------------------------------------------------------------

ArenaFile::~ArenaFile() {
  for (const auto& [address, window] : by_address_)
    munmap(const_cast<uint8_t*>(address), window.bytes);
}

ArenaFile::Window ArenaFile::window_of(uint64_t offset) {
  if (offset < SPARES_AT) return {offset / LANE * LANE, LANE};
  return {SPARES_AT + (offset - SPARES_AT) / PLACE * PLACE, PLACE};
}

uint8_t* ArenaFile::at(uint64_t offset) {
  Window window = window_of(offset);
  bool spare = window.at >= SPARES_AT;
  uint8_t*& known = mapped_[spare ? LANES + (window.at - SPARES_AT) / PLACE : window.at / LANE];
  if (!known) {
    known = file_.map(window.at, window.bytes);
    if (!known) return nullptr;
    by_address_[known] = window;
  }
  return known + (offset - window.at);
}

std::optional<uint64_t> ArenaFile::offset_of(const uint8_t* data) const {
  auto next = by_address_.upper_bound(data);
  if (next == by_address_.begin()) return std::nullopt;
  const auto& [address, window] = *std::prev(next);
  if (data >= address + window.bytes) return std::nullopt;
  return window.at + (data - address);
}

void ArenaFile::read(uint64_t offset, void* to, size_t bytes) const {
  if (!file_.read(offset, to, bytes)) throw std::runtime_error("fcoll: cannot read a peer's part");
}

void ArenaFile::write(uint64_t offset, const void* from, size_t bytes) {
  if (uint8_t* to = at(offset)) return copy(to, from, bytes);
  if (!file_.write(offset, from, bytes))
    throw std::runtime_error("fcoll: no memory for a part of " + std::to_string(bytes) + " bytes");
}

// -- this rank's parts ----------------------------------------------------------------------------

namespace {
// As many parts as fill a core's own cache, in pages of their own.
size_t room_for(size_t bytes) {
  constexpr size_t CACHE = 1 << 20;
  return std::clamp<size_t>(CACHE / std::max<size_t>(bytes, 1), 2, 8) *
         round_up(bytes, SharedFile::PAGE);
}
}  // namespace

Arena::Arena(Group& group) : group_(group), born_(fork_count()), files_(group.size()) {
  try {
    files_[group.rank()] = std::make_shared<ArenaFile>();
  } catch (const std::runtime_error&) {
    shared_ = false;  // the others learn of it when they join
  }
}

uint8_t* Arena::claim(size_t lane, size_t bytes) {
  if (born_ != fork_count())
    throw Error(Error::forked, -1, "this process was forked after the group was used");
  if (!same_lanes_ || lane >= ArenaFile::LANES || by_ring(bytes)) return nullptr;
  // Next to where they met last, or at the beginning: never in it.
  auto [begin, end] = met_[lane];
  uint64_t at = round_up(end, SharedFile::PAGE);
  if (at + bytes > room_for(bytes)) at = begin >= bytes ? 0 : at;
  return files_[group_.rank()]->at(lane * ArenaFile::LANE + at);
}

// Where the peers find a part: it is copied into a spare place if it was made elsewhere.
uint64_t Arena::place(const uint8_t* mine, size_t bytes) {
  ArenaFile& own = *files_[group_.rank()];
  if (auto offset = own.offset_of(mine)) {
    // Noted here and not at the claim: after one that came to nothing the peers may still read where
    // they met last.
    uint64_t lane = *offset / ArenaFile::LANE, begin = *offset % ArenaFile::LANE;
    met_[lane] = {begin, begin + bytes};
    return *offset;
  }
  uint64_t offset = ArenaFile::SPARES_AT + spares_++ % ArenaFile::SPARES * ArenaFile::PLACE;
  try {
    own.write(offset, mine, bytes);
  } catch (const std::exception& e) {
    group_.close(e.what());  // else the peers would wait for this part
  }
  return offset;
}

// -- all ranks' parts -----------------------------------------------------------------------------

Parts Arena::find(const uint64_t* where, size_t bytes) {
  bool same = true, spare = false, mapped = true;
  Parts parts;
  copies_.clear();
  for (int r = 0; r < group_.size(); r++) {
    const uint8_t* part = files_[r]->at(where[r]);
    if (!part) {
      mapped = false;
      auto& copied = copies_.emplace_back(bytes);
      files_[r]->read(where[r], copied.data(), bytes);
      part = copied.data();
    }
    parts.data.push_back(part);
    same = same && where[r] == where[0];
    spare = spare || where[r] >= ArenaFile::SPARES_AT;
  }
  if (!same && !spare) same_lanes_ = false;
  parts.stay = same && !spare && mapped;
  return parts;
}

void Arena::gather(const Call& call, const uint8_t* mine, size_t bytes, std::vector<uint8_t>& all) {
  all.resize(bytes * group_.size());
  Call gathers = Call::all_gather(bytes).signed_by(call.signature ? *call.signature : UNSIGNED);
  group_.run(gathers, mine, all.data());
}

Parts Arena::parts_in(const std::vector<uint8_t>& all, size_t bytes) const {
  Parts parts;
  for (int r = 0; r < group_.size(); r++) parts.data.push_back(all.data() + r * bytes);
  return parts;
}

Parts Arena::meet(const Call& call, const uint8_t* mine, size_t bytes) {
  if (!joined_) join(call);
  if (by_ring(bytes)) {
    gather(call, mine, bytes, travelled_);
    return parts_in(travelled_, bytes);
  }
  uint64_t where[MAX_RANKS];
  group_.announce_and_wait(call, place(mine, bytes), where);
  return find(where, bytes);
}

uint64_t Arena::announce(const Call& call, const uint8_t* mine, size_t bytes) {
  if (!joined_) join(call);
  auto news = std::make_unique<Announced>();
  news->id = ++last_id_;
  news->bytes = bytes;
  news->mine = UINT64_MAX;
  news->ticket = 0;
  if (by_ring(bytes)) {
    gather(call, mine, bytes, news->travelled);
  } else {
    news->mine = place(mine, bytes);
    abandon(news->mine);
    news->ticket = group_.announce(call, news->mine, news->where.data());
  }
  announced_.push_back(std::move(news));
  return last_id_;
}

void Arena::abandon(uint64_t mine) {
  for (const auto& news : announced_)
    if (news->mine == mine && news->ticket) group_.finish(news->ticket);  // it writes to `where`
  std::erase_if(announced_, [&](const auto& news) { return news->mine == mine; });
}

Parts Arena::collect(uint64_t announced) {
  auto found = std::find_if(announced_.begin(), announced_.end(),
                            [&](const auto& news) { return news->id == announced; });
  if (found == announced_.end())
    throw std::runtime_error("fcoll: this collective was never announced");
  auto news = std::move(*found);
  announced_.erase(found);
  if (news->ticket) group_.finish(news->ticket);
  if (news->mine != UINT64_MAX) return find(news->where.data(), news->bytes);
  travelled_ = std::move(news->travelled);
  return parts_in(travelled_, news->bytes);
}

// The ranks open each other's files and agree on what follows: all use them, or none.
void Arena::join(const Call& call) {
  int n = group_.size(), rank = group_.rank();
  uint64_t unused[MAX_RANKS];
  group_.announce_and_wait(call, 0, unused);  // who calls something else hears of this call
  std::vector<Address> addresses(n);
  Address own = files_[rank] ? files_[rank]->address() : Address();
  group_.run(Call::all_gather(sizeof own), &own, addresses.data());
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
  group_.run(Call::all_gather(1), &ok, all_ok.data());
  shared_ = std::all_of(all_ok.begin(), all_ok.end(), [](uint8_t is) { return is; });
  joined_ = true;
}

}  // namespace fcoll
