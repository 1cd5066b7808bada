#include "background.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "process.h"
#include "wait.h"

namespace fcoll {

using namespace std::chrono_literals;

namespace {
// The group's thread leaves a new job for so long to one that waits for it: handing it over takes
// longer than a small call does.
constexpr auto GRACE = 50us;
constexpr auto LOOK_FOR_SIGNALS = 100ms;
}  // namespace

struct Background::Queue {
  int born = fork_count();
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> jobs;  // that nobody has begun
  std::atomic<size_t> unfinished{0};
  std::atomic<std::thread::id> maker{};  // the thread that makes one
  bool stopped = false;
  std::thread thread;

  bool inside() const { return maker.load() == std::this_thread::get_id(); }
  // One at a time, except that a job may wait for a later one.
  bool can_make() const {
    return !jobs.empty() && (maker.load() == std::thread::id() || inside());
  }

  void make_one(std::unique_lock<std::mutex>& lock) {
    Job job = std::move(jobs.front());
    jobs.pop_front();
    auto before = maker.exchange(std::this_thread::get_id());
    lock.unlock();
    job();
    job = nullptr;  // what it holds is let go of without the lock
    lock.lock();
    maker = before;
    unfinished.fetch_sub(1);
    changed.notify_all();
  }

  void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stopped || can_make(); });
      if (stopped) return;
      lock.unlock();
      std::this_thread::sleep_for(GRACE);
      lock.lock();
      if (can_make()) make_one(lock);
    }
  }
};

Background::Background() : queue_(std::make_shared<Queue>()) {}

Background::~Background() {
  Queue& q = *queue_;
  if (q.born != fork_count()) {  // the thread is the parent's, and the mutex may be locked
    new std::shared_ptr<Queue>(queue_);
    return;
  }
  {
    std::lock_guard lock(q.mutex);
    q.stopped = true;
    q.changed.notify_all();
  }
  if (!q.thread.joinable()) return;
  // a job may be the last to hold what it belongs to
  if (q.thread.get_id() == std::this_thread::get_id()) q.thread.detach();
  else q.thread.join();
}

bool Background::empty() const { return !queue_->unfinished.load(std::memory_order_acquire); }
bool Background::inside() const { return queue_->inside(); }

void Background::add(Job job) {
  Queue& q = *queue_;
  std::lock_guard lock(q.mutex);
  if (!q.thread.joinable()) q.thread = std::thread([queue = queue_] { queue->serve(); });
  q.jobs.push_back(std::move(job));
  q.unfinished.fetch_add(1);
  q.changed.notify_all();
}

void Background::help_until(const std::function<bool()>& reached) {
  auto queue = queue_;  // a job may be the last to hold this
  std::unique_lock lock(queue->mutex);
  while (!reached()) {
    if (queue->can_make()) {
      queue->make_one(lock);
      continue;
    }
    queue->changed.wait_for(lock, LOOK_FOR_SIGNALS);
    if (!check_signals) continue;
    lock.unlock();
    check_signals();
    lock.lock();
  }
}

}  // namespace fcoll
