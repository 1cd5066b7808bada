#include "wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

namespace fcoll {

void (*check_signals)() = nullptr;
void (*while_waiting)() = nullptr;

bool sleep_on(const void* word, uint32_t value) {
  timespec longest{0, 5'000'000};  // then see whether the peers live
  return syscall(SYS_futex, word, FUTEX_WAIT, value, &longest, nullptr, 0) != 0 && errno == EINTR;
}

void wake_all(const void* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace fcoll
