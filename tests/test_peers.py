"""Ranks that do not fit together: told when they meet, by both, with what each has; nothing is trained on."""

import contextlib
import re
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from ddp_cases import assert_same_bits, batch, gradients, mlp
from field_cases import DOORS, Door, engines
from ranks import run_on_ranks, watch_ranks
from torch.nn.parallel import DistributedDataParallel

import gsync
from gsync import _native, env

BLOCKS = {"codec": "int8", "exempt": ()}
# What rank 0 is given, what rank 1 is given, and the words about it.
OPTIONS = {
    "codec": ({"codec": "bf16"}, {"codec": "fp16"}, "codec is \"'fp16'\", on rank 0 it is \"'bf16'\""),
    "codec by pattern": (
        {"codec": {"0.*": "bf16", "*": "int8"}},
        {"codec": {"0.*": "int8", "*": "int8"}},
        "codec is \"{'0.*': 'int8', '*': 'int8'}\", on rank 0 it is \"{'0.*': 'bf16', '*': 'int8'}\"",
    ),
    "block size": ({**BLOCKS, "block_size": 32}, {**BLOCKS, "block_size": 64}, "block_size is '64', on rank 0 it is '32'"),
    "exempt": (
        {"codec": "int8", "exempt": ["0.*"]},
        {"codec": "int8", "exempt": ["2.*"]},
        "parameters[0] is 0.bias (67,) torch.float32 int8, on rank 0 it is 0.bias (67,) torch.float32 bf16",
    ),
    "exempt codec": (
        {"codec": "int8", "exempt_codec": "fp32"},
        {"codec": "int8"},
        "parameters[0] is 0.bias (67,) torch.float32 bf16, on rank 0 it is 0.bias (67,) torch.float32 fp32",
    ),
    "seed": (
        {**BLOCKS, "rounding": "stochastic", "seed": 1},
        {**BLOCKS, "rounding": "stochastic"},
        "seed is 0, on rank 0 it is 1",
    ),
    "rounding": ({**BLOCKS, "rounding": "stochastic"}, BLOCKS, "rounding is \"'nearest'\", on rank 0 it is \"'stochastic'\""),
    "exchange": (
        {"exchange": "scatter_gather"},
        {"exchange": "all_reduce"},
        "exchange is \"'all_reduce'\", on rank 0 it is \"'scatter_gather'\"",
    ),
    "average": ({"average": False}, {}, "average is 'True', on rank 0 it is 'False'"),
    "slices": ({"slice_mb": 1}, {"slice_mb": 2}, "slice_mb is '2', on rank 0 it is '1'"),
    "error feedback": ({**BLOCKS, "error_feedback": True}, BLOCKS, "error_feedback is 'False', on rank 0 it is 'True'"),
    "start": ({**BLOCKS, "start_step": 3}, BLOCKS, "start_step is '0', on rank 0 it is '3'"),
}


def _tell(rank, make, kind, backend, **options):
    """The error with which the first backward pass, or the making of the reducer, ends; and what became of the model."""
    module = make()
    before = [param.detach().clone() for param in module.parameters()]
    error = None
    try:
        door = Door(kind, module, backend, **options)
        door(batch(rank, 0)).square().sum().backward()
    except ValueError as caught:
        error = str(caught)
    assert error is not None, "nobody noticed"
    assert_same_bits([param.detach() for param in module.parameters()], before)
    assert all(bool(g.isnan().all()) for g in gradients(module))
    return error


def _options(rank, world_size, kind, backend):
    return {name: _tell(rank, mlp, kind, backend, **pair[rank]) for name, pair in OPTIONS.items()}


@engines
@pytest.mark.parametrize("kind", DOORS)
def test_another_configuration_is_told_by_every_rank(kind, backend):
    here, there = run_on_ranks(_options, 2, args=(kind, backend), timeout_s=120)
    for name, (_, _, words) in OPTIONS.items():
        assert here[name] == there[name]
        assert "gsync was given different things on different ranks: rank 1: " in here[name] and words in here[name], here[name]


class Other(nn.Module):
    """`mlp` with another name, shape, dtype or number of parameters, or another order in memory."""

    def __init__(self, rank, what):
        super().__init__()
        self.first = nn.Linear(31, 8 if what == "shape" and rank else 9)
        second = nn.Linear(self.first.out_features, 4, dtype=torch.float64 if what == "dtype" and rank else None)
        setattr(self, "third" if what == "name" and rank else "second", second)
        if what == "strides" and rank:
            self.first.weight.data = self.first.weight.data.t().contiguous().t()
        if what == "number" and rank:
            self.unlike = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        second = getattr(self, "second", None) or self.third
        return second(self.first(x).to(second.weight.dtype)) + getattr(self, "unlike", 0.0)


MODELS = {
    "shape": "parameters[0] is first.bias (8,) torch.float32 bf16, on rank 0 it is first.bias (9,) torch.float32 bf16",
    "dtype": "parameters[2] is second.bias (4,) torch.float64 bf16, on rank 0 it is second.bias (4,) torch.float32 bf16",
    "name": "parameters[2] is third.bias (4,) torch.float32 bf16, on rank 0 it is second.bias (4,) torch.float32 bf16",
    "number": "5 parameters, on rank 0 4",
    "strides": "strides of parameters[1] is first.weight (1, 9), on rank 0 it is first.weight (31, 1)",
}


