// Runs the threads of a CUDA grid in one thread of the host. The threads of a block are fibers, which change at barriers and at
// operations of a warp; blocks run one after the other.
#pragma once

#include <vector_types.h>

#include <cstdint>
#include <functional>
#include <string>

namespace emulation {

inline constexpr int kWarpSize = 32;

enum class Order : int { kAscending = 0, kDescending = 1, kShuffled = 2 };

/// How the next grids run.
struct Schedule {
  // Of the threads of a block between two waits, and of the blocks. Ascending, all warps go from wait to wait together; descending and
  // shuffled, each runs as far as it can before the next.
  Order order = Order::kAscending;
  uint64_t seed = 0;  // of kShuffled
  uint8_t pattern = 0xee;  // every byte of a block's shared memory when the block begins
};

void set_schedule(const Schedule& schedule);

/// Calls `thread` once for each thread of the grid. Returns "", or what is wrong with the first block that cannot go on.
std::string run_grid(dim3 grid, dim3 block, const std::function<void()>& thread);

// ---- for the threads of a block -----------------------------------------------------------------------------------------

/// Waits for all threads of the block, who must ask by the same `operation` in the same source line. Returns whether one of them
/// brought `predicate`.
bool wait_for_block(const char* operation, int line, bool predicate);

/// Waits for all lanes of the warp, as above. Returns what each of them brought, until the caller's next wait. `mask` must name all.
const uint64_t* wait_for_warp(const char* operation, int line, unsigned mask, uint64_t value);

}  // namespace emulation

// Of the thread that runs.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
