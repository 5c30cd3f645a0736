// The order of collectives that turns the payloads of all ranks into one result that all ranks hold.
//
//   all_reduce      the library sums the payload, an array of fp32, fp16 or bf16, on the wire type
//   scatter_gather  1. all_to_all: chunk r of every rank's payload goes to rank r
//                   2. reduce: rank r sums its chunk in fp32, in rank order, and encodes the sum once
//                   3. all_gather: every rank receives every reduced chunk
//   local           one rank: nothing moves
//
// Cost in bytes that one rank sends, for a payload of P bytes and W ranks: 2 P (W-1)/W under both. Buffers: all_reduce P,
// scatter_gather (2 + 1/W) P, for each slice under way; they grow to the largest slice and stay.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <string>

#include "ops_binding.h"
#include "transport.h"

namespace gsync {

/// What one slice under way needs; uint8, kept from slice to slice.
struct SliceBuffers {
  at::Tensor payload;   // as packed, and in the end the result
  at::Tensor received;  // scatter_gather: my chunk as each rank sent it
  at::Tensor reduced;   // scatter_gather: my chunk, summed

  int64_t bytes() const;
};

class Exchange {
 public:
  virtual ~Exchange() = default;
  /// Into how many chunks a payload is cut.
  virtual int64_t num_chunks() const = 0;
  /// False: payloads stay on this rank, so nothing is gained by a codec.
  virtual bool encodes() const { return true; }
  /// Whether all segments of a payload must have one codec.
  virtual bool one_codec() const = 0;
  /// Bytes that this rank sends for one slice.
  virtual int64_t wire_bytes(const Layout& layout) const = 0;
  /// Makes the buffers large enough for a slice.
  virtual void reserve(const DeviceLayout& layout, SliceBuffers& buffers) const = 0;
  /// Issues collective number `stage` (0, 1, ...) of a slice, once the one before has finished. Null: `payload` holds the
  /// result.
  /// Args: reduce_encode: how `reduce` encodes sums, where there is a reduce
  virtual std::shared_ptr<Collective> issue(int stage, const DeviceLayout& layout, SliceBuffers& buffers, c10::Stream stream,
                                            const EncodeOptions& reduce_encode) const = 0;
};

/// Args: name "all_reduce" or "scatter_gather"; transport null: world size 1, whatever the name.
/// Throws c10::ValueError for another name.
std::unique_ptr<Exchange> make_exchange(const std::string& name, std::shared_ptr<Transport> transport, int rank, int world_size);

}  // namespace gsync
