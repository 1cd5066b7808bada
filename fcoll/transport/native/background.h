// Calls on a group that the program goes on without: made one after the other, by a thread of the
// group or by one that waits for them. Free of torch.
#pragma once

#include <functional>
#include <memory>

namespace fcoll {

class Background {
 public:
  using Job = std::function<void()>;  // does not throw

  Background();
  ~Background();  // no job is left, or only the one that this thread makes
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  void add(Job);
  bool empty() const;
  bool inside() const;  // is this thread making a job?
  // Makes jobs until that is so, or waits while another thread does.
  void help_until(const std::function<bool()>&);

 private:
  struct Queue;
  std::shared_ptr<Queue> queue_;
};

}  // namespace fcoll
