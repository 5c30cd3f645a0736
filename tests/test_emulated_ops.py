"""The operations by themselves on tensors of the emulated device, and what an engine there takes that DDP never hands over."""

from __future__ import annotations

from typing import Any

import emulated
import pytest
import torch
from block_cases import Case
from emulated import run_emulated
from emulated_engines import close, make_ranks, train
from engine_setup import rows

from gsync import backends
from gsync.encoding import EncodeOptions, random_key

pytestmark = pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not() or "emulation")

# More segments than addresses go with a launch.
CASE = Case(tuple((numel, torch.float32, "int8") for numel in (4097, 63, 1, 300, 17, 256, 255, 5000, 3)), chunks=4, shards=2)


def operations(device: torch.device, shards: int) -> list[torch.Tensor]:
    """Everything that pack, reduce, of a chunk and of a shard, and unpack write on `device`, seen from the CPU."""
    native = backends.NativeBackend()
    layout = backends.BucketLayout(CASE.layout_segments(), 4, 0, 1, shards)
    sent = layout.uncompressed if shards > 1 else layout
    table = layout.python

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    def payload(num_bytes: int) -> torch.Tensor:
        return zeros(num_bytes, dtype=torch.uint8)

    gradients = [row.to(device) for row in rows([numel for numel, _, _ in CASE.segments], 0)]
    packed, counters = payload(sent.python.payload_bytes), zeros(2, dtype=torch.int64)
    residuals = [zeros(gradient.numel()) for gradient in gradients]
    out = [packed, counters]
    if shards == 1:
        errors = zeros(table.num_tiles, 4, dtype=torch.float64)
        native.pack(layout, gradients, packed, 0.5, counters, EncodeOptions(residuals, random_key(1, 2, "pack", 3), errors))
        out += [*residuals, errors]
    else:
        native.pack(sent, gradients, packed, 0.5, counters)
    count = table.chunks_per_shard if shards > 1 else 1
    whole = payload(table.payload_bytes)
    for chunk in range(0, 4, count):
        result = payload(count * table.chunk_bytes)
        part_bytes = count * sent.python.chunk_bytes
        pieces = [packed[chunk // count * part_bytes :][:part_bytes].clone() for _ in range(2)]
        native.reduce(layout, chunk, pieces, result, 0.5, EncodeOptions(), uncompressed=shards > 1)
        whole[chunk * table.chunk_bytes :][: result.numel()].copy_(result)
    written = [torch.empty_like(gradient) for gradient in gradients]
    partials, found = zeros(table.num_partials, dtype=torch.float64), zeros(1, dtype=torch.int32)
    sums = zeros(len(gradients), dtype=torch.float64)
    native.unpack(layout, whole, written, partials, found, sums)
    return [tensor.cpu() for tensor in [*out, whole, *written, partials, found, sums]]


def same_as_on_cpu(_rank: int, _world_size: int, shards: int) -> list[int]:
    emulation = emulated.load()
    emulation.set_delay(-1, 0, 200, 1)
    got, expected = operations(torch.device(emulated.DEVICE, 1), shards), operations(torch.device("cpu"), shards)
    emulation.set_delay(-1, 0, 0, 0)
    assert expected[-1].all() and not emulation.take_error()
    return [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not torch.equal(a, b)]


@pytest.mark.parametrize("shards", [1, 2])
def test_operations_write_what_they_write_on_the_cpu(shards):
    assert run_emulated(same_as_on_cpu, args=(shards,)) == [[]]


def flat_over_hosts(_rank: int, _world_size: int, exchange: str) -> list[bool]:
    """A transport for hosts serves the flat exchanges, too, over all its ranks."""
    emulated.load()
    given = [rows((5000,), rank) for rank in range(2)]
    gradients = []
    for ranks_per_host in (1, 2):
        ranks = make_ranks(2, "bf16", exchange, (5000,), ranks_per_host=ranks_per_host)
        assert ranks[0].transport.name == "nccl"
        gradients.append(train(ranks, [given], ((0, 1),))[0])
        close(ranks)
    return [torch.equal(a, b) for a, b in zip(*gradients, strict=True)]


@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
def test_a_transport_for_hosts_serves_the_flat_exchanges(exchange):
    assert run_emulated(flat_over_hosts, args=(exchange,)) == [[True, True]]


def other_dtypes(_rank: int, _world_size: int) -> dict[str, Any]:
    emulation = emulated.load()
    cpu = torch.device("cpu")
    (one,) = make_ranks(1, "fp32", "all_reduce", (6,), torch.complex32, cpu, scale=1.0)
    values = torch.arange(1.0, 13.0).half()
    buffer = torch.view_as_complex(values.view(6, 2)).clone()
    one.engine.submit(emulation.grad_bucket(0, True, buffer, one.parameters)).wait()
    result = {"same": torch.equal(torch.view_as_real(buffer).flatten(), values)}
    result["squares"] = float(one.engine.sum_of_squares().sum())
    close([one])
    (one,) = make_ranks(1, "fp32", "all_reduce", (6,), torch.int32, cpu)
    try:
        one.engine.submit(emulation.grad_bucket(0, True, torch.ones(6, dtype=torch.int32), one.parameters)).wait()
    except RuntimeError as error:
        result["refused"] = str(error)
    close([one])
    return result


def test_half_complex_gradients_are_pairs_and_integers_are_refused():
    (result,) = run_emulated(other_dtypes)
    assert result["same"] and result["squares"] == sum(i * i for i in range(1, 13))
    assert "gradients must be fp32, fp16, bf16, fp64 or complex, got Int" in result["refused"]


def far_ahead(_rank: int, _world_size: int) -> dict[str, Any]:
    """The host hands over more buckets than the engine's clock keeps spans for, while the device has not begun."""
    emulation = emulated.load()
    (one,) = make_ranks(1, "fp32", "all_reduce", (8,))
    buffer = torch.ones(8, device=one.device)
    one.engine.submit(emulation.grad_bucket(0, True, buffer, one.parameters)).wait()  # a plan's tables are waited for
    emulation.synchronize(0)
    emulation.hold(0, True)
    for _ in range(1_499):  # of three spans each, and one more a step
        last = one.engine.submit(emulation.grad_bucket(0, True, buffer, one.parameters))
    emulation.hold(0, False)
    last.wait()
    emulation.synchronize(0)
    stats = one.engine.stats()
    close([one])
    return {name: stats[name] for name in ("steps", "max_queue_depth")}


def test_a_host_that_is_far_ahead_is_not_kept_in_memory_for_ever():
    (result,) = run_emulated(far_ahead)
    assert result["steps"] == 1_500
    assert 4096 / 4 - 2 <= result["max_queue_depth"] < 1_500
