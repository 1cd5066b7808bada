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
constexpr double SIGNALS_US = 100'000;  // look for signals so often, even if none interrupted a sleep

template <class T, class Ready, class Look>
__attribute__((noinline)) void wait_long(const std::atomic<T>& word, std::atomic<uint32_t>& sleepers,
                                         bool crowded, Ready ready, Look look) {
  double start = now_us(), spin_until = start + (crowded ? 0 : SPIN_US);
  while (now_us() < spin_until) {
    for (int i = 0; i < 32; i++) {
      if (ready()) return;
      _mm_pause();
    }
  }
  double yield_until = spin_until + YIELD_US;
  do {
    for (int i = 0; i < 4; i++) {
      if (ready()) return;
      sched_yield();
    }
  } while (now_us() < yield_until);

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
void wait_until(const std::atomic<T>& word, std::atomic<uint32_t>& sleepers, bool crowded, Ready ready,
                Look look) {
  if (!ready()) wait_long(word, sleepers, crowded, ready, look);
}

}  // namespace fcoll
