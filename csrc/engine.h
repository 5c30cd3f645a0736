// From a bucket of gradients that is ready to the same bucket holding the mean of all ranks.
//
//     DDP's reducer                         ddp_hook.cpp
//       │ bucket, future back at once
//       ▼
//     Engine::submit                        plan of the bucket (bucket_plan.h): parts, slices, layouts
//       │ BucketJob
//       ▼
//     Executor                              executor.h: worker thread (host) or stream (device); one order everywhere
//       │ for each slice                    pipeline.h
//       │   pack      gradients ─▶ payload
//       │   exchange  payload of every rank ─▶ result      exchange.h, over a Transport (transport.h)
//       │   unpack    result ─▶ gradients, sums of squares, non-finite flag
//       ▼
//     future completed                      or the engine fails: NaN in what is not synchronised, an error in the future
//
// After set-up nothing on this path takes Python's lock. An engine fails once: from then on every bucket is filled with NaN and
// every call throws what went wrong; the caller makes a new engine, on a new communicator.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bucket_plan.h"
#include "clock.h"
#include "errors.h"
#include "executor.h"
#include "pipeline.h"
#include "transport.h"
#include "watchdog.h"

namespace gsync {

struct EngineOptions {
  c10::Device device{c10::DeviceType::CPU};
  int world_size = 1;
  int rank = 0;
  std::string exchange = "all_reduce";  // or "scatter_gather", "hierarchical"
  double scale = 1.0;                   // multiplies every gradient: 1/world_size for a mean
  int64_t slice_bytes = 25 << 20;       // of gradients
  bool stochastic = false;              // rounding
  int64_t start_step = 0;               // block codecs and residuals are used from this step on; bf16 until then
  int64_t measure_every = 0;           // every how many steps what encoding loses is summed; 0: never
  std::chrono::milliseconds timeout{30 * 60 * 1000};
  std::optional<int> stream_priority;   // device only; none: the highest
  std::string label;                    // names the engine in errors
};

struct BucketTotals {
  int64_t times = 0;
  int64_t gradient_bytes = 0;
  int64_t wire_bytes = 0;
};

/// Totals since the last reset.
struct EngineStats {
  int64_t steps = 0;
  int64_t buckets = 0;
  int64_t gradient_bytes = 0;
  int64_t wire_bytes = 0;
  int64_t nonfinite_steps = 0;
  int64_t packed_nonzero = 0;   // values packed as fp16 that were not zero
  int64_t packed_vanished = 0;  // those of them that became zero
  int64_t buffer_bytes = 0;     // payload buffers held now
  std::vector<double> error_sums;  // [2 * kErrorSums]: of pack, of reduce; empty: not measured
  std::vector<BucketTotals> by_bucket;  // by index
  ClockReport clock;
};

class Engine final : private ExecutorEvents {
 public:
  /// Args: transport: of this engine alone, or null for world size 1, where gradients are only measured.
  /// Throws c10::ValueError for options that do not fit together.
  Engine(std::shared_ptr<Transport> transport, EngineOptions options);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// See Parameters::set. From the next bucket on.
  void set_parameters(const ParameterTable& table);
  /// Calls `call` once: before the first bucket of step `step`, or of the first one after it, in the thread that hands it over and
  /// with no bucket of that step under way. What it throws fails the engine.
  void call_at(int64_t step, std::function<void()> call);
  /// See PhaseClock.
  void time_steps();
  /// Waits for the device, no longer than the time-out.
  StepTimes take_step_times();
  /// Of each bucket of the last finished step, the positions of its parameters in the order of names.
  std::vector<std::vector<int64_t>> last_buckets();
  /// Null for world size 1. Whoever uses it must be sure that no bucket is under way.
  const std::shared_ptr<Transport>& transport() const { return pipeline_.transport; }
  /// From now on residuals are kept in units of `scale`, which the loss is multiplied by: see Parameters::follow_loss_scale, done
  /// at the first bucket of every step. Both are fp32 [1] on the engine's device.
  void follow_loss_scale(at::Tensor scale, at::Tensor unit);

  /// Takes a bucket whose gradients are ready and returns at once. The future holds `result` (by default the buffer) when the
  /// buffer holds the mean, or an error. Throws nothing: a bucket that cannot be synchronised comes back as a failed future.
  c10::intrusive_ptr<c10::ivalue::Future> submit(Bucket bucket, std::optional<c10::IValue> result = std::nullopt);

  /// Waits for the device where errors are measured.
  EngineStats stats();
  void reset_stats();
  /// Keeps when each slice is packed, exchanged and unpacked, from now on, for up to `capacity` spans. Waits for the device.
  void start_trace(int64_t capacity);
  /// Ends that and returns what there is; waits for the device, no longer than the time-out.
  Trace take_trace();
  /// fp64 [number of parameters], in the order of names, of the last finished step; zeros before. Never waits for a device.
  at::Tensor sum_of_squares();
  /// 0-d bool, of the last finished step. Never waits for a device.
  at::Tensor found_nonfinite();

