"""Graphs in which hooks fire twice, late or not at all: the mean of the whole, or an error; never a silent difference."""

import copy
import warnings

import pytest
import torch
import torch.nn as nn
from ddp_cases import Scalars, assert_same_bits, assert_same_on_all_ranks, batch, gradients, mlp, stock
from field_cases import Door, engines, every_door, modes, options_of
from ranks import run_on_ranks
from reducer_cases import alone, assert_gradients
from torch.utils.checkpoint import checkpoint

import gsync


class Twice(nn.Module):
    """A layer used twice inside checkpoints, tied to a third use outside of them."""

    def __init__(self, reentrant, shared=True):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.reentrant, self.shared = reentrant, shared

    def forward(self, x):
        x = x.clone().requires_grad_()
        x = x + checkpoint(self.first, x, use_reentrant=self.reentrant)
        x = x + checkpoint(self.first if self.shared else self.second, x, use_reentrant=self.reentrant)
        return self.head(x).square().sum()


def _reentrant_and_shared(rank, world_size, backend):
    """In the first backward pass already."""
    ours = Door("ddp", Twice(True), backend, codec="fp32")
    try:
        ours(batch(rank, 0, 8)).backward()
    except RuntimeError as error:
        return str(error)
    return "equal" if _equal_on_all_ranks(ours.module) else "different"


def _equal_on_all_ranks(module):
    mine = torch.cat([gradient.flatten() for gradient in gradients(module)])
    everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, mine)
    return all(torch.equal(mine, theirs) for theirs in everyone)


@engines
def test_reentrant_checkpoints_of_a_shared_layer_under_ddp(backend):
    """Case 59. DDP's reducer is done with a parameter at its first gradient: an error, never gradients that differ in silence."""
    for outcome in run_on_ranks(_reentrant_and_shared, 2, args=(backend,)):
        assert "ready" in outcome, outcome


def _create_graph(rank, world_size, backend):
    for options in modes():
        for door in every_door(lambda: Scalars(300), backend, **options):
            for _ in range(2):
                door.zero_grad()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    door(door.module.weight**2 * (rank + 1.0)).backward(create_graph=True)
                got = door.module.weight.grad
                assert got.tolist() == pytest.approx([4.5] * 300, rel=0.02)  # 3 w^2 (rank + 1), averaged
                assert_same_on_all_ranks(got.detach())
                door.module.weight.grad = None


@engines
def test_backward_with_create_graph(backend):
    """Case 63. The values are the mean in every mode; nothing writes into a leaf that autograd guards."""
    run_on_ranks(_create_graph, 2, timeout_s=90, args=(backend,))


class Tying(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x):
        return self.head(self.embed(x)).square().sum()


def _tie(module):
    module.head.weight = module.embed.weight


def _assign(module):
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


def _replace(module):
    module.embed.weight = nn.Parameter(module.embed.weight.detach().clone())


def _halve(module):
    module.to(torch.bfloat16)


def _after_attaching(rank, world_size, backend):
    for change in (_assign, _replace, _halve):
        model = Tying()
        reducer = gsync.GradReducer(model, codec="fp32", backend=backend)
        model(batch(rank, 0, 6)).backward()
        change(model)
        x = batch(rank, 1, 6).to(model.embed.weight.dtype)
        with pytest.raises(gsync.GsyncError, match="weight'"):
            model(x).backward()
        reducer.close()
    # Tied afterwards: one of the two is left over, the other gets both gradients.
    model = Tying()
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend)
    model(batch(rank, 0, 6)).backward()
    _tie(model)
    for step in range(2):
        model.zero_grad()
        model(batch(rank, step, 6)).backward()
        assert_gradients(model, alone(model, world_size, lambda m, r, step=step: m(batch(r, step, 6))), 1e-5)
    reducer.close()
    # DDP keeps the parameters that it was made with, gsync or not: one backward pass of this rank's own, then an error.
    for door in (Door("ddp", Tying(), backend, codec="fp32"), stock(Tying())):
        door(batch(rank, 0, 6)).backward()
        _replace(door.module)
        door.zero_grad()
        door(batch(rank, 1, 6)).backward()
        with pytest.raises(RuntimeError):
            door(batch(rank, 2, 6)).backward()


@engines
def test_parameters_replaced_after_attaching(backend):
    """Case 65. GradReducer raises at the next step and names the parameter. DDP raises one step later, as without gsync."""
    run_on_ranks(_after_attaching, 2, args=(backend,))


