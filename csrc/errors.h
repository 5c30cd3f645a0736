// What goes wrong while gradients are synchronised, and how Python sees it.
//
// A SyncError keeps its Python class on its way through DDP's reducer and the autograd engine, since torch asks every
// torch::PyTorchError for the class to raise. No torch header here: the class itself lives in errors.cpp.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace gsync {

/// Where an error happened, named in every message.
struct ErrorPlace {
  std::string label;    // of the engine, as the user knows it
  int64_t bucket = -1;  // -1: outside of a bucket
  int64_t step = 0;
  int rank = 0;
  int world_size = 1;
};

/// Raised in Python as gsync.SyncTimeoutError when the cause is a time-out, else as gsync.SyncError.
std::exception_ptr make_sync_error(const ErrorPlace& place, const std::string& cause);

/// Raised in Python as gsync.InternalError: a rule of gsync's own was broken.
[[noreturn]] void throw_internal_error(const std::string& message);

/// The message of an exception without torch's C++ stack; "unknown error" where it has none.
std::string cause_of(const std::exception_ptr& error) noexcept;

}  // namespace gsync
