// The last calls on a group, for who asks why it stands still. Free of torch.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "call.h"

namespace fcoll {

struct Flight {
  uint64_t number = 0;  // of the group's calls, from 1
  uint64_t ticks = 0;  // of the processor's clock, when it was made
  uint64_t thread = 0;  // that made it, as pthread_self() has it
  Call call;
  Signature signature;
  uint64_t sent = 0, received = 0;  // bytes, of an exchange
  bool complete = false;
  bool waited_for = false;  // of a message: does a thread wait for its end?
  std::shared_ptr<void> stack;  // of the call, where one was taken
};

// The stack of this thread, which the part that knows Python provides. It may take Python's lock: not
// to be called with a group's turn, for which a thread may wait that has that lock.
extern std::shared_ptr<void> (*take_stack)();

// It takes 18 ns of a call's 1,800 (64 B, from Python), 5 if it is off. A stack takes 1,000 and more.
// Of a call that waits or raises none is needed: its thread is still in it. So unless all are asked
// for, only those are taken of calls that are under way when they return.
class FlightRecorder {
 public:
  // Room for so many calls as torch's variables say, and 256 without them; 0 switches it off.
  FlightRecorder();

  // The stacks of all calls are taken too if torch's variables are set.
  static void before_call();

  // While this lives, calls of this thread have the stack of who issued them elsewhere.
  class Issued {
   public:
    explicit Issued(std::shared_ptr<void> stack);
    ~Issued();
  };

  // A call begins, with the turn of its group; its number, or 0 if it is not recorded: calls that
  // nobody signed are parts of others, but for barriers.
  uint64_t begin(const Call&, uint64_t sent = 0, uint64_t received = 0);
  void wait(uint64_t number);
  void end(uint64_t number);
  // This thread's stack, for keep_stack; not with the turn.
  std::shared_ptr<void> stack() const { return room_ && take_stack ? take_stack() : nullptr; }
  void keep_stack(uint64_t number, std::shared_ptr<void> stack);

  // The oldest first; from any thread.
  std::vector<Flight> flights() const;

 private:
  struct Hold {
    explicit Hold(std::atomic<bool>& held) : held(held) {
      while (held.exchange(true, std::memory_order_acquire)) {
      }
    }
    ~Hold() { held.store(false, std::memory_order_release); }
    std::atomic<bool>& held;
  };
  Flight* find(uint64_t number);

  size_t room_;
  uint64_t last_ = 0;
  std::vector<Flight> flights_;  // made by the first call: there may be many groups
  mutable std::atomic<bool> held_{false};
};

uint64_t ticks_now();  // of the processor's clock: 8 ns, and the system's 20

}  // namespace fcoll
