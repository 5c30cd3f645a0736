// The engine as a communication hook of DistributedDataParallel.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "engine.h"

namespace gsync {

/// A bucket as DDP's reducer hands it over.
Bucket bucket_of(c10d::GradBucket& bucket);

}  // namespace gsync
