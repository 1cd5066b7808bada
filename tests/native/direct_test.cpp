// Parts that are read from their owner's memory, between two processes, when something goes wrong
// while they are: the reader must get the error, never what happens to be in that memory.
//
// direct_test freed|timeout|killed|exec|right
#include "core.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

using namespace fcoll;

namespace {

constexpr size_t BYTES = 1 << 20;

struct Shared {  // what the two know of each other before they have a group
  std::atomic<int> pid[2], fd[2], joined[2], published;
  std::atomic<uint64_t> token[2];
};

Shared* shared;

void until(const std::atomic<int>& flag) {
  while (!flag) usleep(100);
}

uint8_t* memory(uint8_t value) {
  void* at = mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  std::memset(at, value, BYTES);
  return static_cast<uint8_t*>(at);
}

std::unique_ptr<Group> joined(int rank, double timeout_s) {
  auto g = std::make_unique<Group>(rank, 2, timeout_s);
  shared->fd[rank] = g->fd();
  shared->token[rank] = g->token();
  shared->pid[rank] = getpid();
  until(shared->pid[0]), until(shared->pid[1]);
  std::string why = g->join({shared->pid[0], shared->pid[1]}, {shared->fd[0], shared->fd[1]},
                            {shared->token[0], shared->token[1]});
  if (!why.empty()) std::printf("%s\n", why.c_str()), std::exit(1);
  shared->joined[rank] = 1;
  until(shared->joined[1 - rank]);
  return g;
}

// The owner of the memory: publishes it, and then the thing happens, before its peer calls at all.
int owner(const std::string& what) {
  auto g = joined(1, what == "timeout" ? 0.3 : 20);
  uint8_t* in = memory(7);
  std::thread other([&] {
    usleep(200'000);  // the call below has published by then: it waits from its first us on
    if (what == "freed") munmap(in, BYTES);
    if (what == "killed") kill(getpid(), SIGKILL);
    if (what == "exec") shared->published = 1, execl("/bin/sleep", "sleep", "2", nullptr);
    if (what != "timeout") shared->published = 1;
  });
  try {
    g->broadcast(in, BYTES, 1);
  } catch (const Error& e) {
    if (what == "timeout") std::memset(in, 9, BYTES), shared->published = 1;  // it is mine again
    std::printf("owner: %d %s\n", int(e.kind), e.what());
  }
  std::fflush(stdout);
  other.join();
  if (what == "timeout") sleep(1);  // alive: it is not the process that is missing
  return 0;
}

int reader(const std::string& what, int child) {
  auto g = joined(0, 20);
  uint8_t* out = memory(0);
  if (what == "killed") waitpid(child, nullptr, 0);
  else if (what != "right") until(shared->published);
  if (what == "exec") usleep(100'000);
  try {
    g->broadcast(out, BYTES, 1);
    for (size_t i = 0; i < BYTES; i++)
      if (out[i] != 7) return std::printf("wrong data\n"), 1;
    std::printf("reader: right\n");
  } catch (const Error& e) {
    std::printf("reader: %d %s\n", int(e.kind), e.what());
  }
  return 0;
}

}  // namespace

int main(int, char** argv) {
  void* at = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  shared = new (at) Shared{};
  int child = fork();
  if (child == 0) return owner(argv[1]);
  int code = reader(argv[1], child);
  std::fflush(stdout);
  waitpid(child, nullptr, 0);
  return code;
}
