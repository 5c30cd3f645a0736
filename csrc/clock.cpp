#include "clock.h"

#include <algorithm>
#include <utility>

namespace gsync {
namespace {

using Clock = std::chrono::steady_clock;

// Spans not read yet. Beyond it the device is far behind, and the oldest are let go.
constexpr size_t kMaxPending = 4096;
// Begun and not ended at a time: two slices, each in one phase. More would be a fault, and is left out of the trace.
constexpr size_t kMaxOpenSpans = 16;

size_t idx(Phase phase) { return static_cast<size_t>(phase); }

double ms_since(Clock::time_point start, Clock::time_point now) {
  return std::chrono::duration<double, std::milli>(now - start).count();
}

int64_t ns_of(Clock::time_point when) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(when.time_since_epoch()).count();
}

bool same(const SpanOf& a, const SpanOf& b) { return a.step == b.step && a.bucket == b.bucket && a.slice == b.slice; }

}  // namespace

// ---- what both have ----

PhaseTimes& PhaseClock::times_of(int32_t bucket) {
  const auto number = static_cast<size_t>(bucket);
  if (report_.buckets.size() <= number) report_.buckets.resize(number + 1);
  return report_.buckets[number];
}

void PhaseClock::count_hand_over() {
  report_.queued += under_way_;
  report_.max_queued = std::max(report_.max_queued, under_way_);
  ++under_way_;
}

void PhaseClock::add_span(Phase phase, const SpanOf& of, int64_t begin_ns, int64_t end_ns) {
  if (trace_.spans.size() == trace_.spans.capacity()) {
    ++trace_.dropped;
  } else {
    trace_.spans.push_back({phase, of, begin_ns, end_ns});
  }
}

ClockReport PhaseClock::report() {
  std::lock_guard<std::mutex> lock(mutex_);
  return report_;
}

void PhaseClock::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t num_buckets = report_.buckets.size();
  report_ = {};
  report_.buckets.resize(num_buckets);
}

void PhaseClock::start_trace(size_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  trace_ = {};
  trace_.spans.reserve(capacity);
  tracing_ = true;
}

Trace PhaseClock::take_trace() {
  std::lock_guard<std::mutex> lock(mutex_);
  tracing_ = false;
  return std::exchange(trace_, {});
}

void PhaseClock::time_steps() {
  std::lock_guard<std::mutex> lock(mutex_);
  step_times_ = {};
  timing_steps_ = true;
}

StepTimes PhaseClock::take_step_times() {
  std::lock_guard<std::mutex> lock(mutex_);
  timing_steps_ = false;
  return std::exchange(step_times_, {});
}

// ---- host ----

HostClock::OpenBucket& HostClock::open_of(int32_t bucket) {
  const auto number = static_cast<size_t>(bucket);
  if (open_buckets_.size() <= number) open_buckets_.resize(number + 1);
  return open_buckets_[number];
}

void HostClock::ready(const SpanOf& of, bool /*is_last*/, const c10::Stream& /*producer*/) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto now = Clock::now();
  if (under_way_ == 0 && of.bucket > 0) report_.waiting_ms += ms_since(last_done_, now);
  count_hand_over();
  open_of(of.bucket).ready = now;
  if (of.bucket == 0) step_began_ = timing_steps_ ? std::optional(now) : std::nullopt;
  if (!step_began_) return;
  auto& ready_ms = step_times_.ready_ms;
  ready_ms.resize(std::max(ready_ms.size(), static_cast<size_t>(of.bucket) + 1));
  ready_ms[of.bucket] += ms_since(*step_began_, now);
}

void HostClock::begin(Phase phase, const SpanOf& of) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto now = Clock::now();
  for (Open* open : {&open_[idx(phase)], &open_of(of.bucket).phases[idx(phase)]}) {
    if (open->count++ == 0) open->since = now;
  }
  if (tracing_ && open_spans_.size() < kMaxOpenSpans) open_spans_.push_back({phase, of, ns_of(now), 0});
}

void HostClock::end(Phase phase, const SpanOf& of) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto now = Clock::now();
  const auto close = [now, phase](Open& open, PhaseTimes& times) {
    if (--open.count > 0) return;
    open.count = 0;
    times[idx(phase)] += ms_since(open.since, now);
  };
  close(open_[idx(phase)], report_.ms);
  close(open_of(of.bucket).phases[idx(phase)], times_of(of.bucket));
  if (!tracing_) return;
  const auto begun = std::find_if(open_spans_.begin(), open_spans_.end(),
                                  [&](const TraceSpan& span) { return span.phase == phase && same(span.of, of); });
  if (begun == open_spans_.end()) return;  // began before the trace
  add_span(phase, of, begun->begin_ns, ns_of(now));
  open_spans_.erase(begun);
}

void HostClock::done(const SpanOf& of, bool is_last) {
  std::lock_guard<std::mutex> lock(mutex_);
  last_done_ = Clock::now();
  --under_way_;
  const auto ready = open_of(of.bucket).ready;
  const double ms = ms_since(ready, last_done_);
  times_of(of.bucket)[idx(Phase::kBucket)] += ms;
  report_.ms[idx(Phase::kBucket)] += ms;
  if (is_last) report_.ms[idx(Phase::kExposed)] += ms;
  if (is_last && step_began_ && timing_steps_) step_times_.ms.push_back(ms_since(*step_began_, last_done_));
  if (!tracing_) return;
  add_span(Phase::kBucket, of, ns_of(ready), ns_of(last_done_));
  if (is_last) add_span(Phase::kExposed, of, ns_of(ready), ns_of(last_done_));
}

