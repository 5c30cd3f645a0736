"""Autograd graphs under GradReducer: tied weights, checkpointing, shared memory, graphs of gradients, torch.compile."""

# ruff: noqa: B023 (what captures a loop variable is called in the same round)

import warnings

import pytest
import torch
import torch.nn as nn
from ddp_cases import Scalars, assert_same_on_all_ranks, batch, gradients, mlp
from ranks import run_on_ranks
from reducer_cases import alone, assert_gradients, each_engine
from torch.utils.checkpoint import checkpoint

import gsync

engines = pytest.mark.parametrize("backend", each_engine())


def _step(model, loss, rank, world_size, rtol=1e-6):
    """One synchronised backward pass, compared with one process that has all losses."""
    model.zero_grad()
    loss(model, rank).backward()
    assert_gradients(model, alone(model, world_size, lambda m, r: loss(m, r)), rtol)
    assert_same_on_all_ranks(gradients(model))


class Tied(nn.Module):
    """A weight used twice, and one module in two places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.middle(self.middle(self.embed(tokens)).tanh()))


def _tied(rank, world_size, backend):
    model = Tied()
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend, bucket_mb=1e-6)
    assert sum(len(bucket.parameters) for bucket in reducer._buckets) == 3

    def loss(m, r):
        return m(torch.tensor([r, 3, 5])).square().sum()

    for _ in range(3):
        _step(model, loss, rank, world_size)


@engines
def test_tied_weights(backend):
    run_on_ranks(_tied, 2, args=(backend,))


class Blocks(nn.Module):
    """Checkpointed blocks between two plain layers; `twice` uses one block again."""

    def __init__(self, use_reentrant, twice=False):
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(31, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(16, 4)
        self.use_reentrant, self.twice = use_reentrant, twice

    def forward(self, x):
        x = self.first(x)
        for block in [*self.blocks, *([self.blocks[0]] if self.twice else [])]:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


def _checkpointing(rank, world_size, backend):
    for use_reentrant in (False, True):
        for twice in (False, True):
            model = Blocks(use_reentrant, twice)
            reducer = gsync.GradReducer(model, codec="fp32", backend=backend, bucket_mb=1e-6)
            for step in range(4):
                _step(model, lambda m, r, step=step: m(batch(r, step)).square().sum(), rank, world_size, 2e-6)
            assert reducer.stats().steps == 4  # one for each outer backward pass, not for those nested in it
            assert model.unused.weight.grad is None
            reducer.close()


@engines
def test_checkpointing(backend):
    run_on_ranks(_checkpointing, 2, args=(backend,))


def _nested_only(rank, world_size, backend):
    """The module's own forward is not called, so that nothing tells of the outer backward pass; still the mean is right."""
    model = Blocks(True)
    gsync.GradReducer(model, codec="fp32", backend=backend, bucket_mb=1e-6)
    for step in range(3):
        model.zero_grad()
        model.forward(batch(rank, step)).square().sum().backward()
        assert_gradients(model, alone(model, world_size, lambda m, r: m(batch(r, step)).square().sum()), 2e-6)


@engines
def test_reentrant_checkpointing_without_the_modules_own_forward(backend):
    run_on_ranks(_nested_only, 2, args=(backend,))


