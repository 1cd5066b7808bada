// Processes of this host, as others watch them: are they alive, was this one forked? Free of torch.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace fcoll {

// What shows that a process still runs the program that made it: a lock on a file of its own, which
// ends with the process and when it calls exec (a pidfd outlives that). Without a file (fd -1) where
// the system has no such locks.
struct Presence {
  int32_t fd = -1;
  uint64_t token = 0;
};
Presence own_presence();

// A process that cannot be mistaken for a later one with its pid. All who watch one share it: a
// group of 64 ranks takes no 63 file descriptors of its own.
class Process {
 public:
  // Throws std::runtime_error with the reason if it cannot be watched.
  static std::shared_ptr<Process> of(int pid);
  ~Process();
  // From now on one that calls exec is not alive, either.
  void watch(const Presence&);
  bool alive() const;

 private:
  Process(int pid, int pidfd) : pid_(pid), pidfd_(pidfd) {}
  int pid_, pidfd_;
  std::mutex mutex_;
  std::atomic<int> presence_{-1};
};

// Forks that led to this process: what was made before the last of them is a parent's.
extern std::atomic<int> forks;
inline int fork_count() { return forks.load(std::memory_order_relaxed); }

// The mutex is taken over each fork: else the child may find it locked by a thread it does not have.
// Not a shared_mutex, which the child, having another thread id, does not unlock.
void hold_over_forks(void* mutex, void (*lock)(void*), void (*unlock)(void*));
template <class Mutex>
void hold_over_forks(Mutex& mutex) {
  hold_over_forks(&mutex, [](void* m) { static_cast<Mutex*>(m)->lock(); },
                  [](void* m) { static_cast<Mutex*>(m)->unlock(); });
}

// The cores that this process may run on.
cpu_set_t own_cpus();

}  // namespace fcoll
