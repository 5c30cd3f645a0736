// Which kernels serve which type of device. The CPU's and, in a CUDA build, CUDA's are there from the start; a library that brings
// another type of device registers its own.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>

#include <cstdint>

#include "common/kernels.h"

namespace gsync {

/// The three operations on one type of device: each enqueues one kernel on `stream` (CPU: runs at once, `stream` is not looked at)
/// and throws when it cannot. Host tables in the arguments may be reused when the call returns.
struct KernelTable {
  /// As many addresses go with a launch by value; longer tables come in device memory, in Workspace::addresses.
  int64_t max_addresses_by_value;
  void (*pack)(const PackArgs& args, const Workspace& workspace, c10::Stream stream);
  void (*reduce)(const ReduceArgs& args, const Workspace& workspace, c10::Stream stream);
  void (*unpack)(const UnpackArgs& args, const Workspace& workspace, c10::Stream stream);
};

/// The name of a Python capsule that holds a `const KernelTable*`.
inline constexpr const char* kKernelTableName = "gsync.KernelTable";

/// The kernels for devices of that type, or null.
const KernelTable* kernels_of(c10::DeviceType type);

/// Adds a type of device, for the rest of the process: to be called before anything else uses that type. `table` is kept.
/// Throws c10::ValueError for a type that has kernels already.
void register_kernels(c10::DeviceType type, const KernelTable* table);

}  // namespace gsync
