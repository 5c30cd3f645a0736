// The parts of gsync._C: each source file binds its own.
#pragma once

#include <pybind11/pybind11.h>

namespace gsync {

class Engine;

void bind_errors(pybind11::module_& module);
void bind_ops(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
/// Warns in Python, once in the life of an engine, when fp16 loses too many values. Needs Python's lock.
/// Throws pybind11::error_already_set where warnings are errors.
void warn_if_fp16_vanishes(Engine& engine);
/// After bind_engine: adds submit() to its Engine.
void bind_ddp_hook(pybind11::module_& module);
/// After bind_engine.
void bind_grad_reducer(pybind11::module_& module);

}  // namespace gsync
