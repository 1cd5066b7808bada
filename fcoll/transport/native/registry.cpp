// The groups of this process, by handle and by name.
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "served.h"

namespace fcoll::served {

namespace {

std::mutex& registry_mutex = *[] {
  auto* made = new std::mutex;
  hold_over_forks(*made);
  return made;
}();
std::unordered_map<int64_t, GroupPtr> groups;
// A name may be given to another process group later: the one it stood for goes with it.
struct Named {
  GroupPtr group;
  const void* process_group;
};
std::unordered_map<std::string, Named> by_name;
int64_t next_handle = 1;
std::atomic<uint64_t> changes{0};

}  // namespace

GroupPtr group_of(int64_t handle) {
  std::lock_guard lock(registry_mutex);
  auto found = groups.find(handle);
  TORCH_CHECK(found != groups.end(), "fcoll: this group has been destroyed");
  return found->second;
}

GroupPtr group_named(const std::string& name, const void* process_group) {
  std::lock_guard lock(registry_mutex);
  auto found = by_name.find(name);
  if (found == by_name.end()) return nullptr;
  const void* known = found->second.process_group;
  if (process_group && process_group != known) return nullptr;
  return stands_for(name, known) ? found->second.group : nullptr;
}

bool stands_for(const std::string& name, const void* process_group) {
  try {
    return c10d::resolve_process_group(name).get() == process_group;
  } catch (const c10::Error&) {  // there is no such group any more: Python says so
    return false;
  }
}

uint64_t changes_of_groups() { return changes.load(std::memory_order_acquire); }

std::vector<int64_t> open_group(int64_t rank, int64_t n, double timeout_s) {
  auto group = std::make_shared<Group>(rank, n, timeout_s);
  std::lock_guard lock(registry_mutex);
  int64_t handle = next_handle++;
  groups[handle] = group;
  Address at = group->address();
  return {handle, at.fd, int64_t(at.token)};
}

std::string join_group(int64_t handle, at::IntArrayRef pids, at::IntArrayRef fds,
                       at::IntArrayRef tokens) {
  std::vector<Address> addresses;
  for (size_t r = 0; r < pids.size(); r++)
    addresses.push_back({int32_t(pids[r]), int32_t(fds[r]), uint64_t(tokens[r]), RING_BYTES});
  return group_of(handle)->join(addresses);
}

void bind_group(const std::string& name, int64_t handle) {
  auto group = group_of(handle);
  group->close_fd();  // all ranks have mapped it
  std::lock_guard lock(registry_mutex);
  by_name[name] = {group, c10d::resolve_process_group(name).get()};
  changes++;
}

void yield_cores(int64_t handle) {
  auto group = group_of(handle);
  group->close_fd();
  group->yield_cores();
}

void fail_group(int64_t handle, const std::string& why) {
  try {
    group_of(handle)->close(why);
  } catch (const Error&) {  // it is closed now, or was
  }
}

void close_group(int64_t handle) {
  GroupPtr group;  // let go of without the lock
  {
    std::lock_guard lock(registry_mutex);
    auto found = groups.find(handle);
    if (found == groups.end()) return;
    group = found->second;
    std::erase_if(by_name, [&](const auto& entry) { return entry.second.group == group; });
    groups.erase(found);
    changes++;
  }
  group->leave();  // others may hold it still
}

}  // namespace fcoll::served
