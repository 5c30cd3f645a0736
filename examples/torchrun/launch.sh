#!/usr/bin/env bash
# Trains on several nodes by torchrun: the same line on every node, in any order.
#
#     examples/torchrun/launch.sh node0 --folder /shared/run           on node0 and on node1
#
# node0 is where nodes meet. NODES, PROCESSES (on each node), PORT and JOB may be set. When a rank dies all are started again,
# three times, and go on from the last checkpoint.
set -euo pipefail

meeting=${1:?launch.sh: give the host where nodes meet}
shift
here=$(cd "$(dirname "$0")" && pwd)

# Every start gets a store of its own: torch's group may take addresses of a rank that is gone from torchrun's, which outlives it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton-$(id -u)} # on each node's own disk

exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "${NODES:-2}" \
  --nproc-per-node "${PROCESSES:-8}" \
  --rdzv-id "${JOB:-gsync}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$meeting:${PORT:-29400}" \
  ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
  --max-restarts 3 \
  "$here/../cluster.py" "$@"
