// Buckets of gradients in memory that all ranks have mapped (buckets.cpp), as classes of Python's.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fcoll::buckets {

void add_to(py::module_ module);

}  // namespace fcoll::buckets
