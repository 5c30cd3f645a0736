#include "engine.h"

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace gsync {
namespace {

using Clock = std::chrono::steady_clock;

// How long close() lets a device end what it was given. Beyond it a peer is gone, and a process that leaves must not wait for it.
constexpr std::chrono::milliseconds kDrainLimit{5000};

at::TensorOptions on(c10::Device device, at::ScalarType dtype) { return at::TensorOptions().dtype(dtype).device(device); }

at::Tensor host_memory_for(c10::Device device, int64_t numel, at::ScalarType dtype) {
  auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
  // CUDA maps pinned memory into the device's address space, at the same address. Other devices here share the host's memory.
  return at::zeros({numel}, device.is_cuda() ? options.pinned_memory(true) : options);
}

int64_t sparse_bytes(const at::Tensor& gradient) {
  return static_cast<int64_t>(gradient._values().nbytes() + gradient._indices().nbytes());
}

}  // namespace

Engine::Engine(std::shared_ptr<Transport> transport, EngineOptions options)
    : options_(std::move(options)), exchanges_(transport, options_.rank, options_.world_size) {
  TORCH_CHECK_VALUE(options_.world_size >= 1 && options_.rank >= 0 && options_.rank < options_.world_size,
                    "Engine: expected 0 <= rank < world_size, got rank ", options_.rank, ", world_size ", options_.world_size);
  TORCH_CHECK_VALUE(transport || options_.world_size == 1, "Engine: world_size ", options_.world_size, " needs a transport");
  TORCH_CHECK_VALUE(options_.slice_bytes > 0, "Engine: slice_bytes must be positive, got ", options_.slice_bytes);
  TORCH_CHECK_VALUE(options_.timeout.count() > 0, "Engine: timeout_s must be positive, got ", options_.timeout.count() / 1000.0);
  TORCH_CHECK_VALUE(has_kernels(options_.device.type()), "Engine: this build has no kernels for device ", options_.device);

  pipeline_.device = options_.device;
  pipeline_.scale = static_cast<float>(options_.scale);
  pipeline_.exchange = &exchanges_.get(options_.exchange);
  pipeline_.transport = std::move(transport);
  pipeline_.rank = options_.rank;
  pipeline_.stochastic = options_.stochastic;
  pipeline_.measure_every = options_.measure_every;
  parameters_.emplace(exchanges_, options_.exchange, options_.device,
                      PlanOptions{options_.slice_bytes, options_.start_step, options_.measure_every > 0});
  counters_ = at::zeros({3}, on(options_.device, at::kLong));
  pipeline_.counters = static_cast<int64_t*>(counters_.mutable_data_ptr());
  if (!options_.device.is_cpu()) {
    set_up_device();
    return;
  }

  ExecutorEvents& events = *this;
  pipeline_.clock = std::make_unique<HostClock>();
  if (!pipeline_.transport || pipeline_.transport->any_thread()) {
    executor_ = std::make_unique<WorkerExecutor>(pipeline_, events, options_.timeout);
  } else {
    executor_ = std::make_unique<CallerExecutor>(pipeline_, events);
  }
}

void Engine::set_up_device() {
  const c10::DeviceGuard guard(options_.device);
  const c10::impl::VirtualGuardImpl impl(options_.device.type());
  stream_ = options_.stream_priority ? impl.getNewStream(options_.device, *options_.stream_priority)
                                     : impl.getStreamFromGlobalPool(options_.device, /*isHighPriority=*/true);
  // Zeros were written on the current stream; the engine's comes after it.
  c10::Event zeroed(options_.device.type());
  step_nonfinite_ = at::zeros({2}, on(options_.device, at::kInt));
  zeroed.record(impl.getStream(options_.device));
  zeroed.block(*stream_);
  failed_word_ = host_memory_for(options_.device, 1, at::kInt);
  pipeline_.failed = static_cast<const int32_t*>(failed_word_.const_data_ptr());
  arriving_counters_ = host_memory_for(options_.device, 3, at::kLong);
  step_done_ = std::make_unique<c10::Event>(options_.device.type());
  counters_copied_ = std::make_unique<c10::Event>(options_.device.type());
  results_read_ = std::make_unique<c10::Event>(options_.device.type());

  pipeline_.clock = std::make_unique<StreamClock>(*stream_);
  executor_ = std::make_unique<StreamExecutor>(pipeline_, static_cast<ExecutorEvents&>(*this), *stream_);
  watchdog_ = std::make_unique<Watchdog>(
      pipeline_.transport, options_.device, options_.timeout,
      [this](int64_t bucket, int64_t step, const std::string& cause) { fail(bucket, step < 0 ? step_.load() : step, cause); });
}

Engine::~Engine() { close(); }

void Engine::set_parameters(const ParameterTable& table) {
  std::lock_guard<std::mutex> lock(submit_mutex_);
  parameters_->set(table);
}

void Engine::follow_loss_scale(at::Tensor scale, at::Tensor unit) {
  for (const at::Tensor& tensor : {scale, unit}) {
    TORCH_CHECK_VALUE(tensor.scalar_type() == at::kFloat && tensor.numel() == 1 && tensor.device() == options_.device,
                      "Engine.follow_loss_scale: expected fp32 [1] on ", options_.device, ", got ", tensor.scalar_type(), " ",
                      tensor.sizes(), " on ", tensor.device());
  }
  std::lock_guard<std::mutex> lock(submit_mutex_);
  loss_scale_ = scale.view({1});
  residual_unit_ = unit.view({1});
}

// ---- one bucket ----

c10::intrusive_ptr<c10::ivalue::Future> Engine::submit(Bucket bucket, std::optional<c10::IValue> result) {
  see_fork();
  std::exception_ptr refusal;
  try {
    call_if_due(bucket);
  } catch (...) {
    refusal = std::current_exception();
  }
  std::lock_guard<std::mutex> lock(submit_mutex_);
  const c10::AutoGradMode no_grad(false);
  auto job = std::make_shared<BucketJob>();
  if (result) {
    job->result = std::move(*result);
  } else if (bucket.buffer.defined()) {
    job->result = bucket.buffer;
  }
  const c10::TypePtr type = job->result.isPyObject() ? c10::TypePtr(c10::PyObjectType::get())
                            : job->result.isTensor() ? c10::TypePtr(c10::TensorType::get())
                                                     : c10::TypePtr(c10::NoneType::get());
  const auto devices = options_.device.is_cpu() ? std::vector<c10::Device>{} : std::vector<c10::Device>{options_.device};
  job->future = c10::make_intrusive<c10::ivalue::Future>(type, devices);
  job->bucket = std::move(bucket);
  if (!stream_ && at::hasThreadLocalCallbacks()) job->profiled.emplace();
  job->step = step_.load();
  job->seed = seed_.load();
  for (const at::Tensor& parameter : job->bucket.parameters) job->is_used.push_back(parameter.grad().defined());
  const auto future = job->future;
  try {
    const Bucket& given = job->bucket;
    if (given.is_last) step_.fetch_add(1);
    if (stopped()) {
      give_up({job});
      return future;
    }
    if (refusal) std::rethrow_exception(refusal);
    // A backward that ended in the middle has left the other ranks waiting for the bucket that was due; what comes now would be
    // summed with it.
    TORCH_CHECK_VALUE(given.index == next_bucket_, "bucket ", next_bucket_, " was due, bucket ", given.index,
                      " came: the backward before this one did not hand over all its buckets");
    next_bucket_ = given.is_last ? 0 : given.index + 1;
    if (given.index == 0 && loss_scale_.defined() && stream_) step_done_->block(current_stream());
    if (given.index == 0 && loss_scale_.defined()) parameters_->follow_loss_scale(loss_scale_, residual_unit_);
    TORCH_CHECK_VALUE(given.device() == options_.device, "bucket ", given.index, " is on ", given.device(), ", the engine on ",
                      options_.device);
    TORCH_CHECK(!stream_ || !is_capturing(current_stream()),
                "the backward pass is being captured into a CUDA graph, which cannot hold gsync's exchange: capture it under "
                "no_sync(), or not at all");
    if (!given.is_sparse()) job->plan = parameters_->plan(given, job->step);
    job->sums = job->plan ? job->plan : parameters_->sparse_plan(given);
    job->found_nonfinite = &job->host_nonfinite;
    if (stream_) job->found_nonfinite = static_cast<int32_t*>(step_nonfinite_.mutable_data_ptr()) + step_slot_;
    if (given.is_last) parameters_->forget_unused_plans(job->step);
  } catch (...) {
    failed_in(job.get(), std::current_exception());
    give_up({job});
    return future;
  }
  if (stream_) {
    std::lock_guard<std::mutex> results_lock(mutex_);
    results_read_->block(*stream_);
  }
  executor_->submit(std::move(job));
  return future;
}

void Engine::call_at(int64_t step, std::function<void()> call) {
  std::lock_guard<std::mutex> lock(mutex_);
  call_step_ = step;
  call_ = std::move(call);
}

void Engine::call_if_due(const Bucket& bucket) {
  std::function<void()> call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!call_ || bucket.index != 0 || step_.load() < call_step_ || stopped()) return;
    call = std::exchange(call_, nullptr);
  }
  call();
}

