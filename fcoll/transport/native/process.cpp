#include "process.h"

#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace fcoll {

namespace {

struct Held {
  void* mutex;
  void (*lock)(void*);
  void (*unlock)(void*);
};

std::atomic<int> forks{0};
// Never freed, as what follows: a process may be watched while this one exits.
std::mutex& held_mutex = *new std::mutex;
std::vector<Held>& held = *new std::vector<Held>;

void before_fork() {
  held_mutex.lock();
  for (auto& h : held) h.lock(h.mutex);
}

void after_fork() {
  for (auto h = held.rbegin(); h != held.rend(); ++h) h->unlock(h->mutex);
  held_mutex.unlock();
}

void note_forks() {
  static const bool once = (pthread_atfork(before_fork, after_fork, [] { forks++; after_fork(); }), true);
  (void)once;
}

}  // namespace

int fork_count() {
  note_forks();
  return forks;
}

void hold_over_forks(void* mutex, void (*lock)(void*), void (*unlock)(void*)) {
  note_forks();
  std::lock_guard guard(held_mutex);
  held.push_back({mutex, lock, unlock});
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
