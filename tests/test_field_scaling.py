"""The mean comes out right whatever the numbers are: large, small, bad, on any wire type, through both doors."""

import functools
import inspect

import pytest
import torch
import torch.nn as nn
from ddp_cases import EXCHANGES, Scalars, assert_same_bits, assert_same_on_all_ranks, gradients
from field_cases import DOORS, ONE_ROUNDING, Door, engines, engines_and_worlds, every_door, feedback_modes, modes, options_of
from ranks import run_on_ranks
from torch.nn.parallel import DistributedDataParallel

import gsync
from gsync import ops
from gsync.config import CODECS

BLOCKS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")


def constant(door, value, numel):
    """The synchronised gradient where this rank's is `value` everywhere."""
    door.zero_grad()
    door(torch.full((numel,), float(value))).backward()
    return door.module.weight.grad


def _large(rank, world_size, backend):
    for exchange in EXCHANGES:
        for small in ({}, {"bucket_mb": 1e-4, "slice_mb": 1e-3}):
            for door in every_door(lambda: Scalars(1000), backend, codec="fp16", exchange=exchange, **small):
                assert constant(door, 40000.0, 1000).tolist() == [40000.0] * 1000
                assert constant(door, 65504.0, 1000).tolist() == [65504.0] * 1000
                assert not door.sync.found_nonfinite()
                assert constant(door, 70000.0, 1000).isinf().all()  # no fp16 number
                assert door.sync.found_nonfinite()


@engines_and_worlds
def test_large_gradients_stay_finite_in_fp16(backend, world_size):
    """Case 1. The division comes before the cast, so the sum never leaves fp16's range."""
    run_on_ranks(_large, world_size, args=(backend,))


def _divided_once(rank, world_size, backend):
    mean = (world_size + 1) / 2
    for options in modes():
        for door in every_door(lambda: Scalars(300), backend, **options):
            # One code for all: exact but for the scale, which is rounded in pack and in reduce.
            assert constant(door, rank + 1, 300).tolist() == pytest.approx([mean] * 300, rel=4 * 2.0**-24 + _scale_error(options))
            assert_same_on_all_ranks(door.module.weight.grad)
        for door in every_door(lambda: Rows(), backend, codec=options["codec"], exchange=options["exchange"]):
            door(rank).backward()
            rows = [1 / world_size] * world_size + [1.0]
            assert door.module.rows.weight.grad.is_sparse
            dense = door.module.rows.weight.grad.to_dense()
            assert dense[:, 0].tolist() == rows and dense[:, 1].tolist() == rows


def _scale_error(options):
    return {"int4": 2.0**-7 * 2}.get(options["codec"], 0.0)  # its scales are bf16, rounded up


