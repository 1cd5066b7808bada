// Arenas alone, every rank a thread: random programs of collectives whose parts are read some
// collectives later, each value checked when it is read.
//
// arena_test RANKS CALLS SEED agree|differ: do the ranks read each part at the same point of
// their programs, as ranks that run the same graph do?
#include "arena.h"

#include <cstring>
#include <random>

#include "threads.h"

using namespace fcoll;

namespace {

int64_t value(int rank, size_t i, uint64_t call) { return (rank + 1) * 100'000 + i % 97 + call * 7; }

struct Open {  // a collective whose parts are still to be read
  uint64_t call, until;
  size_t lane, count;
  Parts parts;
};

void check(const Open& open, int me) {
  for (size_t r = 0; r < open.parts.data.size(); r++) {
    auto part = reinterpret_cast<const int64_t*>(open.parts.data[r]);
    for (size_t i = 0; i < open.count; i++)
      if (part[i] != value(r, i, open.call)) {
        std::fprintf(stderr, "rank %d, call %llu, part of %zu: wrong at %zu\n", me,
                     (unsigned long long)open.call, r, i);
        std::_Exit(1);
      }
  }
}

void program(Group& g, uint64_t calls, uint64_t seed, bool agree) {
  Arena& arena = g.arena();
  std::mt19937_64 random(seed), own(seed * 31 + g.rank());
  std::vector<Open> open;
  auto busy = [&](size_t lane) {
    for (const auto& o : open)
      if (o.lane == lane) return true;
    return false;
  };
  for (uint64_t k = 0; k < calls; k++) {
    std::erase_if(open, [&](const Open& o) { return o.until <= k && (check(o, g.rank()), true); });
    size_t count = 1 + random() % (random() % 100 ? 2000 : 1'200'000), later = random() % 4, lane = 0;
    bool halves = random() % 3 == 0;
    if (!agree) later = own() % 4;
    while (busy(lane)) lane++;
    std::vector<int64_t> elsewhere(count);
    Claimed claimed = arena.claim(lane, count * 8);
    auto part = reinterpret_cast<int64_t*>(claimed.data);
    if (!part) part = elsewhere.data();
    for (size_t i = 0; i < count; i++) part[i] = value(g.rank(), i, k);
    if (own() % 4 == 0) std::this_thread::yield();
    auto mine = reinterpret_cast<const uint8_t*>(part);
    Call call = Call::all_reduce(count, Type::i64, Op::sum);
    Open now{k, k + later, lane, count, {}};
    if (halves) {
      auto announced = arena.announce(call, mine, count * 8);
      if (own() % 2) std::this_thread::yield();
      now.parts = arena.collect(*announced);
    } else {
      now.parts = arena.meet(call, mine, count * 8);
    }
    open.push_back(std::move(now));
  }
  for (const auto& o : open) check(o, g.rank());
  g.run(Call::barrier(), nullptr, nullptr);  // nobody's arena goes before all have read it
}

}  // namespace

int main(int, char** argv) {
  int n = std::atoi(argv[1]);
  uint64_t calls = std::atoi(argv[2]), seed = std::atoi(argv[3]);
  bool agree = std::strcmp(argv[4], "agree") == 0;
  Groups groups = joined(n);
  on_ranks(n, [&](int r) { program(*groups[r], calls, seed, agree); });
  std::printf("%d ranks, %llu calls: all right\n", n, (unsigned long long)calls);
}
