// The functions of NCCL that gsync calls, over memory that the processes share: operations run in the order of the stream they are
// given. Loaded in place of libnccl.so.2. Like NCCL, a communicator that does not block answers "in progress" first, takes one call
// at a time, and does not tell the other ranks that it was aborted. What NCCL would call a wrong use is an error here.
#include "fake_nccl.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "fake_nccl_board.h"
#include "nccl_api.h"
#include "streams.h"

namespace {

using namespace gsync::nccl;
using namespace emulation;

constexpr auto kSystemError = static_cast<Result>(2);
constexpr auto kInvalidUsage = static_cast<Result>(5);
constexpr auto kRemoteError = static_cast<Result>(6);

std::mutex table_mutex;
std::map<Comm, std::shared_ptr<Communicator>> communicators;  // a handle is never used twice
uintptr_t last_handle = 0;
std::map<int, std::pair<std::string, int>> faults;  // by rank: kind, and how many calls go well before

thread_local int group_depth = 0;
thread_local std::vector<Piece> group;
thread_local Comm group_comm = nullptr;
thread_local Stream group_stream = nullptr;

std::shared_ptr<Communicator> find(Comm handle) {
  std::lock_guard<std::mutex> lock(table_mutex);
  const auto found = communicators.find(handle);
  return found == communicators.end() ? nullptr : found->second;
}

bool strikes(int rank, const std::string& kind) {
  std::lock_guard<std::mutex> lock(table_mutex);
  const auto found = faults.find(rank);
  if (found == faults.end() || found->second.first != kind || found->second.second-- > 0) return false;
  faults.erase(found);
  return true;
}

// One call at a time, and none before the last has succeeded.
class Call {
 public:
  explicit Call(Comm handle) : comm_(find(handle)) { is_first_ = comm_ && !comm_->is_busy.exchange(true); }
  ~Call() {
    if (is_first_) comm_->is_busy.store(false);
  }
  Result check() const {
    if (!is_first_ || comm_->is_aborted.load()) return kInvalidUsage;
    if (comm_->polls_left > 0) return kInvalidUsage;
    if (!strikes(comm_->known_as, "error")) return kSuccess;
    comm_->last_error = "a planted error";
    return kSystemError;
  }
  /// Enqueues the operation, or one that never ends.
  Result issue(Stream stream, std::function<void()> operation) const {
    emulation::count(&emulation::Counters::collectives);
    const bool is_lost = strikes(comm_->known_as, "async_error");
    if (is_lost) comm_->async_error.store(kRemoteError);
    if (is_lost || strikes(comm_->known_as, "hang")) {
      operation = [comm = comm_] {
        while (!gave_up(*comm)) std::this_thread::sleep_for(std::chrono::microseconds(100));
      };
    }
    emulation::enqueue(emulation::stream_of(stream), std::move(operation));
    // An error beside the calls is not told by the call.
    comm_->polls_left = is_lost ? 0 : static_cast<int>(comm_->random() % 3);
    return comm_->polls_left > 0 ? kInProgress : kSuccess;
  }
  const std::shared_ptr<Communicator>& comm() const { return comm_; }

 private:
  std::shared_ptr<Communicator> comm_;
  bool is_first_ = false;
};

size_t bytes_of(size_t count, DataType type) { return count * (type == kUint8 ? 1 : type == kFloat32 ? 4 : 2); }

Result add_to_group(Piece piece, Comm comm, Stream stream) {
  if (group_depth == 0 || (group_comm != nullptr && group_comm != comm) || find(comm) == nullptr) return kInvalidUsage;
  group_comm = comm;
  group_stream = stream;
  group.push_back(piece);
  return kSuccess;
}

// Makes a communicator on the board of that name; faults strike it as `known_as`.
Result join(const std::string& name, int size, int rank, int known_as, Comm* handle) {
  if (size > kMaxRanks) return kInvalidUsage;
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(Board)) != 0) return kSystemError;
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return kSystemError;
  auto comm = std::make_shared<Communicator>();
  comm->name = name;
  comm->board = static_cast<Board*>(memory);
  comm->rank = rank;
  comm->known_as = known_as;
  comm->size = size;
  if (comm->board->attached.fetch_add(1) + 1 == size) shm_unlink(name.c_str());
  std::lock_guard<std::mutex> lock(table_mutex);
  *handle = reinterpret_cast<Comm>(++last_handle);
  communicators[*handle] = std::move(comm);
  return kInProgress;
}

}  // namespace

namespace emulation {

void plant_nccl_fault(int rank, const std::string& kind, int after) {
  std::lock_guard<std::mutex> lock(table_mutex);
  faults[rank] = {kind, after};
}

int64_t live_communicators() {
  std::lock_guard<std::mutex> lock(table_mutex);
  return static_cast<int64_t>(communicators.size());
}

}  // namespace emulation

extern "C" {

#define EXPORT __attribute__((visibility("default")))

EXPORT Result ncclGetVersion(int* version) {
  *version = 22800;
  return kSuccess;
}

EXPORT Result ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  std::snprintf(id->internal, sizeof(id->internal), "/gsync-emulation-%08x%08x", random(), random());
  return kSuccess;
}

EXPORT Result ncclCommInitRankConfig(Comm* handle, int size, UniqueId id, int rank, Config* config) {
  if (config->blocking != 0) return kInvalidUsage;
  return strikes(rank, "init") ? kSystemError : join(id.internal, size, rank, rank, handle);
}

