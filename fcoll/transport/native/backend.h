// torch.distributed's backend "fcoll" (backend.cpp), as functions of Python's.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fcoll::backend {

void add_to(py::module_ module);

}  // namespace fcoll::backend