Trace HostClock::take_trace() {
  Trace trace = PhaseClock::take_trace();
  std::lock_guard<std::mutex> lock(mutex_);
  open_spans_.clear();
  return trace;
}

double cost_of_clock(int64_t num_buckets) {
  HostClock clock;
  const c10::Stream none(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU));
  const auto begin = Clock::now();
  for (int64_t i = 0; i < num_buckets; ++i) {
    const SpanOf of{i, 0, 0};
    clock.ready(of, /*is_last=*/true, none);
    for (const Phase phase : {Phase::kPack, Phase::kExchange, Phase::kUnpack}) {
      clock.begin(phase, of);
      clock.end(phase, of);
    }
    clock.done(of, /*is_last=*/true);
  }
  return 1e-3 * ms_since(begin, Clock::now());
}

// ---- device ----

std::unique_ptr<c10::Event> StreamClock::new_event() {
  if (free_.empty()) return std::make_unique<c10::Event>(stream_.device_type(), c10::EventFlag::BACKEND_DEFAULT);  // with timing
  auto event = std::move(free_.back());
  free_.pop_back();
  return event;
}

void StreamClock::ready(const SpanOf& of, bool is_last, const c10::Stream& producer) {
  std::lock_guard<std::mutex> lock(mutex_);
  resolve();  // which buckets have ended
  count_hand_over();
  if (is_last || tracing_) begin_on(Phase::kBucket, producer);
  if (of.bucket == 0 && timing_steps_) begin_on(Phase::kStep, producer);
}

void StreamClock::begin(Phase phase, const SpanOf& /*of*/) {
  std::lock_guard<std::mutex> lock(mutex_);
  begin_on(phase, stream_);
}

void StreamClock::begin_on(Phase phase, const c10::Stream& stream) {
  auto& start = open_[idx(phase)];
  if (!start) start = new_event();
  start->record(stream);
}

void StreamClock::end(Phase phase, const SpanOf& of) {
  std::lock_guard<std::mutex> lock(mutex_);
  end_span(phase, of);
}

void StreamClock::end_span(Phase phase, const SpanOf& of) {
  auto& start = open_[idx(phase == Phase::kExposed ? Phase::kBucket : phase)];
  if (!start) return;
  auto stop = new_event();
  stop->record(stream_);
  pending_.push_back({phase, of, 0, std::move(start), std::move(stop)});
  if (pending_.size() > kMaxPending) {
    under_way_ -= pending_.front().ends;
    pending_.pop_front();
  }
  // A step's spans are read in later steps; the front has passed by then, so this is one query each.
  resolve();
}

void StreamClock::done(const SpanOf& of, bool is_last) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (pending_.empty()) {
    --under_way_;
  } else {
    ++pending_.back().ends;
  }
  end_span(is_last ? Phase::kExposed : Phase::kBucket, of);
  if (is_last) end_span(Phase::kStep, of);
}

void StreamClock::resolve() {
  while (!pending_.empty() && pending_.front().stop->query()) {
    Span span = std::move(pending_.front());
    pending_.pop_front();
    count(span);
    free_.push_back(std::move(span.start));
    if (span.stop) free_.push_back(std::move(span.stop));
  }
}

void StreamClock::count(Span& span) {
  const double ms = span.start->elapsedTime(*span.stop);
  if (span.phase == Phase::kStep) {
    if (timing_steps_) step_times_.ms.push_back(ms);
    return;
  }
  const bool is_stage = span.phase != Phase::kBucket && span.phase != Phase::kExposed;
  if (span.phase != Phase::kBucket) report_.ms[idx(span.phase)] += ms;
  if (is_stage) times_of(span.of.bucket)[idx(span.phase)] += ms;
  under_way_ -= span.ends;
  if (tracing_ && reference_) {
    const auto at = [this](c10::Event& event) {
      return reference_ns_ + static_cast<int64_t>(1e6 * reference_->elapsedTime(event));
    };
    const int64_t begin_ns = at(*span.start);
    const int64_t end_ns = at(*span.stop);
    add_span(span.phase, span.of, begin_ns, end_ns);
    if (span.phase == Phase::kExposed) add_span(Phase::kBucket, span.of, begin_ns, end_ns);
  }
  if (!is_stage) return;
  if (last_stop_ && span.of.step == last_of_.step && span.of.bucket != last_of_.bucket) {
    report_.waiting_ms += std::max(0.0, last_stop_->elapsedTime(*span.start));
  }
  last_of_ = span.of;
  std::swap(last_stop_, span.stop);
}

ClockReport StreamClock::report() {
  std::lock_guard<std::mutex> lock(mutex_);
  resolve();
  return report_;
}

void StreamClock::reset() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    resolve();
    pending_.clear();
    last_stop_.reset();
    under_way_ = 0;
  }
  PhaseClock::reset();
}

void StreamClock::start_trace(size_t capacity) {
  PhaseClock::start_trace(capacity);
  auto reference = std::make_unique<c10::Event>(stream_.device_type(), c10::EventFlag::BACKEND_DEFAULT);
  reference->record(stream_);
  // Without the lock: a bucket that is handed over needs it before the watchdog sees it, and if the stream hangs, nobody else ends
  // this wait.
  reference->synchronize();
  const int64_t now_ns = ns_of(Clock::now());
  std::lock_guard<std::mutex> lock(mutex_);
  reference_ns_ = now_ns;
  resolve();  // what came before it is no part of the trace
  reference_ = std::move(reference);
}

Trace StreamClock::take_trace() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    resolve();
    if (reference_) free_.push_back(std::move(reference_));
  }
  return PhaseClock::take_trace();
}

bool StreamClock::drained() {
  std::lock_guard<std::mutex> lock(mutex_);
  resolve();
  return pending_.empty();
}

}  // namespace gsync
