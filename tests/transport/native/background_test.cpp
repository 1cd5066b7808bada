// Calls that a group's thread makes, mixed with those that the program makes itself, every rank a
// thread.
#include <atomic>
#include <cstdint>
#include <memory>
#include <random>

#include "threads.h"

using namespace fcoll;

namespace {

using Values = std::vector<int64_t>;

// A sum over all ranks, whose parts are 1, 2, ... times a factor.
struct Sum {
  Values values;
  int64_t result;
  std::atomic<bool> made{false};
  Sum(size_t size, int64_t factor, int rank, int n)
      : values(size, factor * (rank + 1)), result(factor * n * (n + 1) / 2) {}
  Call call() const { return Call::all_reduce(values.size(), Type::i64, Op::sum); }
  void make(Group& group) {
    group.run(call(), values.data(), values.data());
    made = true;
  }
  void check(int rank) const {
    for (int64_t found : values) expect(found == result, "the sum", rank);
  }
};
using SumPtr = std::shared_ptr<Sum>;

// All ranks make the same calls in the same order; how each of them makes one is up to chance.
void as_it_comes() {
  int n = 3;
  Groups groups = joined(n);
  on_ranks(n, [&](int r) {
    Group& group = *groups[r];
    std::mt19937 same(1), own(r);
    std::vector<SumPtr> jobs;
    std::vector<std::pair<uint64_t, SumPtr>> tickets;
    for (int64_t k = 1; k <= 400; k++) {
      size_t sizes[] = {1, 100, 9000, 200'000};
      auto sum = std::make_shared<Sum>(sizes[same() % (k % 20 ? 3 : 4)], k, r, n);
      switch (own() % 4) {
        case 0:
          sum->make(group);
          sum->check(r);
          break;
        case 1:
          if (!group.behind_jobs()) {
            void* at = sum->values.data();
            tickets.push_back({group.start(sum->call(), at, at, 0), sum});
            break;
          }
          [[fallthrough]];
        default:
          group.later([&group, sum] { sum->make(group); });
          jobs.push_back(sum);
      }
      if (jobs.size() && own() % 5 == 0) {
        auto waited = jobs[own() % jobs.size()];
        group.make_jobs_until([&] { return waited->made.load(); });
        waited->check(r);
      }
      if (tickets.size() && own() % 5 == 0) {
        auto [ticket, waited] = tickets[own() % tickets.size()];
        group.finish(ticket);
        waited->check(r);
      }
    }
    group.make_jobs();
    for (auto& sum : jobs) sum->check(r);
    for (auto& [ticket, sum] : tickets) group.finish(ticket), sum->check(r);
  });
}

// A job makes a call of its own, and waits for a job that comes after it.
void jobs_within_jobs() {
  Groups groups = joined(2);
  on_ranks(2, [&](int r) {
    Group& group = *groups[r];
    for (int64_t k = 1; k <= 100; k++) {
      auto outer = std::make_shared<Sum>(10, k, r, 2), inner = std::make_shared<Sum>(20, k + 1, r, 2),
           next = std::make_shared<Sum>(30, k + 2, r, 2);
      std::atomic<bool> added{false}, seen{false};
      group.later([&] {
        while (!added) std::this_thread::yield();
        outer->make(group);
        inner->make(group);
        group.make_jobs_until([&] { return next->made.load(); });
        seen = next->made.load();
      });
      group.later([&] { next->make(group); });
      added = true;
      group.make_jobs();
      expect(seen, "the job saw the next", r);
      for (auto& sum : {outer, inner, next}) sum->check(r);
    }
  });
}

// A ticket is complete though the job behind it is not; and a job that waits ends when its group does.
void a_job_waits() {
  Groups groups = joined(2);
  std::atomic<bool> go_on{false};
  std::atomic<int> closed{0};
  on_ranks(2, [&](int r) {
    Group& group = *groups[r];
    Sum small(1, 1, r, 2);
    auto large = std::make_shared<Sum>(200'000, 1, r, 2);
    uint64_t ticket = group.start(small.call(), small.values.data(), small.values.data(), 0);
    if (r == 0) group.later([&group, large] { large->make(group); });
    group.finish(ticket);
    small.check(r);
    if (r == 0) go_on = true;  // rank 1 makes the large one only now
    while (!go_on) std::this_thread::yield();
    r == 0 ? group.make_jobs() : large->make(group);
    large->check(r);
    if (r == 1) return;
    std::atomic<bool> begun{false};
    group.later([&] {
      begun = true;
      try {
        group.run(Call::barrier(), nullptr, nullptr);
      } catch (const Error& e) {
        closed += e.kind == Error::closed;
      }
    });
    while (!begun) std::this_thread::yield();
    group.leave();
    group.make_jobs();
    expect(closed == 1, "it ended", r);
  });
}

}  // namespace

int main() {
  const std::pair<const char*, void (*)()> cases[] = {
      {"as it comes", as_it_comes},
      {"jobs within jobs", jobs_within_jobs},
      {"a job waits", a_job_waits},
  };
  for (auto [name, run] : cases) {
    now_in = name;
    run();
  }
  std::printf("%zu cases: all right\n", std::size(cases));
}
