#include "transport_nccl.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

namespace gsync {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kUniqueIdKey = "unique_id";
constexpr std::chrono::microseconds kPollInterval{50};

// Enqueued on the engine's stream: whatever comes next on it waits by itself.
class Enqueued final : public Collective {
 public:
  bool done() const override { return true; }
  void finish() override {}
};

nccl::DataType data_type(at::ScalarType type) {
  switch (type) {
    case at::kByte: return nccl::kUint8;
    case at::kHalf: return nccl::kFloat16;
    case at::kFloat: return nccl::kFloat32;
    case at::kBFloat16: return nccl::kBfloat16;
    default: TORCH_CHECK(false, "gsync: no NCCL type for ", c10::toString(type));
  }
}

}  // namespace

NcclTransport::NcclTransport(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::Device device,
                             std::chrono::milliseconds timeout, int min_ctas, int max_ctas, const std::string& library)
    : api_(nccl::load(library)), size_(size), device_(device), timeout_(timeout) {
  const c10::DeviceGuard guard(device_);
  nccl::UniqueId id{};
  if (rank == 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    check(api_->get_unique_id(&id), "ncclGetUniqueId");
    store->set(kUniqueIdKey, std::vector<uint8_t>(id.internal, id.internal + sizeof(id.internal)));
  } else {
    store->wait({kUniqueIdKey}, timeout_);
    const std::vector<uint8_t> bytes = store->get(kUniqueIdKey);
    TORCH_CHECK(bytes.size() == sizeof(id.internal), "gsync: NCCL's unique id has ", bytes.size(), " bytes, expected ",
                sizeof(id.internal));
    std::memcpy(id.internal, bytes.data(), bytes.size());
  }
  config_.blocking = 0;  // so that a rank that never comes is a time-out here, not a hang inside NCCL
  config_.min_ctas = min_ctas;
  config_.max_ctas = max_ctas;
  try {
    std::lock_guard<std::mutex> lock(mutex_);
    check(api_->comm_init_rank_config(&comm_, size, id, rank, &config_), "ncclCommInitRankConfig");
  } catch (...) {
    abort();
    throw;
  }
}

NcclTransport::~NcclTransport() { abort(); }

std::shared_ptr<NcclTransport> NcclTransport::split(int color, int key, int size) {
  const c10::DeviceGuard guard(device_);
  const std::shared_ptr<NcclTransport> part(new NcclTransport(api_, size, device_, timeout_, config_));
  std::lock_guard<std::mutex> lock(mutex_);
  std::lock_guard<std::mutex> lock_part(part->mutex_);
  TORCH_CHECK(!aborted_.load(), "the NCCL communicator was aborted");
  check(api_->comm_split(comm_, color, key, &part->comm_, &part->config_), "ncclCommSplit");
  part->check(nccl::kInProgress, "ncclCommSplit");  // it is ready when it says so itself
  return part;
}

void NcclTransport::check(nccl::Result result, const char* what) {
  const auto deadline = Clock::now() + timeout_;
  while (result == nccl::kInProgress) {
    TORCH_CHECK(!aborted_.load(), what, ": the communicator was aborted");
    TORCH_CHECK(Clock::now() < deadline, what, " timed out after ", static_cast<double>(timeout_.count()) / 1000.0, " s");
    std::this_thread::sleep_for(kPollInterval);
    const nccl::Result asked = api_->comm_get_async_error(comm_, &result);
    if (asked != nccl::kSuccess) result = asked;
  }
  if (result == nccl::kSuccess) return;
  const char* detail = api_->get_last_error(comm_);
  TORCH_CHECK(false, what, ": ", api_->get_error_string(result), detail != nullptr && *detail != '\0' ? ": " : "",
              detail != nullptr ? detail : "");
}

nccl::Stream NcclTransport::current_stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).native_handle();
}

std::shared_ptr<Collective> NcclTransport::all_reduce(const at::Tensor& payload) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!aborted_.load(), "the NCCL communicator was aborted");
  check(api_->all_reduce(payload.const_data_ptr(), payload.mutable_data_ptr(), static_cast<size_t>(payload.numel()),
                         data_type(payload.scalar_type()), nccl::kSum, comm_, current_stream()),
        "ncclAllReduce");
  return std::make_shared<Enqueued>();
}

std::shared_ptr<Collective> NcclTransport::all_to_all(const at::Tensor& out, const at::Tensor& in) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!aborted_.load(), "the NCCL communicator was aborted");
  const auto chunk_bytes = static_cast<size_t>(in.numel() / size_);
  const auto* send = static_cast<const uint8_t*>(in.const_data_ptr());
  auto* receive = static_cast<uint8_t*>(out.mutable_data_ptr());
  const nccl::Stream stream = current_stream();
  check(api_->group_start(), "ncclGroupStart");
  nccl::Result result = nccl::kSuccess;
  for (int peer = 0; peer < size_ && result == nccl::kSuccess; ++peer) {
    result = api_->send(send + static_cast<size_t>(peer) * chunk_bytes, chunk_bytes, nccl::kUint8, peer, comm_, stream);
    if (result == nccl::kInProgress) result = nccl::kSuccess;  // inside a group, the group's end tells
    if (result != nccl::kSuccess) break;
    result = api_->recv(receive + static_cast<size_t>(peer) * chunk_bytes, chunk_bytes, nccl::kUint8, peer, comm_, stream);
    if (result == nccl::kInProgress) result = nccl::kSuccess;
  }
  const nccl::Result ended = api_->group_end();
  check(result, "ncclSend or ncclRecv");
  check(ended, "ncclGroupEnd");
  return std::make_shared<Enqueued>();
}

