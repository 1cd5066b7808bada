#include "process.h"

#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>
#include <unordered_map>
#include <vector>

namespace fcoll {

std::atomic<int> forks{0};

namespace {

struct Held {
  void* mutex;
  void (*lock)(void*);
  void (*unlock)(void*);
};

// Never freed: a process may be watched while this one exits.
struct Holds {
  std::mutex mutex;
  std::vector<Held> held;
};

Holds& holds() {
  static auto& made = *new Holds;
  return made;
}

void before_fork() {
  holds().mutex.lock();
  for (auto& h : holds().held) h.lock(h.mutex);
}

void after_fork() {
  auto& held = holds().held;
  for (auto h = held.rbegin(); h != held.rend(); ++h) h->unlock(h->mutex);
  holds().mutex.unlock();
}

const bool noted = (pthread_atfork(before_fork, after_fork, [] { forks++; after_fork(); }), true);

}  // namespace

void hold_over_forks(void* mutex, void (*lock)(void*), void (*unlock)(void*)) {
  std::lock_guard guard(holds().mutex);
  holds().held.push_back({mutex, lock, unlock});
}

std::shared_ptr<Process> Process::of(int pid) {
  static auto& mutex = *[] {
    auto* made = new std::mutex;
    hold_over_forks(*made);
    return made;
  }();
  static auto& known = *new std::unordered_map<int, std::weak_ptr<Process>>;
  std::lock_guard lock(mutex);
  auto& entry = known[pid];
  auto process = entry.lock();
  if (process && process->alive()) return process;
  int pidfd = syscall(SYS_pidfd_open, pid, 0);
  if (pidfd < 0) return nullptr;
  process.reset(new Process(pidfd));
  entry = process;
  return process;
}

Process::~Process() { close(pidfd_); }

bool Process::alive() const {
  pollfd p{pidfd_, POLLIN, 0};
  return poll(&p, 1, 0) <= 0;
}

cpu_set_t own_cpus() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  sched_getaffinity(0, sizeof cpus, &cpus);
  return cpus;
}

}  // namespace fcoll
