"""Every wait for an event that the engine asks for is needed: leaving any one of them out is noticed.

The emulated device knows a wait by the place in gsync's library that asks for it. The scenarios hold streams back until
all others have come as far as they can, so that whoever does not wait is early, on every machine. With every wait in place they
find nothing.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import emulated
import pytest
import torch
from emulated import run_emulated
from emulated_engines import close, make_ranks
from engine_setup import rows

from gsync import _native

pytestmark = pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not() or "emulation")

NUMELS = (700, 300, 500)
BOUNDS = ((0, 2), (2, 3))
BAD = 3  # of the first parameter: NaN where a step is not finite


def given(rank: int, step: int, is_finite: bool) -> list[torch.Tensor]:
    result = rows(NUMELS, rank, step)
    if not is_finite and rank == 1:
        result[0][BAD] = float("nan")
    return result


def mean(step: int, is_finite: bool = True) -> list[torch.Tensor]:
    sent = [[(row * 0.5).bfloat16().float() for row in given(rank, step, is_finite)] for rank in range(2)]
    return [(a + b).bfloat16().float() for a, b in zip(*sent, strict=True)]


@functools.cache
def extra_stream(rank: int, number: int) -> int:
    """Streams beside the device's default one, for all scenarios: they never end."""
    return int(emulated.load().new_stream(rank))


class Stage:
    """Two ranks whose streams can be held back, to give whoever does not wait all the time to be early."""

    def __init__(self, emulation: Any, numels: tuple[int, ...] = NUMELS, **options: Any) -> None:
        self.emulation = emulation
        self.complaints: list[str] = []
        self.ranks = make_ranks(2, "bf16", "scatter_gather", numels, slice_bytes=16_384, **options)
        self.producers = [one.rank for one in self.ranks]  # the devices' default streams
        self.engines = [emulation.newest_stream(one.rank) for one in self.ranks]
        self.readers = [[extra_stream(one.rank, number) for number in range(2)] for one in self.ranks]

    def hold(self, streams: list[int], is_held: bool = True) -> None:
        for stream in streams:
            self.emulation.hold(stream, is_held)

    def release(self, streams: list[int]) -> None:
        """Lets the streams go on, once all others have come as far as they can."""
        self.emulation.settle()
        self.hold(streams, False)

    def submit(self, step: int, is_finite: bool = True) -> list[list[tuple[torch.Tensor, Any]]]:
        return [one.submit(given(one.rank, step, is_finite), BOUNDS) for one in self.ranks]

    def read(self, number: int, what: str) -> list[torch.Tensor]:
        """Asks every rank for its results on its reader of that number."""
        results = []
        for one in self.ranks:
            before = self.emulation.set_stream(one.rank, self.readers[one.rank][number])
            results.append(getattr(one.engine, what)())
            self.emulation.set_stream(one.rank, before)
        return results

    def on_reader(self, number: int) -> list[int]:
        return [readers[number] for readers in self.readers]

    def check_gradients(self, submitted: list[list[tuple[torch.Tensor, Any]]], step: int, is_finite: bool = True) -> None:
        for one, buckets in zip(self.ranks, submitted, strict=True):
            if not torch.equal(one.collect(buckets).nan_to_num(7.0), torch.cat(mean(step, is_finite)).nan_to_num(7.0)):
                self.complaints.append(f"gradients of step {step}")

    def check_sums(self, sums: list[torch.Tensor], step: int, is_finite: bool = True) -> None:
        self.settle_all()
        expected = torch.stack([row.double().square().sum() for row in mean(step, is_finite)])
        for got in sums:
            if not torch.allclose(got.cpu(), expected, rtol=1e-12, atol=0, equal_nan=True):
                self.complaints.append(f"sums of squares of step {step}")

    def check_found(self, found: list[torch.Tensor], step: int, is_finite: bool) -> None:
        self.settle_all()
        for got in found:
            if bool(got.cpu()) == is_finite:
                self.complaints.append(f"non-finite flag of step {step}")

    def settle_all(self) -> None:
        """Waits for the readers' streams, whose results are then looked at on another stream."""
        for one in self.ranks:
            for stream in (*self.readers[one.rank], self.producers[one.rank], self.engines[one.rank]):
                before = self.emulation.set_stream(one.rank, stream)
                self.emulation.synchronize(one.rank)
                self.emulation.set_stream(one.rank, before)

    def end(self) -> list[str]:
        try:
            close(self.ranks)
        except AssertionError as error:
            self.complaints.append(str(error))
        return self.complaints


def late_zeros(emulation: Any) -> list[str]:
    """What the engine's constructor writes comes as late as it can."""
    builders = [extra_stream(rank, 2) for rank in range(2)]
    for stream in builders:
        emulation.hold(stream, True)
    stage = Stage(emulation, built_on=builders)
    submitted = stage.submit(0, is_finite=False)
    stage.release(builders)
    stage.check_gradients(submitted, 0, is_finite=False)
    stage.settle_all()
    stage.check_found(stage.read(0, "found_nonfinite"), 0, is_finite=False)
    return stage.end()


def late_gradients(emulation: Any) -> list[str]:
    stage = Stage(emulation)
    stage.submit(0)  # the first step copies tables, and waits for that
    for step in (1, 2):
        stage.hold(stage.producers)
        submitted = stage.submit(step)
        stage.release(stage.producers)
        stage.check_gradients(submitted, step)
    return stage.end()