class Dropped(nn.Module):
    """Layers that are left out at random."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x, kept):
        for i in kept:
            x = x + self.layers[i](x).tanh()
        return x.square().sum()


def _kept(rank, step):
    return [i for i in range(6) if torch.rand(1, generator=torch.Generator().manual_seed(97 * step + 13 * i + rank)) > 0.5]


def _layer_drop(rank, world_size, backend):
    for bucket_mb in (1e-4, 25):
        for options in (options_of("fp32"), options_of("int8")):
            for door in every_door(Dropped, backend, bucket_mb=bucket_mb, ddp={"find_unused_parameters": True}, **options):
                for step in range(8):
                    kept = [_kept(r, step) or [0] for r in range(world_size)]
                    door.zero_grad()
                    door(batch(rank, step, 16), kept[rank]).backward()
                    expected = alone(door.module, world_size, lambda m, r, step=step, kept=kept: m(batch(r, step, 16), kept[r]))
                    bound = 1e-5 if options["codec"] == "fp32" else 0.02
                    assert_gradients(door.module, expected, bound)
                    assert_same_on_all_ranks(gradients(door.module))
    # No parameter at all on one rank, or on any.
    model = Dropped()
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend)
    for used_by in ((), (0,), (0,), (), (1,)):
        model.zero_grad()
        if rank in used_by:
            model(batch(rank, 0, 16), [1]).backward()
        reducer.wait()
        got = model.layers[1].weight.grad
        assert (got is not None) == any(r < world_size for r in used_by)
        assert model.layers[0].weight.grad is None
    reducer.close()


@engines
@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_left_out_at_random_on_each_rank(backend, world_size):
    """Case 67. Every bucket is flushed at the end of backward, used or not; one rank alone keeps what it has."""
    run_on_ranks(_layer_drop, world_size, timeout_s=90, args=(backend,))


def _compiled(rank, world_size, backend):
    for codec in ("fp32", "bf16"):
        eager, compiled = Twice(False, shared=False), Twice(False, shared=False)
        reducers = [gsync.GradReducer(each, codec=codec, backend=backend) for each in (eager, compiled)]
        run = torch.compile(compiled, backend="aot_eager")
        for step in range(3):
            for module, call in ((eager, eager), (compiled, run)):
                module.zero_grad()
                call(batch(rank, step, 8)).backward()
            for a, b in zip(gradients(eager), gradients(compiled), strict=True):
                assert torch.allclose(a, b, rtol=1e-5 if codec == "fp32" else 2.0**-7, atol=1e-6)
        for reducer in reducers:
            assert reducer.stats().steps == 3
            reducer.close()


@engines
def test_compiled_with_a_checkpointed_block(backend):
    """Case 69. aot_eager around a checkpointed block: the gradients of eager mode."""
    run_on_ranks(_compiled, 2, timeout_s=120, args=(backend,))


def _compiled_autograd(rank, world_size, backend):
    """A backward pass that torch compiles whole."""
    results = {}
    for kind in ("ddp", "reducer"):
        door = Door(kind, Scalars(5), backend, codec="fp32")
        door(torch.full((5,), rank + 1.0)).backward()
        door.zero_grad()
        with pytest.raises(RuntimeError) as caught, torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            door(torch.full((5,), rank + 1.0)).backward()
        results[kind] = str(caught.value)
    return results


@engines
def test_compiled_autograd_is_refused(backend):
    """Case 98. By DDP itself, and by GradReducer: never a step that was skipped in silence."""
    for results in run_on_ranks(_compiled_autograd, 2, timeout_s=120, args=(backend,), pool="compiled autograd"):
        assert "ompiled autograd" in results["ddp"] and "GradReducer does not work under compiled autograd" in results["reducer"]


def _two_forwards(rank, world_size, backend):
    model = nn.Sequential(nn.Linear(31, 9), nn.BatchNorm1d(9), nn.Linear(9, 1))
    for options in modes():
        ours = Door("ddp", copy.deepcopy(model), backend, ddp={"broadcast_buffers": False}, **options)
        theirs = stock(model, broadcast_buffers=False)
        for step in range(2):
            for each in (ours, theirs):
                each.zero_grad()
                (each(batch(rank, step)).mean() - each(batch(rank, step + 50)).mean()).backward()
            if options["codec"] == "fp32":
                assert_same_bits(gradients(ours.module), gradients(theirs))
            assert_same_on_all_ranks(gradients(ours.module))
        ours.close()
    # GradReducer may set buffers between the two forward passes.
    other = mlp()
    norm = nn.Sequential(other, nn.BatchNorm1d(7))
    gsync.GradReducer(norm, codec="fp32", backend=backend, broadcast_buffers=True)
    for step in range(2):
        norm.zero_grad()
        (norm(batch(rank, step)).square().mean() - norm(batch(rank, step + 50)).square().mean()).backward()
        assert_same_on_all_ranks(gradients(norm))


@engines
def test_two_forward_passes_before_one_backward(backend):
    """Case 62. A discriminator with batch norm: nothing that autograd has saved is changed in place."""
    run_on_ranks(_two_forwards, 2, timeout_s=90, args=(backend,))
