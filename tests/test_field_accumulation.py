"""Unused parameters, gradient accumulation, static graphs, uneven inputs: through both doors, as DDP promises or better."""

import time

import pytest
import torch
import torch.nn as nn
from ddp_cases import Branches, Scalars, assert_same_on_all_ranks, batch, gradients, mlp, stock
from field_cases import DOORS, Door, engines, every_door, modes, options_of
from ranks import run_on_ranks, watch_ranks
from reducer_cases import each_engine
from torch.nn.parallel import DistributedDataParallel

import gsync

UNUSED = {"find_unused_parameters": True}
LOOSE = 0.02  # int4's scales are rounded up to bf16, twice


def one(rank):
    return torch.full((1, 1), rank + 1.0)


def values(module):
    return [None if p.grad is None else p.grad.item() for p in (module.a.weight, module.b.weight)]


def _unsynchronised_use(rank, world_size, backend):
    for options in modes():
        for door in every_door(Branches, backend, ddp=UNUSED, **options):
            for _ in range(2):
                door.zero_grad()
                with door.no_sync():
                    door(one(rank), "a").backward()
                door(one(rank), "b").backward()
                assert values(door.module) == pytest.approx([1.5, 1.5], rel=LOOSE)
                assert_same_on_all_ranks(gradients(door.module))


@engines
def test_parameters_used_under_no_sync_only_are_synchronised(backend):
    """Case 45. a in the accumulated batch, b in the synchronised one: both are the mean."""
    run_on_ranks(_unsynchronised_use, 2, args=(backend,))


