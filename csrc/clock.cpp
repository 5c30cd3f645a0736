#include "clock.h"

#include <utility>

namespace gsync {
namespace {

using Clock = std::chrono::steady_clock;

// Spans not read yet. Beyond it the device is far behind, and the oldest are let go.
constexpr size_t kMaxPending = 4096;

size_t idx(Phase phase) { return static_cast<size_t>(phase); }

}  // namespace

void HostClock::begin(Phase phase) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (open_[idx(phase)]++ == 0) since_[idx(phase)] = Clock::now();
}

void HostClock::end(Phase phase) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--open_[idx(phase)] > 0) return;
  open_[idx(phase)] = 0;
  totals_[idx(phase)] += std::chrono::duration<double, std::milli>(Clock::now() - since_[idx(phase)]).count();
}

PhaseClock::Totals HostClock::totals() {
  std::lock_guard<std::mutex> lock(mutex_);
  return totals_;
}

void HostClock::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  totals_ = {};
}

std::unique_ptr<c10::Event> StreamClock::new_event() {
  if (free_.empty()) return std::make_unique<c10::Event>(stream_.device_type(), c10::EventFlag::BACKEND_DEFAULT);  // with timing
  auto event = std::move(free_.back());
  free_.pop_back();
  return event;
}

void StreamClock::begin(Phase phase) { begin_on(phase, stream_); }

void StreamClock::begin_on(Phase phase, const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& start = open_[idx(phase)];
  if (!start) start = new_event();
  start->record(stream);
}

void StreamClock::end(Phase phase) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& start = open_[idx(phase)];
  if (!start) return;
  auto stop = new_event();
  stop->record(stream_);
  pending_.push_back({phase, std::move(start), std::move(stop)});
  if (pending_.size() > kMaxPending) pending_.pop_front();
  // A step's spans are read in later steps; the front has passed by then, so this is one query each.
  resolve();
}

void StreamClock::resolve() {
  while (!pending_.empty() && pending_.front().stop->query()) {
    Span span = std::move(pending_.front());
    pending_.pop_front();
    totals_[idx(span.phase)] += span.start->elapsedTime(*span.stop);
    free_.push_back(std::move(span.start));
    free_.push_back(std::move(span.stop));
  }
}

PhaseClock::Totals StreamClock::totals() {
  std::lock_guard<std::mutex> lock(mutex_);
  resolve();
  return totals_;
}

void StreamClock::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  resolve();
  pending_.clear();
  totals_ = {};
}

}  // namespace gsync
