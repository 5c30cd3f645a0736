"""`GradReducer` on the emulated device, in real processes: the gradients of the CPU, over a process group and over NCCL."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import emulated
import pytest
import torch
import torch.distributed as dist
from ddp_cases import Branches, batch, mlp
from emulated import run_emulated
from emulated_engines import add_backend_for_device
from torch import nn

import gsync
from gsync import _native, engine, model

pytestmark = pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not() or "emulation")

transports = pytest.mark.parametrize("transport", ["process_group", "nccl"])


class Shapes(nn.Module):
    """Parameters in several memory orders: transposed, a scalar, an empty one, one whose gradient comes transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(31, 7)
        self.transposed = nn.Parameter(torch.randn(7, 19).t())
        self.plain = nn.Parameter(torch.randn(19, 5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) @ self.transposed.t() * self.scale
        return (y @ self.plain.t().contiguous().t()).square().sum() + self.nothing.sum()


@contextmanager
def on_device(rank: int, world_size: int, transport: str) -> Iterator[torch.device]:
    """Within, models on the emulated device are synchronised over a process group, or over the stand-in for NCCL."""
    emulation = emulated.load()
    add_backend_for_device(rank, world_size)
    native = _native.C
    assert native is not None
    nccl = functools.partial(native.NcclTransport, library=str(emulated.FILE))
    with (
        mock.patch.object(model, "_DEVICES", ("cpu", emulated.DEVICE)),
        mock.patch.object(engine, "uses_nccl", lambda config, model, group: transport == "nccl" and model.device.type != "cpu"),
        mock.patch.object(native, "NcclTransport", nccl),
    ):
        yield torch.device(emulated.DEVICE, rank)
    emulation.set_delay(-1, 0, 0, 0)
    error = emulation.take_error()
    assert not error, error


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().cpu() for name, p in module.named_parameters()}


def compare(ours: nn.Module, theirs: nn.Module, what: str) -> None:
    for (name, mine), wanted in zip(gradients(ours).items(), gradients(theirs).values(), strict=True):
        assert (mine is None) == (wanted is None), f"{what}: {name}"
        if mine is not None and wanted is not None:
            assert mine.dtype == wanted.dtype and torch.equal(mine, wanted), f"{what}: {name}"


def _same_as_on_cpu(rank: int, world_size: int, transport: str, options: dict[str, Any]) -> None:
    emulation = emulated.load()
    with on_device(rank, world_size, transport) as device:
        for make in (mlp, Shapes):
            on_cpu = make()
            here = copy.deepcopy(on_cpu).to(device)
            reducers = [gsync.GradReducer(m, bucket_mb=0.01, **options) for m in (here, on_cpu)]
            for step in range(4):
                emulation.set_delay(-1, 0, 200 * step, rank)
                for m in (here, on_cpu):
                    m.zero_grad(set_to_none=step % 2 == 0)
                    inputs = batch(rank, step).to(next(m.parameters()).device)
                    with reducers[0].no_sync(), reducers[1].no_sync():
                        m(inputs).sum().backward()
                    m(inputs + 1).sum().backward()
                compare(here, on_cpu, f"step {step}")
                norms = [reducer.grad_norm().item() for reducer in reducers]
                assert norms[0] == pytest.approx(norms[1], rel=1e-12)
                assert not reducers[0].found_nonfinite()
            assert [one.stats().buckets for one in reducers] == [4 * len(one._buckets) for one in reducers]
            for reducer in reducers:
                reducer.close()


@transports
@pytest.mark.parametrize(
    "options",
    [
        {"codec": "bf16", "exchange": "all_reduce"},
        {"codec": "int8", "exchange": "scatter_gather", "error_feedback": True, "exempt": ()},
    ],
    ids=["bf16", "int8"],
)
def test_gradients_are_those_of_the_cpu(transport, options):
    run_emulated(_same_as_on_cpu, 2, args=(transport, options), timeout_s=100, backend="gloo")


