#include "process.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
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

// -- presence -------------------------------------------------------------------------------------

namespace {

constexpr char PRESENCE_NAME[] = "presence:fcoll";  // other than a group's memory (memory.cpp)

struct flock whole_file() {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return lock;
}

// A lock of the process (F_SETLK), not of the open file: a fork's child does not have it, and does
// not keep it when its parent goes.
Presence make_presence() {
  Presence made;
  if (getrandom(&made.token, sizeof made.token, 0) != sizeof made.token) return {};
  made.fd = memfd_create(PRESENCE_NAME, MFD_CLOEXEC);
  if (made.fd < 0) return {};
  struct flock lock = whole_file();
  if (pwrite(made.fd, &made.token, sizeof made.token, 0) == sizeof made.token &&
      fcntl(made.fd, F_SETLK, &lock) == 0)
    return made;
  close(made.fd);
  return {};
}

std::mutex& held_mutex() {
  auto* made = new std::mutex;
  hold_over_forks(*made);
  return *made;
}

}  // namespace

Presence own_presence() {
  static auto& mutex = held_mutex();
  static Presence made;
  static int born = -1;
  std::lock_guard lock(mutex);
  if (born == fork_count()) return made;
  if (made.fd >= 0) close(made.fd);  // the parent's
  made = make_presence();
  born = fork_count();
  return made;
}

// -- processes ------------------------------------------------------------------------------------

std::shared_ptr<Process> Process::of(int pid) {
  static auto& mutex = held_mutex();
  static auto& known = *new std::unordered_map<int, std::weak_ptr<Process>>;
  std::lock_guard lock(mutex);
  auto& entry = known[pid];
  auto process = entry.lock();
  if (process && process->alive()) return process;
  int pidfd = syscall(SYS_pidfd_open, pid, 0);
  if (pidfd < 0)
    throw std::runtime_error(errno == ESRCH ? "is no process of this PID namespace"
                                            : std::string("cannot be watched: pidfd_open: ") +
                                                  std::strerror(errno));
  process.reset(new Process(pid, pidfd));
  entry = process;
  return process;
}

Process::~Process() {
  close(pidfd_);
  if (presence_ >= 0) close(presence_);
}

void Process::watch(const Presence& at) {
  // A process does not see locks of its own: ranks that are threads of one need not.
  if (at.fd < 0 || pid_ == getpid()) return;
  std::lock_guard lock(mutex_);
  if (presence_ >= 0) return;
  std::string path = "/proc/" + std::to_string(pid_) + "/fd/" + std::to_string(at.fd);
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  uint64_t token = 0;
  bool right = fd >= 0 && pread(fd, &token, sizeof token, 0) == sizeof token && token == at.token;
  if (right)
    presence_ = fd;
  else if (fd >= 0)
    close(fd);
}

bool Process::alive() const {
  pollfd p{pidfd_, POLLIN, 0};
  if (poll(&p, 1, 0) > 0) return false;
  struct flock lock = whole_file();
  return presence_ < 0 || fcntl(presence_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

cpu_set_t own_cpus() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  sched_getaffinity(0, sizeof cpus, &cpus);
  return cpus;
}

}  // namespace fcoll
