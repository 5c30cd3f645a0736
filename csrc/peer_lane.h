// all_to_all and all_gather over Gloo's sends and receives, for one lane.
//
// Gloo's own all_to_all posts its sends first. A receive is announced to the sender over the connection that carries the data
// the other way, so the rank that comes second puts its announcement behind its own data, and the two directions of a link are
// used one after the other: twice the time. Here all receives are posted before the first send. Gloo's all_gather is a ring of
// W-1 rounds that suffers from the same; here every rank sends its chunk to each of the others.
//
//     worker                               waiter, one thread for each lane
//       exchange(): post all, queue ──▶      waits for the oldest exchange, one operation after the other
//       goes on                     ◀──      marks it done, wakes the worker
//
// Gloo's sends and receives have no future, hence the thread. It starts with the first exchange.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "transport.h"

namespace gsync {

class PeerLane {
 public:
  using Wake = std::shared_ptr<std::function<void()>>;

  /// Args:
  ///   tag: of all messages, different from that of other lanes over the same group
  ///   timeout: of every exchange
  ///   known_as: of each rank of the group, the number that errors give it
  PeerLane(int rank, int size, int tag, std::chrono::milliseconds timeout, std::vector<int> known_as);
  ~PeerLane() { abort(); }
  PeerLane(const PeerLane&) = delete;
  PeerLane& operator=(const PeerLane&) = delete;

  /// Sends `outgoing[r]` to rank r and receives `incoming[r]` from it; this rank's own is copied. Returns at once.
  /// Exchanges of a lane must be issued in the same order on every rank, by one thread.
  /// Args: all contiguous, on the CPU, outgoing[r] here as long as incoming[rank] there; wake: called when it has ended, may be null.
  std::shared_ptr<Collective> exchange(c10d::Backend& backend, std::vector<at::Tensor> incoming, std::vector<at::Tensor> outgoing,
                                       Wake wake);
  /// Fails what is under way and lets go of it. Any thread, never blocks, may be called again.
  void abort() noexcept;

 private:
  struct Waiter;

  int rank_;
  int size_;
  int tag_;
  std::chrono::milliseconds timeout_;
  std::vector<int> known_as_;
  std::shared_ptr<Waiter> waiter_;  // shared with its thread, which may outlive the lane for a moment
};

}  // namespace gsync
