"""GSYNC_DEBUG=1: what it finds, on which ranks, in which words; and that it ends where a rank has failed."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ddp_cases import assert_same_bits, assert_same_on_all_ranks, batch, gradients, mlp
from field_cases import DOORS, Door, engines, options_of
from ranks import run_on_ranks, watch_ranks
from reducer_cases import Layouts, each_engine
from torch.nn.parallel import DistributedDataParallel

import gsync
from gsync import debug, env

doors = pytest.mark.parametrize("kind", DOORS)
two_of_them = pytest.mark.parametrize(
    ("kind", "backend"), [pytest.param(kind, *e.values, marks=e.marks) for kind, e in zip(DOORS, each_engine(), strict=True)]
)
TIMEOUT_S, MARGIN_S = 3.0, 3.0


def switch_on(is_on=True):
    env.ENV = replace(env.ENV, debug=is_on)


def debugged(fn):
    """Runs `fn` with GSYNC_DEBUG=1, in a process that is used again."""

    def run(*args):
        switch_on()
        try:
            return fn(*args)
        finally:
            switch_on(False)

    run.__module__, run.__qualname__, run.__wrapped__ = fn.__module__, fn.__qualname__, fn
    return run


class Frozen(nn.Module):
    """Parameters of several kinds: frozen, complex, empty, of other dtypes, shared, sparse."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.layer = nn.Linear(4, 3)
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(300).bfloat16())
        self.pairs = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.zeros(0, 2))
        self.unused = nn.Parameter(torch.ones(2))
        self.rows = nn.Embedding(6, 3, sparse=True)

    def forward(self, x):
        y = self.layer(x[:, :4]).square().sum() + self.rows(torch.tensor([1, 4])).sum()
        z = self.wide.sum() + self.narrow.float().square().sum() + (self.pairs * (1 + 2j)).abs().square().sum()
        return y + z + self.nothing.sum()


@debugged
def _checked(rank, world_size, kind, backend):
    """Models of several kinds, with and without: the same gradients, and nothing is found."""
    for make, width, ddp in ((mlp, 31, {}), (Layouts, 60, {}), (Frozen, 31, {"find_unused_parameters": True})):
        for options in (options_of("bf16"), options_of("int8", error_feedback=True)):
            results = []
            for is_on in (True, False):
                switch_on(is_on)
                door = Door(kind, make(), backend, bucket_mb=1e-3, ddp=ddp, **options)
                optimizer = torch.optim.SGD(door.module.parameters(), 1e-3)
                for step in range(4):
                    optimizer.zero_grad()
                    x = batch(rank, step, width) if make is not Layouts else Layouts.batch(rank, step)
                    with door.no_sync() if step == 1 else torch.enable_grad():
                        door(x).sum().backward()
                    if step == 1:
                        door(x).sum().backward()
                    optimizer.step()
                assert (door.sync._checks is not None) is is_on
                results.append([g.to_dense() if g.is_sparse else g for g in gradients(door.module)])
                door.close()
            assert_same_bits(*results)
            assert_same_on_all_ranks([g.contiguous() for g in results[0] if g.numel()])


@engines
@doors
def test_it_changes_nothing_and_finds_nothing_where_all_is_right(kind, backend):
    run_on_ranks(_checked, 2, args=(kind, backend), timeout_s=120)


def _caught(call):
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "no error", "", 0.0


def _is_marked(module):
    found = gradients(module)
    return bool(found) and all(bool(g.isnan().all()) for g in found)


@debugged
def _drifted(rank, world_size, kind, backend):
    door = Door(kind, mlp(), backend)
    door(batch(rank, 0)).sum().backward()
    with torch.no_grad():
        if rank == 2:
            door.module[2].bias[3] += 1e-3
            door.module[4].weight[1, 1] += 1e-3
    told = _caught(lambda: door(batch(rank, 1)).sum().backward())
    again = _caught(door.sync.grad_norm)
    marked = _is_marked(door.module)
    dist.barrier()
    with torch.no_grad():  # mended, and reset
        for param in door.module.parameters():
            dist.broadcast(param, 0)
    door.sync.reset()
    door.zero_grad()
    door(batch(rank, 2)).sum().backward()
    assert_same_on_all_ranks(gradients(door.module))
    return told, again, marked


