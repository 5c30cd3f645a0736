#include "range.h"

#include <string_view>

#ifdef GSYNC_WITH_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace gsync {

Range::Range(const char* name, bool overlaps) : record_(at::RecordScope::USER_SCOPE) {
  if (record_.isActive()) {
    if (overlaps) record_._setAsync();
    record_.before(std::string_view(name));
  }
#ifdef GSYNC_WITH_NVTX
  nvtx_ = nvtxRangeStartA(name);
#endif
}

Range::~Range() {
#ifdef GSYNC_WITH_NVTX
  nvtxRangeEnd(nvtx_);
#endif
}

}  // namespace gsync
