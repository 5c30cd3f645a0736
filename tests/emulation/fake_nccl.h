// Switches of the stand-in for NCCL.
#pragma once

#include <cstdint>
#include <string>

namespace emulation {

/// Kinds: "error" (a collective returns it), "async_error" (reported beside the calls), "hang" (a collective that never ends),
/// "init" (no communicator). It strikes once, on `rank`, after `after` collectives went well.
void plant_nccl_fault(int rank, const std::string& kind, int after);

/// Communicators of this process that were made and not aborted.
int64_t live_communicators();

}  // namespace emulation
