// Gradients on their way into buckets (gradients.cpp), as a class of Python's.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fcoll::gradients {

void add_to(py::module_ module);

}  // namespace fcoll::gradients
