// The core's collectives on torch tensors: a tensor in, a new one out.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "group.h"

namespace fcoll::served {

using at::Tensor;
using GroupPtr = std::shared_ptr<Group>;

// -- groups by handle and by name -----------------------------------------------------------------

GroupPtr group_of(int64_t handle);
// Null if the name stands for no process group with shared memory now, or for another than this one.
GroupPtr group_named(const std::string& name, const void* process_group = nullptr);
// Does the name stand for this process group now? How often have groups come and gone?
bool stands_for(const std::string& name, const void* process_group);
uint64_t changes_of_groups();
std::vector<int64_t> open_group(int64_t rank, int64_t n, double timeout_s);
std::string join_group(int64_t handle, at::IntArrayRef pids, at::IntArrayRef fds,
                       at::IntArrayRef tokens);
void bind_group(const std::string& name, int64_t handle);
// Of a group whose ranks also wait for other hosts, once they have joined: who waits for a peer gives
// its core to those that wait for messages.
void yield_cores(int64_t handle);
// Peers that wait for this rank in a call hear why it does not come.
void fail_group(int64_t handle, const std::string& why);
void close_group(int64_t handle);

// -- collectives ----------------------------------------------------------------------------------
//
// Arguments need no check before: where a call is not plainly served there is no tensor in its
// result, nothing has been sent, and the process group's kernel checks it and takes it.

// How long a call waits for late peers before it returns a result that is under way.
constexpr double PATIENCE_US = 5;

struct Result {
  Tensor out;
  bool under_way = false;  // a Finish is registered for out, which wait_tensor finds
};

// So that waits find what is under way.
void register_finish(const GroupPtr&, uint64_t ticket, const Tensor& out);
// Can nothing be under way for any tensor? torch counts the works of one thread: what others have
// issued is not in it.
bool nothing_under_way();
void issued_in_thread();  // said of a thread, the main one or another
// A new contiguous tensor, without the dispatcher: a third of at::empty's time.
Tensor empty(const Tensor& like, at::IntArrayRef sizes);

Result all_reduce(const GroupPtr&, const Tensor& x, Op, bool grad_is_identity = false);
Result all_gather(const GroupPtr&, const Tensor& x, int64_t dim);
Result reduce_scatter(const GroupPtr&, const Tensor& x, Op, int64_t dim);
Result broadcast(const GroupPtr&, const Tensor& x, int64_t src);
// Splits are in rows; none at all are equal ones.
Result all_to_all(const GroupPtr&, const Tensor& x, at::IntArrayRef out_splits,
                  at::IntArrayRef in_splits);

// One message for each dtype, complete on return; an empty list where not served.
std::vector<Tensor> all_reduce_coalesced(const GroupPtr&, const std::vector<Tensor>&, Op,
                                         bool grad_is_identity = false);
std::vector<Tensor> all_gather_coalesced(const GroupPtr&, const std::vector<Tensor>&);
std::vector<Tensor> reduce_scatter_coalesced(const GroupPtr&, const std::vector<Tensor>&, Op);

// The core's all_to_all on contiguous tensors, with splits as above.
void exchange(Group&, const Tensor& out, const Tensor& x, at::IntArrayRef out_splits,
              at::IntArrayRef in_splits, const Signature&);

// What the ranks compare of a call that Python makes: the row's name, its tensors, the facts in the
// order of Facts (signature.h), and more numbers (sizes, dims, a permutation).
Signature signature_of(c10::string_view row, at::TensorList, at::IntArrayRef facts,
                       at::IntArrayRef more);

}  // namespace fcoll::served
