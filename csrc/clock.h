// How long packing, exchanging and unpacking take, without ever waiting for a device.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <array>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace gsync {

/// kExchange: from a slice's first collective to its result, counted once where slices overlap.
/// kExposed: from the hand-over of a step's last bucket to its end, when backward has nothing left to hide it behind.
enum class Phase { kPack = 0, kExchange = 1, kUnpack = 2, kExposed = 3 };
inline constexpr size_t kNumPhases = 4;

class PhaseClock {
 public:
  using Totals = std::array<double, kNumPhases>;  // ms

  virtual ~PhaseClock() = default;
  virtual void begin(Phase phase) = 0;
  virtual void end(Phase phase) = 0;
  /// Totals of what has ended since the last reset.
  virtual Totals totals() = 0;
  virtual void reset() = 0;
};

/// Wall-clock time of the host.
class HostClock final : public PhaseClock {
 public:
  void begin(Phase phase) override;
  void end(Phase phase) override;
  Totals totals() override;
  void reset() override;

 private:
  std::mutex mutex_;
  Totals totals_{};
  std::array<int, kNumPhases> open_{};
  std::array<std::chrono::steady_clock::time_point, kNumPhases> since_{};
};

/// Time on a device's stream, from pairs of events that are read once they have passed.
class StreamClock final : public PhaseClock {
 public:
  explicit StreamClock(c10::Stream stream) : stream_(stream) {}

  void begin(Phase phase) override;
  void end(Phase phase) override;
  Totals totals() override;
  void reset() override;
  /// As begin(), at the current point of another stream of the same device.
  void begin_on(Phase phase, const c10::Stream& stream);

 private:
  struct Span {
    Phase phase;
    std::unique_ptr<c10::Event> start;
    std::unique_ptr<c10::Event> stop;
  };
  std::unique_ptr<c10::Event> new_event();
  void resolve();

  std::mutex mutex_;
  c10::Stream stream_;
  Totals totals_{};
  std::array<std::unique_ptr<c10::Event>, kNumPhases> open_;
  std::deque<Span> pending_;
  std::vector<std::unique_ptr<c10::Event>> free_;
};

}  // namespace gsync
