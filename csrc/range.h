// A stretch of work as profilers see it: torch.profiler by its name, and on CUDA Nsight as an NVTX range. Costs two reads where
// nobody listens.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>

#if defined(GSYNC_WITH_CUDA) && __has_include(<nvtx3/nvToolsExt.h>)
#define GSYNC_WITH_NVTX
#endif

namespace gsync {

class Range {
 public:
  /// Begins it; the destructor ends it, in the same thread.
  /// Args: overlaps: it may end after a range that began later
  explicit Range(const char* name, bool overlaps = false);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  at::RecordFunction record_;
#ifdef GSYNC_WITH_NVTX
  uint64_t nvtx_;
#endif
};

}  // namespace gsync