void Engine::bucket_done(BucketJob& job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++stats_.buckets;
    const int64_t dense_bytes = job.plan ? job.plan->gradient_bytes : sparse_bytes(job.bucket.buffer);
    const int64_t wire_bytes = job.plan ? job.plan->wire_bytes : dense_bytes * (options_.world_size - 1);
    stats_.gradient_bytes += dense_bytes;
    stats_.wire_bytes += wire_bytes;
    const auto number = static_cast<size_t>(job.bucket.index);
    if (stats_.by_bucket.size() <= number) stats_.by_bucket.resize(number + 1);
    BucketTotals& totals = stats_.by_bucket[number];
    ++totals.times;
    totals.gradient_bytes += dense_bytes;
    totals.wire_bytes += wire_bytes;
    step_plans_.push_back(job.sums);
    step_found_nonfinite_ = step_found_nonfinite_ || job.host_nonfinite != 0;
    if (job.bucket.is_last) {
      ++stats_.steps;
      finished_step_ = job.step;
      if (stream_) {
        finish_step_on_device();
      } else {
        finish_step_on_host();
      }
    }
  }
  if (watchdog_) watchdog_->watch(job.bucket, job.step, *job.producer, *stream_);
  if (job.bucket.is_sparse()) return job.future->markCompleted(std::move(job.result));
  // The storage is named since it cannot be found in a Python object without Python's lock. Gradients that lie anywhere have
  // none in common; any memory of the device will do, as whoever waits then waits for this stream.
  const at::Tensor& memory = job.bucket.buffer.defined() ? job.bucket.buffer : counters_;
  job.future->markCompleted(std::move(job.result), {{memory.storage().getWeakStorageImpl()}});
}