EXPORT Result ncclCommSplit(Comm handle, int color, int key, Comm* part, Config* config) {
  const Call call(handle);
  const Result result = config->blocking == 0 && color >= 0 ? call.check() : kInvalidUsage;
  if (result != kSuccess) return result;
  // Everyone tells everyone, on this thread: no operation may be under way.
  Communicator& comm = *call.comm();
  std::vector<std::pair<int, int>> told(static_cast<size_t>(comm.size));
  std::pair<int, int> mine{color, key};
  std::vector<Piece> pieces;
  for (int rank = 0; rank < comm.size; ++rank) {
    pieces.push_back({true, reinterpret_cast<uint8_t*>(&mine), sizeof(mine), rank});
    pieces.push_back({false, reinterpret_cast<uint8_t*>(&told[static_cast<size_t>(rank)]), sizeof(mine), rank});
  }
  exchange_pieces(comm, pieces, sizeof(mine));
  if (gave_up(comm)) return kRemoteError;
  if (strikes(comm.known_as, "split")) return kSystemError;
  const auto has_color = [color](const auto& other) { return other.first == color; };
  const auto is_before = [mine](const auto& other) { return other.first == mine.first && other.second < mine.second; };
  const auto size = static_cast<int>(std::count_if(told.begin(), told.end(), has_color));
  const auto rank = static_cast<int>(std::count_if(told.begin(), told.end(), is_before));
  const std::string name = comm.name + "-" + std::to_string(++comm.splits) + "-" + std::to_string(color);
  return join(name, size, rank, comm.known_as, part);
}

EXPORT Result ncclCommGetAsyncError(Comm handle, Result* error) {
  const Call call(handle);
  const auto& comm = call.comm();
  if (!comm || comm->is_aborted.load()) return kInvalidUsage;
  *error = static_cast<Result>(comm->async_error.load());
  if (*error != kSuccess) return kSuccess;
  if (comm->board->attached.load() < comm->size) *error = kInProgress;
  if (comm->polls_left > 0) {
    --comm->polls_left;
    *error = kInProgress;
  }
  return kSuccess;
}

EXPORT Result ncclCommAbort(Comm handle) {
  const auto comm = find(handle);
  if (!comm) return kInvalidUsage;
  comm->is_aborted.store(true);
  std::lock_guard<std::mutex> lock(table_mutex);
  communicators.erase(handle);
  return kSuccess;
}

EXPORT Result ncclAllReduce(const void* send, void* receive, size_t count, DataType type, ReduceOp op, Comm handle,
                            Stream stream) {
  const Call call(handle);
  const Result result = op == kSum && type != kUint8 ? call.check() : kInvalidUsage;
  if (result != kSuccess) return result;
  return call.issue(stream, [=, comm = call.comm()] {
    sum_all(*comm, static_cast<const uint8_t*>(send), static_cast<uint8_t*>(receive), bytes_of(count, type), type);
  });
}

EXPORT Result ncclAllGather(const void* send, void* receive, size_t count, DataType type, Comm handle, Stream stream) {
  const Call call(handle);
  const Result result = call.check();
  if (result != kSuccess) return result;
  const size_t bytes = bytes_of(count, type);
  std::vector<Piece> pieces;
  auto* from = static_cast<uint8_t*>(const_cast<void*>(send));
  for (int rank = 0; rank < call.comm()->size; ++rank) {
    pieces.push_back({true, from, bytes, rank});
    pieces.push_back({false, static_cast<uint8_t*>(receive) + static_cast<size_t>(rank) * bytes, bytes, rank});
  }
  return call.issue(stream, [=, comm = call.comm()] { exchange_pieces(*comm, pieces, bytes); });
}

EXPORT Result ncclSend(const void* buffer, size_t count, DataType type, int peer, Comm comm, Stream stream) {
  auto* from = static_cast<uint8_t*>(const_cast<void*>(buffer));
  return add_to_group({true, from, bytes_of(count, type), peer}, comm, stream);
}

EXPORT Result ncclRecv(void* buffer, size_t count, DataType type, int peer, Comm comm, Stream stream) {
  return add_to_group({false, static_cast<uint8_t*>(buffer), bytes_of(count, type), peer}, comm, stream);
}

EXPORT Result ncclGroupStart() {
  ++group_depth;
  return kSuccess;
}

EXPORT Result ncclGroupEnd() {
  if (group_depth == 0) return kInvalidUsage;
  if (--group_depth > 0 || group.empty()) return kSuccess;
  const std::vector<Piece> pieces = std::exchange(group, {});
  const Call call(std::exchange(group_comm, nullptr));
  const Result result = call.check();
  if (result != kSuccess) return result;
  for (const Piece& piece : pieces) {
    if (piece.bytes != pieces.front().bytes) return kInvalidUsage;  // all that is needed here
  }
  return call.issue(group_stream, [=, comm = call.comm()] { exchange_pieces(*comm, pieces, pieces.front().bytes); });
}

EXPORT const char* ncclGetErrorString(Result result) {
  switch (static_cast<int>(result)) {
    case 0: return "no error";
    case 2: return "unhandled system error";
    case 5: return "invalid usage";
    case 6: return "remote process exited or there was a network error";
    default: return "operation in progress";
  }
}

EXPORT const char* ncclGetLastError(Comm handle) {
  const auto comm = find(handle);
  return comm ? comm->last_error.c_str() : "";
}

}  // extern "C"