class Aliases(nn.Module):
    """Autograd gives these parameters views of a gradient that others are still to read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.early = nn.Parameter(torch.randn(64))
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(32)) for _ in range(2)])
        self.flat = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        late = torch.cat([*self.parts])
        early = (self.early * x).exp().tanh()
        return ((early + late + self.flat.view(64)) * x).sum() + (late * early).sum()


def _aliases(rank, world_size, backend):
    model = Aliases()
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend, bucket_mb=1e-6)
    for step in range(8):
        x = [torch.randn(64, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world_size)]
        _step(model, lambda m, r, x=x: m(x[r]), rank, world_size)
    reducer.close()
    # A flat memory that the user has laid the gradients into stays theirs.
    model = mlp()
    memory = torch.zeros(sum(p.numel() for p in model.parameters()))
    begin = 0
    for param in model.parameters():
        param.grad = memory[begin : begin + param.numel()].view_as(param)
        begin += param.numel()
    gsync.GradReducer(model, codec="fp32", backend=backend, bucket_mb=1e-6)
    for step in range(3):
        memory.zero_()
        model(batch(rank, step)).square().sum().backward()
        expected = alone(model, world_size, lambda m, r: m(batch(r, step)).square().sum())
        assert_gradients(model, expected)
        assert torch.allclose(memory, torch.cat([g.flatten() for g in expected.values()]), rtol=1e-4, atol=1e-4)


@engines
def test_gradients_that_share_memory(backend):
    run_on_ranks(_aliases, 2, args=(backend,))


def _penalised(model, rank, step):
    """A loss with a gradient penalty."""
    x = batch(rank, step).requires_grad_()
    y = model(x).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return y + slope.square().sum()


def _graphs_of_gradients(rank, world_size, backend):
    model = mlp()
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend, bucket_mb=1e-3)
    for step in range(3):
        loss = _penalised(model, rank, step)
        assert reducer.stats().steps == step  # autograd.grad does not synchronise
        model.zero_grad()
        loss.backward()
        assert_gradients(model, alone(model, world_size, lambda m, r: _penalised(m, r, step)), 5e-6)
    # backward(create_graph=True): the values are the mean, the graph is this rank's own, as under DDP.
    small = Scalars(3)
    gsync.GradReducer(small, codec="fp32", backend=backend)
    for _ in range(2):
        small.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            small(small.weight**2 * (rank + 1.0)).backward(create_graph=True)
        assert small.weight.grad.tolist() == [4.5] * 3  # 3 w^2 (rank + 1)
        (second,) = torch.autograd.grad(small.weight.grad.sum(), small.weight)
        assert second.tolist() == [6.0 * (rank + 1)] * 3


@engines
def test_graphs_of_gradients(backend):
    run_on_ranks(_graphs_of_gradients, 2, args=(backend,))


def _outside_training(rank, world_size, backend):
    """Backward passes that reach no parameter of the module, or are not to be synchronised, cost nothing and change nothing."""
    model, other = Scalars(3), Scalars(3)
    reducer = gsync.GradReducer(model, backend=backend)
    other(torch.ones(3)).backward()
    if rank == 0:  # as a saliency map on one rank
        with reducer.no_sync():
            x = torch.ones(3, requires_grad=True)
            model(x).backward()
            model.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.ones(3))
    assert reducer.stats().steps == 0
    model(torch.full((3,), rank + 1.0)).backward()
    assert model.weight.grad.tolist() == [1.5] * 3


@engines
def test_backward_outside_of_training(backend):
    run_on_ranks(_outside_training, 2, args=(backend,))


def _compiled(rank, world_size, backend, compiler):
    for before in (False, True):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(31, 8), nn.Tanh(), nn.Linear(8, 3))
        compiled = torch.compile(model, backend=compiler)
        reducer = gsync.GradReducer(model if before else compiled, codec="fp32", backend=backend)
        assert reducer._names == ["0.bias", "0.weight", "2.bias", "2.weight"]
        for step in range(3):
            model.zero_grad()
            compiled(batch(rank, step)).square().sum().backward()
            assert_gradients(model, alone(model, world_size, lambda m, r: m(batch(r, step)).square().sum()), 1e-5)
        assert reducer.stats().steps == 3
        reducer.close()


@engines
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_modules(backend, compiler):
    run_on_ranks(_compiled, 2, 240, args=(backend, compiler))


@pytest.mark.parametrize("backend", [engine for engine in each_engine() if engine.values[0] == "native"])
def test_modules_compiled_by_inductor(backend):
    run_on_ranks(_compiled, 2, 240, args=(backend, "inductor"))


def _compiled_buffers(rank, world_size, backend):
    for before in (False, True):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(31, 8), nn.BatchNorm1d(8))
        compiled = torch.compile(model, backend="eager")
        reducer = gsync.GradReducer(model if before else compiled, backend=backend, broadcast_buffers=True)
        for step in range(2):
            compiled(batch(rank, step))
        compiled(batch(0, 9))  # starts from rank 0's buffers, with the same batch
        assert_same_on_all_ranks([model[1].running_mean, model[1].running_var])
        reducer.close()


@engines
def test_buffers_of_compiled_modules(backend):
    run_on_ranks(_compiled_buffers, 2, 240, args=(backend,))


def _fullgraph(rank, world_size, backend):
    model = mlp()
    gsync.GradReducer(model, codec="fp32", backend=backend)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _step(model, lambda m, r: (compiled if m is model else m)(batch(r, 0)).square().sum(), rank, world_size, 1e-5)


@engines
def test_hooks_do_not_break_the_graph(backend):
    run_on_ranks(_fullgraph, 2, args=(backend,))
