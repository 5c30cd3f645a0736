// The way of one slice: pack -> exchange -> unpack. Executors (executor.h) decide when each step is taken; this file knows
// neither threads nor streams.
//
//   start()    1. pack: the slice's gradients, times the scale, encoded into `payload`
//              2. exchange: the first collective is issued
//   advance()  2. exchange: that collective has finished; the next one is issued, or
//              3. unpack: the result is decoded into the gradients, with sums of squares and the non-finite flag
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "bucket_plan.h"
#include "clock.h"
#include "exchange.h"
#include "range.h"

namespace gsync {

/// A bucket on its way through the engine.
struct BucketJob {
  Bucket bucket;
  std::shared_ptr<BucketPlan> plan;  // null: a sparse gradient
  std::shared_ptr<BucketPlan> sums;  // whose parts take the sums of squares: plan, or for a sparse gradient one without slices
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::IValue result;  // what the future will hold
  std::optional<c10::Stream> producer;  // device: where the gradients were made
  std::vector<bool> is_used;  // of each parameter: whether this rank's backward pass reached it
  int64_t step = 0;
  uint64_t seed = 0;
  int64_t slices_left = 0;
  std::optional<at::ThreadLocalState> profiled;  // of the thread that handed it over, where a profiler listens there
  int32_t* found_nonfinite = nullptr;  // on the device; set to 1, never cleared
  int32_t host_nonfinite = 0;          // what found_nonfinite points to on the CPU

  SpanOf span() const { return {step, static_cast<int32_t>(bucket.index), 0}; }
};

/// What all slices of an engine share.
struct Pipeline {
  std::shared_ptr<Transport> transport;  // null: world size 1
  const Exchange* exchange = nullptr;  // of parameters that were told no other
  std::unique_ptr<PhaseClock> clock;
  c10::Device device{c10::DeviceType::CPU};
  float scale = 1.0f;
  int rank = 0;
  bool stochastic = false;         // rounding
  int64_t measure_every = 0;       // every how many steps what encoding loses is summed; 0: never
  int64_t* counters = nullptr;     // [2] on the device: non-zero values packed as fp16, and those of them that vanished
  const int32_t* failed = nullptr;  // word the device reads before it writes gradients; null on the CPU
};

class Flow {
 public:
  Flow(const Pipeline& pipeline, std::shared_ptr<BucketJob> job, int64_t number);
  virtual ~Flow() = default;

  /// Issues the first collective.
  virtual void start(c10::Stream stream) = 0;
  /// Takes the next step; true when the slice is done. Waits for the collective under way if it has not ended: see ready().
  virtual bool advance(c10::Stream stream) = 0;

  bool ready() const { return !collective_ || collective_->done(); }
  /// How many collectives have finished.
  int stage() const { return stage_; }
  std::chrono::steady_clock::time_point issued() const { return issued_; }
  const std::shared_ptr<BucketJob>& job() const { return job_; }

 protected:
  /// Around a phase: counted by the clock, seen by profilers.
  void begin(Phase phase);
  void end(Phase phase);

  const Pipeline& pipeline_;
  std::shared_ptr<BucketJob> job_;
  std::shared_ptr<Collective> collective_;
  std::chrono::steady_clock::time_point issued_;
  int stage_ = 0;

 private:
  SpanOf of_;
  std::optional<Range> range_;
};

/// The next slice of a job, or its sparse gradient.
/// Args: number in [0, num_flows(job)); buffers: of this slice alone until it is done.
std::unique_ptr<Flow> make_flow(const Pipeline& pipeline, std::shared_ptr<BucketJob> job, int64_t number, SliceBuffers& buffers);
int64_t num_flows(const BucketJob& job);

/// Fills a bucket's buffer and the `.grad` of its parameters with NaN.
void poison(const Bucket& bucket);

}  // namespace gsync