std::shared_ptr<Collective> NcclTransport::all_gather(const at::Tensor& out, const at::Tensor& in) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!aborted_.load(), "the NCCL communicator was aborted");
  check(api_->all_gather(in.const_data_ptr(), out.mutable_data_ptr(), static_cast<size_t>(in.numel()), nccl::kUint8, comm_,
                         current_stream()),
        "ncclAllGather");
  return std::make_shared<Enqueued>();
}

// The watchdog learns of a bucket when it has been enqueued as a whole. Until then this keeps the time-out.
void NcclTransport::wait_for_stream(const char* what) {
  c10::Event reached(device_.type());
  reached.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  const auto deadline = Clock::now() + timeout_;
  while (!reached.query()) {
    TORCH_CHECK(!aborted_.load(), "the NCCL communicator was aborted");
    const std::string error = async_error();
    TORCH_CHECK(error.empty(), error);
    TORCH_CHECK(Clock::now() < deadline, what, " timed out after ", static_cast<double>(timeout_.count()) / 1000.0, " s");
    std::this_thread::sleep_for(kPollInterval);
  }
  TORCH_CHECK(!aborted_.load(), "the NCCL communicator was aborted");  // then what came is anything
}

// NCCL knows no sparse tensors: the lengths, then the indices and values of every rank, each padded to the longest, and a sum
// of what came. The lengths have to reach the host, so this waits, and so does the sum, for its number of entries; embeddings with
// sparse gradients are small or rare.
std::shared_ptr<Collective> NcclTransport::all_reduce_sparse(const at::Tensor& gradient) {
  const at::Tensor mine = gradient.coalesce();
  const at::Tensor indices = mine.indices().contiguous();
  const at::Tensor values = mine.values().contiguous();
  const auto gather = [&](const at::Tensor& in) {
    const at::Tensor bytes = in.contiguous().view({-1}).view(at::kByte);
    at::Tensor out = at::empty({size_ * bytes.numel()}, bytes.options());
    all_gather(out, bytes);
    return out;
  };
  const at::Tensor gathered_lengths = gather(at::full({1}, indices.size(1), indices.options())).view(at::kLong);
  wait_for_stream("ncclAllGather of the lengths of sparse gradients");
  const at::Tensor lengths = gathered_lengths.cpu();
  const auto* length = static_cast<const int64_t*>(lengths.const_data_ptr());
  const int64_t longest = *std::max_element(length, length + size_);
  const int64_t dims = indices.size(0);

  at::Tensor padded_indices = at::zeros({longest, dims}, indices.options());
  std::vector<int64_t> value_sizes = values.sizes().vec();
  value_sizes[0] = longest;
  at::Tensor padded_values = at::zeros(value_sizes, values.options());
  padded_indices.narrow(0, 0, indices.size(1)).copy_(indices.t());
  padded_values.narrow(0, 0, indices.size(1)).copy_(values);

  std::vector<at::Tensor> all_indices;
  std::vector<at::Tensor> all_values;
  const at::Tensor gathered_indices = gather(padded_indices).view(at::kLong).view({size_, longest, dims});
  value_sizes.insert(value_sizes.begin(), size_);
  const at::Tensor gathered_values = gather(padded_values).view(values.scalar_type()).view(value_sizes);
  wait_for_stream("ncclAllGather of sparse gradients");
  for (int64_t rank = 0; rank < size_; ++rank) {
    all_indices.push_back(gathered_indices.select(0, rank).narrow(0, 0, length[rank]).t());
    all_values.push_back(gathered_values.select(0, rank).narrow(0, 0, length[rank]));
  }
  const at::Tensor sum = at::sparse_coo_tensor(at::cat(all_indices, 1), at::cat(all_values, 0), gradient.sizes()).coalesce();
  gradient.copy_(sum);
  return std::make_shared<Enqueued>();
}

std::string NcclTransport::async_error() {
  // Someone who waits inside check() sees the error by himself.
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || comm_ == nullptr || aborted_.load()) return {};
  nccl::Result state = nccl::kSuccess;
  const nccl::Result asked = api_->comm_get_async_error(comm_, &state);
  if (asked != nccl::kSuccess) state = asked;
  if (state == nccl::kSuccess || state == nccl::kInProgress) return {};
  const char* detail = api_->get_last_error(comm_);
  return std::string("NCCL: ") + api_->get_error_string(state) +
         (detail != nullptr && *detail != '\0' ? std::string(": ") + detail : "");
}

void NcclTransport::abort() noexcept {
  if (aborted_.exchange(true)) return;
  std::lock_guard<std::mutex> lock(mutex_);  // check() gives up once it sees aborted_
  if (comm_ == nullptr) return;
  try {
    const c10::DeviceGuard guard(device_);
    api_->comm_abort(comm_);
  } catch (...) {  // the device is gone, and the communicator with it
  }
  comm_ = nullptr;
}

}  // namespace gsync