def _unused(rank, world_size, backend):
    for options in modes():
        for door in every_door(Branches, backend, ddp=UNUSED, **options):
            optimizer = torch.optim.SGD(door.module.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
            door(one(rank), "a").backward()
            assert values(door.module) == [pytest.approx(1.5, rel=LOOSE), None]
            before = door.module.b.weight.item()
            optimizer.step()
            assert door.module.b.weight.item() == before  # neither momentum nor decay moves it
            optimizer.zero_grad()
            door(one(rank), "ab"[rank]).backward()
            assert values(door.module) == pytest.approx([0.5, 1.0], rel=LOOSE)
            assert_same_on_all_ranks(gradients(door.module))


@engines
def test_unused_everywhere_is_none_and_unused_here_is_the_mean(backend):
    """Case 47. None where no rank used it, so that no optimizer moves it; the mean with zero where one did."""
    run_on_ranks(_unused, 2, args=(backend,))


def _flag_off(rank, world_size, backend):
    door = Door("reducer", Branches(), backend, codec="fp32")
    for _ in range(3):
        door.zero_grad()
        door(one(rank), "a").backward()
        assert values(door.module) == [1.5, None]
    assert door.sync.stats().steps == 3
    door.close()
    # DDP without its flag never completes the bucket, and tells at the next forward pass: as stock, hook or not.
    for each in (Door("ddp", Branches(), backend, codec="fp32"), stock(Branches())):
        each(one(rank), "a").backward()
        assert values(each.module) == [rank + 1.0, None]
        with pytest.raises(RuntimeError, match="find_unused_parameters"):
            each(one(rank), "a")


@engines
def test_an_unused_parameter_without_the_flag(backend):
    """Case 46. GradReducer flushes at the end of backward; DDP is as without gsync: it raises at the next forward pass."""
    run_on_ranks(_flag_off, 2, args=(backend,))


def _static(rank, world_size, backend):
    x = torch.full((3,), rank + 1.0)
    for codec in ("fp32", "int8"):
        # Accumulation from the second backward pass on, after which DDP has recorded its graph.
        door = Door("ddp", Scalars(3), backend, ddp={"static_graph": True}, **options_of(codec))
        door(x).backward()
        for _ in range(3):
            door.zero_grad()
            with door.no_sync():
                door(x).backward()
            door(x).backward()
            assert door.module.weight.grad.tolist() == pytest.approx([3.0] * 3, rel=1e-6)
        door.close()
        door = Door("reducer", Scalars(3), backend, **options_of(codec))
        for _ in range(3):
            door.zero_grad()
            with door.no_sync():
                door(x).backward()
            door(x).backward()
            assert door.module.weight.grad.tolist() == pytest.approx([3.0] * 3, rel=1e-6)
        door.close()
    # In the very first backward pass DDP stops with an error of its own, on every rank, with gsync and without.
    for make in (
        lambda: Door("ddp", Scalars(3), backend, ddp={"static_graph": True}).model,
        lambda: stock(Scalars(3), static_graph=True),
    ):
        model = make()
        with pytest.raises(RuntimeError):
            with model.no_sync():
                model(x).backward()
            model(x).backward()


@engines
def test_static_graphs_accumulate(backend):
    """Case 50. GradReducer at once, DDP from its second backward pass on; before that it raises, and is never silent."""
    run_on_ranks(_static, 2, args=(backend,))


def _manual(rank, world_size, backend):
    for codec in ("fp32", "int8"):
        for ddp in ({"static_graph": True}, {}):
            for door in every_door(mlp, backend, ddp=ddp, **options_of(codec)):
                optimizer = torch.optim.SGD(door.module.parameters(), 1e-3)
                for step in range(3):
                    # Manual optimisation: the loss is computed and driven outside of the wrapped module.
                    loss = door(batch(rank, step)).square().sum() / 2
                    optimizer.zero_grad()
                    torch.autograd.backward([loss])
                    assert_same_on_all_ranks(gradients(door.module))
                    optimizer.step()
                assert_same_on_all_ranks([p.detach() for p in door.module.parameters()])


@engines
def test_manual_optimisation_leaves_equal_gradients(backend):
    """Case 51. From the first step on, with a static graph too."""
    run_on_ranks(_manual, 2, args=(backend,))


def _between(rank, world_size, backend):
    x = torch.full((3,), rank + 1.0)
    # DDP decides in the forward pass; with gsync it does the same as without.
    for model in (Door("ddp", Scalars(3), backend, codec="fp32").model, stock(Scalars(3))):
        with model.no_sync():
            model(x).backward()
        model.require_backward_grad_sync = False
        loss = model(x)
        model.require_backward_grad_sync = True
        loss.backward()
        assert model.module.weight.grad.tolist() == [2.0 * (rank + 1)] * 3
    # GradReducer decides where backward runs.
    door = Door("reducer", Scalars(3), backend, codec="fp32")
    for _ in range(2):
        door.zero_grad()
        with door.no_sync():
            door(x).backward()
            loss = door(x)
        loss.backward()
        assert door.module.weight.grad.tolist() == [3.0] * 3


@engines
def test_switching_between_forward_and_backward(backend):
    """Case 53. GradReducer synchronises by where backward runs: 3.0. DDP looks at the forward pass, gsync or not: 2.0 and 4.0."""
    run_on_ranks(_between, 2, args=(backend,))


def _accumulate(rank, world_size, backend):
    x = torch.full((300,), rank + 1.0)
    for options in modes():
        for ddp in ({}, {"gradient_as_bucket_view": True}):
            for door in every_door(lambda: Scalars(300), backend, ddp=ddp, **options):
                for step in range(6):
                    if step % 2:
                        door.zero_grad()
                    else:
                        door.model.zero_grad(set_to_none=False)
                    with door.no_sync():
                        door(x).backward()
                    door(x).backward()
                    assert door.module.weight.grad.tolist() == pytest.approx([3.0] * 300, rel=LOOSE)


@engines
def test_accumulation_stays_right_for_six_steps(backend):
    """Case 54. Whichever memory the gradients are in, every codec."""
    run_on_ranks(_accumulate, 2, args=(backend,))


def _uneven(rank, world_size, backend):
    for options in modes():
        for accumulate in (False, True):
            model = DistributedDataParallel(Scalars(300))
            sync = gsync.register(model, backend=backend, **options)
            means = []
            with model.join():
                for _ in range(2 + 2 * rank):
                    model.zero_grad()
                    if accumulate:
                        with model.no_sync():
                            model(torch.full((300,), 0.5)).backward()
                    model(torch.full((300,), 0.5 if accumulate else 1.0)).backward()
                    means.append(model.module.weight.grad[7].item())
            # Under no_sync a rank that has joined adds zeros, and its own gradients are gone; the others' count whole.
            assert means == pytest.approx([1.0, 1.0, 0.5, 0.5][: len(means)], rel=LOOSE), (options, accumulate)
            sync.close()
        # GradReducer knows no Join: a rank without a batch takes part by wait().
        door = Door("reducer", Scalars(300), backend, **options)
        means = []
        for step in range(4):
            door.zero_grad()
            if step < 2 + 2 * rank:
                door(torch.ones(300)).backward()
            door.sync.wait()
            means.append(door.module.weight.grad[7].item())
        assert means == pytest.approx([1.0, 1.0, 0.5, 0.5], rel=LOOSE)
        door.close()


@engines
def test_uneven_inputs(backend):
    """Case 56. Two batches on one rank, four on the other: 1, 1, 0.5, 0.5, with accumulation too; no hang."""
    run_on_ranks(_uneven, 2, timeout_s=90, args=(backend,))


TIMEOUT_S = 3.0
MARGIN_S = 5.0
only_native = pytest.mark.parametrize("backend", [engine for engine in each_engine() if engine.values[0] == "native"])


def _one_batch_less(rank, world_size, backend, kind):
    """Rank 1 skips its third batch; every layer has the same size, so that buckets could be taken for one another."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    door = Door(kind, module, backend, codec="fp32", bucket_mb=1e-4)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    started = time.monotonic()
    done, error = 0, None
    try:
        for step in range(5):
            if rank == 1 and step == 2:
                continue
            optimizer.zero_grad()
            loss = door(batch(rank, step, 16)).square().sum()
            started = time.monotonic()
            loss.backward()
            optimizer.step()
            done += 1
    except gsync.SyncError as failed:
        error = str(failed)
    return done, error, time.monotonic() - started, [p.detach() for p in module.parameters()]


@only_native
@pytest.mark.parametrize("kind", DOORS)
def test_a_rank_that_skips_a_batch_is_missed_at_the_end(backend, kind):
    """Case 58. Backward passes are matched by their number, never a bucket with another: equal weights, then an error in time."""
    first, second = watch_ranks(_one_batch_less, 2, 60, args=(backend, kind), group_timeout_s=TIMEOUT_S)
    assert first.error is None and second.error is None, (first, second)
    done, error, seconds, weights = first.value
    assert done == 4 and seconds < TIMEOUT_S + MARGIN_S
    assert "step 4" in error and "rank 0 of 2" in error and "bucket" in error, error
    done, error, _, theirs = second.value
    assert done == 4 and error is None
    assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))


def _leaves_in_the_middle(rank, world_size, backend, kind):
    """Rank 1's backward pass ends by an exception between two buckets of one size, and it goes on with the next batch."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    door = Door(kind, module, backend, codec="fp32", bucket_mb=1e-4)
    results = []
    for step in range(5):
        door.zero_grad()
        try:
            y = door(batch(rank, step, 16))
            if rank == 1 and step == 2:
                module[1].weight.register_hook(_raise)
            y.square().sum().backward()
        except ZeroDivisionError:
            results.append("raised")
            continue
        except (gsync.SyncError, RuntimeError) as error:
            results.append(f"{type(error).__name__}: {error}")
            break
        results.append("right" if _is_mean(module, step, world_size) else "wrong")
    return results


def _raise(gradient):
    raise ZeroDivisionError


def _is_mean(module, step, world_size):
    plain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    plain.load_state_dict(module.state_dict())
    for other in range(world_size):
        (plain(batch(other, step, 16)).square().sum() / world_size).backward()
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(gradients(module), gradients(plain), strict=True))


@only_native
@pytest.mark.parametrize("kind", DOORS)
def test_a_backward_left_in_the_middle_is_never_matched_with_the_next(backend, kind):
    """Case 58. Buckets have equal sizes, and still no rank takes one for another: an error on both."""
    first, second = watch_ranks(_leaves_in_the_middle, 2, 60, args=(backend, kind), group_timeout_s=TIMEOUT_S)
    assert first.error is None and second.error is None, (first, second)
    assert first.value[:2] == second.value[:2] == ["right", "right"]
    assert first.value[2].startswith("Sync") and len(first.value) == 3, first.value
    assert second.value[2] == "raised" and second.value[3] not in ("right", "wrong"), second.value
