// Sums in place alone, every rank a thread: random programs of them and of other collectives, some
// under way while others start, each value checked when it is complete.
//
// in_place_test RANKS CALLS SEED; in_place_test RANKS us: how long they take beside those in the ring.
#include "shared_parts.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "group.h"
#include "threads.h"
#include "wait.h"

using namespace fcoll;

namespace {

constexpr size_t PLACES = 4, PLACE = 40'000;  // elements

int64_t value(int rank, size_t i, uint64_t call) { return (rank + 1) * 1000 + i % 97 + call * 7; }

struct Sum {
  uint64_t call, ticket;
  size_t count;
};

void check(const int64_t* found, size_t count, int n, uint64_t call, int me) {
  for (size_t i = 0; i < count; i++) {
    int64_t right = 0;
    for (int r = 0; r < n; r++) right += value(r, i, call);
    if (found[i] == right) continue;
    std::fprintf(stderr, "rank %d, call %llu: wrong at %zu\n", me, (unsigned long long)call, i);
    std::_Exit(1);
  }
}

void program(Group& g, uint64_t calls, uint64_t seed) {
  std::mt19937_64 random(seed), own(seed * 31 + g.rank());
  auto parts = std::make_shared<SharedParts>(PLACES * PLACE * 8);
  if (!parts->join(g, Call::all_reduce(1, Type::i64, Op::sum))) std::_Exit(2);
  auto at = [&](size_t p) { return reinterpret_cast<int64_t*>(parts->own()) + p * PLACE; };
  std::vector<std::optional<Sum>> under_way(PLACES);
  auto end = [&](size_t p) {
    if (!under_way[p]) return;
    g.finish(under_way[p]->ticket);
    check(at(p), under_way[p]->count, g.size(), under_way[p]->call, g.rank());
    under_way[p].reset();
  };
  for (uint64_t k = 0; k < calls; k++) {
    size_t count = 1 + random() % (random() % 4 ? 100 : PLACE), p = random() % PLACES;
    if (own() % 3 == 0) std::this_thread::yield();
    if (own() % 5 == 0) end(own() % PLACES);  // when each rank likes
    Call call = Call::all_reduce(count, Type::i64, Op::sum);
    if (random() % 4 == 0) {
      std::vector<int64_t> x(count);
      for (size_t i = 0; i < count; i++) x[i] = value(g.rank(), i, k);
      g.run(call, x.data(), x.data());
      check(x.data(), count, g.size(), k, g.rank());
      continue;
    }
    end(p);
    for (size_t i = 0; i < count; i++) at(p)[i] = value(g.rank(), i, k);
    under_way[p] = Sum{k, g.start_in_place(call, parts, p * PLACE * 8), count};
  }
  for (uint64_t k = calls; k < calls + 2 * RING; k++) {  // nothing else: their slots are used again
    size_t p = k % PLACES, count = PLACE;
    end(p);
    for (size_t i = 0; i < count; i++) at(p)[i] = value(g.rank(), i, k);
    Call call = Call::all_reduce(count, Type::i64, Op::sum);
    under_way[p] = Sum{k, g.start_in_place(call, parts, p * PLACE * 8), count};
  }
  for (size_t p = 0; p < PLACES; p++) end(p);
  g.run(Call::barrier(), nullptr, nullptr);
}

void measure(Group& g) {
  constexpr size_t LARGEST = 32 << 20;
  auto parts = std::make_shared<SharedParts>(LARGEST);
  parts->join(g, Call::all_reduce(1, Type::f32, Op::sum));
  std::vector<float> x(LARGEST / 4, 1.0f);
  std::memset(parts->own(), 0, LARGEST);
  for (size_t bytes = 256; bytes <= LARGEST; bytes *= 4) {
    Call call = Call::all_reduce(bytes / 4, Type::f32, Op::sum);
    std::vector<double> ring, place;
    for (int i = 0; i < (bytes > (1 << 20) ? 30 : 300); i++) {
      auto timed = [&](auto run) {
        g.run(Call::barrier(), nullptr, nullptr);
        double start = now_us();
        run();
        return now_us() - start;
      };
      auto* own = reinterpret_cast<float*>(parts->own());
      std::fill_n(x.data(), bytes / 4, float(i));  // as gradients are written before they are sent
      ring.push_back(timed([&] { g.run(call, x.data(), x.data()); }));
      std::fill_n(own, bytes / 4, float(i));
      place.push_back(timed([&] { g.finish(g.start_in_place(call, parts, 0)); }));
    }
    auto median = [](std::vector<double>& t) {
      std::nth_element(t.begin(), t.begin() + t.size() / 2, t.end());
      return t[t.size() / 2];
    };
    if (g.rank() == 0)
      std::printf("%9zu B: ring %8.1f us, in place %8.1f us\n", bytes, median(ring), median(place));
  }
}

}  // namespace

int main(int, char** argv) {
  int n = std::atoi(argv[1]);
  Groups groups = joined(n);
  if (!std::strcmp(argv[2], "us")) {
    on_ranks(n, [&](int r) { measure(*groups[r]); });
    return 0;
  }
  uint64_t calls = std::atoi(argv[2]), seed = std::atoi(argv[3]);
  on_ranks(n, [&](int r) { program(*groups[r], calls, seed); });
  std::printf("%d ranks, %llu calls: all right\n", n, (unsigned long long)calls);
}
