#!/usr/bin/env bash
# On a login node, which needs no GPU: builds a wheel of gsync for the GPUs of the compute nodes.
#
#     examples/slurm/build.sh /shared/wheels
#
# The environment that is active must have torch's CUDA build, setuptools, wheel and ninja, and nvcc must be there: a system's, or
# pip's packages (pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl nvidia-nvvm at torch's CUDA version). A compute
# node without a network then installs it from the folder:
#
#     pip install --no-index --find-links /shared/wheels torch-gsync
#
# For an environment of its own there, fetch what it needs while there is a network:
#
#     pip download --dest /shared/wheels torch==2.14.1
set -euo pipefail

wheels=${1:?build.sh: give the folder for the wheel}
source_tree=$(cd "$(dirname "$0")/../.." && pwd)

export GSYNC_BUILD=${GSYNC_BUILD:-cuda}                         # an error here, not a build without kernels, where nvcc is missing
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-"8.0;9.0"} # no GPU here to ask: A100 and H100
export MAX_JOBS=${MAX_JOBS:-4}                                  # login nodes are shared

mkdir -p "$wheels"
"${PYTHON:-python}" -m pip wheel --no-build-isolation --no-deps --wheel-dir "$wheels" "$source_tree"
