// What compiled graphs call: collectives on data that is already in the group's arena.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace fcoll::compiled {

using at::Tensor;

// Memory for this rank's part of the next collective in a lane. Where the group has no shared
// memory, or none yet in this process, it is ordinary memory, and what follows copes with that.
Tensor claim(std::string group_name, int64_t lane, at::IntArrayRef size, at::IntArrayRef stride,
             at::ScalarType dtype, at::Device device);

// Every rank's part of a collective, by rank, once all of them are there. Of a reduce-scatter, this
// rank's share of each. `dim` is the collective's, which the ranks must agree on.
std::vector<Tensor> meet(const Tensor& own, std::string collective, std::string reduce_op,
                         std::string group_name, int64_t dim);

// The same in two halves.
Tensor announce(const Tensor& own, std::string collective, std::string reduce_op,
                std::string group_name, int64_t dim);
std::vector<Tensor> collect(const Tensor& token, const Tensor& own, std::string collective,
                            std::string group_name);

// The parts reduced, by the kernel that eager uses.
Tensor meet_and_reduce(const Tensor& own, std::string collective, std::string reduce_op,
                       std::string group_name, int64_t dim);

// How many collectives of compiled graphs had parts in different lanes on the ranks, which are copied.
int64_t lane_disagreements(std::string group_name);

// torch's symmetric memory, for ops of users that find their peers by it. alloc_id: the same
// memory at every call with it; -1 for memory of its own.
Tensor symmetric_empty(std::string group_name, int64_t alloc_id, at::IntArrayRef size,
                       at::IntArrayRef stride, at::ScalarType dtype, at::Device device);

}  // namespace fcoll::compiled