def _unused(rank: int, world_size: int, transport: str) -> None:
    emulation = emulated.load()
    with on_device(rank, world_size, transport) as device:
        module = Branches().to(device)
        reducer = gsync.GradReducer(module, codec="bf16", exchange="scatter_gather", bucket_mb=1e-6)
        x = torch.full((2, 1), 2.0 * (rank + 1), device=device)

        def values() -> list[float | None]:
            return [None if p.grad is None else p.grad.item() for p in (module.a.weight, module.b.weight)]

        def backward(which: str) -> None:
            sum(getattr(module, name)(x).sum() for name in which).backward()  # type: ignore[union-attr]

        for step in range(3):
            emulation.set_delay(-1, 0, 300 * step, rank)
            module.zero_grad()
            backward("a")
            assert values() == [6.0, None]  # nobody used b
            module.zero_grad()
            backward("ab" if rank == 0 else "a")
            assert values() == [6.0, 2.0]  # rank 0 only: (4 + 0) / 2
            module.zero_grad(set_to_none=False)
            backward("a")
            assert values() == [6.0, 0.0]
        # A rank whose loss reaches no parameter at all takes part in wait().
        module.zero_grad()
        reducer.wait()
        if rank == 0:
            backward("ab")
        reducer.wait()
        assert values() == [2.0, 2.0]
        reducer.close()


@transports
def test_a_parameter_that_only_another_rank_uses_gets_the_mean(transport):
    run_emulated(_unused, 2, args=(transport,), backend="gloo")


class Sparse(nn.Module):
    """A table of which each rank reads some rows, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(10, 3, sparse=True)
        self.linear = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(rows) + 1).square().sum()


def _sparse(rank: int, world_size: int, transport: str) -> None:
    with on_device(rank, world_size, transport) as device:
        on_cpu = Sparse()
        here = copy.deepcopy(on_cpu).to(device)
        reducers = [gsync.GradReducer(m, codec="fp32", bucket_mb=1e-6) for m in (here, on_cpu)]
        for step in range(3):
            for m in (here, on_cpu):
                m.zero_grad()
                loss = m(torch.tensor([rank + step, 4, 4]).to(m.linear.weight.device))
                if rank == 1 and step == 1:  # a rank whose loss does not reach the table
                    loss = m.linear.weight.square().sum() + m.linear.bias.sum()
                loss.backward()
            ours, theirs = here.table.weight.grad, on_cpu.table.weight.grad
            assert ours is not None and theirs is not None and ours.is_sparse
            rebuilt = torch.sparse_coo_tensor(ours._indices().cpu(), ours._values().cpu(), ours.shape, check_invariants=True)
            assert torch.equal(rebuilt.to_dense(), theirs.to_dense())
            assert torch.equal(here.linear.weight.grad.cpu(), on_cpu.linear.weight.grad)
            norms = [reducer.grad_norm().item() for reducer in reducers]
            assert norms[0] == pytest.approx(norms[1], rel=1e-12)
        for reducer in reducers:
            reducer.close()


@transports
def test_sparse_gradients_are_those_of_the_cpu(transport):
    run_emulated(_sparse, 2, args=(transport,), backend="gloo")


def _fault(rank: int, world_size: int) -> None:
    emulation = emulated.load()
    with on_device(rank, world_size, "nccl") as device:
        module = mlp().to(device)
        reducer = gsync.GradReducer(module, codec="bf16", timeout_s=2.0, bucket_mb=0.01)

        def step() -> None:
            module.zero_grad()
            module(batch(rank, 0).to(device)).sum().backward()
            # The host was ahead of the device: what went wrong there is told by whoever asks next.
            emulation.synchronize(rank)
            reducer.wait()

        for _ in range(2):
            step()
        right = gradients(module)
        if rank == 1:
            emulation.plant_nccl_fault(1, "error", 1)
        with pytest.raises(gsync.SyncError, match="planted error" if rank == 1 else "timed out after 2"):
            step()
        assert all(gradient is not None and gradient.isnan().all() for gradient in list(gradients(module).values())[:1])
        dist.all_reduce(torch.zeros(1))  # both have learnt of it
        reducer.reset()
        step()
        for name, gradient in gradients(module).items():
            assert torch.equal(gradient, right[name]), name  # type: ignore[arg-type]
        reducer.close()
        assert emulation.live_communicators() == 0


def test_a_fault_is_an_error_and_after_reset_the_mean_is_right_again():
    run_emulated(_fault, 2, backend="gloo")