class Rows(nn.Module):
    """A sparse embedding of which each rank uses a row of its own and the last one, and a dense layer."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(torch.distributed.get_world_size() + 1, 2, sparse=True)
        self.dense = nn.Linear(2, 2)

    def forward(self, rank):
        return self.rows(torch.tensor([rank, self.rows.num_embeddings - 1])).sum() + self.dense(torch.ones(2)).sum()


@engines_and_worlds
def test_the_mean_is_divided_once(backend, world_size):
    """Case 3. grad = rank + 1 gives 1.5 and 2.5, sparse rows included."""
    run_on_ranks(_divided_once, world_size, timeout_s=120, args=(backend,))


def test_the_error_is_flat_in_the_number_of_ranks():
    """Case 4. fp16 and bf16 under scatter_gather: flat from 2 to 128 ranks, where a sum in the wire type loses more with each."""
    numel = 2048
    for codec, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        ours, theirs = {}, {}
        for world_size in (2, 16, 128):
            generator = torch.Generator().manual_seed(world_size)
            each = [torch.randn(numel, generator=generator) for _ in range(world_size)]
            exact = torch.stack(each).double().mean(0)
            payloads = [ops.pack([g], codec, 1 / world_size) for g in each]
            result = torch.empty(numel)
            ops.unpack(ops.reduce(payloads, [numel], codec), [result], codec)
            hops = functools.reduce(
                lambda total, g: total + (g / world_size).to(dtype), each[1:], (each[0] / world_size).to(dtype)
            )
            ours[world_size], theirs[world_size] = (float((x.double() - exact).norm() / exact.norm()) for x in (result, hops))
        assert all(abs(error / ours[2] - 1) <= 0.1 for error in ours.values()), ours
        assert ours[128] <= 2**0.5 * ONE_ROUNDING[codec] and theirs[128] > 2 * ours[128], (ours, theirs)


def _clamped(rank, world_size, backend):
    for value in (127.0, -127.0, 3e38):
        for codec in BLOCKS:
            for door in every_door(lambda: Scalars(600), backend, **options_of(codec)):
                # All codes are the largest one on every rank.
                got = constant(door, value, 600)
                assert got.tolist() == pytest.approx([value] * 600, rel=1e-6 + _scale_error({"codec": codec}))


@engines_and_worlds
def test_codes_at_their_largest_do_not_wrap(backend, world_size):
    """Case 7. Sums are taken in fp32, not on the codes."""
    run_on_ranks(_clamped, world_size, args=(backend,))


FIELD_VALUES = (448.0, 465.0, 1000.0, -1000.0, float("inf"), float("nan"), 0.0, 1e-4)


@pytest.mark.parametrize("codec", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_is_the_same_from_every_backend(backend, device, codec):
    """Case 8. Out of range, Inf and NaN alike: the bytes and the decoded values of the reference."""
    whole = torch.tensor(FIELD_VALUES).repeat_interleave(256)  # a block for each value
    mixed = torch.tensor(FIELD_VALUES)
    for values in (whole, mixed, mixed[[0, 1, 2, 3, 6, 7]]):
        expected = ops.pack([values], codec, backend="reference")
        payload = ops.pack([values.to(device)], codec, backend=backend)
        assert_same_bits(payload.cpu(), expected)
        result, reference = torch.empty_like(values, device=device), torch.empty_like(values)
        found, _ = ops.unpack(payload, [result], codec, backend=backend)
        ops.unpack(expected, [reference], codec, backend="reference")
        assert_same_bits(result.cpu(), reference)
        assert bool(found) == (not values.isfinite().all())
    # Alone in its block each finite value comes back; what is not finite spoils its block.
    result = torch.empty_like(whole)
    ops.unpack(ops.pack([whole], codec, backend="reference"), [result], codec, backend="reference")
    for value, got in zip(FIELD_VALUES, result.view(-1, 256), strict=True):
        assert got.isfinite().any() == torch.tensor(value).isfinite()
        if torch.tensor(value).isfinite():
            assert got.tolist() == pytest.approx([value] * 256, rel=1e-6)


def _fp8(rank, world_size, backend):
    for codec in ("fp8_e4m3", "fp8_e5m2"):
        for numel in (1, 1000):
            for door in every_door(lambda n=numel: Scalars(n), backend, **options_of(codec)):
                for value in (1000.0, 1e-4, 3e38, 0.0):
                    assert constant(door, value, numel).tolist() == pytest.approx([value] * numel, rel=1e-6)
                for bad in (float("inf"), float("nan")):
                    got = constant(door, bad if rank == 1 else 1.0, numel)
                    assert not got.isfinite().any() and door.sync.found_nonfinite()


@engines
def test_fp8_travels_as_bytes(backend):
    """Case 9. Gloo takes no float8: what is sent are bytes, in buckets of 1 and of 1000 elements."""
    run_on_ranks(_fp8, 2, args=(backend,))


def _bf16(rank, world_size, backend):
    for codec in ("bf16", "fp32"):
        for exchange in EXCHANGES:
            for dtype in (torch.bfloat16, torch.float32):
                for door in every_door(lambda d=dtype: Scalars(1000, d), backend, codec=codec, exchange=exchange):
                    door.zero_grad()
                    door(torch.full((1000,), rank + 1.0, dtype=dtype)).backward()
                    assert door.module.weight.grad.dtype == dtype
                    assert door.module.weight.grad.tolist() == [1.5] * 1000


@engines
def test_bf16_on_gloo(backend):
    """Case 10. As a codec, and as the dtype of the model."""
    run_on_ranks(_bf16, 2, args=(backend,))


def test_the_hook_is_a_function_that_ddp_accepts():
    """Cases 12 and 73. A name that DDP does not refuse on CPUs, the argument `bucket`, annotations that it compares."""
    assert inspect.isfunction(gsync.hook) and gsync.hook.__name__ == "hook"
    parameters = inspect.signature(gsync.hook).parameters
    assert list(parameters) == ["state", "bucket"]
    assert parameters["bucket"].annotation is torch.distributed.GradBucket
    assert inspect.signature(gsync.hook).return_annotation == torch.futures.Future[torch.Tensor]


def _wrapped_hooks(rank, world_size, backend):
    def mine(state, bucket):
        return gsync.hook(state, bucket)

    @functools.wraps(gsync.hook)
    def wrapped(*args):
        return gsync.hook(*args)

    class Callable:
        def __init__(self):
            self.__name__ = self.__qualname__ = "callable"  # DDP reads both

        def __call__(self, state, bucket):
            return gsync.hook(state, bucket)

        def method(self, state, bucket):
            return gsync.hook(state, bucket)

    for each in (gsync.hook, mine, wrapped, Callable(), Callable().method):
        model = DistributedDataParallel(Scalars(3))
        model.register_comm_hook(gsync.SyncState(backend=backend), each)
        model(torch.full((3,), rank + 1.0)).backward()
        assert model.module.weight.grad.tolist() == [1.5] * 3
    # functools.partial has no __name__, which DDP wants: refused on the spot, not in backward.
    model = DistributedDataParallel(Scalars(3))
    with pytest.raises(AttributeError, match="__name__"):
        model.register_comm_hook(None, functools.partial(gsync.hook))


@engines
def test_hooks_around_gsyncs_hook(backend):
    """Cases 12 and 73. Functions, callables with a name and bound methods that call `gsync.hook` run on a CPU."""
    run_on_ranks(_wrapped_hooks, 2, args=(backend,))


def _written():
    """Bytes that this process has handed to write calls since its start, sockets included."""
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("wchar")).split()[1])


def _on_the_wire(rank, world_size, backend):
    numel = 1 << 20
    ratios = {}
    for options in modes():
        for door in every_door(lambda: Scalars(numel), backend, **options):
            constant(door, 1.0, numel)  # groups are connected, buffers made
            door.sync.reset_stats()
            torch.distributed.barrier()
            before = _written()
            constant(door, 1.0, numel)
            sent = _written() - before
            counted = door.sync.stats().wire_bytes
            assert sent == pytest.approx(counted, rel=0.01), (options, door.kind, sent, counted)
            ratios[options["codec"]] = counted / (4 * numel)
    return ratios


@engines
def test_the_bytes_that_leave_are_those_the_codec_promises(backend):
    """Case 13. Counted by the kernel, not by gsync: what two ranks send is the codec's share of fp32's bytes."""
    shares = {
        "fp32": 1,
        "fp16": 1 / 2,
        "bf16": 1 / 2,
        "fp8_e4m3": 65 / 256,
        "fp8_e5m2": 65 / 256,
        "int8": 65 / 256,
        "int4": 17 / 128,
    }
    for ratios in run_on_ranks(_on_the_wire, 2, timeout_s=120, args=(backend,)):
        for codec, share in shares.items():
            assert ratios[codec] == pytest.approx(share, rel=0.01), codec


def _every_type(rank, world_size, backend):
    for options in modes():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for door in every_door(lambda d=dtype: Scalars(300, d), backend, **options):
                x = torch.full((300,), rank + 1.0, dtype=dtype)
                for _ in range(4):
                    door.zero_grad()
                    with door.no_sync():
                        door(x).backward()
                    door(x).backward()
                    got = door.module.weight.grad
                    assert got.dtype == dtype
                    # 3 is a number of every dtype; int4's scale is not exact.
                    assert got.tolist() == pytest.approx([3.0] * 300, rel=1e-6 + _scale_error(options))


@engines
def test_gradients_come_back_in_their_own_dtype(backend):
    """Case 15. Every wire type under every dtype of parameters, four steps of two batches each."""
    run_on_ranks(_every_type, 2, timeout_s=120, args=(backend,))


class Silent(nn.Module):
    """A table with rows of zero gradient between large ones, and a matrix whose gradient is zero everywhere."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 256))
        self.quiet = nn.Parameter(torch.ones(3, 200))

    def forward(self, x):
        rows = torch.tensor([0.0, 1.0, 0.0, 1e4])[:, None] * x
        return (self.table * rows).sum() + (self.quiet * 0.0).sum()


