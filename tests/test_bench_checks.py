"""Nothing wrong is timed: what the checks have to notice, and what they must let pass."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gsync.benchmarks import checks, measure, rivals, workloads
from gsync.benchmarks.options import Options
from gsync.benchmarks.progress import Progress
from gsync.benchmarks.simulation import SimulatedRanks
from ranks import run_on_ranks

from gsync import config

FP32 = rivals.Bound(2.0**-24, 2.0**-149, lambda world: world + 1)
BF16 = rivals.Bound(2.0**-8, 2.0**-133, lambda world: world)


def _verdicts(rank: int, world_size: int) -> dict[str, str]:
    own = [torch.full((3, 5), float(rank + 1)), torch.empty(0), torch.linspace(-1.0, 1.0, 7) * (rank + 1)]
    reference = checks.make_reference(own, own)
    mean = [tensor.float() for tensor in reference.mean]
    rounded = [tensor.bfloat16().float() for tensor in mean]
    hidden = [tensor.clone() for tensor in mean]
    hidden[2][3] = 1e-3  # the exact mean is 0 there
    poisoned = [tensor.clone() for tensor in mean]
    poisoned[0][1, 1] = float("nan")
    odd = [tensor.clone() for tensor in mean]
    odd[0][0, 0] += rank * 2.0**-20
    cases = {"mean": (mean, FP32), "rounded": (rounded, BF16), "rounded as fp32": (rounded, FP32), "own": (own, BF16),
             "hidden": (hidden, BF16), "nan": (poisoned, BF16), "odd": (odd, BF16), "unbounded": (rounded, None)}  # fmt: skip
    return {name: checks.check_mean(found, reference, bound).problem for name, (found, bound) in cases.items()}


def test_a_wrong_mean_is_noticed_on_every_rank() -> None:
    first, second, third = run_on_ranks(_verdicts, 3)
    assert first == second == third
    assert first["mean"] == first["rounded"] == first["unbounded"] == ""
    assert "parameter 2 is off" in first["rounded as fp32"]
    assert "ranks 1, 2 hold other gradients" in first["own"]
    assert "parameter 2 is off by up to 0.001" in first["hidden"]
    assert "not finite" in first["nan"]
    assert "ranks 1, 2 hold other gradients" in first["odd"]


def _block_verdicts(rank: int, world_size: int) -> dict[str, str]:
    own = torch.full((2, 40), 0.01 * (rank + 1))
    own[0, 3] = 1.0  # in the first block of 64, on every rank
    empty = torch.empty(0, 2)
    reference = checks.make_reference([own, empty], [own, empty])
    bound = rivals.gsync_bound("int4", "scatter_gather", {})
    allowed = bound.relative(world_size)  # of 1, the mean of the largest in the block; in the second block of 0.015
    places = {"within": (0, 0.95), "above": (0, 1.05), "other block": (70, 0.016), "other block within": (70, 0.014)}
    found = {}
    for name, (place, size) in places.items():
        mean = reference.mean[0].float()
        mean.view(-1)[place] += size * allowed
        found[name] = checks.check_mean([mean, empty], reference, bound).problem
    return found


def test_the_error_of_a_block_codec_is_held_against_its_block() -> None:
    first, second = run_on_ranks(_block_verdicts, 2)
    assert first == second
    assert first["within"] == first["other block within"] == ""
    assert "more than its bound" in first["above"] and "more than its bound" in first["other block"]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("codec", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_bounds_hold_and_are_not_much_too_wide(codec: str, rounding: str) -> None:
    numel, world_size, block = 5000, 3, {"int4": 64}.get(codec, 256)
    worst = {}
    for feedback in (False, True):
        bound = rivals.gsync_bound(codec, "scatter_gather", {"error_feedback": feedback, "rounding": rounding})
        ranks = SimulatedRanks({"weight": codec}, [numel], world_size, feedback, rounding)
        generator = torch.Generator().manual_seed(1)
        gradients = [[torch.randn(numel, generator=generator)] for _ in range(world_size)]  # the same at each step, as in the job
        sizes = torch.stack([gradient.double().abs() for [gradient] in gradients])
        if bound.block_size:
            assert bound.block_size == block
            blocks = torch.nn.functional.pad(sizes, (0, -numel % block)).view(world_size, -1, block).amax(2)
            sizes = blocks.repeat_interleave(block, 1)[:, :numel]
        allowed = sizes.mean(0) * bound.relative(world_size) + bound.absolute(world_size)
        exact = sum(gradient.double() for [gradient] in gradients) / world_size
        shares = []
        for _ in range(4):
            mean = torch.empty(numel)
            ranks.synchronize(gradients, [mean])
            shares.append(float(((mean.double() - exact).abs() / allowed).max()))
        worst[feedback] = max(shares)
    assert 0.2 < worst[False] <= 1 and 0.2 < worst[True] <= 1, worst


def test_combinations_that_cannot_work_are_left_out_unless_asked_for() -> None:
    def names(codecs: list[str], exchanges: list[str], **fields: Any) -> list[str]:
        return [rival.name for rival in rivals.make_rivals([rivals.GSYNC], codecs, exchanges, fields)]

    def reducers(**fields: Any) -> list[str]:
        return [rival.name for rival in rivals.make_rivals([rivals.REDUCER], [], [], fields)]

    everything = names([], [])
    assert "bf16 all_reduce" in everything and "bf16 scatter_gather" in everything
    for codec in config.CODECS:
        assert f"{codec} scatter_gather" in everything
    assert set(names([], ["all_reduce"])) == {f"{codec} all_reduce" for codec in config.PLAIN_CODECS}
    assert names(["int8"], []) == ["int8 scatter_gather"]
    assert names([], [], exempt=("*.bias",)) == [f"{codec} scatter_gather" for codec in config.BLOCK_CODECS]
    assert names(["bf16", "auto"], [], auto_codecs=("fp32", "int8")) == ["bf16 all_reduce", "bf16 scatter_gather", "auto auto"]
    assert names(["auto"], ["scatter_gather"]) == ["auto scatter_gather"]
    with pytest.raises(ValueError, match="--auto-codecs acts with --codec auto"):
        Options(codecs=("bf16",), fields={"auto_codecs": ("fp32", "int8")})
    assert reducers() == ["bf16 all_reduce", "bf16 scatter_gather"]
    assert reducers(block_size=512) == ["fp8_e4m3 scatter_gather"]
    with pytest.raises(ValueError, match="libraries cannot sum int8"):
        names(["bf16", "int8"], ["all_reduce", "scatter_gather"])
    with pytest.raises(ValueError, match="bf17"):
        names(["bf16", "bf17"], [])
    with pytest.raises(ValueError, match="ring"):
        names([], ["all_reduce", "ring"])
    with pytest.raises(ValueError, match="bf17"):
        names(["bf16", "bf17"], ["all_reduce"])
    with pytest.raises(ValueError, match="slice_mb"):
        names([], [], slice_mb=0)


def _relative_error(rank: int, world_size: int) -> float:
    own = [torch.tensor([3.0, 4.0])]
    return checks.check_mean([torch.tensor([3.0, 4.5])], checks.make_reference(own, own), None).error


def test_the_error_is_the_relative_l2_norm() -> None:
    assert run_on_ranks(_relative_error, 2) == pytest.approx([0.1, 0.1])


# DDP reads the annotations of hooks, so that they must not be strings in this file.
def _local_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _sum_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda done: done.value()[0])


def _refusing(model: Any) -> rivals.Armed:
    raise RuntimeError("not on\nthis machine")


def _run_with_faulty_rivals(rank: int, world_size: int) -> dict[str, Any]:
    def hooked(hook: Any) -> Any:
        def arm(model: Any) -> rivals.Armed:
            model.register_comm_hook(None, hook)
            return rivals.Armed(lambda: 1.0)

        return arm

    class Faulty(Options):
        def make_rivals(self) -> list[rivals.Rival]:
            bad = [rivals.Rival("ddp", name, arm, FP32) for name, arm in
                   (("local", hooked(_local_hook)), ("sum", hooked(_sum_hook)), ("refusing", _refusing))]  # fmt: skip
            return super().make_rivals() + bad

    options = Faulty(model="mlp", sizes=workloads.Sizes(layers=2, width=16), rivals=("stock again",), steps=3, warmup=2)
    return measure.Job(options, torch.device("cpu"), "", Progress(False)).run()


def test_wrong_rivals_are_not_timed_and_the_others_are() -> None:
    results = run_on_ranks(_run_with_faulty_rivals, 2)
    rows = {row["name"]: row for row in results[0]["rows"]}
    assert results[0]["rows"][0]["name"] == "stock"
    assert len(rows["stock"]["step_ms"]["samples"]) == len(rows["stock again"]["step_ms"]["samples"]) == 3
    assert "hold other gradients" in rows["local"]["wrong"] and "step_ms" not in rows["local"]
    assert "more than its bound" in rows["sum"]["wrong"] and "step_ms" not in rows["sum"]
    assert rows["refusing"]["refused"] == "RuntimeError: not on this machine"


@pytest.mark.parametrize("model", workloads.MODELS)
def test_every_rank_draws_its_part_of_one_batch(model: str) -> None:
    sizes = workloads.Sizes(width=16, batch=3, heads=2 if model == "transformer" else None)
    workload = workloads.make_workload(model, sizes, seed=5)
    parts = [workload.batch_at(7, rank, 2) for rank in range(2)]
    again = workload.batch_at(7, 1, 2)
    assert torch.equal(parts[1][0], again[0]) and torch.equal(parts[1][1], again[1])
    assert not torch.equal(parts[0][0], parts[1][0])
    assert not torch.equal(parts[0][0], workload.batch_at(8, 0, 2)[0])
    module = workload.build()
    loss = workload.loss(module(parts[0][0]), parts[0][1])
    loss.backward()
    assert torch.isfinite(loss) and all(parameter.grad is not None for parameter in module.parameters())


def test_digits_are_learnt_in_the_default_run() -> None:
    workload = workloads.make_workload("digits-mlp", workloads.Sizes(), seed=0)
    torch.manual_seed(0)
    module = workload.build()
    optimizer = torch.optim.SGD(module.parameters(), workload.learning_rate, workload.momentum)
    for step in range(200):
        optimizer.zero_grad()
        inputs, targets = workload.batch_at(step, 0, 1)
        workload.loss(module(inputs), targets).backward()
        optimizer.step()
    assert workload.evaluate is not None
    assert workload.evaluate(module, torch.device("cpu"))[1] > 90.0


def test_sizes_that_a_model_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="--heads 2: mlp has no such size"):
        workloads.make_workload("mlp", workloads.Sizes(heads=2), 0)
    with pytest.raises(ValueError, match="--layers 0: expected at least 1"):
        workloads.make_workload("mlp", workloads.Sizes(layers=0), 0)
    with pytest.raises(ValueError, match="--width 255: not a multiple of --heads 4"):
        workloads.make_workload("transformer", workloads.Sizes(width=255), 0)
    with pytest.raises(ValueError, match="--model cnn: expected one of digits-cnn"):
        workloads.make_workload("cnn", workloads.Sizes(), 0)
