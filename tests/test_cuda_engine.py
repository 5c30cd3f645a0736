"""gsync on a real GPU, from backward to the mean: values, streams, graph capture, the current device.

Several ranks share a GPU where NCCL allows that (from 2.30 on, when asked). Values are tested on the CPU too, which shows that
the right ones are expected.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
from engine_setup import Listed, rows
from ranks import run_on_ranks
from torch.nn.parallel import DistributedDataParallel

import gsync
from gsync import _native, machine, ops

NUMELS = (0, 1, 255, 4099, 20_000, 3)
NAMES = [f"parts.{idx}" for idx in range(len(NUMELS))]
STEPS = 4
SLEEP_CYCLES = 100_000_000  # 50 ms at 2 GHz
NCCL_SHARES_GPUS = (2, 30)
_DOORS = ("ddp", "reducer")


def why_not(world_size: int) -> str:
    """Why that many ranks cannot run on this machine's GPUs, or ""."""
    if not _native.has_cuda():
        return "the extension was built without CUDA"
    if world_size <= torch.cuda.device_count():
        return ""
    version, reason = machine.nccl()
    if version is None or tuple(map(int, version.split(".")[:2])) < NCCL_SHARES_GPUS:
        return f"{world_size} ranks need as many GPUs: NCCL is {version or reason}, and shares one from 2.30 on"
    return ""


def needs(world_size: int) -> None:
    reason = why_not(world_size)
    if reason:
        pytest.skip(reason)


def device_of(rank: int, kind: str) -> torch.device:
    """The rank's device, made current; before NCCL is used."""
    if kind == "cpu":
        return torch.device("cpu")
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def synchronised(door: str, device: torch.device, **options: Any) -> tuple[torch.nn.Module, Any]:
    """A model whose gradients are what it is given, and its synchronisation."""
    module = Listed(NUMELS).to(device)
    if door == "reducer":
        return module, gsync.GradReducer(module, **options)
    wrapped = DistributedDataParallel(module, bucket_cap_mb=0.05)
    return wrapped, gsync.register(wrapped, **options)


def given(rank: int, step: int, device: torch.device) -> list[torch.Tensor]:
    return [row.to(device) for row in rows(NUMELS, rank, step)]


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.detach().clone() for parameter in model.parameters()]


def expected(world_size: int, step: int, codec: str) -> list[torch.Tensor]:
    """The mean under scatter_gather, by the reference's operations."""
    if world_size == 1:
        return rows(NUMELS, 0, step)
    where: dict[str, Any] = {"names": NAMES, "backend": "reference"}
    sent = [
        ops.pack(rows(NUMELS, rank, step), codec, 1.0 / world_size, world_size, rank=rank, **where) for rank in range(world_size)
    ]
    chunks = [payload.view(world_size, -1) for payload in sent]
    reduced = [
        ops.reduce([payload[chunk] for payload in chunks], list(NUMELS), codec, world_size, chunk, **where)
        for chunk in range(world_size)
    ]
    mean = [torch.empty(numel) for numel in NUMELS]
    ops.unpack(torch.cat(reduced), mean, codec, world_size, **where)
    return mean


def train(rank: int, world_size: int, kind: str, door: str, codec: str) -> dict[str, Any]:
    device = device_of(rank, kind)
    options: dict[str, Any] = {"exempt": ()} if codec.startswith("int") else {}
    model, sync = synchronised(door, device, codec=codec, exchange="scatter_gather", **options)
    found, norms = [], []
    for step in range(STEPS):
        model.zero_grad()
        model(given(rank, step, device)).backward()
        found.append([gradient.cpu() for gradient in gradients_of(model)])
        norms.append(float(sync.grad_norm()))
        assert not sync.found_nonfinite()
    stats = sync.stats()
    sync.close()
    return {"gradients": found, "norms": norms, "steps": stats.steps}


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("door", _DOORS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mean_is_the_reference_s_bit_for_bit(device: torch.device, world_size: int, door: str, codec: str) -> None:
    if device.type == "cuda":
        needs(world_size)
    elif world_size == 4 or codec not in ("fp32", "int8"):
        pytest.skip("on the CPU, one and two ranks and two codecs are enough to test the test")
    elif _native.C is None:
        pytest.skip(_native.MISSING)
    backend = "gloo" if device.type == "cpu" else "nccl"
    results = run_on_ranks(train, world_size, 120, backend, (device.type, door, codec))
    for result in results:
        for step, gradients in enumerate(result["gradients"]):
            wanted = expected(world_size, step, codec)
            assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True)), (step, codec)
            squares = sum(float(gradient.double().square().sum()) for gradient in wanted)
            assert result["norms"][step] == pytest.approx(squares**0.5, rel=1e-12)
        assert result["norms"] == results[0]["norms"] and result["steps"] == STEPS


