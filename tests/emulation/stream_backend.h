// A process group's backend for tensors on the device, as NCCL's is: what torch's own code, and a transport over a process group, use.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace emulation {

/// A backend whose collectives run on a stream of its own, behind what the caller's stream has been given, and hand the device's
/// memory to `host`, a backend for the CPU that nobody else uses. The host waits in a barrier only.
c10::intrusive_ptr<c10d::Backend> make_stream_backend(c10::intrusive_ptr<c10d::Backend> host);

}  // namespace emulation