void Engine::failed_in(const BucketJob* job, const std::exception_ptr& cause) {
  fail(job != nullptr ? job->bucket.index : -1, job != nullptr ? job->step : step_.load(), cause_of(cause));
}

void Engine::give_up(const std::vector<std::shared_ptr<BucketJob>>& jobs) {
  if (jobs.empty()) return;
  if (!failed()) fail(jobs.front()->bucket.index, jobs.front()->step, "the engine was closed before the bucket was done");
  std::vector<Bucket> buckets;
  for (const auto& job : jobs) buckets.push_back(job->bucket);
  spoil(buckets);
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    error = error_;
  }
  for (const auto& job : jobs) job->future->setErrorIfNeeded(error);
}

void Engine::spoil(const std::vector<Bucket>& buckets) {
  std::vector<Bucket> all;
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    all.swap(to_spoil_);
  }
  all.insert(all.end(), buckets.begin(), buckets.end());
  if (all.empty()) return;
  try {
    if (stream_) {
      // What was enqueued before the failure may write into the buckets still, and the caller may free them.
      c10::Event drained(options_.device.type());
      drained.record(*stream_);
      drained.block(current_stream());
    }
  } catch (...) {  // the device is lost: its gradients are out of reach, the error says why
  }
  for (const Bucket& bucket : all) {
    try {
      poison(bucket);
    } catch (...) {  // as above
    }
  }
}

