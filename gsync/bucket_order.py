"""Which parameters `GradReducer` synchronises together, and in which order: the same rule for both engines.

A bucket has one dtype and at most about `bucket_mb` of gradients. The first one of each dtype is small, so that the exchange
starts early. Buckets are handed over in the order in which the last gradient of each becomes ready.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import nn

FIRST_BUCKET_BYTES = 2**20


class ReducerBucket(NamedTuple):
    """Parameters, by index, that are synchronised together; as `_C.GradReducer.set_buckets` takes it.

    Attributes:
        parameters: of one dtype and device.
        is_sparse: one parameter, whose gradients are sparse.
        is_late: handed over at the end of the backward pass only, since a parameter in it gets more than one gradient.
    """

    parameters: list[int]
    is_sparse: bool = False
    is_late: bool = False


def make_buckets(
    order: Sequence[int],
    params: Sequence[torch.Tensor],
    sparse: Collection[int],
    late: Collection[int],
    bucket_bytes: int,
) -> list[ReducerBucket]:
    """Returns the buckets in the order in which they are handed over.

    Args:
        order: indices of the parameters to synchronise, as their gradients become ready.
        params: all parameters.
        sparse: indices of those with sparse gradients; each is a bucket of its own.
        late: indices of those that get more than one gradient in a backward pass.
        bucket_bytes: bytes of gradients at which a bucket is full; one parameter may be larger.
    """
    last_idx: list[tuple[bool, int, ReducerBucket]] = []
    open_buckets: dict[tuple[torch.dtype, bool], tuple[list[int], int]] = {}
    started: set[torch.dtype] = set()
    for position, idx in enumerate(order):
        is_late = idx in late
        if idx in sparse:
            last_idx.append((is_late, position, ReducerBucket([idx], True, is_late)))
            continue
        key = (params[idx].dtype, is_late)
        members, num_bytes = open_buckets.pop(key, ([], 0))
        members.append(idx)
        num_bytes += params[idx].numel() * params[idx].element_size()
        limit = bucket_bytes if params[idx].dtype in started else min(FIRST_BUCKET_BYTES, bucket_bytes)
        if num_bytes >= limit:
            started.add(params[idx].dtype)
            last_idx.append((is_late, position, ReducerBucket(members, False, is_late)))
        else:
            open_buckets[key] = (members, num_bytes)
    positions = {idx: position for position, idx in enumerate(order)}
    for (_, is_late), (members, _) in open_buckets.items():
        last_idx.append((is_late, positions[members[-1]], ReducerBucket(members, False, is_late)))
    return [bucket for _, _, bucket in sorted(last_idx, key=lambda entry: entry[:2])]


def sparse_parameters(module: nn.Module, params: Sequence[torch.Tensor]) -> set[int]:
    """Returns the indices of parameters with sparse gradients: weights of embeddings that say so, and of nothing else."""
    is_sparse: dict[int, bool] = {}
    for child in module.modules():
        for param in child.parameters(recurse=False):
            says_so = isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
            is_sparse[id(param)] = is_sparse.get(id(param), True) and says_so
    return {idx for idx, param in enumerate(params) if is_sparse.get(id(param), False)}