def _zeros(rank, world_size, backend):
    for options in feedback_modes():
        for door in every_door(Silent, backend, **options):
            used = torch.zeros(2, 256, dtype=torch.float64)
            for step in range(20):
                x = torch.randn(256, generator=torch.Generator().manual_seed(100 * step + rank))
                other = torch.randn(256, generator=torch.Generator().manual_seed(100 * step + 1 - rank))
                door.zero_grad()
                door(x).backward()
                table, quiet = door.module.table.grad, door.module.quiet.grad
                assert_same_bits(table[[0, 2]], torch.zeros(2, 256))
                assert_same_bits(quiet, torch.zeros(3, 200))
                used += table[[1, 3]].double() / torch.tensor([[1.0], [1e4]]) - (x + other).double() / 2
            # What is lost in the sum of 20 steps is in the residuals: each at most two roundings of twice the largest there.
            assert used.abs().max() <= 4 * ONE_ROUNDING[options["codec"]] * 5, options
            assert_same_on_all_ranks(gradients(door.module))


@engines
def test_zero_stays_zero(backend):
    """Case 19. Rows and buckets of zeros under scales and residuals, 20 steps; rows beside them are as without."""
    run_on_ranks(_zeros, 2, timeout_s=120, args=(backend,))


@pytest.mark.gpu
def test_gpu_bf16_mean_is_not_zero(tmp_path):
    """Case 6. gsync divides in its own kernel and asks NCCL for plain sums, so no pre-multiplied sum can return zeros."""
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        for kind in DOORS:
            door = Door(kind, Scalars(1000).cuda(), "native", codec="bf16")
            door(torch.full((1000,), 3.0, device="cuda")).backward()
            assert door.module.weight.grad.tolist() == [3.0] * 1000
            door.close()
    finally:
        torch.distributed.destroy_process_group()


def test_every_codec_is_tried_here():
    """Case 15. A codec that is added has to be tried, too."""
    assert set(ONE_ROUNDING) == set(CODECS) == {options["codec"] for options in modes()}