void Engine::fail(int64_t bucket, int64_t step, const std::string& cause) noexcept {
  std::vector<Bucket> under_way;
  try {
    if (watchdog_) under_way = watchdog_->under_way();
  } catch (...) {  // the device is lost
  }
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (error_) return;
    to_spoil_ = std::move(under_way);
    error_ = make_sync_error({options_.label, bucket, step, options_.rank, options_.world_size}, cause);
    failed_.store(true);
  }
  // The word first: kernels that an aborted communicator lets go on then write NaN.
  if (failed_word_.defined()) *static_cast<volatile int32_t*>(failed_word_.mutable_data_ptr()) = 1;
  if (pipeline_.transport) pipeline_.transport->abort();
  executor_->wake();
}

// ---- one step ----

void Engine::finish_step_on_host() {
  at::Tensor sums = at::zeros({parameters_->size()}, on(at::kCPU, at::kDouble));
  auto* by_name = static_cast<double*>(sums.mutable_data_ptr());
  for (const auto& plan : step_plans_) {
    for (const Part& part : plan->parts) {
      const auto* of_segment = static_cast<const double*>(part.sum_of_squares.const_data_ptr());
      for (size_t i = 0; i < part.norm_idx.size(); ++i) by_name[part.norm_idx[i]] = of_segment[i];
    }
  }
  finished_plans_ = std::exchange(step_plans_, {});
  sum_of_squares_ = std::move(sums);
  pipeline_.counters[2] += step_found_nonfinite_ ? 1 : 0;
  found_nonfinite_ = at::zeros({}, on(at::kCPU, at::kBool));
  *static_cast<bool*>(found_nonfinite_.mutable_data_ptr()) = step_found_nonfinite_;
  step_found_nonfinite_ = false;
  see_counters(pipeline_.counters);
}

void Engine::finish_step_on_device() {
  // On the engine's stream, which the executor has made current.
  finished_plans_ = std::exchange(step_plans_, {});
  counters_.narrow(0, 2, 1).add_(step_nonfinite_.narrow(0, step_slot_, 1));
  step_slot_ = 1 - step_slot_;
  step_nonfinite_.narrow(0, step_slot_, 1).zero_();
  step_done_->record(*stream_);
  counters_are_newer_ = true;
  see_arrived_counters();
}

c10::Stream Engine::current_stream() const {
  return c10::impl::VirtualGuardImpl(options_.device.type()).getStream(options_.device);
}

// ---- the end ----

void Engine::see_fork() {
  if (!forked() || failed_.exchange(true)) return;
  error_ = make_sync_error({options_.label, -1, step_.load(), options_.rank, options_.world_size},
                           "this process was forked from rank " + std::to_string(options_.rank) +
                               ", whose threads and connections it does not have; only that process can synchronise this model");
}

void Engine::raise_pending() {
  see_fork();
  if (!failed()) return;
  spoil({});
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (error_) std::rethrow_exception(error_);
}

void Engine::abort(const std::string& reason) {
  see_fork();
  fail(-1, step_.load(), reason);
}

void Engine::close() noexcept {
  if (closed_.exchange(true) || forked()) return;
  if (stream_) {
    // Let the device end what it was given: it uses memory of ours. Once the engine has failed it writes NaN.
    const auto limit = std::min(kDrainLimit, options_.timeout);
    if (!failed() && !watchdog_->drain(limit)) fail(-1, step_.load(), "the engine was closed while a bucket was under way");
    try {
      c10::Event last(options_.device.type());
      last.record(*stream_);
      const auto deadline = Clock::now() + limit;
      while (!last.query() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } catch (...) {  // the device is lost
    }
  }
  if (watchdog_) watchdog_->close();
  executor_->close();
  if (pipeline_.transport) pipeline_.transport->abort();
  call_at(0, nullptr);
}

}  // namespace gsync
