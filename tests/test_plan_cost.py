"""The formulas of `gsync plan`: bytes as gsync sends them, buckets as DDP and GradReducer cut them, seconds as by hand."""

from __future__ import annotations

import os
from typing import Any

import plan_cases
import pytest
import torch
import torch.distributed as dist
from ddp_cases import why_no_engine
from gsync.benchmarks import planner, shapes
from gsync.benchmarks.planner import Choice, Planner, Settings
from gsync.benchmarks.shapes import Parameter, Sizer
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gsync
from gsync import cost, layout, model, ops
from gsync.bucket_order import make_buckets
from gsync.config import CODECS
from gsync.cost import Kernel, Link, Network, SliceSize, Topology
from gsync.schedule import Training

NET = Network(Link(1e8, 1e-3, 1e-4), Link(1e9, 1e-5, 1e-6))
DEVICE = Network(Link(1e8, 1e-3, 1e-4), Link(1e9, 1e-5, 1e-6), on_device=True)
NUMELS = st.lists(st.sampled_from([0, 1, 255, 256, 257, 4095, 4096, 12289, 70001]), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(numels=NUMELS, codec=st.sampled_from(CODECS), world_size=st.integers(1, 9), slice_kib=st.sampled_from([16, 100, 10**6]))
def test_slices_have_exactly_the_bytes_of_the_layout(numels: list[int], codec: str, world_size: int, slice_kib: int) -> None:
    params = [Parameter(f"p{idx}", numel, is_exempt=idx % 3 == 1) for idx, numel in enumerate(numels)]
    codecs = shapes.codecs_of(params, codec)
    bucket = list(range(len(params)))
    found = Sizer(params, codecs).slices(bucket, slice_kib << 10, Topology(world_size), "scatter_gather")
    segments = [
        layout.Segment(param.numel, 0, layout.CODEC_KINDS[one], layout.hash64(param.name))
        for param, one in zip(params, codecs, strict=True)
    ]
    wanted = [layout.build_layout(segments, world_size, idx, len(found)).chunk_bytes for idx in range(len(found))]
    assert [one.chunk_bytes for one in found] == wanted
    assert sum(one.numel for one in found) == sum(numels)
    if len(found) == 1:
        names = [param.name for param in params]
        assert found[0].chunk_bytes * world_size == ops.payload_bytes(numels, codecs, num_chunks=world_size, names=names)


def _wire_bytes(
    rank: int, world_size: int, codec: str, exchange: str, slice_mb: float, ranks_per_host: int
) -> tuple[float, list[tuple[str, int, int]]]:
    os.environ["GSYNC_LOCAL_WORLD_SIZE"] = str(ranks_per_host)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100), nn.Linear(100, 7))
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.2)
    sync = gsync.register(ddp, codec=codec, exchange=exchange, slice_mb=slice_mb)
    for _ in range(3):  # DDP rebuilds its buckets for the second step
        sync.reset_stats()
        ddp(torch.ones(2, 300)).sum().backward()
    sent = sync.stats().wire_bytes
    sync.close()
    return sent, [(name, param.numel(), param.dim()) for name, param in module.named_parameters()]


@pytest.mark.skipif(bool(why_no_engine("native")), reason=why_no_engine("native"))
@pytest.mark.parametrize(
    ("codec", "exchange"), [("fp32", "all_reduce"), ("bf16", "all_reduce"), ("int8", "scatter_gather"), ("int8", "hierarchical")]
)
def test_wire_bytes_are_those_that_the_engine_counts(codec: str, exchange: str) -> None:
    slice_mb = 0.1
    world_size, ranks_per_host = (4, 2) if exchange == "hierarchical" else (3, 1)
    topology, arguments = Topology(world_size, ranks_per_host), (codec, exchange, slice_mb, ranks_per_host)
    for sent, rows in run_on_ranks(_wire_bytes, world_size, args=arguments, pool="plan"):
        params = [Parameter(name, numel, is_exempt=dim < 2) for name, numel, dim in rows]
        made = Planner(params, Settings(Training(0.0, 0.1), slice_mb=slice_mb), plan_cases.calibration(), lambda level: NET)
        row = made.predict(Choice(planner.GSYNC, codec, exchange, 0.2), topology)
        assert sent == pytest.approx(row["wire_bytes"], abs=row["slices"])  # the engine rounds each slice's down to whole bytes