  /// Throws the error that ended this engine, if one did.
  /// On a device first fills with NaN what was under way when it failed, on the current stream.
  void raise_pending();
  bool failed() const { return failed_.load(); }
  /// Fails the engine for a reason found outside of it, so that the other ranks fail at once too.
  void abort(const std::string& reason);
  /// Ends threads and transport; what is under way fails. On a device what was handed over may still end, for some seconds.
  /// May be called again.
  void close() noexcept;
  bool closed() const { return closed_.load(); }
  /// Whether this is a copy that a fork made: its threads and connections are another process's.
  bool forked() const { return getpid() != pid_; }
  int64_t step() const { return step_.load(); }
  void set_step(int64_t step) { step_.store(step); }
  /// Of stochastic rounding, from the next bucket on.
  void set_seed(uint64_t seed) { seed_.store(seed); }
  /// Whether more than 1 % of the non-zero values packed as fp16 vanished, and take_fp16_warning() has not been called since.
  bool fp16_warning_due() const { return fp16_warning_due_.load(); }
  bool take_fp16_warning() { return fp16_warning_due_.exchange(false); }

 private:
  void bucket_done(BucketJob& job) override;
  void failed_in(const BucketJob* job, const std::exception_ptr& cause) override;
  void give_up(const std::vector<std::shared_ptr<BucketJob>>& jobs) override;
  bool stopped() const override { return failed() || closed(); }

  void set_up_device();
  /// Makes the call that call_at() was given, if it is due.
  void call_if_due(const Bucket& bucket);
  /// Until the clock has counted what the device was given, or the time-out.
  void wait_for_clock();
  /// In a forked process: fails the engine, and touches neither threads nor connections.
  void see_fork();
  /// The first failure counts.
  void fail(int64_t bucket, int64_t step, const std::string& cause) noexcept;
  void finish_step_on_host();
  void finish_step_on_device();
  void see_counters(const int64_t* counters);
  /// Device: reads the copy that was made last if it is there, and makes a new one if there is something new.
  void see_arrived_counters();
  c10::Stream current_stream() const;
  /// Device, after a failure: fills these and what was under way with NaN, on the caller's current stream, after the engine's.
  void spoil(const std::vector<Bucket>& buckets);
  /// Device: around work on the caller's current stream that reads the results of the last step.
  c10::Stream begin_reading();
  void end_reading(c10::Stream reader);

  const pid_t pid_ = getpid();
  EngineOptions options_;
  Exchanges exchanges_;
  Pipeline pipeline_;
  std::optional<Parameters> parameters_;
  std::unique_ptr<Executor> executor_;

  // int64 [3] on the device: values packed as fp16 that were not zero, those of them that became zero, non-finite steps.
  at::Tensor counters_;
  // Device only.
  std::optional<c10::Stream> stream_;
  std::unique_ptr<Watchdog> watchdog_;
  at::Tensor failed_word_;  // int32 [1], host memory that the device reads
  at::Tensor step_nonfinite_;  // int32 [2] on the device: of the step under way and of the last finished one, in turn
  int step_slot_ = 0;  // which of them is the step under way; guarded by submit_mutex_ and mutex_
  std::unique_ptr<c10::Event> step_done_;  // of the last finished step
  at::Tensor arriving_counters_;  // pinned copy of counters_, valid once counters_copied_ has passed
  std::unique_ptr<c10::Event> counters_copied_;
  bool counters_are_newer_ = false;  // than the copy that was made last
  std::unique_ptr<c10::Event> results_read_;  // by work on another stream, which the next step must not overtake

  std::mutex submit_mutex_;  // one bucket at a time; guards parameters_ and what follows
  int64_t next_bucket_ = 0;  // the index that is due
  at::Tensor loss_scale_;  // undefined: not followed
  at::Tensor residual_unit_;
  std::mutex error_mutex_;  // apart from mutex_: a device that hangs may keep a call waiting that holds that one
  std::exception_ptr error_;
  std::vector<Bucket> to_spoil_;  // device: under way when the engine failed
  std::mutex mutex_;  // guards what follows
  EngineStats stats_;
  std::array<int64_t, 3> known_counters_{};  // as last seen on the host
  std::array<int64_t, 3> counters_at_reset_{};
  bool fp16_warned_ = false;
  std::vector<std::shared_ptr<BucketPlan>> step_plans_;  // of the step under way
  std::vector<std::shared_ptr<BucketPlan>> finished_plans_;  // of the last finished step
  int64_t call_step_ = 0;
  std::function<void()> call_;
  int64_t finished_step_ = -1;
  bool step_found_nonfinite_ = false;  // host
  at::Tensor sum_of_squares_;  // host
  at::Tensor found_nonfinite_;  // host

  std::atomic<int64_t> step_{0};
  std::atomic<uint64_t> seed_{0};
  std::atomic<bool> failed_{false};
  std::atomic<bool> closed_{false};
  std::atomic<bool> fp16_warning_due_{false};
};

}  // namespace gsync
