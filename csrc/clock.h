// How long packing, exchanging and unpacking take, for each bucket, without ever waiting for a device; and while a trace is taken,
// when.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace gsync {

/// kExchange: from a slice's first collective to its result, counted once where slices overlap.
/// kExposed: from the hand-over of a step's last bucket to its end, when backward has nothing left to hide it behind.
/// kBucket: from the hand-over of any bucket, when its gradients are ready, to its end; on a device in traces only.
/// kStep: from the hand-over of a step's first bucket to the end of its last; while steps are timed only, and in no trace.
enum class Phase { kPack = 0, kExchange = 1, kUnpack = 2, kExposed = 3, kBucket = 4, kStep = 5 };
inline constexpr size_t kNumPhases = 6;

/// What a span is a part of. `slice` counts through the whole bucket.
struct SpanOf {
  int64_t step = 0;
  int32_t bucket = 0;
  int32_t slice = 0;
};

/// Of a trace; times in ns of the host's steady clock.
struct TraceSpan {
  Phase phase;
  SpanOf of;
  int64_t begin_ns;
  int64_t end_ns;
};

struct Trace {
  std::vector<TraceSpan> spans;  // in the order in which they ended
  int64_t dropped = 0;  // those that found no room
};

using PhaseTimes = std::array<double, kNumPhases>;  // ms

/// Totals of what has ended since the last reset.
struct ClockReport {
  PhaseTimes ms{};
  std::vector<PhaseTimes> buckets;  // by index
  double waiting_ms = 0.0;  // between a step's first bucket and its last, with no bucket under way
  int64_t queued = 0;  // sum over the buckets handed over: how many were under way then
  int64_t max_queued = 0;
};

/// Of the steps that began and ended since they are timed.
struct StepTimes {
  std::vector<double> ms;  // kStep of each
  std::vector<double>
      ready_ms;  // by bucket: from the hand-over of the first to its own, summed over the steps; empty on a device
};

/// Safe to call from several threads. Allocates nothing once every bucket has been seen, but for a trace.
class PhaseClock {
 public:
  virtual ~PhaseClock() = default;
  /// A bucket is handed over.
  /// Args: producer: device: the stream at whose current point its gradients are ready
  virtual void ready(const SpanOf& of, bool is_last, const c10::Stream& producer) = 0;
  virtual void begin(Phase phase, const SpanOf& of) = 0;
  virtual void end(Phase phase, const SpanOf& of) = 0;
  /// A bucket has ended (device: all of it is enqueued).
  virtual void done(const SpanOf& of, bool is_last) = 0;

  virtual ClockReport report();
  virtual void reset();
  /// Keeps the spans that begin from now on, up to `capacity`. On a device it waits for what is enqueued.
  virtual void start_trace(size_t capacity);
  /// Ends the trace. On a device only spans that have passed are in it: see drained().
  virtual Trace take_trace();
  /// Whether every span that has been ended is in the totals.
  virtual bool drained() { return true; }
  /// Times steps from now on: StepTimes of zero. On a device it costs two events a step.
  void time_steps();
  /// Ends that; returns what was timed. On a device only steps that have passed are in it: see drained().
  StepTimes take_step_times();

 protected:
  PhaseTimes& times_of(int32_t bucket);
  void count_hand_over();
  void add_span(Phase phase, const SpanOf& of, int64_t begin_ns, int64_t end_ns);

  std::mutex mutex_;  // guards everything here and in the subclasses
  ClockReport report_;
  bool tracing_ = false;
  bool timing_steps_ = false;
  StepTimes step_times_;
  int64_t under_way_ = 0;  // buckets

 private:
  Trace trace_;
};

/// Wall-clock time of the host.
class HostClock final : public PhaseClock {
 public:
  void ready(const SpanOf& of, bool is_last, const c10::Stream& producer) override;
  void begin(Phase phase, const SpanOf& of) override;
  void end(Phase phase, const SpanOf& of) override;
  void done(const SpanOf& of, bool is_last) override;
  Trace take_trace() override;

 private:
  using TimePoint = std::chrono::steady_clock::time_point;
  // Spans of one kind that overlap count once.
  struct Open {
    int count = 0;
    TimePoint since;
  };
  struct OpenBucket {
    std::array<Open, kNumPhases> phases;
    TimePoint ready;
  };
  OpenBucket& open_of(int32_t bucket);

  std::array<Open, kNumPhases> open_{};
  std::vector<OpenBucket> open_buckets_;
  std::optional<TimePoint> step_began_;  // of a step that is timed
  TimePoint last_done_;
  std::vector<TraceSpan> open_spans_;  // of the trace: begun, not ended
};

/// What counting `num_buckets` buckets of one slice costs on the host, in s: for the benchmark.
double cost_of_clock(int64_t num_buckets);

/// Time on a device's stream, from pairs of events that are read once they have passed.
class StreamClock final : public PhaseClock {
 public:
  explicit StreamClock(c10::Stream stream) : stream_(stream) {}

  void ready(const SpanOf& of, bool is_last, const c10::Stream& producer) override;
  void begin(Phase phase, const SpanOf& of) override;
  void end(Phase phase, const SpanOf& of) override;
  void done(const SpanOf& of, bool is_last) override;
  ClockReport report() override;
  void reset() override;
  void start_trace(size_t capacity) override;
  Trace take_trace() override;
  bool drained() override;

 private:
  struct Span {
    Phase phase;
    SpanOf of;
    int64_t ends;  // buckets
    std::unique_ptr<c10::Event> start;
    std::unique_ptr<c10::Event> stop;
  };
  std::unique_ptr<c10::Event> new_event();
  void begin_on(Phase phase, const c10::Stream& stream);
  void end_span(Phase phase, const SpanOf& of);
  void resolve();
  void count(Span& span);

  c10::Stream stream_;
  std::array<std::unique_ptr<c10::Event>, kNumPhases> open_;
  std::deque<Span> pending_;
  std::vector<std::unique_ptr<c10::Event>> free_;
  // The end of what was counted last on the engine's stream: how long it then waited for gradients.
  std::unique_ptr<c10::Event> last_stop_;
  SpanOf last_of_;
  // The device's time is told from this event and the host's time when it passed.
  std::unique_ptr<c10::Event> reference_;
  int64_t reference_ns_ = 0;
};

}  // namespace gsync
