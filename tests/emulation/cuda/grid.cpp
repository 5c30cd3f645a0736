#include "grid.h"

#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

// Saves the registers that a function keeps for its caller, and the stack pointer at *from; goes on at `to`. ucontext makes two system
// calls for the same.
extern "C" void gsync_emulated_switch(void** from, void* to);
asm(R"(
.text
.globl gsync_emulated_switch
.hidden gsync_emulated_switch
.type gsync_emulated_switch, @function
gsync_emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gsync_emulated_switch, . - gsync_emulated_switch
)");

namespace emulation {
namespace {

constexpr size_t kStackBytes = 512 * 1024;
constexpr size_t kGuardBytes = 4096;
constexpr int kSavedRegisters = 6;

enum class State : uint8_t { kReady, kWaits, kEnded };

/// Where threads wait for each other.
struct Place {
  const char* operation = nullptr;
  int line = 0;
  bool of_warp = false;

  bool operator==(const Place& other) const { return std::strcmp(operation, other.operation) == 0 && line == other.line; }
  std::string name() const { return std::string(operation) + " in line " + std::to_string(line); }
};

struct Fiber {
  void* stack_pointer = nullptr;
  State state = State::kEnded;
  Place place;
};

struct Warp {
  int num_arrived = 0;
  uint64_t brought[kWarpSize];
  uint64_t settled[kWarpSize];
};

Schedule schedule;

// The block that runs.
const std::function<void()>* body = nullptr;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
void* scheduler = nullptr;
int num_threads = 0;
int current = 0;
int num_arrived = 0;
bool brought_predicate = false;
bool settled_predicate = false;
std::string failure;

// ---- fibers ------------------------------------------------------------------------------------------------------------

void leave() { gsync_emulated_switch(&fibers[current].stack_pointer, scheduler); }

void run_fiber() {
  while (true) {
    (*body)();
    fibers[current].state = State::kEnded;
    leave();
  }
}

void prepare(Fiber& fiber) {
  constexpr size_t kBytes = kGuardBytes + kStackBytes;
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) std::abort();
  // As if run_fiber had been called from nowhere and had left before its first instruction.
  auto* top = reinterpret_cast<void**>(static_cast<uint8_t*>(memory) + kBytes) - 1;
  *--top = reinterpret_cast<void*>(&run_fiber);
  fiber.stack_pointer = top - kSavedRegisters;
}

/// Ends the grid with an error. Nobody goes on with it.
[[noreturn]] void stop(const std::string& error) {
  failure = error;
  leave();
  std::abort();
}

// ---- shared memory -----------------------------------------------------------------------------------------------------

/// This library's thread-local memory.
struct SharedMemory {
  uint8_t* begin = nullptr;
  size_t bytes = 0;
};

thread_local char anchor;

SharedMemory shared_memory() {
  *static_cast<volatile char*>(&anchor) = 0;  // makes the memory exist
  SharedMemory found;
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* result) {
        const auto here = reinterpret_cast<uintptr_t>(&schedule);
        bool is_ours = false;
        size_t bytes = 0;
        for (int i = 0; i < library->dlpi_phnum; ++i) {
          const ElfW(Phdr) & part = library->dlpi_phdr[i];
          const uintptr_t begin = library->dlpi_addr + part.p_vaddr;
          if (part.p_type == PT_LOAD) is_ours |= here >= begin && here < begin + part.p_memsz;
          if (part.p_type == PT_TLS) bytes = part.p_memsz;
        }
        if (is_ours) *static_cast<SharedMemory*>(result) = {static_cast<uint8_t*>(library->dlpi_tls_data), bytes};
        return is_ours ? 1 : 0;
      },
      &found);
  if (found.begin == nullptr) std::abort();
  return found;
}

// ---- blocks ------------------------------------------------------------------------------------------------------------

std::vector<int> in_order(int count, std::mt19937_64& random) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (schedule.order == Order::kDescending) std::reverse(order.begin(), order.end());
  if (schedule.order == Order::kShuffled) std::shuffle(order.begin(), order.end(), random);
  return order;
}

std::string describe(int thread) {
  const Fiber& fiber = fibers[thread];
  const std::string name = "thread " + std::to_string(thread) + " of block " + std::to_string(blockIdx.x);
  return fiber.state == State::kEnded ? name + " has ended" : name + " waits at " + fiber.place.name();
}

