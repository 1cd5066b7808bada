#include "arena.h"

#include <algorithm>
#include <string>

namespace fcoll {

namespace {
// As many places as fill a core's own cache.
size_t places_for(size_t bytes) {
  constexpr size_t CACHE = 1 << 20;
  return std::clamp<size_t>(CACHE / std::max<size_t>(bytes, 1), 2, Arena::PLACES);
}
}  // namespace

Arena::Arena(Group& group) : group_(group), born_(fork_count()), memories_(group.size()) {
  memories_[group.rank()] = std::make_shared<Memory>(LANES * PLACES * PLACE);
}

uint8_t* Arena::claim(size_t lane, size_t bytes) {
  if (born_ != fork_count())
    throw Error(Error::forked, -1, "this process was forked after the group was used");
  if (!agreed_) return nullptr;
  if (lane >= LANES - SPARE) return nullptr;
  if (bytes > PLACE)
    throw std::runtime_error("fcoll: no room for " + std::to_string(bytes) + " bytes in the arena");
  size_t place = (met_[lane] + 1) % places_for(bytes);  // never the one where they met last
  return memories_[group_.rank()]->data() + (lane * PLACES + place) * PLACE;
}

const uint8_t* Arena::copied(const uint8_t* data, size_t bytes) {
  if (bytes > PLACE)
    throw std::runtime_error("fcoll: no room for " + std::to_string(bytes) + " bytes in the arena");
  size_t lane = LANES - SPARE + spares_++ % SPARE;
  uint8_t* to = memories_[group_.rank()]->data() + lane * PLACES * PLACE;
  copy(to, data, bytes);
  return to;
}

bool Arena::has(const uint8_t* data) const {
  const Memory& own = *memories_[group_.rank()];
  return data >= own.data() && data < own.data() + own.bytes();
}

// Not at the claim: after one that came to nothing the peers may still read where they met last.
uint64_t Arena::turn(const uint8_t* mine) {
  uint64_t offset = mine - memories_[group_.rank()]->data(), place = offset / PLACE;
  met_[place / PLACES] = place % PLACES;
  return offset;
}

bool Arena::find(const uint64_t* where, std::vector<uint8_t*>& parts) {
  bool same = true, spare = false;
  for (int r = 0; r < group_.size(); r++) {
    parts.push_back(memories_[r]->data() + where[r]);
    same = same && where[r] == where[0];
    spare = spare || where[r] >= (LANES - SPARE) * PLACES * PLACE;
  }
  if (!same && !spare) agreed_ = false;
  return same && !spare;
}

bool Arena::meet(const Call& call, const uint8_t* mine, std::vector<uint8_t*>& parts) {
  if (!joined_) join(call);
  uint64_t where[MAX_RANKS];
  group_.meet(call, turn(mine), where);
  return find(where, parts);
}

uint64_t Arena::announce(const Call& call, const uint8_t* mine) {
  if (!joined_) join(call);
  abandon(mine);
  auto news = std::make_unique<Announced>();
  news->id = ++last_id_;
  news->mine = mine;
  news->ticket = group_.announce(call, turn(mine), news->where.data(), 0);
  announced_.push_back(std::move(news));
  return last_id_;
}

void Arena::abandon(const uint8_t* mine) {
  for (const auto& news : announced_)
    if (news->mine == mine && news->ticket) group_.finish(news->ticket);  // it writes to `where`
  std::erase_if(announced_, [&](const auto& news) { return news->mine == mine; });
}

bool Arena::collect(uint64_t announced, std::vector<uint8_t*>& parts) {
  auto found = std::find_if(announced_.begin(), announced_.end(),
                            [&](const auto& news) { return news->id == announced; });
  if (found == announced_.end())
    throw std::runtime_error("fcoll: this collective was never announced");
  if ((*found)->ticket) group_.finish((*found)->ticket);
  bool stays = find((*found)->where.data(), parts);
  announced_.erase(found);
  return stays;
}

void Arena::join(const Call& call) {
  int n = group_.size();
  uint64_t unused[MAX_RANKS];
  group_.meet(call, 0, unused);  // so that a rank which calls something else hears of this call
  std::vector<Address> addresses(n);
  Address own = memories_[group_.rank()]->address();
  group_.all_gather(&own, addresses.data(), sizeof own);
  std::string failure;
  for (int r = 0; r < n && failure.empty(); r++) {
    if (r == group_.rank()) continue;
    try {
      memories_[r] = std::make_shared<Memory>(addresses[r]);
    } catch (const std::exception& e) {
      failure = e.what();
    }
  }
  std::vector<uint8_t> failed(n);
  uint8_t mine = !failure.empty();
  group_.all_gather(&mine, failed.data(), 1);  // all of them join, or all of them fail
  memories_[group_.rank()]->close_fd();
  if (mine) throw std::runtime_error(failure);
  auto other = std::find(failed.begin(), failed.end(), 1);
  if (other != failed.end())
    throw std::runtime_error("fcoll: rank " + std::to_string(other - failed.begin()) +
                             " cannot map the arenas of its peers");
  joined_ = true;
}

}  // namespace fcoll
