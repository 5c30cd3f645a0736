"""Which parameters GradReducer puts together, and in which order."""

# ruff: noqa: B023 (what captures a loop variable is called in the same round)

import pytest
import torch
import torch.nn as nn
from ddp_cases import batch, mlp
from ranks import run_on_ranks
from reducer_cases import alone, assert_gradients, each_engine

import gsync
from gsync.bucket_order import FIRST_BUCKET_BYTES, make_buckets, sparse_parameters


def _params(*numels, dtype=torch.float32):
    return [torch.empty(numel, dtype=dtype, device="meta") for numel in numels]


def test_every_parameter_is_in_one_bucket_in_the_order_given():
    params = _params(*[100] * 50)
    order = [*range(49, -1, -1)]
    buckets = make_buckets(order, params, (), (), 1000)
    assert [idx for bucket in buckets for idx in bucket.parameters] == order
    assert all(sum(params[i].numel() * 4 for i in bucket.parameters) <= 1200 for bucket in buckets)
    assert not any(bucket.is_sparse or bucket.is_late for bucket in buckets)


def test_first_bucket_of_each_dtype_is_small():
    numel = FIRST_BUCKET_BYTES // 4 // 4
    params = [*_params(*[numel] * 40), *_params(*[numel] * 40, dtype=torch.float64)]
    buckets = make_buckets(range(80), params, (), (), 25 * 2**20)
    sizes = {}
    for bucket in buckets:
        kinds = {params[i].dtype for i in bucket.parameters}
        assert len(kinds) == 1
        sizes.setdefault(kinds.pop(), []).append(sum(params[i].nbytes for i in bucket.parameters))
    assert [own[0] for own in sizes.values()] == [FIRST_BUCKET_BYTES] * 2
    assert all(size > FIRST_BUCKET_BYTES for own in sizes.values() for size in own[1:])


def test_buckets_come_in_the_order_of_their_last_gradient():
    params = [*_params(10, 10), *_params(10, 10, dtype=torch.float64)]
    buckets = make_buckets([0, 2, 3, 1], params, (), (), 10**6)
    assert [bucket.parameters for bucket in buckets] == [[2, 3], [0, 1]]


def test_sparse_and_late_parameters_have_buckets_of_their_own():
    params = _params(10, 10, 10, 10)
    buckets = make_buckets([0, 1, 2, 3], params, {1}, {0}, 10**6)
    assert buckets == [([1], True, False), ([2, 3], False, False), ([0], False, True)]
    module = nn.ModuleList([nn.Embedding(3, 2, sparse=True), nn.Linear(2, 3), nn.Embedding(3, 2)])
    params = list(module.parameters())
    assert sparse_parameters(module, params) == {0}
    module[1].weight = module[0].weight
    assert sparse_parameters(module, params) == set()


class Backwards(nn.Module):
    """Its last registered layer is used first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(31, 31) for _ in range(4)])

    def forward(self, x, order=(3, 1, 0, 2)):
        for i in order:
            x = self.layers[i](x).tanh()
        return x


def _learned(rank, world_size, backend):
    model = Backwards()
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend, bucket_mb=1e-6)

    def layers():
        return [int(reducer._names[bucket.parameters[0]].split(".")[1]) for bucket in reducer._buckets]

    assert layers() == [3, 3, 2, 2, 1, 1, 0, 0]
    # Rank 0's order counts, whatever the others see.
    order = (3, 1, 0, 2) if rank == 0 else (0, 1, 2, 3)
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step), order).square().sum().backward()
        assert layers() == [2, 2, 0, 0, 1, 1, 3, 3]
        orders = [(3, 1, 0, 2), *[(0, 1, 2, 3)] * (world_size - 1)]
        assert_gradients(model, alone(model, world_size, lambda m, r: m(batch(r, step), orders[r]).square().sum()), 1e-5)


@pytest.mark.parametrize("backend", each_engine())
def test_order_is_learned_in_the_first_step_and_then_fixed(backend):
    run_on_ranks(_learned, 3, args=(backend,))


def _memory(rank, world_size, backend):
    """Wire buffers only, and they do not grow."""
    model = mlp(width=700)
    reducer = gsync.GradReducer(model, codec="bf16", backend=backend, slice_mb=0.05, bucket_mb=0.1)
    held = []
    for step in range(6):
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        addresses = {g.grad.untyped_storage().data_ptr() for g in model.parameters()}
        assert len(addresses) == 6
        held.append(reducer._engine.stats()["buffer_bytes"])
    gradients = sum(param.numel() * 4 for param in model.parameters())
    assert held[1:] == [held[1]] * 5 and held[1] <= 0.6 * gradients


@pytest.mark.parametrize("backend", [engine for engine in each_engine() if engine.values[0] == "native"])
def test_memory_is_wire_buffers_only(backend):
    run_on_ranks(_memory, 2, args=(backend,))


def _copies(model, x):
    """How many tensors a backward pass copies."""
    loss = model(x).square().sum()
    with torch.autograd.profiler.profile() as profile:
        loss.backward()
    return sum(event.name in ("aten::copy_", "aten::clone") for event in profile.function_events)


def _packed_in_place(rank, world_size):
    model, plain = mlp(), mlp()
    gsync.GradReducer(model, codec="bf16", backend="native")
    x = batch(rank, 0)
    for _ in range(3):
        for module in (model, plain):
            module.zero_grad()
        assert _copies(model, x) == _copies(plain, x)


def test_gradients_are_packed_from_where_autograd_left_them():
    """Those of linear layers are views (of a transposed product, of a sum), whose memory nobody else reads."""
    run_on_ranks(_packed_in_place, 2)
