// The order of collectives that turns the payloads of all ranks into one result that all ranks hold.
//
//   all_reduce      the library sums the payload, an array of fp32, fp16 or bf16, on the wire type
//   scatter_gather  1. all_to_all: chunk r of every rank's payload goes to rank r
//                   2. reduce: rank r sums its chunk in fp32, in rank order, and encodes the sum once
//                   3. all_gather: every rank receives every reduced chunk
//   hierarchical    H hosts of G ranks; a shard is what one local rank reduces
//                   1. all_to_all inside the host, of fp32: shard g goes to local rank g
//                   2. reduce_shard: the host's sum of a shard, encoded for the first time
//                   3. all_to_all between the ranks of equal local rank, of the shard's chunks
//                   4. reduce: as above
//                   5. all_gather between these ranks: the shard
//                   6. all_gather inside the host, of the encoded bytes: all shards
//   local           one rank: nothing moves
//
// Cost in bytes that one rank sends, for a payload of P bytes, Q of them as fp32, and W ranks: 2 P (W-1)/W under the first two;
// hierarchical 2 P (H-1)/W out of the host and (P + Q) (G-1)/G inside. Buffers: all_reduce P, scatter_gather (2 + 1/W) P,
// hierarchical 2 Q + P (1/G + 1/W), for each slice under way; they grow to the largest slice and stay.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "ops_binding.h"
#include "transport.h"

namespace gsync {

/// What one slice under way needs; uint8, kept from slice to slice.
struct SliceBuffers {
  at::Tensor payload;   // as packed, and in the end the result
  at::Tensor received;  // my chunk, or shard, as each rank sent it
  at::Tensor reduced;   // my chunk, summed
  at::Tensor shard;     // hierarchical: my shard, encoded

  int64_t bytes() const;
};

/// A slice as it travels, and, where it is packed as fp32 first, as it is packed.
struct SliceLayout {
  std::unique_ptr<DeviceLayout> wire;
  std::unique_ptr<DeviceLayout> uncompressed;  // or null

  const DeviceLayout& packed() const { return uncompressed ? *uncompressed : *wire; }
};

/// How a slice is encoded: first the gradients, or a host's sum of them, then the sum over all ranks.
struct Encodings {
  EncodeOptions first;
  EncodeOptions reduce;
};

class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual std::string name() const = 0;
  /// Into how many chunks a payload is cut.
  virtual int64_t num_chunks() const = 0;
  /// Into how many shards, each encoded first by the rank that sums it in a host; 1: gradients are encoded by `pack`.
  virtual int64_t num_shards() const { return 1; }
  /// What this rank reduces.
  virtual int64_t my_chunk() const { return 0; }
  virtual int64_t my_shard() const { return 0; }
  /// Whether payloads are packed as fp32.
  bool packs_uncompressed() const { return num_shards() > 1; }
  /// False: payloads stay on this rank, so nothing is gained by a codec.
  virtual bool encodes() const { return true; }
  /// Whether all segments of a payload must have one codec.
  virtual bool one_codec() const = 0;
  /// Bytes that this rank sends for one slice.
  virtual int64_t wire_bytes(const SliceLayout& layout) const = 0;
  /// Makes the buffers large enough for a slice.
  virtual void reserve(const SliceLayout& layout, SliceBuffers& buffers) const = 0;
  /// Issues collective number `stage` (0, 1, ...) of a slice, once the one before has finished. Null: `payload` holds the
  /// result.
  virtual std::shared_ptr<Collective> issue(int stage, const SliceLayout& layout, SliceBuffers& buffers, c10::Stream stream,
                                            const Encodings& encodings) const = 0;
};

/// Args: name "all_reduce", "scatter_gather" or "hierarchical", which needs a HierarchicalTransport with more than one rank a host;
/// transport null: world size 1, whatever the name.
/// Throws c10::ValueError for another name or transport.
std::unique_ptr<Exchange> make_exchange(const std::string& name, std::shared_ptr<Transport> transport, int rank, int world_size);

/// Those over one transport, by name; each is made when it is first asked for, and stays.
class Exchanges {
 public:
  Exchanges(std::shared_ptr<Transport> transport, int rank, int world_size);
  /// Throws as make_exchange() does.
  const Exchange& get(const std::string& name);

 private:
  std::shared_ptr<Transport> transport_;
  int rank_;
  int world_size_;
  std::map<std::string, std::unique_ptr<Exchange>> made_;
};

}  // namespace gsync
