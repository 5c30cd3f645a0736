// Random words for stochastic rounding: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
//
// A word depends on what is rounded and on nothing else: seed, step, stage, sender's rank, the parameter's name and the element's
// place in it. So it is the same in every backend, for every way to cut a bucket, and the user's generators are not touched.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace gsync {

enum class Stage : uint32_t { kPack = 0, kReduce = 1 };

/// Finaliser of splitmix64: each input bit reaches each output bit.
GSYNC_HOST_DEVICE uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// Key of one encoding: everything that is equal for all elements. `rank` is the sender's rank in the group, 0 in stage `reduce`.
GSYNC_HOST_DEVICE uint64_t philox_key(uint64_t seed, uint64_t step, Stage stage, uint32_t rank) {
  const uint64_t who = (static_cast<uint64_t>(stage) << 32) | rank;
  return mix64(mix64(mix64(seed + 0x9e3779b97f4a7c15ull) + step) + who);
}

struct PhiloxWords {
  uint32_t word[4];
};

/// The words of elements 4 * quad .. 4 * quad + 3 of the parameter with this name.
GSYNC_HOST_DEVICE PhiloxWords philox(uint64_t key, uint64_t name_hash, uint64_t quad) {
  uint32_t c0 = static_cast<uint32_t>(quad), c1 = static_cast<uint32_t>(quad >> 32);
  uint32_t c2 = static_cast<uint32_t>(name_hash), c3 = static_cast<uint32_t>(name_hash >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = 0xd2511f53ull * c0, p1 = 0xcd9e8d57ull * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace gsync