def train_on_streams(rank: int, world_size: int, kind: str, door: str, side: bool) -> list[bool]:
    """Gradients that are late on the current stream, read on it at once; norms read on a third stream."""
    device = device_of(rank, kind)
    model, sync = synchronised(door, device, codec="fp32", exchange="scatter_gather")
    stream = torch.cuda.Stream(device) if side else torch.cuda.default_stream(device)
    reader = torch.cuda.Stream(device)
    results, host_was_ahead = [], []
    inputs = [given(rank, step, device) for step in range(STEPS)]
    torch.cuda.synchronize(device)
    for step in range(STEPS):
        late = [torch.zeros_like(row) for row in inputs[step]]
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(stream):
            model.zero_grad(set_to_none=True)
            torch.cuda._sleep(SLEEP_CYCLES)
            for row, values in zip(late, inputs[step], strict=True):
                row.copy_(values)
            model(late).backward()
            host_was_ahead.append(not stream.query())
            gradients = gradients_of(model)
        with torch.cuda.stream(reader):
            results.append((gradients, sync.grad_norm().clone()))
        torch.cuda.default_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    for step, (gradients, norm) in enumerate(results):
        wanted = expected(world_size, step, "fp32")
        assert all(torch.equal(a.cpu(), b) for a, b in zip(gradients, wanted, strict=True)), step
        squares = sum(float(gradient.double().square().sum()) for gradient in wanted)
        assert float(norm) == pytest.approx(squares**0.5, rel=1e-12)
    sync.close()
    return host_was_ahead


@pytest.mark.gpu
@pytest.mark.parametrize("door", _DOORS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("side", [False, True], ids=["busy default stream", "side stream"])
def test_gradients_are_waited_for_by_the_device_and_not_by_the_host(world_size: int, door: str, side: bool) -> None:
    needs(world_size)
    for host_was_ahead in run_on_ranks(train_on_streams, world_size, 120, "nccl", ("cuda", door, side)):
        # The first steps make plans, tables and, under DDP, the buckets anew.
        assert all(host_was_ahead[2:]), host_was_ahead


def capture(rank: int, world_size: int, kind: str) -> list[str]:
    device = device_of(rank, kind)
    model, sync = synchronised("reducer", device, codec="bf16")
    inputs = given(rank, 0, device)
    for _ in range(3):
        model(inputs).backward()
    torch.cuda.synchronize(device)
    said = []
    # Whatever happens to a graph whose capture was left by an error is torch's affair.
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        try:
            model(inputs).backward()
            sync.wait()
        except gsync.SyncError as error:
            said.append(str(error))
    return said


@pytest.mark.gpu
def test_capture_into_a_graph_is_refused_with_words() -> None:
    needs(1)
    said = run_on_ranks(capture, 1, 120, "nccl", ("cuda",))[0]
    assert said and "captured into a CUDA graph" in said[0], said


def train_beside_current_device(rank: int, world_size: int) -> list[torch.Tensor]:
    torch.cuda.set_device(0)
    device = torch.device("cuda", 1)
    model, sync = synchronised("reducer", device, codec="fp32")
    for step in range(2):
        model.zero_grad()
        model(given(rank, step, device)).backward()
        float(sync.grad_norm())
        assert torch.cuda.current_device() == 0
    found = [gradient.cpu() for gradient in gradients_of(model)]
    sync.close()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one_is_served() -> None:
    needs(1)
    found = run_on_ranks(train_beside_current_device, 1, 120, "nccl")[0]
    assert all(torch.equal(a, b) for a, b in zip(found, expected(1, 1, "fp32"), strict=True))


def test_why_ranks_cannot_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine, "nccl", lambda: ("2.28.9", "libnccl.so.2"))
    assert why_not(1) == ""
    assert why_not(2) == "2 ranks need as many GPUs: NCCL is 2.28.9, and shares one from 2.30 on"
    monkeypatch.setattr(machine, "nccl", lambda: (None, "libnccl.so.2 does not load"))
    assert why_not(4) == "4 ranks need as many GPUs: NCCL is libnccl.so.2 does not load, and shares one from 2.30 on"
    monkeypatch.setattr(machine, "nccl", lambda: ("2.30.1", "libnccl.so.2"))
    assert why_not(4) == ""
    monkeypatch.setattr(_native, "has_cuda", lambda: False)
    assert why_not(1) == "the extension was built without CUDA"
