// Arenas whose ranks do not use the same lanes, every rank a thread; and sums in place beside other
// calls. Each case is one that went wrong.
#include <atomic>
#include <cstring>
#include <random>

#include "arena.h"
#include "shared_parts.h"
#include "threads.h"

using namespace fcoll;

namespace {

const Call ONE = Call::all_reduce(1, Type::i64, Op::sum);

struct Part {
  Claimed claimed;
  int64_t elsewhere = 0;
  Part(Arena& arena, size_t lane, int64_t value) : claimed(arena.claim(lane, 8)) {
    std::memcpy(data(), &value, 8);
  }
  uint8_t* data() { return claimed.data ? claimed.data : reinterpret_cast<uint8_t*>(&elsewhere); }
};

void check(const Parts& parts, int64_t value, int rank) {  // rank r's is value + r
  for (size_t r = 0; r < parts.data.size(); r++) {
    int64_t found;
    std::memcpy(&found, parts.data[r], 8);
    if (found != value + int64_t(r))
      std::fprintf(stderr, "%lld instead of %lld\n", (long long)found, (long long)(value + int64_t(r)));
    expect(found == value + int64_t(r), "the parts of this call", rank);
  }
}

void meet(Arena& arena, size_t lane, int64_t value, int rank) {
  Part part(arena, lane, value + rank);
  check(arena.meet(ONE, part.data(), 8), value, rank);
}

void disagree_once(Arena& arena, int rank) { meet(arena, size_t(rank), 1, rank); }

// One rank recompiled alone; then parts are collected long after they were announced.
void parts_collected_late() {
  Groups groups = joined(2);
  on_ranks(2, [&](int r) {
    Arena& arena = groups[r]->arena();
    disagree_once(arena, r);
    Part part(arena, 0, 1000 + r);
    auto announced = arena.announce(ONE, part.data(), 8);
    for (int64_t k = 0; k < 200; k++) meet(arena, 1 + k % 3 * size_t(r), 10 * k, r);
    check(arena.collect(*announced), 1000, r);
    groups[r]->run(Call::barrier(), nullptr, nullptr);
  });
}

// More than there are lanes and spare places.
void many_announced_at_once() {
  for (bool differ : {false, true}) {
    Groups groups = joined(2);
    on_ranks(2, [&](int r) {
      Arena& arena = groups[r]->arena();
      if (differ) disagree_once(arena, r);
      std::vector<std::unique_ptr<Part>> parts;
      std::vector<std::shared_ptr<Arena::Announced>> announced;
      for (int64_t k = 0; k < 700; k++) {
        parts.push_back(std::make_unique<Part>(arena, k, 10 * k + r));
        announced.push_back(arena.announce(ONE, parts.back()->data(), 8));
      }
      for (int64_t k = 699; k >= 0; k--) check(arena.collect(*announced[k]), 10 * k, r);
      groups[r]->run(Call::barrier(), nullptr, nullptr);
    });
  }
}

// Rank 0 fails between the halves of a collective in which the ranks use different lanes, and goes on.
void a_failure_in_other_lanes() {
  Groups groups = joined(2);
  on_ranks(2, [&](int r) {
    Arena& arena = groups[r]->arena();
    Part held(arena, 0, 100 + r);
    Parts first = arena.meet(ONE, held.data(), 8);  // read at the end by rank 1
    size_t other = r == 0 ? 0 : 1;  // rank 0 uses the lane again: its program does not need `first`
    for (int64_t k = 0; k < 30; k++) {
      Part part(arena, other, 10 * k + r);
      auto announced = arena.announce(ONE, part.data(), 8);
      if (r == 0) continue;  // it fails, and never collects
      check(arena.collect(*announced), 10 * k, r);
      check(first, 100, r);
    }
    groups[r]->run(Call::barrier(), nullptr, nullptr);
  });
}

// Programs of claims in lanes of their own, read some calls later; then the same lanes again, which
// are soon used in place.
void lanes_are_used_again() {
  Groups groups = joined(3);
  on_ranks(3, [&](int r) {
    Arena& arena = groups[r]->arena();
    std::mt19937_64 own(r);
    for (int round = 0; round < 6; round++) {
      for (int64_t k = 0; k < 40; k++) meet(arena, own() % 3, 10 * k, r);
      for (int64_t k = 0; k < 12; k++) meet(arena, k % 3, 10 * k, r);
      uint64_t before = arena.disagreements();
      for (size_t lane = 0; lane < 3; lane++) {
        Part part(arena, lane, 5 + r);
        Parts parts = arena.meet(ONE, part.data(), 8);
        check(parts, 5, r);
        expect(parts.data[r] == part.claimed.data, "it is read in place again", r);
      }
      expect(arena.disagreements() == before && before > 0, "they agree again", r);
    }
    groups[r]->run(Call::barrier(), nullptr, nullptr);
  });
}

// Two threads of each rank take turns: one makes a call now and then, and reads what it got until its
// next, while the other makes more than a lane has places.
void two_threads_with_programs() {
  constexpr int CALLS = 240, TURN = 12;
  Groups groups = joined(2);
  on_ranks(2, [&](int r) {
    Arena& arena = groups[r]->arena();
    std::atomic<int> next{0};
    auto thread = [&](int which) {
      Parts parts;
      for (int k = 0, mine = 0; k < CALLS; k++) {
        if ((k % TURN == 0) != (which == 0)) continue;
        while (next != k) std::this_thread::yield();
        if (!parts.data.empty()) check(parts, 10 * mine, r);
        Part part(arena, 0, 10 * k + r);
        parts = arena.meet(ONE, part.data(), 8);
        mine = k;
        next++;
      }
    };
    std::thread other([&] { thread(1); });
    thread(0);
    other.join();
    groups[r]->run(Call::barrier(), nullptr, nullptr);
  });
}

// -- sums in place --------------------------------------------------------------------------------

struct Sums {
  Groups one = joined(2, 10), two = joined(2, 10);
  std::vector<std::shared_ptr<SharedParts>> parts{std::make_shared<SharedParts>(8192),
                                                  std::make_shared<SharedParts>(8192)};
  Sums() {
    on_ranks(2, [&](int r) { expect(parts[r]->join(*one[r], ONE), "joined", r); });
  }
  uint64_t start(int r, size_t at = 0) {
    int64_t value = r + 1;
    std::memcpy(parts[r]->own() + at, &value, 8);
    return one[r]->start_in_place(ONE, parts[r], at);
  }
  void check(int r) {
    int64_t found;
    std::memcpy(&found, parts[r]->own(), 8);
    expect(found == 3, "the sum", r);
  }
  void on_the_other_group(int r) {
    int64_t x = r + 1;
    two[r]->run(ONE, &x, &x);
    expect(x == 3, "the sum on the other group", r);
  }
};

void a_start_behind_a_sum() {
  Sums sums;
  std::atomic<bool> first{false};
  on_ranks(2, [&](int r) {
    if (r == 1)
      while (!first) std::this_thread::yield();
    uint64_t ticket = sums.start(r);
    int64_t x = r + 1, y = 0;
    uint64_t other = sums.one[r]->start(ONE, &x, &y, 0);
    first = true;
    sums.on_the_other_group(r);
    sums.one[r]->finish(other);
    expect(y == 3, "the small sum", r);
    sums.one[r]->finish(ticket);
    sums.check(r);
  });
}

// One rank waits for the sum before it makes the call on the other group, the other one after it.
void a_wait_for_a_share() {
  Sums sums;
  std::atomic<bool> first{false};
  on_ranks(2, [&](int r) {
    if (r == 0)
      while (!first) std::this_thread::yield();
    uint64_t ticket = sums.start(r);
    first = true;
    if (r == 0) sums.one[r]->finish(ticket);
    sums.on_the_other_group(r);
    if (r == 1) sums.one[r]->finish(ticket);
    sums.check(r);
  });
}

template <class F>
void both_mismatch(F call) {
  on_ranks(2, [&](int r) {
    try {
      call(r);
    } catch (const Error& e) {
      return expect(e.kind == Error::mismatch, e.what(), r);
    }
    expect(false, "a mismatch", r);
  });
}

void sums_at_other_places() {
  Sums sums;
  both_mismatch([&](int r) { sums.one[r]->finish(sums.start(r, r * 4096)); });
}

// Buckets of two reducers, which only their signatures tell apart.
void sums_of_other_buckets() {
  auto tagged = [](uint64_t tag) {
    Call call = ONE;
    call.digest = tag;
    return call;
  };
  Groups groups = joined(2, 10);
  both_mismatch([&](int r) { SharedParts(4096).join(*groups[r], tagged(7 + r)); });
  Sums sums;
  both_mismatch([&](int r) {
    sums.one[r]->finish(sums.one[r]->start_in_place(tagged(7 + r), sums.parts[r], 0));
  });
}

// -- other calls ----------------------------------------------------------------------------------

void splits_of_one_direction() {
  for (int n : {2, 3}) {
    Groups groups = joined(n, 10);
    on_ranks(n, [&](int r) {
      int64_t in[8] = {}, out[8] = {};
      size_t sends[3] = {8, 8, 8}, expects[3] = {8, 8, 8};
      if (r == 0) sends[1] = 16;  // rank 1 expects 8
      try {
        groups[r]->all_to_all(Call::all_to_all(8), in, out, sends, expects);
      } catch (const Error& e) {
        return expect(e.kind == Error::mismatch, e.what(), r);
      }
      expect(false, "a mismatch on all ranks", r);
    });
  }
}

void round_trips_with_all() {
  Groups groups = joined(3, 20);
  on_ranks(3, [&](int r) {
    for (auto [a, b] : {std::pair(0, 1), std::pair(0, 2)})  // a third pair would help the second on
      if (r == a || r == b) expect(groups[r]->round_trip_ns(r == a ? b : a) > 0, "a time", r);
  });
}

// Results that nobody waits for are let go of when later calls fill them; and a group is left at once.
void dropped_results() {
  Groups groups = joined(2, 10);
  on_ranks(2, [&](int r) {
    std::weak_ptr<int64_t> last;
    for (int64_t k = 0; k < 100; k++) {
      auto out = std::make_shared<int64_t>(0);
      int64_t x = k;
      if (uint64_t ticket = groups[r]->start(ONE, &x, out.get(), 0)) groups[r]->keep(ticket, out);
      last = out;
    }
    groups[r]->run(Call::barrier(), nullptr, nullptr);
    expect(last.expired(), "nobody holds it", r);
  });
  on_ranks(2, [&](int r) {
    auto out = std::make_shared<int64_t>(0);
    int64_t x = 1;
    if (r == 1) return groups[r]->leave();
    if (uint64_t ticket = groups[r]->start(ONE, &x, out.get(), 0)) {
      groups[r]->keep(ticket, out);
      try {
        groups[r]->finish(ticket);
      } catch (const Error& e) {
        return expect(e.kind == Error::peer_died, e.what(), r);
      }
    }
    expect(false, "it left", r);
  });
}

}  // namespace

int main() {
  const std::pair<const char*, void (*)()> cases[] = {
      {"parts collected late", parts_collected_late},
      {"many announced at once", many_announced_at_once},
      {"a failure in other lanes", a_failure_in_other_lanes},
      {"lanes are used again", lanes_are_used_again},
      {"two threads with programs", two_threads_with_programs},
      {"a start behind a sum", a_start_behind_a_sum},
      {"a wait for a share", a_wait_for_a_share},
      {"sums at other places", sums_at_other_places},
      {"sums of other buckets", sums_of_other_buckets},
      {"splits of one direction", splits_of_one_direction},
      {"round trips with all", round_trips_with_all},
      {"dropped results", dropped_results},
  };
  for (auto [name, run] : cases) {
    now_in = name;
    run();
  }
  std::printf("%zu cases: all right\n", std::size(cases));
}