def late_results(emulation: Any) -> list[str]:
    """Results are asked for while the engine has not come to the step."""
    stage = Stage(emulation)
    stage.submit(0)
    stage.settle_all()
    stage.hold(stage.engines)
    stage.submit(1, is_finite=False)
    found, sums = stage.read(0, "found_nonfinite"), stage.read(1, "sum_of_squares")
    stage.release(stage.engines)
    stage.check_found(found, 1, is_finite=False)
    stage.check_sums(sums, 1, is_finite=False)
    return stage.end()


def late_readers(emulation: Any, last: str) -> list[str]:
    """A reader that is late, another after it that is not, and a next step that must not overtake the first."""
    stage = Stage(emulation, measure_every=int(last == "reset_stats"))
    stage.submit(0, is_finite=False)
    stage.settle_all()
    stage.hold(stage.on_reader(0))
    found, sums = stage.read(0, "found_nonfinite"), stage.read(0, "sum_of_squares")
    if last:
        stage.read(1, last)
    for step in (1, 2):
        stage.submit(step)
    stage.release(stage.on_reader(0))
    stage.check_found(found, 0, is_finite=False)
    stage.check_sums(sums, 0, is_finite=False)
    return stage.end()


def late_errors(emulation: Any) -> list[str]:
    """What encoding loses is summed by the engine, read by stats() and set to zero by reset_stats()."""
    stage = Stage(emulation, measure_every=1)

    def check(step: int) -> None:
        lost = torch.cat([row * 0.5 - (row * 0.5).bfloat16().float() for row in given(0, step, True)])
        expected = float(lost.double().square().sum())
        got = stats["error_sums"][0]
        if abs(got - expected) > 1e-6 * expected:
            stage.complaints.append(f"errors of step {step}: {got} instead of {expected}")

    stage.hold(stage.engines)
    stage.submit(0)
    releaser = threading.Timer(0.3, stage.release, (stage.engines,))
    releaser.start()
    stats = stage.ranks[0].engine.stats()  # the host waits
    releaser.join()
    check(0)
    stage.hold(stage.engines)
    stage.submit(1)
    stage.read(0, "reset_stats")
    stage.release(stage.engines)
    stage.settle_all()
    stage.submit(2)
    stage.settle_all()
    stats = stage.ranks[0].engine.stats()
    check(2)
    return stage.end()


def late_failure(emulation: Any) -> list[str]:
    """A bucket fails when some of its slices are on the engine's stream already, and its memory is given back."""
    stage = Stage(emulation, (9_000,))
    stage.hold(stage.engines)
    # Three slices of three launches each; the second launch of the third slice fails.
    submitted = stage.ranks[0].submit([torch.ones(9_000)], ((0, 1),), lambda: emulation.fail_launch(7))
    submitted.clear()
    stage.release(stage.engines)
    stage.settle_all()
    return stage.end()


SCENARIOS: dict[str, Callable[[Any], list[str]]] = {
    "late zeros": late_zeros,
    "late gradients": late_gradients,
    "late results": late_results,
    "late reader": lambda emulation: late_readers(emulation, ""),
    "late reader, then sums": lambda emulation: late_readers(emulation, "sum_of_squares"),
    "late reader, then flag": lambda emulation: late_readers(emulation, "found_nonfinite"),
    "late reader, then reset": lambda emulation: late_readers(emulation, "reset_stats"),
    "late errors": late_errors,
    "late failure": late_failure,
}


def exercise(_rank: int, _world_size: int, without: list[str] | None) -> list[str] | dict[str, list[str]]:
    """Returns the complaints for each of the sites left out, or, with None, for none; then the sites seen."""
    emulation = emulated.load()
    emulation.take_sites()
    complaints: dict[str, list[str]] = {}
    for site in without or [""]:
        emulation.leave_out([site] if site else [])
        found: list[str] = []
        for name, scenario in SCENARIOS.items():
            try:
                found += [f"{name}: {complaint}" for complaint in scenario(emulation)]
            except Exception as error:
                found.append(f"{name}: {type(error).__name__}: {error}")
            if site and found:
                break
        complaints[site] = found
    emulation.leave_out([])
    if without is None:
        return {"complaints": complaints[""], "sites": emulation.take_sites()}
    return complaints


def functions_of(sites: list[str]) -> dict[str, str]:
    """Returns for each site the function that it is in, where `nm` can tell; for messages."""
    native = _native.C
    nm = shutil.which("nm")
    if nm is None or native is None:
        return {}
    table = subprocess.run([nm, "-C", "-n", str(native.__file__)], capture_output=True, text=True, check=False, timeout=60).stdout
    symbols = [
        (int(address, 16), name)
        for address, kind, name in (line.split(maxsplit=2) for line in table.splitlines() if line[:1] != " ")
        if kind in "tTwW"
    ]
    result = {}
    for site in sites:
        inside = [[name for address, name in symbols if address <= int(offset, 16)][-1:] for offset in site.split("<")]
        result[site] = " < ".join(name for names in inside for name in names)
    return result


def test_every_wait_is_needed():
    (whole,) = run_emulated(exercise, args=(None,))
    assert whole["complaints"] == []
    sites = whole["sites"]
    names = functions_of(sites)
    assert len(sites) >= 6, names
    (noticed,) = run_emulated(exercise, args=(sites,), timeout_s=150)
    assert list(noticed) == sites
    overlooked = [f"{site} {names.get(site, '')}" for site, complaints in noticed.items() if not complaints]
    assert not overlooked, f"nothing notices when these are left out: {overlooked}"
