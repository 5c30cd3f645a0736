"""Streams, devices and graphs on a GPU. What of it can be tried without one is tried on the emulated device (docs/testing.md)."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ddp_cases import Scalars
from field_cases import DOORS, Door

import gsync

pytestmark = pytest.mark.gpu


@pytest.fixture
def alone_on_gpu(tmp_path):
    """A NCCL group of this process; its engine packs and unpacks on its own stream as with more ranks."""
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield torch.device("cuda", torch.cuda.current_device())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", DOORS)
def test_gpu_gradients_are_read_when_they_are_there(alone_on_gpu, kind):
    """Case 94. A whole step on a user's stream behind a long kernel, `.grad` read at once, 200 times."""
    numel = 1 << 20
    door = Door(kind, Scalars(numel).cuda(), "native", codec="fp32")
    stream = torch.cuda.Stream()
    for step in range(200):
        with torch.cuda.stream(stream):
            x = torch.full((numel,), float(step + 1), device="cuda")
            torch.cuda._sleep(200_000)
            door.zero_grad()
            door(x).backward()
            low, high = door.module.weight.grad.aminmax()
        stream.synchronize()
        assert (float(low), float(high)) == (step + 1.0, step + 1.0), step
    door.close()


def test_gpu_reducer_made_on_a_side_stream(alone_on_gpu):
    """Case 95. The hooks of accumulators do not tie the step to the stream they were made on."""
    with torch.cuda.stream(torch.cuda.Stream()):
        model = Scalars(1 << 20).cuda()
        reducer = gsync.GradReducer(model, codec="fp32", backend="native")
    torch.cuda.synchronize()
    for step in range(50):
        model.zero_grad()
        torch.cuda._sleep(200_000)
        model(torch.full((1 << 20,), float(step + 1), device="cuda")).backward()
        assert float(model.weight.grad.min()) == float(model.weight.grad.max()) == step + 1.0
    reducer.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_zero_is_left_alone_by_a_model_on_another(alone_on_gpu):
    """Case 97. Kernels, buffers and streams go to the gradients' device, whichever is the current one."""
    before = torch.cuda.memory_allocated(0)
    model = Scalars(1 << 20).to("cuda:1")
    reducer = gsync.GradReducer(model, codec="int8", exempt=(), backend="native")
    model(torch.ones(1 << 20, device="cuda:1")).backward()
    torch.cuda.synchronize(1)
    assert torch.cuda.memory_allocated(0) == before
    reducer.close()


@pytest.mark.parametrize("kind", DOORS)
def test_gpu_capture_into_a_graph_is_refused(alone_on_gpu, kind):
    """Case 100. While capturing, the exchange raises; afterwards the process goes on."""
    door = Door(kind, Scalars(1000).cuda(), "native", codec="bf16")
    x = torch.ones(1000, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(11):
            door.zero_grad()
            door(x).backward()
    torch.cuda.synchronize()
    refused: list[str] = []

    def step():
        try:
            door(x).backward()
        except RuntimeError as error:
            refused.append(str(error))

    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
        step()
    assert refused and "captured into a CUDA graph" in refused[0]
    torch.cuda.synchronize()


FIRST_CALL = """
import sys, torch
from gsync import ops
x = torch.ones(5000, device="cuda")
payload = ops.pack([x], "int8", backend="triton")
ops.unpack(payload, [x], "int8", backend="triton")
assert x.eq(1.0).all()
"""


def test_gpu_ranks_compile_the_same_triton_kernels_at_once(tmp_path):
    """Case 114. Eight processes, one empty cache, the first call at the same moment."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    running = [
        subprocess.Popen([sys.executable, "-c", FIRST_CALL], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(8)
    ]
    try:
        for process in running:
            told, _ = process.communicate(timeout=200)
            assert process.returncode == 0, told.decode()
    finally:
        for process in running:
            process.kill()