@settings(max_examples=60, deadline=None)
@given(numels=st.lists(st.integers(1, 5000), min_size=1, max_size=30), limit=st.integers(1, 20000))
def test_buckets_are_cut_as_ddp_and_the_reducer_cut_them(numels: list[int], limit: int) -> None:
    params = [torch.empty(numel, device="meta") for numel in numels]
    first = min(2**20, limit)
    found = cost.cut_buckets([4 * numel for numel in numels], limit, first)
    wanted = make_buckets(range(len(params)), params, (), (), limit)
    assert found == [bucket.parameters for bucket in wanted]
    indices, _ = dist._compute_bucket_assignment_by_size([torch.empty(numel) for numel in numels], [first, limit])
    assert found == indices


def test_the_last_parameter_is_handed_over_first() -> None:
    params = [Parameter(str(idx), 100) for idx in range(5)]
    assert shapes.cut(params, 800, 400) == [[4], [3, 2], [1, 0]]


@pytest.mark.parametrize("exempt", [None, ("layers.*", "head.weight")])
def test_codecs_are_those_that_gsync_gives_a_module(exempt: tuple[str, ...] | None) -> None:
    module = nn.ModuleDict(
        {"table": nn.Embedding(9, 4), "layers": nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)]), "head": nn.Linear(4, 9)}
    )
    config = gsync.SyncConfig(codec="int8", exempt=exempt, exempt_codec="fp16")
    rows = list(module.named_parameters())
    assert shapes.codecs_of(shapes.of_module(module), "int8", exempt, "fp16") == model.codecs_of(rows, module, config)


@pytest.mark.parametrize("world_size", [1, 3])
def test_residuals_are_of_what_is_packed_and_of_what_is_reduced(world_size: int) -> None:
    segments = [layout.Segment(numel, 0, layout.CODEC_KINDS["int8"], layout.hash64(str(numel))) for numel in (257, 33153)]
    held = [sum(layout.share_of(segment, rank, world_size)[1] for segment in segments) for rank in range(world_size)]
    numel = sum(segment.numel for segment in segments)
    found = cost.residual_bytes("scatter_gather", numel, Topology(world_size))
    assert found == pytest.approx(sum(4 * (numel + one) for one in held) / world_size, abs=4)
    assert cost.residual_bytes("hierarchical", 32_000, Topology(8, 4)) == 4 * (8_000 + 4_000)


@settings(max_examples=40, deadline=None)
@given(
    numels=NUMELS,
    codec=st.sampled_from(CODECS),
    ranks=st.integers(1, 4),
    hosts=st.integers(1, 4),
    slice_kib=st.sampled_from([64, 10**6]),
)
def test_hierarchical_packs_the_shares_of_the_codec_as_fp32(
    numels: list[int], codec: str, ranks: int, hosts: int, slice_kib: int
) -> None:
    params = [Parameter(f"p{idx}", numel, is_exempt=idx % 3 == 1) for idx, numel in enumerate(numels)]
    codecs = shapes.codecs_of(params, codec)
    found = Sizer(params, codecs).slices(range(len(params)), slice_kib << 10, Topology(ranks * hosts, ranks), "hierarchical")
    segments = [
        layout.Segment(param.numel, 0, layout.CODEC_KINDS[one], layout.hash64(param.name))
        for param, one in zip(params, codecs, strict=True)
    ]
    for idx, one in enumerate(found):
        wanted = layout.build_layout(segments, ranks * hosts, idx, len(found), ranks)
        assert (one.chunk_bytes, one.fp32_chunk_bytes) == (wanted.chunk_bytes, wanted.uncompressed.chunk_bytes)


def test_a_ring_takes_its_rounds_and_its_bytes() -> None:
    step = cost.all_reduce(8e6, "fp32", Topology(8, 2), NET)
    assert step.latency_s == pytest.approx(14 * 1e-3)
    assert step.seconds == pytest.approx(14 * 1e6 / 1e8) and step.inter == 1.0
    assert step.intra == pytest.approx(0.1)
    assert step.wire_bytes == step.host_bytes == pytest.approx(14e6)
    inside = cost.all_reduce(8e6, "fp32", Topology(8, 8), NET)
    assert inside.latency_s == pytest.approx(14 * 1e-5) and inside.seconds == pytest.approx(14e-3) and inside.host_bytes == 0


