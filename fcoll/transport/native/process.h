// Processes of this host, as others watch them: are they alive, was this one forked? Free of torch.
#pragma once

#include <sched.h>

#include <atomic>
#include <memory>

namespace fcoll {

// A process that cannot be mistaken for a later one with its pid. All who watch one share it: a
// group of 64 ranks takes no 63 file descriptors of its own.
class Process {
 public:
  static std::shared_ptr<Process> of(int pid);  // null if there is none of that pid
  ~Process();
  bool alive() const;

 private:
  explicit Process(int pidfd) : pidfd_(pidfd) {}
  int pidfd_;
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
