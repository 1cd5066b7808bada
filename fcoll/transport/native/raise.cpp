#include <atomic>
#include <stdexcept>

#include "tensors.h"

namespace fcoll::tensors {

namespace {
std::atomic<Raise> raise_in_python = nullptr;
}

void raise_by(Raise how) { raise_in_python = how; }

void raise(const std::string& cls, int rank, const std::string& what) {
  std::string message = "fcoll." + cls + "[" + std::to_string(rank) + "]: " + what;
  if (Raise how = raise_in_python) how(message);
  throw std::runtime_error(message);
}

void raise(const Error& e) {
  static const char* classes[] = {"CollectiveMismatch", "PeerDied", "CollectiveTimeout",
                                  "GroupClosed", "GroupForked"};
  raise(classes[e.kind], e.rank, e.what());
}

}  // namespace fcoll::tensors
