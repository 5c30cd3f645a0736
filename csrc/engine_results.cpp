// What an engine tells: statistics, times, and the results of the last step. On a device it is read on the caller's stream.
#include <ATen/ops/ne.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>

#include "engine.h"

namespace gsync {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kFp16WarningShare = 0.01;

at::TensorOptions on(c10::Device device, at::ScalarType dtype) { return at::TensorOptions().dtype(dtype).device(device); }

}  // namespace

void Engine::see_counters(const int64_t* counters) {
  std::copy_n(counters, known_counters_.size(), known_counters_.begin());
  const double vanished_share =
      static_cast<double>(known_counters_[1]) / static_cast<double>(std::max<int64_t>(1, known_counters_[0]));
  if (vanished_share > kFp16WarningShare && !fp16_warned_) {
    fp16_warned_ = true;
    fp16_warning_due_.store(true);
  }
}

void Engine::see_arrived_counters() {
  if (!counters_copied_->query()) return;
  if (counters_copied_->was_marked_for_recording()) {
    see_counters(static_cast<const int64_t*>(arriving_counters_.const_data_ptr()));
  }
  if (!counters_are_newer_) return;
  const c10::StreamGuard guard(*stream_);
  arriving_counters_.copy_(counters_, /*non_blocking=*/true);  // the copy before has arrived, so its memory is free
  counters_copied_->record(*stream_);
  counters_are_newer_ = false;
}

c10::Stream Engine::begin_reading() {
  const c10::Stream reader = current_stream();
  step_done_->block(reader);
  return reader;
}

void Engine::end_reading(c10::Stream reader) {
  results_read_->block(reader);  // so that the event stands for those who read before, too
  results_read_->record(reader);
}

EngineStats Engine::stats() {
  at::Tensor errors;
  if (options_.measure_every > 0) {
    std::lock_guard<std::mutex> lock(submit_mutex_);
    if (stream_) step_done_->block(current_stream());
    errors = parameters_->error_sums();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (stream_) see_arrived_counters();
  EngineStats stats = stats_;
  if (errors.defined()) {
    errors = errors.cpu();
    const auto* sums = static_cast<const double*>(errors.const_data_ptr());
    stats.error_sums.assign(sums, sums + errors.numel());
  }
  stats.packed_nonzero = known_counters_[0] - counters_at_reset_[0];
  stats.packed_vanished = known_counters_[1] - counters_at_reset_[1];
  stats.nonfinite_steps = known_counters_[2] - counters_at_reset_[2];
  stats.buffer_bytes = executor_->buffer_bytes();
  stats.clock = pipeline_.clock->report();
  return stats;
}

void Engine::reset_stats() {
  if (options_.measure_every > 0) {
    std::lock_guard<std::mutex> lock(submit_mutex_);
    if (stream_) step_done_->block(current_stream());
    parameters_->reset_error_sums();
    if (stream_) {
      std::lock_guard<std::mutex> results_lock(mutex_);
      end_reading(current_stream());
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (stream_) see_arrived_counters();
  const size_t num_buckets = stats_.by_bucket.size();
  stats_ = {};
  stats_.by_bucket.resize(num_buckets);
  counters_at_reset_ = known_counters_;
  pipeline_.clock->reset();
}

void Engine::start_trace(int64_t capacity) {
  TORCH_CHECK_VALUE(capacity > 0, "Engine.start_trace: capacity must be positive, got ", capacity);
  const c10::DeviceGuard guard(options_.device);
  pipeline_.clock->start_trace(static_cast<size_t>(capacity));
}

Trace Engine::take_trace() {
  wait_for_clock();
  return pipeline_.clock->take_trace();
}

void Engine::time_steps() { pipeline_.clock->time_steps(); }

StepTimes Engine::take_step_times() {
  wait_for_clock();
  return pipeline_.clock->take_step_times();
}

void Engine::wait_for_clock() {
  const auto deadline = Clock::now() + options_.timeout;
  while (!failed() && !pipeline_.clock->drained() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::vector<std::vector<int64_t>> Engine::last_buckets() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::vector<int64_t>> buckets;
  for (const auto& plan : finished_plans_) {
    std::vector<int64_t>& bucket = buckets.emplace_back();
    for (const Part& part : plan->parts) bucket.insert(bucket.end(), part.norm_idx.begin(), part.norm_idx.end());
  }
  return buckets;
}

at::Tensor Engine::sum_of_squares() {
  raise_pending();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!stream_) return sum_of_squares_.defined() ? sum_of_squares_ : at::zeros({parameters_->size()}, on(at::kCPU, at::kDouble));
  at::Tensor sums = at::zeros({parameters_->size()}, on(options_.device, at::kDouble));
  const c10::Stream reader = begin_reading();
  for (const auto& plan : finished_plans_) {
    for (const Part& part : plan->parts) {
      sums.index_copy_(0, part.norm_idx_on_device, part.sum_of_squares);
    }
  }
  end_reading(reader);
  return sums;
}

at::Tensor Engine::found_nonfinite() {
  raise_pending();
  std::lock_guard<std::mutex> lock(mutex_);
  if (finished_step_ < 0) return at::zeros({}, on(options_.device, at::kBool));
  if (!stream_) return found_nonfinite_;
  const c10::Stream reader = begin_reading();
  at::Tensor found = step_nonfinite_.select(0, 1 - step_slot_).ne(0);
  end_reading(reader);
  return found;
}

}  // namespace gsync
