// What goes wrong, under the sanitizers: every rank is a thread.
//
// failures_test SEED: each case on new groups; what a rank gets is checked, and that none hangs.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

#include "arena.h"
#include "shared_buffers.h"
#include "threads.h"

using namespace fcoll;

namespace {

// The error that a call raises.
template <class F>
Error::What raised(F call, int rank) {
  try {
    call();
  } catch (const Error& e) {
    return e.kind;
  }
  expect(false, "it raises", rank);
  std::_Exit(1);
}

void differing_roots(uint64_t) {
  Groups groups = joined(3);
  on_ranks(3, [&](int r) {
    int64_t x = r;
    auto call = [&] { groups[r]->run(Call::broadcast(8, r == 0 ? 0 : 1), &x, &x); };
    Error::What what = raised(call, r);
    expect(what == Error::mismatch, "a mismatch", r);
    expect(raised(call, r) == Error::closed, "then it is closed", r);
  });
}

void a_wrong_own_split(uint64_t) {
  Groups groups = joined(2);
  on_ranks(2, [&](int r) {
    int64_t in[4] = {r, r, r, r}, out[4] = {};
    size_t wrong_in[2] = {24, 8}, wrong_out[2] = {8, 24}, even[2] = {8, 8};
    if (r == 0)
      expect(raised([&] { groups[r]->all_to_all(Call::all_to_all(8), in, out, wrong_in, wrong_out); }, r) ==
                 Error::mismatch,
             "a mismatch", r);
    groups[r]->all_to_all(Call::all_to_all(8), in, out, even, even);  // nothing was sent
    expect(out[0] == 0 && out[1] == 1, "the group goes on", r);
  });
}

void a_late_rank(uint64_t) {
  Groups groups = joined(3, 0.05);
  std::atomic<int> given_up{0};
  on_ranks(3, [&](int r) {
    int64_t x = 1;
    auto call = [&] { groups[r]->run(Call::all_reduce(1, Type::i64, Op::sum), &x, &x); };
    if (r == 2) {
      while (given_up < 2) std::this_thread::yield();
      call();  // the parts of all are there
      expect(x == 3, "the sum", r);
      expect(raised(call, r) == Error::timeout, "the others' timeout", r);
    } else {
      expect(raised(call, r) == Error::timeout, "a timeout", r);
      given_up++;
    }
    expect(raised(call, r) == Error::closed, "a retry does not begin one call off", r);
  });
}

// Rank 1 is stopped in the middle of the exchange until rank 2 has left: rank 0, which waits for it,
// has the time to look at them all.
std::atomic<bool> left{false};
void until_left(int) {
  while (!left) usleep(1'000);
  usleep(30'000);
}

void a_bystander_leaves(uint64_t) {
  Groups groups = joined(3);
  std::vector<uint8_t> data(64 << 20, 7);
  std::atomic<pthread_t> receiver{};
  left = false;
  signal(SIGUSR1, until_left);
  on_ranks(3, [&](int r) {
    if (r == 1) receiver = pthread_self();
    size_t big = data.size(), none[3] = {}, sends[3] = {0, r == 0 ? big : 0, 0},
           receives[3] = {r == 1 ? big : 0, 0, 0};
    std::vector<uint8_t> out(r == 1 ? big : 0);
    groups[r]->all_to_all(Call::all_to_all(1), data.data(), out.data(), r == 0 ? sends : none,
                          r == 1 ? receives : none);
    if (r == 2) {  // its part is done long before the others'
      pthread_kill(receiver, SIGUSR1);
      groups[r].reset();
      left = true;
    } else {
      expect(r != 1 || out == data, "all of it arrives", r);
    }
  });
}

void a_rank_leaves_too_early(uint64_t) {
  Groups groups = joined(3);
  groups[2].reset();
  on_ranks(2, [&](int r) {
    expect(raised([&] { groups[r]->run(Call::barrier(), nullptr, nullptr); }, r) == Error::peer_died, "it left", r);
  });
}

void orphaned_announcements(uint64_t seed) {
  Groups groups = joined(2);
  on_ranks(2, [&](int r) {
    Arena& arena = groups[r]->arena();
    std::mt19937_64 random(seed);
    for (int64_t k = 0; k < 300; k++) {
      Claimed part = arena.claim(0, 8);
      *reinterpret_cast<int64_t*>(part.data) = 10 * k + r;
      auto announced = arena.announce(Call::all_reduce(1, Type::i64, Op::sum), part.data, 8);
      if (random() % 3 == 0) continue;  // an error in between: it is never collected
      Parts parts = arena.collect(*announced);
      for (int p = 0; p < 2; p++) {
        int64_t found;
        std::memcpy(&found, parts.data[p], 8);
        expect(found == 10 * k + p, "the parts of this call", r);
      }
    }
    groups[r]->run(Call::barrier(), nullptr, nullptr);
  });
}

void orphans_of_one_rank(uint64_t seed) {
  constexpr size_t COUNT = 100'000;  // a lane has room for two in turn
  Groups groups = joined(2);
  on_ranks(2, [&](int r) {
    Arena& arena = groups[r]->arena();
    std::mt19937_64 random(seed);
    Call call = Call::all_reduce(COUNT, Type::i64, Op::sum);
    for (int64_t k = 0; k < 40; k++) {
      Claimed part = arena.claim(0, COUNT * 8);
      std::fill_n(reinterpret_cast<int64_t*>(part.data), COUNT, k);
      auto announced = arena.announce(call, part.data, COUNT * 8);
      if (r == 0 && k < 38) continue;  // an error after each of them
      Parts parts = arena.collect(*announced);
      std::this_thread::yield();
      for (auto* p : parts.data)
        expect(std::count(reinterpret_cast<const int64_t*>(p),
                          reinterpret_cast<const int64_t*>(p) + COUNT, k) == int64_t(COUNT),
               "what the other rank wrote for this call", r);
    }
    groups[r]->run(Call::barrier(), nullptr, nullptr);
  });
}

void many_started(uint64_t seed) {
  Groups groups = joined(3);
  on_ranks(3, [&](int r) {
    std::mt19937_64 random(seed + r);
    std::vector<int64_t> in(500), out(500);
    std::vector<uint64_t> tickets;
    for (int64_t k = 0; k < 500; k++) {
      in[k] = k + r;
      tickets.push_back(groups[r]->start(Call::all_reduce(1, Type::i64, Op::sum), &in[k],
                                         &out[k], 0));
      if (random() % 16 == 0) std::this_thread::yield();
    }
    groups[r]->run(Call::barrier(), nullptr, nullptr);
    for (int64_t k = 0; k < 500; k++) {
      if (tickets[k]) groups[r]->finish(tickets[k]);
      expect(out[k] == 3 * k + 3, "the sum", r);
    }
  });
}

void two_threads_of_a_rank(uint64_t) {
  Groups groups = joined(2, 0.1);
  on_ranks(2, [&](int r) {
    if (r == 1) return;
    std::thread other([&] {
      try {
        groups[0]->run(Call::barrier(), nullptr, nullptr);
      } catch (const Error&) {
      }
    });
    Error::What what = raised([&] { groups[0]->run(Call::barrier(), nullptr, nullptr); }, r);
    expect(what == Error::timeout || what == Error::closed, "nobody waits for ever", r);
    other.join();
  });
}

void ranks_on_one_core(uint64_t) {
  cpu_set_t all = own_cpus(), one;
  CPU_ZERO(&one);
  for (int c = 0; c < CPU_SETSIZE && !CPU_COUNT(&one); c++)
    if (CPU_ISSET(c, &all)) CPU_SET(c, &one);
  expect(joined(2)[0]->crowded() == (CPU_COUNT(&all) < 2), "as many cores as there are");
  sched_setaffinity(0, sizeof one, &one);
  expect(joined(2)[0]->crowded(), "they share it");
  sched_setaffinity(0, sizeof all, &all);
}

// -- buffers that the ranks share -----------------------------------------------------------------

using Buffers = std::vector<std::unique_ptr<SharedBuffers>>;

Buffers shared(std::vector<std::shared_ptr<Memory>>& memories) {
  int n = memories.size();
  Buffers made;
  std::vector<Address> buffers, pads;
  for (int r = 0; r < n; r++) {
    made.push_back(std::make_unique<SharedBuffers>(r, n, 10'000, memories[r], 1024));
    buffers.push_back(made[r]->buffer()), pads.push_back(made[r]->pad());
  }
  on_ranks(n, [&](int r) { made[r]->join(buffers, pads); });
  return made;
}

void a_barrier_retried(uint64_t) {
  std::vector<std::shared_ptr<Memory>> memories;
  for (int r = 0; r < 3; r++) memories.push_back(Memory::make(64));
  Buffers first = shared(memories);
  std::atomic<int> given_up{0};
  on_ranks(3, [&](int r) {
    if (r == 2)
      while (!given_up) std::this_thread::yield();
    else if (r == 0)
      expect(raised([&] { first[r]->barrier(0, 20); }, r) == Error::timeout, "a timeout", r),
          given_up++;
    Error::What what = raised([&] { first[r]->barrier(0, 5'000); }, r);
    expect(what == Error::closed || (r == 1 && what == Error::timeout), "that of rank 0", r);
    for (int i = 0; i < 3; i++)
      expect(raised([&] { first[r]->barrier(0, 5'000); }, r) == Error::closed, "closed for all", r);
    expect(first[r]->closed(), "it says so", r);
  });
  Buffers again = shared(memories);
  on_ranks(3, [&](int r) {
    for (int64_t k = 0; k < 50; k++) {
      static_cast<int64_t*>(again[r]->buffer_ptrs()[r])[0] = k;
      again[r]->barrier(0, 0);
      for (int p = 0; p < 3; p++)
        expect(static_cast<int64_t*>(again[r]->buffer_ptrs()[p])[0] == k, "one phase", r);
      again[r]->barrier(0, 0);
    }
  });
}

void a_signal_retried(uint64_t) {
  std::vector<std::shared_ptr<Memory>> memories{Memory::make(64), Memory::make(64)};
  Buffers made = shared(memories);
  std::atomic<bool> late{false};
  on_ranks(2, [&](int r) {
    if (r == 0) {
      expect(raised([&] { made[0]->wait_signal(1, 0, 10); }, r) == Error::timeout, "a timeout", r);
      late = true;
      made[0]->wait_signal(1, 0, 0);  // nothing was lost
    } else {
      while (!late) std::this_thread::yield();
      made[1]->put_signal(0, 0, 0);
    }
    made[r]->barrier(1, 0);
  });
}

}  // namespace

int main(int, char** argv) {
  uint64_t seed = std::atoi(argv[1]);
  const std::pair<const char*, void (*)(uint64_t)> cases[] = {
      {"differing roots", differing_roots},
      {"a wrong own split", a_wrong_own_split},
      {"a late rank", a_late_rank},
      {"a bystander leaves", a_bystander_leaves},
      {"a rank leaves too early", a_rank_leaves_too_early},
      {"orphaned announcements", orphaned_announcements},
      {"orphans of one rank", orphans_of_one_rank},
      {"many started", many_started},
      {"two threads of a rank", two_threads_of_a_rank},
      {"ranks on one core", ranks_on_one_core},
      {"a barrier retried", a_barrier_retried},
      {"a signal retried", a_signal_retried},
  };
  for (auto [name, run] : cases) {
    now_in = name;
    run(seed);
  }
  std::printf("%zu cases: all right\n", std::size(cases));
}