@engines
@doors
def test_a_parameter_that_differs_is_named_with_the_ranks(kind, backend):
    for told, again, marked in run_on_ranks(_drifted, 3, args=(kind, backend)):
        assert told[0] == "SyncError", told
        assert "step 1" in told[1] or "step 2" in told[1], told
        assert "GSYNC_DEBUG: parameter '2.bias' on rank 2 is not what it is on rank 0; 2 of 6 parameters differ" in told[1]
        assert again[:2] == told[:2] and marked


@debugged
def _other_buckets(rank, world_size, kind, backend):
    """Rank 1 cuts other buckets, behind the back of whatever looks at that before."""
    if kind == "ddp":
        module = mlp()
        model = DistributedDataParallel(module, bucket_cap_mb=25 if rank else 1e-3, find_unused_parameters=True)
        sync = gsync.SyncState(module=module, backend=backend)
        model.register_comm_hook(sync, gsync.hook)
    else:
        model = module = mlp()
        sync = gsync.GradReducer(module, backend=backend)
        if rank == 1:
            sync._set_buckets(sync._initial_order[::-1], ())
    told = _caught(lambda: model(batch(rank, 0)).sum().backward())
    return told, _is_marked(module)


@engines
@doors
def test_buckets_that_differ_are_named_before_anything_is_sent(kind, backend):
    for (name, text, _), marked in run_on_ranks(_other_buckets, 2, args=(kind, backend)):
        assert name == "SyncError", text
        assert "GSYNC_DEBUG: bucket 0 of step 0 is not the same on all ranks: " in text
        first = "parameter 0 of it is '4.bias' of 7 elements, bf16 on rank 0, and '0.weight' of 2077 elements, bf16 on rank 1"
        assert first in text, text
        assert marked


@debugged
def _other_codec(rank, world_size, backend):
    """The engine of rank 1 has been given another codec than the ranks agreed on."""
    door = Door("ddp", mlp(), backend)
    door(batch(rank, 0)).sum().backward()
    if rank == 1:
        entries = door.sync._checks._entries
        entries.update({key: (name, "fp16") for key, (name, _) in entries.items() if name == "4.bias"})
    return _caught(lambda: door(batch(rank, 1)).sum().backward())


@engines
def test_another_codec_is_named(backend):
    for name, text, _ in run_on_ranks(_other_codec, 2, args=(backend,)):
        assert name == "SyncError", text
        assert "'4.bias' of 7 elements, bf16 on rank 0, and '4.bias' of 7 elements, fp16 on rank 1" in text


@debugged
def _skipped(rank, world_size, kind, backend):
    """Rank 1 leaves its second backward pass in the middle and goes on with the third."""
    door = Door(kind, mlp(), backend, bucket_mb=1e-3, timeout_s=20.0)
    for _ in range(2):
        door(batch(rank, 0)).sum().backward()
    handles = []

    def fail(_):
        raise ZeroDivisionError

    if rank == 1:
        handles = [door.module[2].weight.register_hook(fail)]
    told = _caught(lambda: door(batch(rank, 1)).sum().backward())
    for handle in handles:
        handle.remove()
    then = _caught(lambda: door(batch(rank, 2)).sum().backward())
    return told, then, any(bool(g.isnan().all()) for g in gradients(door.module))


@two_of_them
def test_a_backward_pass_that_is_left_ends_the_others_at_once(kind, backend):
    here, there = watch_ranks(_skipped, 2, 60, args=(kind, backend), group_timeout_s=30.0)
    assert here.error is None and there.error is None, (here, there)
    (name, text, seconds), _, marked = here.value
    assert name == "SyncError" and "GSYNC_DEBUG" in text and seconds < MARGIN_S and marked, here.value
    (first, _, _), (second, _, _), _ = there.value
    assert first == "ZeroDivisionError", there.value
    assert second == ("RuntimeError" if kind == "ddp" else "SyncError"), there.value  # DDP's own: not all gradients came
    assert [here.exit_code, there.exit_code] == [0, 0]


@debugged
def _wrong_norm(rank, world_size, kind, backend):
    door = Door(kind, mlp(), backend)
    door(batch(rank, 0)).sum().backward()
    if rank == 1:
        checks = door.sync._checks
        right = checks._engine

        class Wrong:
            failed = property(lambda self: right.failed)

            def __getattr__(self, name):
                return getattr(right, name)

            def sum_of_squares(self):
                return 1.01 * right.sum_of_squares()

        checks._engine = Wrong()
    door.zero_grad()
    told = _caught(lambda: door(batch(rank, 1)).sum().backward())
    return told, _is_marked(door.module), _caught(door.sync.grad_norm)


