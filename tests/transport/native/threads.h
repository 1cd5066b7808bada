// Groups whose ranks are threads of one process: they share one mapping of each memory, so that
// ThreadSanitizer follows what they read and write.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "group.h"

using Groups = std::vector<std::unique_ptr<fcoll::Group>>;

inline Groups joined(int n, double timeout_s = 60) {
  Groups groups;
  std::vector<fcoll::Address> addresses;
  for (int r = 0; r < n; r++) {
    groups.push_back(std::make_unique<fcoll::Group>(r, n, timeout_s));
    addresses.push_back(groups[r]->address());
  }
  for (auto& g : groups) {
    std::string why = g->join(addresses);
    if (why.empty()) continue;
    std::fprintf(stderr, "%s\n", why.c_str());
    std::_Exit(1);
  }
  return groups;
}

inline const char* now_in = "";  // the case that runs

inline void expect(bool holds, const char* what, int rank = -1) {
  if (holds) return;
  std::fprintf(stderr, "%s: rank %d: not so: %s\n", now_in, rank, what);
  std::_Exit(1);
}

// One thread a rank, until all of them are done.
inline void on_ranks(int n, const std::function<void(int)>& program) {
  std::vector<std::thread> threads;
  for (int r = 0; r < n; r++) threads.emplace_back([&program, r] { program(r); });
  for (auto& t : threads) t.join();
}
