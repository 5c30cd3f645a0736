"""Residuals, their loss scale, stochastic rounding and the sums of errors, on a device with streams: those of the CPU."""

from __future__ import annotations

from typing import Any

import emulated
import pytest
import torch
from emulated import run_emulated
from emulated_engines import NUMELS, Rank, close, make_ranks
from engine_setup import rows

pytestmark = pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not() or "emulation")

BUCKETS = ((0, 4), (4, 7), (7, len(NUMELS)))
# Of each step. One that is not a scale is no reason to change residuals.
SCALES = (1024.0, 1024.0, 512.0, float("inf"), 512.0, 0.0, 768.0)


def train(ranks: list[Rank], scales: list[torch.Tensor], collected: list[torch.Tensor]) -> None:
    """Trains with a loss scale that changes on the device, in the order of its current stream, and appends the gradients."""
    for step, value in enumerate(SCALES):
        submitted = []
        for one, scale in zip(ranks, scales, strict=True):
            scale.fill_(value)
            submitted.append(one.submit([row * 512 for row in rows(NUMELS, one.rank, step)], BUCKETS))
        for one, buckets in zip(ranks, submitted, strict=True):
            collected.append(one.collect(buckets))


def state_of(ranks: list[Rank]) -> list[torch.Tensor]:
    """Residuals and units, by rank; read on the current stream, behind the last step."""
    state = []
    for one in ranks:
        one.engine.sum_of_squares()  # the current stream waits for the step
        for residual in one.residuals.table.values():
            state += [residual.sender.cpu(), residual.reducer.cpu()]
        state.append(one.residuals.unit.cpu())
    return state


def error_sums_of(ranks: list[Rank]) -> list[torch.Tensor]:
    """Sums of errors before and after they are set to zero."""
    sums = []
    for one in ranks:
        sums.append(torch.tensor(one.engine.stats()["error_sums"], dtype=torch.float64))
        one.engine.reset_stats()
        sums.append(torch.tensor(one.engine.stats()["error_sums"], dtype=torch.float64))
    return sums


def same_as_on_cpu(_rank: int, _world_size: int, exchange: str, codec: str, options: dict[str, Any]) -> list[str]:
    """Returns in what the engines differ, over several timings."""
    emulation = emulated.load()
    world_size = 4 if exchange == "hierarchical" else 2
    settings: dict[str, Any] = {"slice_bytes": 10_000, "error_feedback": True, "measure_every": 2, **options}
    settings["ranks_per_host"] = 2 if exchange == "hierarchical" else 1

    def run(device: torch.device | None) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        ranks = make_ranks(world_size, codec, exchange, device=device, **settings)
        scales = [torch.zeros(1, device=one.device) for one in ranks]
        for one, scale in zip(ranks, scales, strict=True):
            one.engine.follow_loss_scale(scale, one.residuals.unit)
            one.engine.set_seed(5)
        gradients: list[torch.Tensor] = []
        train(ranks, scales, gradients)
        state, sums = state_of(ranks), error_sums_of(ranks)
        close(ranks)
        return gradients, state, sums

    expected = run(torch.device("cpu"))
    assert all(tensor.any() for tensor in expected[2][::2]) and not any(tensor.any() for tensor in expected[2][1::2])
    differences = []
    for seed in range(2):
        emulation.set_delay(-1, 0, 200 * seed, seed)
        got = run(None)
        # Sums of errors are added up over plans in no order: fp64, of far fewer than 2**20 terms.
        bounds = {"gradients": 0.0, "residuals": 0.0, "sums of errors": 2.0**-30}
        for (what, rtol), ours, theirs in zip(bounds.items(), got, expected, strict=True):
            pairs = enumerate(zip(ours, theirs, strict=True))
            wrong = [i for i, (a, b) in pairs if not torch.allclose(a, b, rtol=rtol, atol=0.0)]
            if wrong:
                differences.append(f"seed {seed}: {what} {wrong}")
    emulation.set_delay(-1, 0, 0, 0)
    return differences


@pytest.mark.parametrize(
    ("exchange", "codec", "options"),
    [
        ("scatter_gather", "int8", {}),
        ("scatter_gather", "int4", {"rounding": "stochastic", "start_step": 2}),
        ("scatter_gather", "bf16", {}),
        ("hierarchical", "int8", {"rounding": "stochastic"}),
    ],
)
def test_residuals_follow_the_loss_scale_as_on_the_cpu(exchange, codec, options):
    assert run_emulated(same_as_on_cpu, args=(exchange, codec, options)) == [[]]


def what_is_refused(_rank: int, _world_size: int) -> list[str]:
    emulated.load()
    (one,) = make_ranks(1, "bf16", "all_reduce", (10,))
    good = torch.ones(1, device=one.device)
    messages = []
    for bad in (torch.ones(1), torch.ones(2, device=one.device), torch.ones(1, dtype=torch.float64, device=one.device)):
        for pair in ((bad, good), (good, bad)):
            try:
                one.engine.follow_loss_scale(*pair)
            except ValueError as error:
                messages.append(str(error))
    close([one])
    return messages


def test_a_loss_scale_elsewhere_is_refused():
    (messages,) = run_emulated(what_is_refused)
    assert len(messages) == 6
    assert all("expected fp32 [1] on emu:0" in message for message in messages)
