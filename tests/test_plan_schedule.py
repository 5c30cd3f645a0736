"""The simulated step: small schedules worked out by hand, and what holds for all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gsync import schedule
from gsync.cost import Step
from gsync.schedule import Bucket, Outcome, Training, simulate

DEVICE = Training(forward_s=1.0, backward_s=2.0)  # cores do not matter


def compute(seconds: float, what: str = "pack", cpu: float = 0.0) -> Step:
    return Step(what, seconds, cpu=cpu)


def move(seconds: float, latency_s: float = 0.0, cpu: float = 0.0, inter: float = 1.0) -> Step:
    return Step("all_reduce", seconds, latency_s, cpu, inter, is_collective=True)


def on_device(buckets: list[Bucket], training: Training = DEVICE) -> Outcome:
    return simulate(training, buckets, under_way=1, overlaps_latency=False)


def test_without_buckets_a_step_is_what_it_computes() -> None:
    outcome = simulate(Training(1.0, 2.0, 0.5), [])
    assert outcome.step_s == pytest.approx(3.5) and outcome.exposed_s == pytest.approx(0.0)


def test_one_bucket_at_the_end_is_exposed_whole() -> None:
    outcome = on_device([Bucket(1.0, ((compute(0.1), move(1.0, 0.2), compute(0.3, "unpack")),), 0.05, 0.07)])
    assert outcome.done_s == pytest.approx((3.05 + 0.1 + 1.2 + 0.3,))
    assert outcome.exposed_s == pytest.approx(0.05 + 1.6 + 0.07)


def test_the_next_bucket_waits_for_the_one_before_it() -> None:
    # Ready at 2 and 3; the first moves until 3.5, the second after it.
    outcome = on_device([Bucket(0.5, ((move(1.5),),)), Bucket(1.0, ((move(1.0, 0.25),),))])
    assert outcome.done_s == pytest.approx((3.5, 4.75))
    assert outcome.exposed_s == pytest.approx(1.75)


def test_what_backward_hides_costs_nothing() -> None:
    outcome = on_device([Bucket(0.1, ((move(1.5),),)), Bucket(0.9, ((move(0.2),),))])
    assert outcome.exposed_s == pytest.approx(0.0) and outcome.done_s == pytest.approx((2.7, 3.0))


def test_copies_back_go_bucket_by_bucket_while_others_are_under_way() -> None:
    # Ready at 2 and 3. The first is copied back from 3 to 3.4, while the second moves until 4.
    outcome = on_device([Bucket(0.5, ((move(0.5),),), 0.0, 0.4), Bucket(1.0, ((move(1.0),),), 0.0, 0.4)])
    assert outcome.step_s == pytest.approx(4.4)


def test_latency_of_the_next_collective_passes_meanwhile_on_a_host() -> None:
    buckets = [Bucket(1.0, ((move(1.0, 0.5),), (move(1.0, 0.5),)))]
    assert simulate(DEVICE, buckets, 2, True).exposed_s == pytest.approx(2.5)
    assert simulate(DEVICE, buckets, 1, False).exposed_s == pytest.approx(3.0)


def test_two_slices_share_the_link_on_their_lanes() -> None:
    # all_to_all 1, reduce 0.25, all_gather 1. Slice 1 moves 0 to 1, is reduced until 1.25. From 1 on slice 2 has the link alone,
    # from 1.25 half of it, with 0.75 left: until 2.75. Slice 1 then has 0.25 left, alone, until 3: slice 2 is reduced meanwhile.
    # Slice 2 gathers from 3 to 4.
    steps = (move(1.0), compute(0.25, "reduce"), move(1.0))
    outcome = simulate(DEVICE, [Bucket(0.5, (steps,)), Bucket(0.5, (steps,))], 2, True)
    assert outcome.done_s == pytest.approx((2.0 + 3.0, 2.0 + 4.0))


def test_a_third_slice_is_packed_when_a_buffer_is_free() -> None:
    # One engine: pack 0.1 each; moves follow each other; unpack of the first at 1.1 to 1.3, then the third is packed until 1.4.
    steps = (compute(0.1), move(1.0), compute(0.2, "unpack"))
    outcome = simulate(DEVICE, [Bucket(1.0, (steps,)) for _ in range(3)], 2, True)
    # The second moves 1.1 to 2.1 and is unpacked until 2.3, the third moves 2.1 to 3.1.
    assert [when - 3.0 for when in outcome.done_s] == pytest.approx([1.3, 2.3, 3.3])


def test_on_cpus_the_engine_takes_half_of_the_only_core() -> None:
    training = Training(1.0, 2.0, threads=1, cores=1)
    # From 2 on backward has 1 s left and pack 0.5 s: both at half speed until 3, then backward alone until 3.5.
    outcome = simulate(training, [Bucket(0.5, ((compute(0.5, cpu=1.0),),)), Bucket(1.0, ())])
    assert outcome.done_s[0] == pytest.approx(3.0) and outcome.step_s == pytest.approx(3.5)
    free = simulate(Training(1.0, 2.0, threads=1, cores=2), [Bucket(0.5, ((compute(0.5, cpu=1.0),),))])
    assert free.step_s == pytest.approx(3.0)


def test_a_collective_takes_of_the_core_what_it_needs_and_backward_the_rest() -> None:
    training = Training(1.0, 2.0, threads=1, cores=1)
    outcome = simulate(training, [Bucket(0.5, ((move(1.0, cpu=0.25),),))])
    # From 2 to 3 backward gets three quarters, so it ends at 3.25.
    assert outcome.done_s[0] == pytest.approx(3.0) and outcome.step_s == pytest.approx(3.25)


@pytest.mark.parametrize(
    ("demands", "capacity", "wanted"),
    [
        ([1.0, 1.0], 2.0, [1.0, 1.0]),
        ([1.0, 1.0], 1.0, [0.5, 0.5]),
        ([1.0, 0.2], 1.0, [0.8, 1.0]),
        ([3.0, 1.0], 2.0, [0.5, 0.5]),
        ([0.0, 1.0, 1.0], 1.0, [1.0, 0.5, 0.5]),
    ],
)
def test_what_is_short_is_shared_fairly(demands: list[float], capacity: float, wanted: list[float]) -> None:
    assert schedule._fair(demands, capacity) == pytest.approx(wanted)


def test_memory_held_is_that_of_the_buckets_under_way() -> None:
    buckets = [Bucket(0.5, ((move(0.75),),), held_bytes=10), Bucket(0.75, ((move(0.1),),), held_bytes=7),
               Bucket(1.0, ((move(0.1),),), held_bytes=5)]  # fmt: skip
    assert on_device(buckets).held_bytes == 17


def test_wrong_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="do not rise"):
        simulate(DEVICE, [Bucket(0.6, ()), Bucket(0.5, ())])
    with pytest.raises(ValueError, match="under_way=0: expected at least 1"):
        simulate(DEVICE, [], under_way=0)


SECONDS = st.floats(0.0, 2.0)
SLICE = st.tuples(SECONDS, SECONDS, st.floats(0.0, 0.3), SECONDS)


@st.composite
def schedules(draw: st.DrawFn, factor: float = 1.0) -> list[tuple[float, list[tuple[float, float, float, float]]]]:
    shares = sorted(draw(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5)))
    return [(share, draw(st.lists(SLICE, min_size=1, max_size=3))) for share in shares]


def made(plan: list[tuple[float, list[tuple[float, float, float, float]]]], factor: float, cpu: float = 0.0) -> list[Bucket]:
    return [
        Bucket(
            share,
            tuple(
                (compute(pack, cpu=cpu), move(factor * sent, factor * latency), compute(unpack, "unpack", cpu))
                for pack, sent, latency, unpack in slices
            ),
        )
        for share, slices in plan
    ]


@settings(max_examples=100, deadline=None)
@given(plan=schedules(), factor=st.floats(1.0, 3.0))
def test_a_slower_link_never_makes_a_device_faster(
    plan: list[tuple[float, list[tuple[float, float, float, float]]]], factor: float
) -> None:
    assert on_device(made(plan, factor)).step_s >= on_device(made(plan, 1.0)).step_s - 1e-9


@settings(max_examples=100, deadline=None)
@given(plan=schedules(), cores=st.sampled_from([1.0, 2.0]), under_way=st.sampled_from([1, 2]))
def test_a_step_lies_between_its_longest_part_and_their_sum(
    plan: list[tuple[float, list[tuple[float, float, float, float]]]], cores: float, under_way: int
) -> None:
    training = Training(1.0, 2.0, 0.5, threads=1, cores=cores)
    outcome = simulate(training, made(plan, 1.0, cpu=1.0), under_way, True)
    slices = [one for _, some in plan for one in some]
    sent, computed = sum(one[1] for one in slices), sum(one[0] + one[3] for one in slices)
    ready = 1.0 + 2.0 * plan[0][0]
    least = max(training.step_s, ready + sent, (training.step_s + computed) / cores)
    assert outcome.step_s >= least - 1e-6
    assert outcome.step_s <= training.step_s + sent + computed + sum(one[2] for one in slices) + 1e-6
    assert all(after >= before for before, after in zip(outcome.done_s, outcome.done_s[1:], strict=False))
