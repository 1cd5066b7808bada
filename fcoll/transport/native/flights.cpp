// The records of a group's calls, as Python reads them (transport/flight_records.py).
#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/library.h>

#include <chrono>
#include <sstream>

#include "served.h"
#include "tensors.h"

namespace fcoll::served {

namespace {

std::shared_ptr<void> python_stack() { return torch::CapturedTraceback::gather(true, false, false); }

const bool stacks_provided = (take_stack = &python_stack, true);

std::string quoted(const std::string& text) {
  std::ostringstream made;
  made << '"';
  for (unsigned char c : text) {
    char escaped[8];
    if (c == '"' || c == '\\') made << '\\' << c;
    else if (c < 32) std::snprintf(escaped, sizeof escaped, "\\u%04x", c), made << escaped;
    else made << c;
  }
  made << '"';
  return made.str();
}

// The innermost first, as torch's own records have them.
std::string frames_of(const Flight& flight) {
  auto* stack = static_cast<torch::CapturedTraceback*>(flight.stack.get());
  if (!stack) return "[]";
  auto symbolized = torch::symbolize({stack});
  std::string made;
  for (uint64_t i : symbolized.tracebacks.at(0)) {
    const auto& frame = symbolized.all_frames.at(i);
    made += (made.empty() ? "" : ", ") + ("{\"name\": " + quoted(frame.funcname)) +
            ", \"filename\": " + quoted(frame.filename) +
            ", \"line\": " + std::to_string(frame.lineno) + "}";
  }
  return "[" + made + "]";
}

// The first tensor of a signature: its dtype and its sizes, of which -1 are each rank's own.
std::string tensor_of(const Signature& s) {
  constexpr int at = 6;  // behind the facts (signature.h)
  if (!s.digest || s.words[5] < 1 || s.size < at + 2) return "null, \"sizes\": []";
  std::string sizes;
  for (int64_t d = 0; d < s.words[at + 1] && at + 2 + d < s.size; d++)
    sizes += (d ? ", " : "") + std::to_string(s.words[at + 2 + d]);
  return quoted(c10::toString(at::ScalarType(s.words[at]))) + ", \"sizes\": [" + sizes + "]";
}

std::string json_of(const Flight& flight, double age_ns) {
  const Call& call = flight.call;
  const Signature& s = flight.signature;
  std::string shown = s.digest && describe ? describe(s) : call.show();
  std::ostringstream made;
  made << "{\"number\": " << flight.number << ", \"ticks\": " << flight.ticks
       << ", \"age_ns\": " << int64_t(age_ns) << ", \"thread\": " << flight.thread
       << ", \"complete\": " << (flight.complete ? "true" : "false")
       << ", \"waited_for\": " << (flight.waited_for ? "true" : "false")
       << ", \"peer\": " << (s.digest ? s.words[1] : -1)
       << ", \"kind\": " << quoted(KIND_NAMES[size_t(call.kind)])
       << ", \"row\": " << quoted(s.digest ? s.row : KIND_NAMES[size_t(call.kind)])
       << ", \"call\": " << quoted(shown) << ", \"digest\": " << quoted(std::to_string(s.digest))
       << ", \"count\": " << call.count << ", \"item_bytes\": " << size_of(call.type)
       << ", \"sent\": " << flight.sent << ", \"received\": " << flight.received
       << ", \"dtype\": " << tensor_of(s) << ", \"frames\": " << frames_of(flight) << "}";
  return made.str();
}

// The clock's ticks are counted against the system's since the library was loaded.
struct Clock {
  uint64_t ticks = ticks_now();
  std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
} const loaded;

std::string listed(const std::vector<Flight>& flights) {
  Clock now;
  double passed_ns = std::chrono::duration<double, std::nano>(now.time - loaded.time).count();
  double tick_ns = passed_ns / double(now.ticks - loaded.ticks);
  std::string made;
  for (const Flight& flight : flights)
    made += (made.empty() ? "" : ",\n") + json_of(flight, double(now.ticks - flight.ticks) * tick_ns);
  return "[" + made + "]";
}

std::string flights(int64_t handle) { return listed(group_of(handle)->flights()); }
std::string messages(int64_t handle) { return listed(group_of(handle)->messages().flights()); }

}  // namespace

}  // namespace fcoll::served

TORCH_LIBRARY_FRAGMENT(fcoll_native, m) {
  m.def("flights(int handle) -> str", &fcoll::served::flights);
  m.def("messages(int handle) -> str", &fcoll::served::messages);
}
