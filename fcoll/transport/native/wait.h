// Waiting for a word in shared memory to change: spin, then yield, then sleep. Every wait is here.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

#include "call.h"

namespace fcoll {

inline double now_us() {
  using namespace std::chrono;
  return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

// Throws if this thread was asked to stop (Ctrl-C). The part that knows Python provides it.
extern void (*check_signals)();

// What a thread that waits does meanwhile for peers that may be waiting for it elsewhere (group.cpp).
extern void (*while_waiting)();

// Sleeps while the word has the value, for 5 ms at most. True if a signal came meanwhile.
bool sleep_on(const void* word, uint32_t value);
void wake_all(const void* word);

// Wake who sleeps on a word. They are counted, so that who sets it need not call the kernel for
// nobody. There is no fence between the word and the count: a wake can be missed, and sleeps are short.
template <class T>
void wake(const std::atomic<T>& word, const std::atomic<uint32_t>& sleepers) {
  if (sleepers.load(std::memory_order_relaxed)) wake_all(&word);
}

// How long a wait spins before it yields, and yields before it sleeps. With more ranks than cores
// it yields at once: 4 ranks on 2 busy cores, 64 B: 2.6 to 4.1 us; 4.7 to 5.0 if it spins for 0.5 us
// before, 8.0 to 8.4 if for 2 us.
constexpr double SPIN_US = 60, YIELD_US = 1500;
// A thread that did not run for longer than this while it spun or yielded has lost its core to another
// program. A sleeper gets it back at once when it is woken: 30 small calls beside 4 busy programs on
// 2 cores take 3.4 ms on average instead of 5.1.
constexpr double LOST_US = 50;
// Who lost it for a whole time slice sleeps at once for a while: to spin would use up the process's own
// slices. With LOST_US in the place of SLICE_US, torch's DDP of 10 M parameters beside 4 busy programs
// took 0.89 and 0.90 of gloo's time, but pauses that short come on quiet hosts too; like this 0.96
// to 1.10, and 1.07 to 1.19 without.
constexpr double SLICE_US = 500, CROWDED_US = 50'000;
constexpr double SIGNALS_US = 100'000;  // look for signals so often, even if none interrupted a sleep

// How a thread waits: it may have nothing else to do, share its core, or have all the time there is.
enum class Patience { awake, crowded, asleep };
inline Patience awake(bool crowded) { return crowded ? Patience::crowded : Patience::awake; }

// Has this process lost a core for a time slice lately?
inline std::atomic<double> crowded_until_us{0};
inline bool lost_cores_lately() {
  return now_us() < crowded_until_us.load(std::memory_order_relaxed);
}

// Was the core another program's since then? Then it is not worth while to stay awake.
inline bool lost_core(double since_us) {
  double now = now_us(), away = now - since_us;
  if (away > SLICE_US) crowded_until_us.store(now + CROWDED_US, std::memory_order_relaxed);
  return away > LOST_US;
}

template <class T, class Ready, class Look>
__attribute__((noinline)) void wait_long(const std::atomic<T>& word, std::atomic<uint32_t>& sleepers,
                                         Patience patience, Ready ready, Look look) {
  double start = now_us();
  if (patience == Patience::awake && lost_cores_lately()) patience = Patience::asleep;
  bool lost = false;
  auto awake = [&](double for_us, int looks, auto pause) {
    double stop = now_us() + for_us;
    for (double now = stop - for_us; !lost && now < stop; now = now_us()) {
      for (int i = 0; i < looks; i++) {
        if (ready()) return true;
        pause();
      }
      lost = lost_core(now);
    }
    return false;
  };
  if (patience == Patience::awake && awake(SPIN_US, 32, [] { _mm_pause(); })) return;
  if (patience != Patience::asleep && awake(YIELD_US, 4, [] { sched_yield(); })) return;

  struct Sleeper {
    std::atomic<uint32_t>& count;
    explicit Sleeper(std::atomic<uint32_t>& count) : count(count) { count.fetch_add(1); }
    ~Sleeper() { count.fetch_sub(1); }
  } sleeper(sleepers);
  double looked_for_signals = 0;
  for (;;) {
    T value = word.load(std::memory_order_acquire);
    if (ready()) return;
    bool signalled = sleep_on(&word, uint32_t(value));  // a long word's low half
    if (ready()) return;
    if (while_waiting) while_waiting();
    double now = now_us();
    if (check_signals && (signalled || now - looked_for_signals > SIGNALS_US)) {
      check_signals();
      looked_for_signals = now;
    }
    std::optional<Error> problem = look(now - start);
    if (ready()) return;  // it came before whatever is wrong now
    if (problem) throw *problem;
  }
}

// Returns once ready() is true; it depends on the word. look(waited_us) gives the reason why that
// will not come, or nothing.
template <class T, class Ready, class Look>
void wait_until(const std::atomic<T>& word, std::atomic<uint32_t>& sleepers, Patience patience,
                Ready ready, Look look) {
  if (!ready()) wait_long(word, sleepers, patience, ready, look);
}

}  // namespace fcoll
