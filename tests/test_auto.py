"""codec="auto": what may be chosen, how times decide, what the engine is told, and that all ranks do the same."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from ddp_cases import (
    ENGINES,
    assert_same_bits,
    assert_same_on_all_ranks,
    batch,
    gradients,
    mlp,
    why_no_engine,
    wrap,
)
from ranks import RanksError, run_on_ranks

import gsync
from gsync import choices, cost, ops, tuner
from gsync.choices import Choice, Predictor, Shape
from gsync.config import SyncConfig
from gsync.tuner import _Way, still_racing, verdict

ALL_CODECS = ("fp32", "fp16", "bf16", "int8")


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    reason = why_no_engine(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def on_hosts(ranks_per_host):
    os.environ["GSYNC_LOCAL_WORLD_SIZE"] = str(ranks_per_host)


def run(fn, world_size, *args, timeout_s=120):
    return run_on_ranks(fn, world_size, timeout_s=timeout_s, args=args, pool="hosts")


def step(model, rank, number):
    model.zero_grad()
    model(batch(rank, number)).square().sum().backward()


# ---- what may be chosen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "auto", "auto_codecs": ["bf16", "int8"]}, "expected 'fp32', to fall back to, and at least one more"),
        ({"codec": "auto", "auto_codecs": ["fp32"]}, "expected 'fp32', to fall back to, and at least one more"),
        ({"codec": "auto", "auto_codecs": ["fp32", "int2"]}, "auto_codecs='int2' is unknown"),
        ({"auto_codecs": ["fp32", "int8"]}, r"auto_codecs=\['fp32', 'int8'\] acts with codec='auto'"),
        ({"codec": "auto", "error_feedback": True}, "residuals belong to one codec and exchange"),
        ({"codec": "auto", "block_size": 64}, "codec fp32, bf16 has no blocks"),
        ({"codec": "auto", "auto_codecs": ["fp32", "int8"], "exchange": "all_reduce"}, "libraries cannot sum int8"),
        ({"codec": "auto", "auto_codecs": ["fp32", "fp16"], "exchange": "hierarchical"}, "nothing counts the values that vanish"),
        ({"codec": {"*": "auto"}}, r"codec\['\*'\]='auto' is unknown"),
    ],
)
def test_what_cannot_act_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SyncConfig(**options)


def test_auto_codecs_are_a_list_of_names():
    for given in ("fp32", 3):
        with pytest.raises(TypeError, match=f"auto_codecs: expected codecs in a list, got {given!r}"):
            SyncConfig(codec="auto", auto_codecs=given)


@pytest.mark.parametrize(
    ("codecs", "exchange", "ranks_per_host", "expected"),
    [
        (("bf16", "fp32"), "auto", 1, "fp32 all_reduce, fp32 scatter_gather, bf16 all_reduce, bf16 scatter_gather"),
        (("fp32", "int8"), "auto", 2,
         "fp32 all_reduce, fp32 scatter_gather, fp32 hierarchical, int8 scatter_gather, int8 hierarchical"),
        (("fp32", "bf16"), "scatter_gather", 2, "fp32 scatter_gather, bf16 scatter_gather"),
        (("fp32", "fp16"), "auto", 2,
         "fp32 all_reduce, fp32 scatter_gather, fp32 hierarchical, fp16 all_reduce, fp16 scatter_gather"),
    ],
)  # fmt: skip
def test_candidates_are_what_the_configuration_allows(codecs, exchange, ranks_per_host, expected):
    config = SyncConfig(codec="auto", auto_codecs=codecs, exchange=exchange)
    found = choices.candidates(config, "all_reduce" if exchange == "auto" else exchange, cost.Topology(4, ranks_per_host))
    assert ", ".join(map(str, found)) == expected


# ---- predictions -------------------------------------------------------------------------------------------------------


def predictor(bytes_per_s: float, ready_s: list[float], world_size: int = 2, latency_s: float = 1e-5) -> Predictor:
    """Buckets of a million elements, on cores to spare, with operations that cost next to nothing."""
    link = cost.Link(bytes_per_s, latency_s, 0.0)
    kernel = cost.Kernel(1e-12, 1e-12, 1e-12, 1e-12)
    config = SyncConfig(codec="auto", auto_codecs=("fp32", "bf16", "int8"))
    shapes = [
        Shape((f"p{idx}",), (1_000_000,), {codec: (codec,) for codec in config.auto_codecs}, when)
        for idx, when in enumerate(ready_s)
    ]
    kernels = dict.fromkeys(config.auto_codecs, kernel)
    return Predictor(shapes, cost.Network(link, link), kernels, cost.Topology(world_size), config, 1, 8)


def test_on_a_slow_link_the_narrowest_is_predicted_to_be_fastest():
    config = SyncConfig(codec="auto", auto_codecs=("fp32", "bf16", "int8"))
    candidates = choices.candidates(config, "all_reduce", cost.Topology(2))
    found = predictor(1e8, [0.0, 0.1]).shortlist(candidates, 2)
    assert found[0] == Choice("int8", "scatter_gather") and found[1].codec == "bf16"


def test_a_bucket_that_backward_hides_stays_in_fp32():
    # 4 MB take 40 ms at 100 MB/s. Between the first two buckets there are 100 ms; nothing hides the last.
    made = predictor(1e8, [0.0, 0.1, 0.101])
    narrow, wide = Choice("int8", "scatter_gather"), Choice("fp32", "all_reduce")
    mixed = made.relax(narrow, [wide])
    assert mixed == [wide, narrow, narrow]
    assert made.step_s(mixed) <= 1.006 * made.step_s([narrow] * 3) < 0.9 * made.step_s([wide] * 3)


def test_buckets_are_as_large_as_latency_asks_for():
    narrow = Choice("int8", "scatter_gather")
    sizes = [predictor(1e8, [0.0], latency_s=latency_s).bucket_mb(narrow) for latency_s in (1e-6, 1e-4, 1e-2)]
    assert sizes[0] == 1 and sizes == sorted(sizes) and sizes[-1] == 25


# ---- what decides ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "best", "second"),
    [
        ([[10, 10, 10], [5, 5, 5]], 1, 0),
        ([[10, 10, 10], [9.9, 9.9, 9.9]], 0, 1),  # not worth another codec
        ([[10, 30, 10], [9, 27, 9]], 1, 0),  # a slow round is slow for all
        ([[10, 10, 10], [5, 5, 5], [4.97, 4.97, 4.97]], 1, 2),  # the wider one of two that are alike
        ([[10, 10, 10], [20], [8, 8, 8]], 2, 0),
        ([[10, 10, 10], [11, 5, 11]], 0, 1),  # one fast round proves nothing
    ],
)
def test_the_fastest_wins_if_it_wins_clearly(times, best, second):
    labels = ["fp32 all_reduce", "bf16 all_reduce", "int8 scatter_gather"][: len(times)]
    found = verdict(labels, times)
    assert found[:2] == (best, second)
    assert found[3] == sorted(times[best])[len(times[best]) // 2] and labels[1] in found[2]


def test_what_is_far_behind_is_not_tried_again():
    assert still_racing([[10.0], [5.0], [5.5], [6.0]]) == [0, 1, 2]
    assert still_racing([[10.0, 10.0], [5.0, 5.0], [5.5, 5.5], [6.0]]) == [0, 1, 2]  # nor in a later round


def test_steps_that_became_slower_are_a_reason_to_look_again():
    made = object.__new__(tuner.Tuner)
    made._settled = tuner._Settled(_Way("", {}), _Way("", {}), ms=10.0)
    assert made._why_again(12.4) == ""
    assert made._why_again(12.6) == "steps took 12.6 ms instead of 10.0"


# ---- what the engine does ----------------------------------------------------------------------------------------------


def _use(sync: Any, by_name: dict[str, Choice]) -> None:
    """As a decision does, on all ranks before the same step; the last one."""
    sync._tuner._use(_Way("test", by_name))
    sync._engine.call_at(1 << 40, print)


def _as_if_fixed(rank, world_size, backend, ranks_per_host):
    on_hosts(ranks_per_host)
    model, sync = wrap(mlp(), backend, ddp={"bucket_cap_mb": 0.02}, codec="auto", auto_codecs=ALL_CODECS)
    names = [name for name, _ in model.module.named_parameters()]
    step(model, rank, 0)
    pairs = [("fp32", "all_reduce"), ("fp16", "all_reduce"), ("bf16", "scatter_gather"), ("int8", "scatter_gather")]
    pairs += [("int8", "hierarchical"), ("fp32", "hierarchical"), ("bf16", "hierarchical")] if ranks_per_host > 1 else []
    for number, (codec, exchange) in enumerate(pairs):
        fixed, _ = wrap(mlp(), backend, ddp={"bucket_cap_mb": 0.02}, codec=codec, exchange=exchange)
        _use(sync, dict.fromkeys(names, Choice(codec, exchange)))
        for again in range(2):
            step(model, rank, 2 * number + again)
            step(fixed, rank, 2 * number + again)
            if again or exchange != "all_reduce":  # library sums depend on buckets: one in the first step
                assert_same_bits(gradients(model), gradients(fixed))
    # Everything in one bucket, in the same step; what is layout-independent has the bits that it has alone.
    mixed = {name: Choice(*pairs[idx % len(pairs)]) for idx, name in enumerate(names)}
    _use(sync, mixed)
    step(model, rank, 3)
    assert_same_on_all_ranks([*gradients(model), sync.grad_norm(), sync.found_nonfinite()])
    for codec, exchange in pairs:
        if exchange == "all_reduce" and world_size > 2:
            continue  # the order in which the library sums depends on the bucket
        fixed, _ = wrap(mlp(), backend, codec=codec, exchange=exchange)
        step(fixed, rank, 3)
        for (name, parameter), (_, alone) in zip(model.module.named_parameters(), fixed.module.named_parameters(), strict=True):
            if mixed[name] == Choice(codec, exchange):
                assert_same_bits(parameter.grad, alone.grad)


@pytest.mark.parametrize(("world_size", "ranks_per_host"), [(2, 1), (4, 2)])
def test_gradients_are_those_of_the_choice(engine, world_size, ranks_per_host):
    run(_as_if_fixed, world_size, engine, ranks_per_host)


def _callback_fails(rank, world_size, backend):
    model, sync = wrap(mlp(), backend, codec="fp32")
    step(model, rank, 0)

    def fail() -> None:
        raise ValueError("this callback cannot go on")

    sync._engine.call_at(2, fail)
    step(model, rank, 1)
    with pytest.raises(gsync.SyncError, match="this callback cannot go on"):
        step(model, rank, 2)
    assert all(gradient.isnan().all() for gradient in gradients(model))
    sync.reset()
    step(model, rank, 3)
    assert all(gradient.isfinite().all() for gradient in gradients(model))


def test_a_callback_that_raises_fails_the_engine(engine):
    run(_callback_fails, 2, engine)


def _times(rank, world_size, backend):
    model, sync = wrap(mlp(), backend, ddp={"bucket_cap_mb": 0.02}, codec="bf16")
    for number in range(3):
        step(model, rank, number)
    engine = sync._engine
    assert engine.take_step_times() == ([], [])
    engine.time_steps()
    for number in range(2):
        step(model, rank, number)
    times, ready_ms = engine.take_step_times()
    buckets = engine.last_buckets()
    assert len(times) == 2 and 0 < min(times) <= max(times) < 10_000
    assert len(ready_ms) == len(buckets) > 1
    assert ready_ms[0] == 0 and ready_ms == sorted(ready_ms) and ready_ms[-1] < sum(times)
    assert sorted(position for bucket in buckets for position in bucket) == list(range(6))
    step(model, rank, 2)
    assert engine.take_step_times() == ([], [])


def test_an_engine_times_steps_when_it_is_told_to(engine):
    run(_times, 2, engine)


# ---- from the first step to the choice -----------------------------------------------------------------------------------


def _quick() -> None:
    """Looks and trials come soon."""
    tuner._WATCHED, tuner._LOOKS = 2, 2


def _tells_times(ms_of: dict[str, float]) -> None:
    """From here on a step of each way takes what `ms_of` says; others 50 ms."""

    def time(self: Any) -> Any:
        yield 1
        return ms_of.get(self._way.label, 50.0), []

    tuner.Tuner._time = time  # type: ignore[method-assign]


def _door(door: str, backend: str, module: torch.nn.Module, **options: Any) -> tuple[Any, Any]:
    if door == "ddp":
        return wrap(module, backend, ddp={"bucket_cap_mb": 0.02}, **options)
    return module, gsync.GradReducer(module, backend=backend, **options)


def _chooses_and_withdraws(rank, world_size, backend, door):
    on_hosts(1)
    _quick()
    ms_of = {"bf16 all_reduce": 20.0, "bf16 scatter_gather": 30.0}
    _tells_times(ms_of)
    state = torch.get_rng_state()
    model, sync = _door(door, backend, mlp(), codec="auto")
    torch.set_rng_state(state)
    assert not sync.is_settled
    first, last = "bf16 all_reduce (20.0 ms; to 50.0 of fp32 all_reduce: ", "fp32 all_reduce (50.0 ms; to 50.0"
    seen: list[str] = []
    while not (seen and seen[-1].startswith(last)):
        step(model, rank, len(seen) % 3)
        assert_same_on_all_ranks(gradients(model))
        seen.append(sync.stats().choice)
        if seen[-1].startswith(first) and sync.is_settled:
            ms_of["bf16 all_reduce"] = 80.0
        assert len(seen) < 150, seen[-20:]
    assert torch.equal(torch.get_rng_state(), state)  # measuring draws nothing
    assert "bf16 all_reduce 1.60" in seen[-1] and any(choice.startswith(first) for choice in seen)
    return seen


@pytest.mark.parametrize("door", ["ddp", "reducer"])
def test_what_is_fastest_stays_until_it_is_slower_than_fp32(engine, door):
    # Processes of its own: it changes what the module of the tuner does.
    found = run_on_ranks(_chooses_and_withdraws, 2, timeout_s=120, args=(engine, door), pool=f"auto {engine} {door}")
    assert found[0] == found[1]


def _really(rank, world_size, backend, ranks_per_host):
    on_hosts(ranks_per_host)
    tuner._MOST_STEPS = 4  # steps take a millisecond here
    model, sync = wrap(mlp(), backend, ddp={"bucket_cap_mb": 0.02}, codec="auto", auto_codecs=ALL_CODECS)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    steps = 0
    while not sync.is_settled:
        step(model, rank, steps % 5)
        optimizer.step()
        steps += 1
        assert steps < 200
    assert_same_on_all_ranks(list(model.parameters()))
    choice = sync.stats().choice
    sync.reset()
    step(model, rank, 0)
    assert sync.is_settled and sync.stats().choice == choice  # a new engine goes on with it
    text = str(sync.stats())
    sync.close()
    return choice, text


@pytest.mark.parametrize(("world_size", "ranks_per_host"), [(2, 1), (4, 2)])
def test_a_choice_is_made_by_measuring(engine, world_size, ranks_per_host):
    found = run_on_ranks(_really, world_size, timeout_s=120, args=(engine, ranks_per_host), pool="auto")
    assert len({choice for choice, _ in found}) == 1
    choice, text = found[0]
    assert re.fullmatch(r"\w+ \w+( for \d+, .*parameters)? \([\d.]+ ms; to [\d.]+ of [\w ]+: .*\)", choice), choice
    assert f"  choice    {choice}" in text


def _alone(rank, world_size, backend):
    model, sync = wrap(mlp(), backend, codec="auto")
    step(model, rank, 0)
    assert sync.is_settled and sync.stats().choice == ""


def test_one_rank_has_nothing_to_choose(engine):
    run(_alone, 1, engine)


def _new_parameter(rank, world_size, backend):
    module = mlp()
    module[4].weight.requires_grad_(False)
    reducer = gsync.GradReducer(module, backend=backend, codec="auto", auto_codecs=("fp32", "int8"))
    names = [name for name, _ in module.named_parameters()]
    step(module, rank, 0)
    _use(reducer, dict.fromkeys((name for name in names if name != "4.weight"), Choice("int8", "scatter_gather")))
    step(module, rank, 1)
    module[4].weight.requires_grad_(True)
    step(module, rank, 2)
    assert_same_on_all_ranks(gradients(module))
    plain = [mlp() for _ in range(world_size)]
    for other, copy in enumerate(plain):
        step(copy, other, 2)
    mean = sum(copy[4].weight.grad for copy in plain) / world_size
    torch.testing.assert_close(module[4].weight.grad, mean, rtol=1e-6, atol=1e-6)  # in fp32
    mean = sum(copy[2].weight.grad for copy in plain) / world_size
    assert not torch.allclose(module[2].weight.grad, mean, rtol=1e-6, atol=1e-6)  # in int8 still
    return reducer.stats().choice


def test_what_is_trained_later_travels_in_fp32(engine):
    for choice in run(_new_parameter, 2, engine):
        assert choice.startswith("int8 scatter_gather for 5, fp32 all_reduce for 1 parameters (")


def _different(rank, world_size, backend):
    codecs = ("fp32", "bf16") if rank == 0 else ("fp32", "fp16")
    model, _ = wrap(mlp(), backend, codec="auto", auto_codecs=codecs)
    with pytest.raises(ValueError, match="auto_codecs"):
        step(model, rank, 0)


def test_ranks_with_other_codecs_are_told_so(engine):
    run(_different, 2, engine)


def _dies_in_a_trial(rank, world_size, backend):
    model, _ = wrap(mlp(), backend, codec="auto", timeout_s=3)
    for number in range(9):
        step(model, rank, number)
    if rank == 1:
        os._exit(3)
    with pytest.raises(gsync.SyncError):
        for number in range(20):
            step(model, rank, number)


def test_a_rank_that_dies_in_a_trial_is_an_error(engine):
    with pytest.raises(RanksError, match="rank 1"):
        run(_dies_in_a_trial, 2, engine)


def test_the_cost_of_a_bucket_counts_its_bytes_exactly():
    made = predictor(1e6, [0.0])
    (steps,) = made._make_steps(0, Choice("int8", "scatter_gather"))
    sent = [one.wire_bytes for one in steps if one.is_collective]
    assert sent == [ops.payload_bytes([1_000_000], "int8", None, 2, ["p0"]) / 2] * 2
