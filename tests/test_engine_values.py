"""What the engine makes of gradients: the mean, the same on every rank, whatever the slices and the order."""

from __future__ import annotations

import pytest
import torch
from engine_setup import Listed, make_ddp, make_engine, rows
from ranks import run_on_ranks

from gsync import _native

pytestmark = pytest.mark.skipif(_native.C is None, reason=_native.MISSING or "native build")

NUMELS = (0, 1, 255, 256, 257, 4099, 3)
WIRE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def train_steps(rank: int, world_size: int, codec: str, exchange: str, steps: int, slice_bytes: int, options: dict):
    module = Listed(NUMELS)
    engine = make_engine(module, rank, world_size, codec, exchange, slice_bytes=slice_bytes)
    ddp = make_ddp(module, engine, **options)
    grads, sums = [], None
    for step in range(steps):
        module.zero_grad()
        ddp(rows(NUMELS, rank, step)).backward()
        grads.append([parameter.grad.clone() for parameter in module.parameters()])
        sums = engine.sum_of_squares()
        assert not engine.found_nonfinite()
    stats = engine.stats()
    engine.close()
    return grads, sums, stats


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_mean_of_all_ranks(world_size, exchange, codec):
    results = run_on_ranks(train_steps, world_size, args=(codec, exchange, 3, 25 << 20, {}))
    for step in range(3):
        for idx, _ in enumerate(NUMELS):
            scale = torch.tensor(1.0 / world_size)
            sent = [(rows(NUMELS, rank, step)[idx] * scale).to(WIRE[codec]) for rank in range(world_size)]
            total = sent[0].float()
            for values in sent[1:]:
                total = total + values.float()
            expected = total.to(WIRE[codec]).float()
            got = results[0][0][step][idx]
            if exchange == "scatter_gather" or world_size == 2:
                assert torch.equal(got, expected)
            else:  # each of the W-1 sums on the wire type rounds once, relative to at most the sum of magnitudes
                bound = sum(values.float().abs() for values in sent) * (world_size - 1) * torch.finfo(WIRE[codec]).eps + 1e-30
                assert (got - expected).abs().le(bound).all()
            for other in results[1:]:
                assert torch.equal(got, other[0][step][idx])
    last = results[0][0][-1]
    names = sorted(range(len(NUMELS)), key=lambda idx: f"parts.{idx}")
    expected_sums = torch.stack([last[idx].double().square().sum() for idx in names])
    torch.testing.assert_close(results[0][1], expected_sums, rtol=1e-12, atol=0)
    for other in results[1:]:
        assert torch.equal(results[0][1], other[1])
    stats = results[0][2]
    assert stats["steps"] == 3
    assert stats["gradient_bytes"] == 3 * 4 * sum(NUMELS)
