// The functions of NCCL that gsync calls, found at run time in the library that torch has loaded. So one build works with
// and without NCCL, and with a stand-in of the same interface. Types and numbers are those of nccl.h, which keeps them stable.
#pragma once

#include <climits>
#include <cstddef>
#include <memory>
#include <string>

namespace gsync::nccl {

using Comm = struct OpaqueComm*;
using Stream = void*;

struct UniqueId {
  char internal[128];
};

enum Result : int { kSuccess = 0, kInProgress = 7 };
enum DataType : int { kUint8 = 1, kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9 };
enum ReduceOp : int { kSum = 0 };

inline constexpr int kUndefined = INT_MIN;
// The configuration as of this version: later libraries read `version` and fill in what was added since.
inline constexpr int kConfigVersion = 21800;

struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = kConfigVersion;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
};

struct Api {
  Result (*get_version)(int* version);
  Result (*get_unique_id)(UniqueId* id);
  Result (*comm_init_rank_config)(Comm* comm, int num_ranks, UniqueId id, int rank, Config* config);
  Result (*comm_split)(Comm comm, int color, int key, Comm* part, Config* config);
  Result (*comm_get_async_error)(Comm comm, Result* error);
  Result (*comm_abort)(Comm comm);
  Result (*all_reduce)(const void* send, void* receive, size_t count, DataType type, ReduceOp op, Comm comm, Stream stream);
  Result (*all_gather)(const void* send, void* receive, size_t send_count, DataType type, Comm comm, Stream stream);
  Result (*send)(const void* buffer, size_t count, DataType type, int peer, Comm comm, Stream stream);
  Result (*recv)(void* buffer, size_t count, DataType type, int peer, Comm comm, Stream stream);
  Result (*group_start)();
  Result (*group_end)();
  const char* (*get_error_string)(Result result);
  const char* (*get_last_error)(Comm comm);
};

/// Loads `library`; it stays loaded as long as the process.
/// Throws c10::Error when it cannot be loaded, lacks a function, or is older than NCCL 2.18.
std::shared_ptr<const Api> load(const std::string& library);

}  // namespace gsync::nccl