@engines
@doors
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_norm_that_is_not_that_of_the_gradients_is_told_with_both_values(kind, backend, world_size):
    switch = {1: _wrong_norm_alone, 2: _wrong_norm}[world_size]
    for (name, text, _), marked, again in run_on_ranks(switch, world_size, args=(kind, backend)):
        assert name == "InternalError" and "GSYNC_DEBUG: on rank" in text, text
        values = [float(part.split(",")[0].split(";")[0]) for part in text.replace(" gradients ", " is ").split(" is ")[1:3]]
        assert values[0] == pytest.approx(1.01**0.5 * values[1])
        assert marked and again[0] == "SyncError"


@debugged
def _wrong_norm_alone(rank, world_size, kind, backend):
    return _wrong_norm.__wrapped__(1, world_size, kind, backend)


@debugged
def _uneven(rank, world_size, backend):
    """Rank 1 has fewer batches: with join its parameters are not compared, with wait() they are."""
    model = DistributedDataParallel(mlp())
    sync = gsync.register(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with model.join():
        for step in range(4 - 2 * rank):
            optimizer.zero_grad()
            model(batch(rank, step)).sum().backward()
            optimizer.step()
    assert sync.stats().steps >= 4
    module = mlp()
    reducer = gsync.GradReducer(module, backend=backend)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    for step in range(4):
        optimizer.zero_grad()
        if step < 2 or rank == 0:
            module(batch(rank, step)).sum().backward()
        reducer.wait()
        optimizer.step()
    assert_same_on_all_ranks(list(module.parameters()))


@engines
def test_ranks_without_a_batch_take_part(backend):
    run_on_ranks(_uneven, 2, args=(backend,))


@debugged
def _killed(rank, world_size, kind, backend):
    door = Door(kind, mlp(), backend, bucket_mb=1e-3)
    for step in range(20):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        told = _caught(lambda step=step: door(batch(rank, step)).sum().backward())
        if told[0] != "no error":
            return told
    return None


@two_of_them
def test_a_rank_that_is_killed_ends_the_others_at_once(kind, backend):
    outcomes = watch_ranks(_killed, 2, 60, args=(kind, backend), group_timeout_s=60.0)
    assert outcomes[1].exit_code == -signal.SIGKILL
    name, text, seconds = outcomes[0].value
    assert name == "SyncError" and "the ranks could not be compared" in text and seconds < MARGIN_S, outcomes[0]


@debugged
def _late(rank, world_size, kind, backend):
    door = Door(kind, mlp(), backend, timeout_s=TIMEOUT_S)
    for _ in range(2):  # DDP itself communicates in the second forward pass
        door(batch(rank, 0)).sum().backward()
    if rank == 1:
        time.sleep(TIMEOUT_S + 2)
    return _caught(lambda: door(batch(rank, 1)).sum().backward())


@two_of_them
def test_a_rank_that_is_late_is_an_error_in_time(kind, backend):
    here, there = watch_ranks(_late, 2, 60, args=(kind, backend), group_timeout_s=60.0)
    assert here.value[0] == "SyncTimeoutError" and here.value[2] < TIMEOUT_S + MARGIN_S, here
    assert there.value[0].startswith("Sync"), there


def test_a_bucket_that_has_more_and_ranks_in_different_places_are_told():
    text = debug._different_buckets(3, 1, [["'a'", "'b'"], ["'a'", "'b'"], ["'a'"]])
    assert text.startswith("GSYNC_DEBUG: bucket 1 of step 3 is not the same on all ranks: ")
    assert text.endswith("it has 2 parameters on rank 0 and 1 on rank 2; 'b' is on rank 0 only")
    headers = [torch.tensor([debug._END, 4, 0, 17]), torch.tensor([debug._BUCKET, 5, 2, 18])]
    expected = "the ranks are in different places: rank 0 is at the end of step 4, rank 1 is at bucket 2 of step 5"
    assert debug._different_places(headers) == f"GSYNC_DEBUG: {expected}"


def test_the_variable_switches_it_on():
    assert [env.read({"GSYNC_DEBUG": value}).debug for value in ("1", "0", "")] == [True, False, False]
    with pytest.raises(ValueError, match="GSYNC_DEBUG='yes': expected one of 0, 1"):
        env.read({"GSYNC_DEBUG": "yes"})


def test_it_is_off_unless_asked_for():
    assert env.read({}).debug is False
    module = mlp()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        reducer = gsync.GradReducer(module)
        module(batch(0, 0)).sum().backward()
        assert reducer._checks is None
        reducer.close()
    finally:
        dist.destroy_process_group()