/// Who waits for whom, when nobody can go on.
std::string why_stuck() {
  const auto is_waiting = [](const Fiber& fiber) { return fiber.state == State::kWaits; };
  const auto first = std::find_if(fibers.begin(), fibers.begin() + num_threads, is_waiting);
  const int thread = static_cast<int>(first - fibers.begin());
  for (int other = 0; other < num_threads; ++other) {
    if (first->place.of_warp && other / kWarpSize != thread / kWarpSize) continue;
    if (!is_waiting(fibers[other]) || !(fibers[other].place == first->place)) return describe(thread) + ", " + describe(other);
  }
  return describe(thread);
}

/// Runs the threads of one block until all have ended. Returns "" or why that does not happen.
std::string run_block(std::mt19937_64& random) {
  num_arrived = 0;
  brought_predicate = false;
  for (Warp& warp : warps) warp.num_arrived = 0;
  for (int thread = 0; thread < num_threads; ++thread) fibers[thread].state = State::kReady;
  // Runs the threads that are ready among [first, first + count), each until it waits; false when there are none.
  const auto run_once = [&](int first, int count) {
    bool progressed = false;
    for (const int i : in_order(count, random)) {
      const int thread = first + i;
      if (fibers[thread].state != State::kReady || !failure.empty()) continue;
      progressed = true;
      current = thread;
      threadIdx = {static_cast<unsigned>(thread), 0, 0};
      gsync_emulated_switch(&scheduler, fibers[thread].stack_pointer);
    }
    return progressed;
  };
  for (bool progressed = true; progressed && failure.empty();) {
    // Ascending, the warps keep step with each other; else one runs as far ahead of the others as barriers let it.
    if (schedule.order == Order::kAscending) {
      progressed = run_once(0, num_threads);
      continue;
    }
    progressed = false;
    for (const int warp : in_order(num_threads / kWarpSize, random)) {
      while (run_once(warp * kWarpSize, kWarpSize)) progressed = true;
    }
  }
  if (!failure.empty()) return failure;
  const auto has_ended = [](const Fiber& fiber) { return fiber.state == State::kEnded; };
  return std::all_of(fibers.begin(), fibers.begin() + num_threads, has_ended) ? "" : why_stuck();
}

/// The last one to arrive lets threads [first, last) go on.
void release(int first, int last) {
  for (int thread = first; thread < last; ++thread) {
    if (!(fibers[thread].place == fibers[current].place)) stop(describe(current) + ", " + describe(thread));
  }
  for (int thread = first; thread < last; ++thread) fibers[thread].state = State::kReady;
}

}  // namespace

void set_schedule(const Schedule& wanted) { schedule = wanted; }

std::string run_grid(dim3 grid, dim3 block, const std::function<void()>& thread) {
  if (grid.y * grid.z * block.y * block.z != 1 || grid.x == 0 || block.x == 0 || block.x % kWarpSize != 0) {
    return "only grids of one dimension and of whole warps are emulated";
  }
  static const SharedMemory shared = shared_memory();
  num_threads = static_cast<int>(block.x);
  gridDim = grid;
  blockDim = block;
  body = &thread;
  failure.clear();
  warps.resize(num_threads / kWarpSize);
  while (static_cast<int>(fibers.size()) < num_threads) prepare(fibers.emplace_back());
  std::mt19937_64 random(schedule.seed);
  for (const int idx : in_order(static_cast<int>(grid.x), random)) {
    blockIdx = {static_cast<unsigned>(idx), 0, 0};
    std::memset(shared.begin, schedule.pattern, shared.bytes);
    const std::string error = run_block(random);
    if (error.empty()) continue;
    fibers.clear();  // their stacks are in use for ever
    return error;
  }
  return "";
}

bool wait_for_block(const char* operation, int line, bool predicate) {
  fibers[current].place = {operation, line, false};
  fibers[current].state = State::kWaits;
  brought_predicate |= predicate;
  if (++num_arrived == num_threads) {
    num_arrived = 0;
    settled_predicate = std::exchange(brought_predicate, false);
    release(0, num_threads);
  } else {
    leave();
  }
  return settled_predicate;
}

const uint64_t* wait_for_warp(const char* operation, int line, unsigned mask, uint64_t value) {
  fibers[current].place = {operation, line, true};
  fibers[current].state = State::kWaits;
  if (mask != 0xffffffffu) stop(describe(current) + ": only masks of whole warps are emulated");
  const int first = current / kWarpSize * kWarpSize;
  Warp& warp = warps[first / kWarpSize];
  warp.brought[current - first] = value;
  if (++warp.num_arrived == kWarpSize) {
    warp.num_arrived = 0;
    std::copy(std::begin(warp.brought), std::end(warp.brought), warp.settled);
    release(first, first + kWarpSize);
  } else {
    leave();
  }
  return warp.settled;
}

}  // namespace emulation