def _models(rank, world_size, backend):
    return {what: _tell(rank, lambda: Other(rank, what), "reducer", backend) for what in MODELS}  # noqa: B023


@engines
def test_another_model_is_told_by_every_rank(backend):
    """Under DDP most of this is DDP's own to tell, when it is made."""
    here, there = run_on_ranks(_models, 2, args=(backend,))
    for what, words in MODELS.items():
        assert here[what] == there[what] and words in here[what], here[what]


def _memory_order(rank, world_size, backend):
    """DDP compares strides when it is made; rank 1 changes them then."""
    model = DistributedDataParallel(Other(0, ""))
    gsync.register(model, backend=backend)
    if rank == 1:
        weight = model.module.first.weight
        weight.data = weight.data.t().contiguous().t()
    with pytest.raises(ValueError, match=re.escape(MODELS["strides"])):
        model(batch(rank, 0)).sum().backward()


def _ddp_buckets(rank, world_size, backend):
    """Buckets of other lengths, over which Gloo would end the process."""
    found = []
    for pair in (
        ({"bucket_cap_mb": 1e-3}, {"bucket_cap_mb": 25}),
        ({}, {"find_unused_parameters": False}),
        ({}, {"static_graph": True}),
    ):
        model = DistributedDataParallel(mlp(), **{"find_unused_parameters": True, **pair[rank]})
        gsync.register(model, backend=backend)
        with pytest.raises(ValueError, match="gsync was given different things on different ranks") as caught:
            model(batch(rank, 0)).sum().backward()
        assert all(bool(g.isnan().all()) for g in gradients(model))
        found.append(str(caught.value))
    return found


@engines
def test_other_buckets_of_ddp_are_told_by_every_rank(backend):
    run_on_ranks(_memory_order, 2, args=(backend,))
    here, there = run_on_ranks(_ddp_buckets, 2, args=(backend,))
    assert here == there
    assert "bucket_cap_mb of DDP is 25.0, on rank 0 it is 0.00" in here[0]
    assert "bucket_cap_mb of DDP is None, on rank 0 it is 25.0" in here[1]  # rank 0 cuts those of rank 1
    assert "bucket_cap_mb of DDP is None, on rank 0 it is 25.0" in here[2]


def _bucket_mb(rank, world_size, backend):
    with pytest.raises(ValueError, match=r"bucket_mb is '2', on rank 0 it is '1'"):
        gsync.GradReducer(mlp(), backend=backend, bucket_mb=1 + rank)
    with pytest.raises(ValueError, match="broadcast_buffers is True, on rank 0 it is False"):
        gsync.GradReducer(mlp(), backend=backend, broadcast_buffers=bool(rank))


@engines
def test_other_buckets_of_the_reducer_are_told_by_every_rank(backend):
    run_on_ranks(_bucket_mb, 2, args=(backend,))


@contextlib.contextmanager
def _changed(rank, owner, name, value):
    """On rank 1 `owner.name` is `value` meanwhile."""
    before = getattr(owner, name)
    if rank == 1:
        setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _installations(rank, world_size, kind):
    with _changed(rank, gsync, "__version__", "99.0"):
        version = _tell(rank, mlp, kind, "auto")
    with _changed(rank, env, "ENV", replace(env.ENV, debug=True)):
        debug = _tell(rank, mlp, kind, "auto")
    engine = _tell(rank, mlp, kind, ("native", "reference")[rank]) if hasattr(_native.C, "Engine") else None
    return version, debug, engine


@pytest.mark.parametrize("kind", DOORS)
def test_another_installation_is_told_by_every_rank(kind):
    here, there = run_on_ranks(_installations, 2, args=(kind,))
    assert here == there
    version, debug, engine = here
    assert f"version of gsync is '99.0', on rank 0 it is '{gsync.__version__}'" in version
    assert "GSYNC_DEBUG is True, on rank 0 it is False" in debug
    assert engine is None or "engine is \"('python', 'reference')\", on rank 0 it is \"('native', 'native')\"" in engine


def _late_difference(rank, world_size):
    """Three ranks: the one that fits hears of the one that does not."""
    return _tell(rank, mlp, "ddp", "auto", codec="fp16" if rank == 2 else "bf16")


def test_ranks_that_fit_hear_which_one_does_not():
    texts = run_on_ranks(_late_difference, 3)
    assert len(set(texts)) == 1 and "ranks: rank 2: codec is \"'fp16'\"" in texts[0], texts


def _no_gsync(rank, world_size):
    """Rank 1 has stock DDP: it never comes to the meeting."""
    model = DistributedDataParallel(mlp())
    if rank == 0:
        gsync.register(model, timeout_s=2.0)
        with pytest.raises(gsync.SyncTimeoutError, match=r"rank 0 waited 2 s for rank 1 to start synchronising"):
            model(batch(rank, 0)).sum().backward()
        return bool(torch.stack([g.isnan().all() for g in gradients(model)]).any())
    with pytest.raises(RuntimeError):
        model(batch(rank, 0)).sum().backward()
    return True


def test_a_rank_without_gsync_is_missed():
    outcomes = watch_ranks(_no_gsync, 2, 60, group_timeout_s=5.0)
    assert [outcome.value for outcome in outcomes] == [True, True], outcomes
