"""Buckets of every kind, and how the engine moves them: slices, order, buffers, threads."""

from __future__ import annotations

import time

import pytest
import torch
from engine_setup import Listed, make_ddp, make_engine, rows
from ranks import run_on_ranks

from gsync import _native

pytestmark = pytest.mark.skipif(_native.C is None, reason=_native.MISSING or "native build")

NUMELS = (70_001, 5, 40_000, 0, 9_999)


def grads_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters()]


def step_with_slices(rank: int, world_size: int, codec: str, exchange: str, slice_bytes: int, delays: bool, options: dict):
    module = Listed(NUMELS)
    engine = make_engine(module, rank, world_size, codec, exchange, slice_bytes=slice_bytes)
    ddp = make_ddp(module, engine, **options)
    generator = torch.Generator().manual_seed(rank)
    buffers = []
    for step in range(5):
        module.zero_grad()
        loss = ddp(rows(NUMELS, rank, step))
        if delays:
            time.sleep(0.05 * float(torch.rand(1, generator=generator)))
        loss.backward()
        buffers.append(engine.stats()["buffer_bytes"])
    sums = engine.sum_of_squares()
    engine.close()
    return grads_of(module), sums, buffers


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_slices_buckets_and_timing_do_not_change_bits_under_scatter_gather(codec):
    whole = run_on_ranks(step_with_slices, 3, args=(codec, "scatter_gather", 25 << 20, False, {}))
    sliced = run_on_ranks(step_with_slices, 3, args=(codec, "scatter_gather", 20_000, True, {"bucket_cap_mb": 0.1}))
    for a, b in zip(whole, sliced, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
        assert torch.equal(a[1], b[1])


def test_slices_under_all_reduce_keep_the_ranks_equal():
    results = run_on_ranks(step_with_slices, 3, args=("bf16", "all_reduce", 20_000, True, {"bucket_cap_mb": 0.1}))
    for grads, sums, _ in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(grads, results[0][0], strict=True))
        assert torch.equal(sums, results[0][1])


@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
def test_buffers_are_two_slices_and_stay(exchange):
    slice_bytes = 100_000
    for _, _, buffers in run_on_ranks(step_with_slices, 2, args=("bf16", exchange, slice_bytes, False, {})):
        assert buffers[-1] == buffers[-2]  # DDP makes new buckets in the second step
        payload = slice_bytes // 2 + 4096 * 2 + 1024  # bf16; a slice is whole tiles
        factor = 1 if exchange == "all_reduce" else 2.5
        assert 0 < buffers[0] <= 2 * factor * payload


def mixed_codecs(rank: int, world_size: int, exchange: str):
    module = Listed((300, 5000, 7))
    engine = make_engine(module, rank, world_size, exchange=exchange, codecs=["fp32", "bf16", "fp16"])
    ddp = make_ddp(module, engine)
    ddp(rows((300, 5000, 7), rank)).backward()
    return grads_of(module), engine.sum_of_squares()


@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
def test_one_bucket_may_hold_several_codecs(exchange):
    results = run_on_ranks(mixed_codecs, 2, args=(exchange,))
    for idx, wire in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        sent = [(rows((300, 5000, 7), rank)[idx] * 0.5).to(wire).float() for rank in range(2)]
        for grads, _ in results:
            assert torch.equal(grads[idx], (sent[0] + sent[1]).to(wire).float())
    expected = torch.stack([grad.double().square().sum() for grad in results[0][0]])
    torch.testing.assert_close(results[0][1], expected, rtol=1e-12, atol=0)


def of_dtype(rank: int, world_size: int, dtype: torch.dtype, view: bool):
    module = Listed((301, 17), dtype)
    engine = make_engine(module, rank, world_size, "fp32", "scatter_gather")
    ddp = make_ddp(module, engine, gradient_as_bucket_view=view)
    inputs = rows((301, 17), rank, dtype=dtype)
    if dtype.is_complex:
        inputs = [torch.complex(row.real, 2 * row.real).to(dtype) for row in inputs]
    ddp(inputs).backward()
    return grads_of(module), [row.conj().resolve_conj() if dtype.is_complex else row for row in inputs]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128])
def test_every_dtype(dtype, view):
    results = run_on_ranks(of_dtype, 2, args=(dtype, view))
    real = torch.complex64 if dtype.is_complex else torch.float32
    for idx in range(2):
        halves = [results[rank][1][idx].to(real) * 0.5 for rank in range(2)]
        for grads, _ in results:
            assert torch.equal(grads[idx], (halves[0] + halves[1]).to(dtype))


class WithEmbedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(6, 2, sparse=True)
        self.dense = torch.nn.Linear(2, 2, bias=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.dense(self.rows(indices)).sum() + self.rows(indices).sum()


def sparse_embedding(rank: int, world_size: int):
    torch.manual_seed(0)
    module = WithEmbedding()
    with torch.no_grad():
        module.dense.weight.zero_()
    engine = make_engine(module, rank, world_size, "bf16")
    ddp = make_ddp(module, engine)
    for _ in range(2):
        module.zero_grad()
        ddp(torch.tensor([rank, 3])).backward()
    grad = module.rows.weight.grad
    return grad.is_sparse, grad.to_dense(), module.dense.weight.grad.clone()


def test_a_sparse_gradient_stays_sparse_and_exact():
    results = run_on_ranks(sparse_embedding, 2)
    for is_sparse, dense, weight in results:
        assert is_sparse
        assert torch.equal(dense, torch.tensor([0.5, 0.5, 0, 1.0, 0, 0])[:, None].expand(6, 2))
        assert torch.equal(weight, results[0][2])


def world_of_one(rank: int, world_size: int):
    module = Listed(NUMELS)
    engine = make_engine(module, rank, 1, "bf16")
    ddp = make_ddp(module, engine)
    inputs = rows(NUMELS, 7)
    ddp(inputs).backward()
    exact = all(torch.equal(grad, row) for grad, row in zip(grads_of(module), inputs, strict=True))
    sums, quiet = engine.sum_of_squares(), bool(engine.found_nonfinite())
    module.zero_grad()
    inputs[2][5] = float("nan")
    ddp(inputs).backward()
    stats = engine.stats()
    return exact, sums, quiet, bool(engine.found_nonfinite()), stats["wire_bytes"], stats["nonfinite_steps"]


def test_one_rank_alone_keeps_its_gradients_and_measures_them():
    exact, sums, quiet, loud, wire_bytes, nonfinite_steps = run_on_ranks(world_of_one, 1)[0]
    assert exact and not quiet and loud and wire_bytes == 0 and nonfinite_steps == 1
    expected = torch.stack([row.double().square().sum() for row in rows(NUMELS, 7)])
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0)


def nonfinite_on_one_rank(rank: int, world_size: int, codec: str, exchange: str):
    module = Listed(NUMELS)
    engine = make_engine(module, rank, world_size, codec, exchange)
    ddp = make_ddp(module, engine)
    flags = []
    for step in range(3):
        module.zero_grad()
        inputs = rows(NUMELS, rank, step)
        if step == 1 and rank == 1:
            inputs[0][77] = float("inf")
        ddp(inputs).backward()
        flags.append(bool(engine.found_nonfinite()))
    return flags, engine.stats()["nonfinite_steps"]


@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
def test_nonfinite_on_one_rank_is_found_on_every_rank(codec, exchange):
    for flags, count in run_on_ranks(nonfinite_on_one_rank, 2, args=(codec, exchange)):
        assert flags == [False, True, False] and count == 1


def vanishing(rank: int, world_size: int):
    import warnings

    module = Listed((1000,))
    engine = make_engine(module, rank, world_size, "fp16")
    ddp = make_ddp(module, engine)
    inputs = [torch.ones(1000)]
    inputs[0][:30] = 1e-9
    inputs[0][500:] = 0.0
    ddp(inputs).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stats = engine.stats()
        engine.stats()
    return stats["packed_nonzero"], stats["packed_vanished"], [str(warning.message) for warning in caught]


def test_values_that_vanish_in_fp16_are_counted_and_warned_of_once():
    for nonzero, vanished, messages in run_on_ranks(vanishing, 2):
        assert (nonzero, vanished) == (500, 30)
        assert len(messages) == 1 and "bf16" in messages[0]


def vanishing_in_the_hook(rank: int, world_size: int):
    """What the hook, in a thread of autograd's, says of values that vanish; and whether it stops where warnings are errors."""
    import sys
    import warnings

    told = []
    for action in ("always", "error"):
        module = Listed((1000,))
        engine = make_engine(module, rank, world_size, "fp16")
        ddp = make_ddp(module, engine)
        unraisable: list[str] = []
        before, sys.unraisablehook = sys.unraisablehook, lambda args, found=unraisable: found.append(str(args.exc_value))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            for _ in range(3):
                ddp([torch.full((1000,), 1e-9)]).backward()
        sys.unraisablehook = before
        told.append([str(warning.message) for warning in caught] + unraisable)
        assert not module.parts[0].grad.any()
    return told


def test_the_hook_warns_once_of_values_that_vanish_and_goes_on():
    for told in run_on_ranks(vanishing_in_the_hook, 2):
        for messages in told:
            assert len(messages) == 1 and "became zero in fp16" in messages[0]


def through_python(rank: int, world_size: int):
    module = Listed(NUMELS)
    engine = make_engine(module, rank, world_size, "fp32")
    ddp = torch.nn.parallel.DistributedDataParallel(module)

    def hook(state, bucket):
        future = engine.submit(bucket)
        assert isinstance(future, torch._C.Future)  # the base of torch.futures.Future, as from work.get_future()
        return future

    ddp.register_comm_hook(None, hook)
    for step in range(3):
        module.zero_grad()
        ddp(rows(NUMELS, rank, step)).backward()
    good = grads_of(module)
    engine.abort("a test")
    try:
        ddp(rows(NUMELS, rank, 3)).backward()
    except Exception as error:
        return good, type(error).__name__, engine.step
    return good, "", engine.step


def test_submit_from_a_python_hook():
    for grads, name, step in run_on_ranks(through_python, 2):
        for idx, grad in enumerate(grads):
            assert torch.equal(grad, rows(NUMELS, 0, 2)[idx] * 0.5 + rows(NUMELS, 1, 2)[idx] * 0.5)
        assert name == "SyncError" and step == 4


def busy_python(rank: int, world_size: int):
    """Buckets are handed over while this thread then keeps Python's lock for half a second without a break."""
    import ctypes

    module = Listed(NUMELS)
    engine = make_engine(module, rank, world_size)
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    ddp(rows(NUMELS, rank)).backward()  # a plain step, to have buckets
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    for bucket in buckets:
        bucket.buffer().fill_(rank + 1.0)
    futures = [engine.submit(bucket) for bucket in buckets]
    ctypes.PyDLL(None).usleep(500_000)  # PyDLL: keeps the lock
    return all(future.done() for future in futures), [float(bucket.buffer()[0]) for bucket in buckets]


def test_the_worker_needs_no_python_lock():
    for done, values in run_on_ranks(busy_python, 2):
        assert done and all(value == 1.5 for value in values)
