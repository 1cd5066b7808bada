#include "shared_parts.h"

#include <algorithm>

#include "group.h"

namespace fcoll {

SharedParts::SharedParts(size_t bytes) {
  try {
    own_ = Memory::make(bytes);
  } catch (const std::runtime_error&) {
  }
}

bool SharedParts::join(Group& group, Call call) {
  int n = group.size(), rank = group.rank();
  call.in_place = true;
  auto turn = group.enter();
  group.announce_and_wait(turn, call, 0);  // who calls something else hears of this call
  std::vector<Address> addresses(n);
  Address mine = own_ ? own_->address() : Address();
  group.run(turn, Call::all_gather(sizeof mine), &mine, addresses.data());
  std::vector<std::shared_ptr<Memory>> found(n);
  // Of other sizes on some rank: the call of the part that differs says so.
  uint8_t ok = own_ && std::all_of(addresses.begin(), addresses.end(),
                                   [&](const Address& a) { return a.bytes == mine.bytes; });
  for (int r = 0; r < n && ok; r++) {
    try {
      found[r] = r == rank ? own_ : Memory::open(addresses[r]);
    } catch (const std::runtime_error&) {
      ok = 0;
    }
  }
  std::vector<uint8_t> all_ok(n);
  group.run(turn, Call::all_gather(1), &ok, all_ok.data());
  if (own_) own_->close_fd();
  if (!std::all_of(all_ok.begin(), all_ok.end(), [](uint8_t is) { return is; })) return false;
  memories_ = std::move(found);
  return true;
}

}  // namespace fcoll