def test_a_device_takes_the_tree_where_latency_counts() -> None:
    small, large = (cost.all_reduce(size, "fp32", Topology(1024), DEVICE) for size in (1e3, 1e9))
    assert small.latency_s == pytest.approx(20 * 1e-3) and small.wire_bytes == 2e3
    assert large.latency_s == pytest.approx(20 * 1e-3) and large.seconds == pytest.approx(20.0)
    few = cost.all_reduce(1e9, "fp32", Topology(2), DEVICE)
    assert few.seconds == pytest.approx(10.0) and few.latency_s == pytest.approx(2e-3)


def test_a_flat_all_to_all_shares_the_link_of_its_host() -> None:
    step = cost.all_to_all(1e5, 2, 4, Topology(8, 2), NET)
    assert step.host_bytes == 2 * 6 * 1e5 and step.wire_bytes == 7e5
    assert step.seconds == pytest.approx(12e5 / 1e8)
    assert step.latency_s == pytest.approx(1e-3 + 6 * 1e-4)
    assert cost.all_gather(1e5, 2, 4, Topology(8, 2), NET).seconds == step.seconds
    ring = cost.all_gather(1e5, 2, 4, Topology(8, 2), DEVICE)
    assert ring.host_bytes == 7e5 and ring.latency_s == pytest.approx(7e-3)


def test_hierarchical_sends_fp32_inside_a_host_and_the_codec_between() -> None:
    topology, size = Topology(32, 8), SliceSize(32_000, 0, 1_016, 4_000)
    kernels = {codec: Kernel(1e-9, 1e-9, 1e-9, 1e-9) for codec in ("fp32", "int8")}
    steps = cost.steps_of("hierarchical", "int8", size, kernels, topology, NET)
    assert [step.what for step in steps] == [
        "pack", "all_to_all", "reduce", "all_to_all", "reduce", "all_gather", "all_gather", "unpack"
    ]  # fmt: skip
    inner, outer, between, inside = (step for step in steps if step.is_collective)
    assert inner.wire_bytes == 7 / 8 * 4 * 32_000 and inner.host_bytes == 0
    assert outer.wire_bytes == between.wire_bytes == 3 * 1_016 and outer.host_bytes == 8 * 3 * 1_016
    assert inside.wire_bytes == 7 * 4 * 1_016 and inside.host_bytes == 0
    assert cost.wire_bytes("hierarchical", size, topology) == sum(step.wire_bytes for step in steps)
    one_host = cost.steps_of("hierarchical", "int8", SliceSize(32_000, 0, 4_064, 16_000), kernels, Topology(8, 8), NET)
    assert [step.what for step in one_host] == ["pack", "all_to_all", "reduce", "all_gather", "unpack"]
    assert cost.wire_bytes("hierarchical", SliceSize(32_000, 0, 4_064, 16_000), Topology(8, 8)) == 7 * (4_064 + 16_000)
    assert cost.buffer_bytes("hierarchical", size, topology) == 2 * 32 * 4_000 + 5 * 1_016
    flat = cost.steps_of("scatter_gather", "int8", size, kernels, topology, NET)
    assert sum(step.host_bytes for step in flat) == 2 * 8 * 24 * 1_016  # eight times as much as leaves it above


def test_wire_bytes_are_the_sum_of_the_steps() -> None:
    kernels = {codec: Kernel(1e-9, 1e-9) for codec in CODECS}
    size, topology = SliceSize(4096, 8192, 1040, 2064), Topology(8, 2)
    for exchange in cost.EXCHANGES:
        steps = cost.steps_of(exchange, "bf16", size, kernels, topology, NET)
        assert cost.wire_bytes(exchange, size, topology) == pytest.approx(sum(step.wire_bytes for step in steps))
    assert cost.buffer_bytes("all_reduce", size, topology) == 8192
    assert cost.buffer_bytes("scatter_gather", size, topology) == (2 * 8 + 1) * 1040


def _steps(exchange: str, codec: str) -> tuple[cost.Step, ...]:
    return cost.steps_of(exchange, codec, SliceSize(1, 2), {codec: Kernel(0, 0)}, Topology(2), NET)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Topology(6, 4), "world_size=6 is no multiple of ranks_per_host=4"),
        (lambda: Topology(0), "expected at least 1 of each"),
        (lambda: _steps("ring", "bf16"), "expected one of all_reduce"),
        (lambda: _steps("all_reduce", "int8"), "cannot sum int8"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
