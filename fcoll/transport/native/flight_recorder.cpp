#include "flight_recorder.h"

#include <immintrin.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace fcoll {

std::shared_ptr<void> (*take_stack)() = nullptr;

namespace {

struct FlightSettings {
  size_t room = 256;  // 66 KB a group
  bool stacks = false;
};

FlightSettings flight_settings() {
  static const FlightSettings found = [] {
    FlightSettings read;
    for (const char* name : {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"})
      if (const char* text = std::getenv(name)) {
        read.room = size_t(std::max(0L, std::strtol(text, nullptr, 10)));
        read.stacks = read.room > 0;
        break;
      }
    return read;
  }();
  return found;
}

// From before_call() to begin(), which have no other way to one another: whoever enters a group's
// turn between them does not know of which call it is.
thread_local std::shared_ptr<void> stack_before_call;
thread_local std::shared_ptr<void> stack_of_issue;

}  // namespace

uint64_t ticks_now() { return __rdtsc(); }

FlightRecorder::FlightRecorder() : room_(flight_settings().room) {}

void FlightRecorder::before_call() {
  static const bool stacks = flight_settings().stacks;
  if (stacks && take_stack && !stack_of_issue) stack_before_call = take_stack();
}

FlightRecorder::Issued::Issued(std::shared_ptr<void> stack) { stack_of_issue = std::move(stack); }
FlightRecorder::Issued::~Issued() { stack_of_issue = nullptr; }

uint64_t FlightRecorder::begin(const Call& call, uint64_t sent, uint64_t received) {
  if (!room_ || (!call.digest && call.kind != Kind::barrier)) return 0;
  Hold hold(held_);
  if (flights_.empty()) flights_.resize(room_);
  uint64_t number = ++last_;
  Flight& flight = flights_[number % room_];
  flight.number = number;
  flight.ticks = ticks_now();
  flight.thread = pthread_self();
  flight.call = call;
  flight.call.signature = nullptr;
  if (call.signature) flight.signature = *call.signature;
  else flight.signature.digest = 0;
  flight.sent = sent;
  flight.received = received;
  flight.complete = flight.waited_for = false;
  flight.stack = stack_of_issue ? stack_of_issue : std::move(stack_before_call);
  return number;
}

Flight* FlightRecorder::find(uint64_t number) {
  if (!number) return nullptr;
  Flight& flight = flights_[number % room_];
  return flight.number == number ? &flight : nullptr;
}

void FlightRecorder::wait(uint64_t number) {
  if (!number) return;
  Hold hold(held_);
  if (Flight* flight = find(number)) flight->waited_for = true;
}

void FlightRecorder::end(uint64_t number) {
  if (!number) return;
  Hold hold(held_);
  if (Flight* flight = find(number)) flight->complete = true;
}

void FlightRecorder::keep_stack(uint64_t number, std::shared_ptr<void> stack) {
  if (!stack) return;
  Hold hold(held_);
  if (Flight* flight = find(number); flight && !flight->stack) flight->stack = std::move(stack);
}

std::vector<Flight> FlightRecorder::flights() const {
  std::vector<Flight> found;
  found.reserve(room_);
  Hold hold(held_);
  for (uint64_t k = 0; k < flights_.size(); k++) {
    const Flight& flight = flights_[(last_ + 1 + k) % room_];
    if (flight.number) found.push_back(flight);
  }
  return found;
}

}  // namespace fcoll
