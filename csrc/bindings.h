// The parts of gsync._C: each source file binds its own.
#pragma once

#include <pybind11/pybind11.h>

namespace gsync {

void bind_errors(pybind11::module_& module);
void bind_ops(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
/// After bind_engine: adds submit() to its Engine.
void bind_ddp_hook(pybind11::module_& module);

}  // namespace gsync
