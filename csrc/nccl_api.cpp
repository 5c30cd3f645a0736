#include "nccl_api.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace gsync::nccl {
namespace {

template <typename Function>
void find(void* handle, const std::string& library, const char* name, Function& function) {
  void* symbol = dlsym(handle, name);
  TORCH_CHECK(symbol != nullptr, "gsync: ", library, " has no function ", name);
  function = reinterpret_cast<Function>(symbol);
}

}  // namespace

std::shared_ptr<const Api> load(const std::string& library) {
  // Never closed: NCCL keeps threads of its own.
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    TORCH_CHECK(false, "gsync: cannot load NCCL: ", reason != nullptr ? reason : library.c_str());
  }
  auto api = std::make_shared<Api>();
  find(handle, library, "ncclGetVersion", api->get_version);
  int version = 0;
  const Result result = api->get_version(&version);
  TORCH_CHECK(result == kSuccess && version >= kConfigVersion,
              "gsync: transport nccl needs NCCL 2.18 or later, found version code ", version, " in ", library,
              "; transport='process_group' works with older ones");
  find(handle, library, "ncclGetUniqueId", api->get_unique_id);
  find(handle, library, "ncclCommInitRankConfig", api->comm_init_rank_config);
  find(handle, library, "ncclCommSplit", api->comm_split);
  find(handle, library, "ncclCommGetAsyncError", api->comm_get_async_error);
  find(handle, library, "ncclCommAbort", api->comm_abort);
  find(handle, library, "ncclAllReduce", api->all_reduce);
  find(handle, library, "ncclAllGather", api->all_gather);
  find(handle, library, "ncclSend", api->send);
  find(handle, library, "ncclRecv", api->recv);
  find(handle, library, "ncclGroupStart", api->group_start);
  find(handle, library, "ncclGroupEnd", api->group_end);
  find(handle, library, "ncclGetErrorString", api->get_error_string);
  find(handle, library, "ncclGetLastError", api->get_last_error);

  return api;
}

}  // namespace gsync::nccl
