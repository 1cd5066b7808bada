// The core alone, for the sanitizers: every rank is a thread.
//
// core_test RANKS CALLS SEED: that many random collectives on all ranks, every result checked.
#include <cstring>
#include <random>

#include "threads.h"

using namespace fcoll;

namespace {

int64_t value(int rank, size_t i, uint64_t call) { return (rank + 1) * 1000 + i % 97 + call % 89; }

[[noreturn]] void wrong(const char* what, int rank, uint64_t call, size_t i) {
  std::fprintf(stderr, "%s: wrong at element %zu on rank %d, call %llu\n", what, i, rank,
               (unsigned long long)call);
  std::_Exit(1);
}

size_t random_count(std::mt19937_64& random) {
  switch (random() % 8) {
    case 0: return random() % 200'000;  // several slots
    case 1: return random() % 40'000;
    default: return random() % 300;
  }
}

void ranks_calls(Group& g, int calls, uint64_t seed) {
  int n = g.size(), me = g.rank();
  std::mt19937_64 random(seed), delay(seed + me);
  struct Started {
    uint64_t ticket, call;
    size_t first, count;  // of the sums of all elements, those in out
    std::unique_ptr<std::vector<int64_t>> out;
  };
  std::vector<Started> started;
  auto check_started = [&] {
    for (auto& s : started) {
      if (s.ticket) g.finish(s.ticket);
      for (size_t i = 0; i < s.count; i++) {
        int64_t sum = 0;
        for (int r = 0; r < n; r++) sum += value(r, s.first + i, s.call);
        if ((*s.out)[i] != sum) wrong("started reduction", me, s.call, i);
      }
    }
    started.clear();
  };
  for (int k = 0; k < calls; k++) {
    uint64_t call = random();
    size_t count = k % 150 == 149 ? 1'100'000 : random_count(random);  // past the ring and caches
    if (delay() % 50 == 0) std::this_thread::yield();
    g.assume(delay() % 2 ? Distance::far : Distance::near);  // both ways of copying
    crowded_until_us = delay() % 4 ? 0 : now_us() + CROWDED_US;  // as if cores were lost
    std::vector<int64_t> in(count * n + 1), out(count * n + 1, -1);
    for (size_t i = 0; i < in.size(); i++) in[i] = value(me, i, call);
    switch (call % 7) {
      case 0:
        g.run(Call::all_reduce(count, Type::i64, Op::max), in.data(), out.data());
        for (size_t i = 0; i < count; i++)
          if (out[i] != value(n - 1, i, call)) wrong("all_reduce", me, call, i);
        break;
      case 1:
        if (delay() % 2) {  // a rank may take the two halves apart where another does not
          Call what = Call::all_gather(count * 8);
          if (uint64_t ticket = g.start(what, in.data(), out.data(), 0)) g.finish(ticket);
        } else {
          g.run(Call::all_gather(count * 8), in.data(), out.data());
        }
        for (size_t i = 0; i < count * n; i++)
          if (out[i] != value(i / count, i % count, call)) wrong("all_gather", me, call, i);
        break;
      case 2:
        g.run(Call::reduce_scatter(count, Type::i64, Op::min), in.data(), out.data());
        for (size_t i = 0; i < count; i++)
          if (out[i] != value(0, me * count + i, call)) wrong("reduce_scatter", me, call, i);
        break;
      case 3: {  // rank s sends (s + d) % 3 parts of count / 3 to rank d
        std::vector<size_t> sends(n), receives(n);
        size_t part = count / 3 * 8;
        for (int r = 0; r < n; r++) sends[r] = (me + r) % 3 * part, receives[r] = (r + me) % 3 * part;
        g.all_to_all(Call::all_to_all(8), in.data(), out.data(), sends.data(), receives.data());
        size_t at = 0;
        for (int s = 0; s < n; s++) {
          size_t skip = 0;
          for (int d = 0; d < me; d++) skip += (s + d) % 3 * part / 8;
          for (size_t i = 0; i < receives[s] / 8; i++, at++)
            if (out[at] != value(s, skip + i, call)) wrong("all_to_all", me, call, at);
        }
        break;
      }
      case 4: {
        int root = call / 7 % n;
        g.run(Call::broadcast(count * 8, root), in.data(), in.data());
        for (size_t i = 0; i < count; i++)
          if (in[i] != value(root, i, call)) wrong("broadcast", me, call, i);
        break;
      }
      case 5:
        g.run(Call::barrier(), nullptr, nullptr);
        break;
      default: {
        auto result = std::make_unique<std::vector<int64_t>>(count + 1);
        bool scatters = call / 7 % 2;
        Call what = scatters ? Call::reduce_scatter(count, Type::i64, Op::sum)
                             : Call::all_reduce(count, Type::i64, Op::sum);
        uint64_t ticket = 0;
        if (delay() % 3) ticket = g.start(what, in.data(), result->data(), 0);
        else g.run(what, in.data(), result->data());
        std::memset(in.data(), 0, in.size() * 8);  // the caller may do so
        started.push_back({ticket, call, scatters ? me * count : 0, count, std::move(result)});
        if (call / 7 % 5 == 0) check_started();
      }
    }
  }
  check_started();
}

}  // namespace

int main(int argc, char** argv) {
  int n = argc > 1 ? std::atoi(argv[1]) : 4, calls = argc > 2 ? std::atoi(argv[2]) : 2000;
  uint64_t seed = argc > 3 ? std::atoi(argv[3]) : 0;
  Groups groups = joined(n);
  on_ranks(n, [&](int r) { ranks_calls(*groups[r], calls, seed); });
  std::printf("%d ranks, %d calls: all right\n", n, calls);
}
