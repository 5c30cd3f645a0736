// What DDP itself asks of a process group for tensors on the device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace emulation {

/// A backend that waits for the current stream and hands the device's memory to `host`, a backend for the CPU.
c10::intrusive_ptr<c10d::Backend> make_host_backend(c10::intrusive_ptr<c10d::Backend> host);

}  // namespace emulation
