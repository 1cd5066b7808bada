// The core alone, for the sanitizers: every rank is a thread here, and all see one mapping of each
// segment (FCOLL_TEST_THREADS), so that ThreadSanitizer follows what they read and write.
//
// core_test RANKS CALLS SEED: that many random collectives on all ranks, every result checked.
#include "core.h"

#include <unistd.h>

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

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
  struct Started { uint64_t ticket, call; size_t count; std::unique_ptr<std::vector<int64_t>> out; };
  std::vector<Started> started;
  auto check_started = [&] {
    for (auto& s : started) {
      if (s.ticket) g.finish(s.ticket);
      for (size_t i = 0; i < s.count; i++) {
        int64_t sum = 0;
        for (int r = 0; r < n; r++) sum += value(r, i, s.call);
        if ((*s.out)[i] != sum) wrong("started all_reduce", me, s.call, i);
      }
    }
    started.clear();
  };
  for (int k = 0; k < calls; k++) {
    uint64_t call = random();
    size_t count = k % 150 == 149 ? 1'100'000 : random_count(random);  // past the ring and caches
    if (delay() % 50 == 0) std::this_thread::yield();
    std::vector<int64_t> in(count * n + 1), out(count * n + 1, -1);
    for (size_t i = 0; i < in.size(); i++) in[i] = value(me, i, call);
    switch (call % 7) {
      case 0:
        g.all_reduce(in.data(), out.data(), count, Type::i64, Op::max);
        for (size_t i = 0; i < count; i++)
          if (out[i] != value(n - 1, i, call)) wrong("all_reduce", me, call, i);
        break;
      case 1:
        if (delay() % 2) {  // a rank may take the two halves apart where another does not
          Call what{Kind::all_gather, Type::bytes, Op::sum, 0, count * 8};
          if (uint64_t ticket = g.start(what, in.data(), out.data(), 0)) g.finish(ticket);
        } else {
          g.all_gather(in.data(), out.data(), count * 8);
        }
        for (size_t i = 0; i < count * n; i++)
          if (out[i] != value(i / count, i % count, call)) wrong("all_gather", me, call, i);
        break;
      case 2:
        g.reduce_scatter(in.data(), out.data(), count, Type::i64, Op::min);
        for (size_t i = 0; i < count; i++)
          if (out[i] != value(0, me * count + i, call)) wrong("reduce_scatter", me, call, i);
        break;
      case 3: {  // rank s sends (s + d) % 3 parts of count / 3 to rank d
        std::vector<size_t> sends(n), receives(n);
        size_t part = count / 3 * 8;
        for (int r = 0; r < n; r++) sends[r] = (me + r) % 3 * part, receives[r] = (r + me) % 3 * part;
        g.all_to_all(in.data(), out.data(), sends.data(), receives.data(), 8);
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
        g.broadcast(in.data(), count * 8, root);
        for (size_t i = 0; i < count; i++)
          if (in[i] != value(root, i, call)) wrong("broadcast", me, call, i);
        break;
      }
      case 5:
        g.barrier();
        break;
      default: {
        auto result = std::make_unique<std::vector<int64_t>>(count + 1);
        Call what{Kind::all_reduce, Type::i64, Op::sum, 0, count};
        uint64_t ticket = 0;
        if (delay() % 3) ticket = g.start(what, in.data(), result->data(), 0);
        else g.all_reduce(in.data(), result->data(), count, Type::i64, Op::sum);
        std::memset(in.data(), 0, in.size() * 8);  // the caller may do so
        started.push_back({ticket, call, count, std::move(result)});
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
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<int> pids(n, getpid()), fds;
  std::vector<uint64_t> tokens;
  for (int r = 0; r < n; r++) {
    groups.push_back(std::make_unique<Group>(r, n, 60));
    fds.push_back(groups[r]->fd());
    tokens.push_back(groups[r]->token());
  }
  for (auto& g : groups) {
    std::string why = g->join(pids, fds, tokens);
    if (!why.empty()) return std::fprintf(stderr, "%s\n", why.c_str()), 1;
  }
  std::vector<std::thread> threads;
  for (auto& g : groups) threads.emplace_back([&g, calls, seed] { ranks_calls(*g, calls, seed); });
  for (auto& t : threads) t.join();
  std::printf("%d ranks, %d calls: all right\n", n, calls);
}
