"""Training under DDP on the emulated device: real processes, streams, the native hook, a NCCL communicator of its own."""

from __future__ import annotations

from typing import Any

import emulated
import pytest
import torch
import torch.distributed as dist
from emulated import run_emulated
from emulated_engines import add_backend_for_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gsync import _native

pytestmark = pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not() or "emulation")

STEPS = 6


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 40), nn.ReLU(), nn.Linear(40, 2))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(16, 20, generator=generator)
    return inputs, torch.stack([inputs[:, :10].sum(1), inputs[:, 10:].square().sum(1)], 1) / 10


def train(rank: int, world_size: int, exchange: str) -> dict[str, Any]:
    emulation = emulated.load()
    device = torch.device(emulated.DEVICE, rank)
    native = _native.C
    assert native is not None
    add_backend_for_device(rank, world_size)
    emulation.set_delay(-1, 0, 300, rank)

    store = dist.PrefixStore("gsync", dist.distributed_c10d._get_default_store())
    transport = native.NcclTransport(store, rank, world_size, str(device), 20.0, library=str(emulated.FILE))
    engine = native.Engine(
        transport,
        device=str(device),
        world_size=world_size,
        rank=rank,
        exchange=exchange,
        scale=1.0 / world_size,
        slice_bytes=4_000,
        timeout_s=20.0,
    )
    module = make_model().to(device)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.01)
    names, parameters = zip(*module.named_parameters(), strict=True)
    engine.set_parameters(list(parameters), list(names), ["bf16"] * len(names))
    native.register_ddp_hook(ddp.reducer, lambda: engine)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = (tensor.to(device) for tensor in batch(rank, step))
        loss = (ddp(inputs) - targets).square().mean()
        loss.backward()
        norms.append(float(engine.sum_of_squares().sum().sqrt()))
        assert not engine.found_nonfinite()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    weights = [parameter.detach().cpu() for parameter in module.parameters()]
    stats = engine.stats()
    dist.barrier()
    engine.close()
    emulation.set_delay(-1, 0, 0, 0)
    return {"losses": losses, "norms": norms, "weights": weights, "buckets": stats["buckets"], "error": emulation.take_error()}


def train_on_cpu(world_size: int) -> list[torch.Tensor]:
    """The same training in one process, with the mean taken in fp32."""
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(STEPS):
        for rank in range(world_size):
            inputs, targets = batch(rank, step)
            ((module(inputs) - targets).square().mean() / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
def test_training_goes_as_on_the_cpu(exchange):
    results = run_emulated(train, 2, args=(exchange,), timeout_s=100, backend="gloo")
    for result in results:
        assert result["error"] == ""
        assert result["buckets"] > STEPS  # several a step, once DDP has made its buckets anew
        assert result["losses"][-1] < result["losses"][0]
        assert result["norms"] == results[0]["norms"]
        assert all(torch.equal(a, b) for a, b in zip(result["weights"], results[0]["weights"], strict=True))
    for got, expected in zip(results[0]["weights"], train_on_cpu(2), strict=True):
        # Of a few steps: each gradient is rounded to 8 bits twice, so that a step is off by a hundredth of itself at most.
        assert (got - expected).abs().max() < 0.01 * expected.abs().max()
