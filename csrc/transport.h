// Who moves bytes between the ranks: a group of c10d processes, or a NCCL communicator of our own.
//
// Collectives run on one of two lanes, each with its own communicator where the library allows: lane 0 carries all_reduce and
// all_to_all, lane 1 all_gather. So the order inside each communicator is the order of the slices, whatever the timing, while
// the all_gather of one slice overlaps the all_to_all of the next.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

namespace gsync {

/// One collective under way. Its tensors stay alive with it.
class Collective {
 public:
  virtual ~Collective() = default;
  /// Whether it has ended, well or not. Never blocks. Always true on a device, where the stream keeps the order.
  virtual bool done() const = 0;
  /// Throws what went wrong. Host: blocks until the end. Device: the current stream waits, the host does not.
  virtual void finish() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  /// "gloo", "nccl", ...: for messages.
  virtual std::string name() const = 0;
  /// 2 when all_gather has a communicator of its own.
  virtual int num_lanes() const = 0;
  /// False: collectives have to be issued by the thread that runs backward.
  virtual bool any_thread() const = 0;
  /// `wake` is called, from any thread, whenever a collective ends. Host transports with any_thread() only.
  virtual void set_wake(std::function<void()> wake) = 0;

  /// Sums `payload` (1-d, fp32, fp16 or bf16) over the ranks, in place.
  virtual std::shared_ptr<Collective> all_reduce(const at::Tensor& payload) = 0;
  /// Chunk r of `in` goes to rank r; chunk r of `out` comes from rank r. Both uint8 [world_size * chunk_bytes].
  virtual std::shared_ptr<Collective> all_to_all(const at::Tensor& out, const at::Tensor& in) = 0;
  /// `in` uint8 [chunk_bytes] of every rank, in rank order, into `out` [world_size * chunk_bytes].
  virtual std::shared_ptr<Collective> all_gather(const at::Tensor& out, const at::Tensor& in) = 0;
  /// Sums a sparse COO tensor over the ranks, in place.
  virtual std::shared_ptr<Collective> all_reduce_sparse(const at::Tensor& gradient) = 0;

  /// What the library reports about itself outside of any call; empty: nothing. Any thread.
  virtual std::string async_error() = 0;
  /// Ends the communicators so that the other ranks fail at once. Any thread, never blocks, may be called again.
  virtual void abort() noexcept = 0;
};

}  // namespace gsync
