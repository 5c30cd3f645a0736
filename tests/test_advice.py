"""The doctor's advice: the formula, what follows from it, and a measurement between real ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gsync import advice
from gsync.advice import FP32, Candidate, Link

BF16 = Candidate("bf16", "all_reduce", 1e-9, 0.5)
INT8 = Candidate("int8", "scatter_gather", 2e-9, 0.25)
INT4 = Candidate("int4", "scatter_gather", 3e-9, 0.13)


def test_the_time_is_that_of_the_formula():
    link = Link(world_size=4, latency_s=1e-3, bytes_per_s=1e8)
    assert link.factor == 1.5
    assert advice.time_of(FP32, link, 1e8) == pytest.approx(1e-3 + 1.5)
    assert advice.time_of(INT8, link, 1e8) == pytest.approx(0.2 + 2e-3 + 0.25 * 1.5)


@pytest.mark.parametrize("candidate", [BF16, INT8, INT4])
@pytest.mark.parametrize("world_size", [2, 8])
def test_a_codec_breaks_even_at_the_bandwidth_told(candidate, world_size):
    limit = advice.pays_below(candidate, Link(world_size, 0.0, 1.0))
    for bandwidth, wins in ((0.99 * limit, True), (1.01 * limit, False)):
        link = Link(world_size, 0.0, bandwidth)
        assert (advice.time_of(candidate, link, 1e6) < advice.time_of(FP32, link, 1e6)) is wins
    assert math.isinf(advice.pays_below(FP32, Link(2, 0.0, 1.0)))


@pytest.mark.parametrize(
    ("bytes_per_s", "wanted"),
    [(1e10, FP32), (3e8, BF16), (1e8, INT8), (1e7, INT4)],
    ids=["10 GB/s", "300 MB/s", "100 MB/s", "10 MB/s"],
)
def test_the_slower_the_link_the_narrower_the_codec(bytes_per_s, wanted):
    assert advice.choose([BF16, INT8, INT4], Link(2, 1e-4, bytes_per_s)) is wanted


def test_a_larger_error_has_to_be_worth_it():
    """int4 is 1 % faster than int8 here, bf16 40 % faster than fp32."""
    near = Candidate("int4", "scatter_gather", 0.99 * INT8.encode_s_per_byte, INT8.wire_share)
    link = Link(2, 0.0, 1e8)
    assert advice.time_of(near, link, 1e6) < advice.time_of(INT8, link, 1e6)
    assert advice.choose([INT8, near], link) is INT8


def test_buckets_are_as_small_as_latency_lets_them():
    sizes = [advice.bucket_mb(FP32, Link(2, latency_s, 1e8)) for latency_s in (1e-4, 1e-3, 1e-2, 1.0)]
    assert sizes == [1, 2, 25, 100]
    for size, latency_s in zip(sizes[:3], (1e-4, 1e-3, 1e-2), strict=True):
        assert latency_s <= 0.05 * advice.time_of(FP32, Link(2, latency_s, 1e8), size * 2**20)


@pytest.mark.parametrize("bytes_per_s", [1e6, 2e8, 1e11])
def test_advice_fits_a_terminal(bytes_per_s):
    text = advice.lines([BF16, INT8, INT4], Link(128, 5e-4, bytes_per_s), "gloo on cpu", 9.7)
    assert all(len(line) <= 80 for line in text), text
    assert any(advice.FORMULA in line for line in text)
    (try_this,) = [line for line in text if line.startswith("advice")]
    wanted = {1e6: 'codec="int4", exchange="scatter_gather", error_feedback=True', 2e8: 'codec="int8"', 1e11: "stay with fp32"}
    assert wanted[bytes_per_s] in try_this


def test_two_ranks_measure_and_say_what_to_try(tmp_path: Path):
    path = tmp_path / "doctor.json"
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD_SIZE", "MASTER_"))
    }
    command = [sys.executable, "-m", "gsync.doctor", "--measure", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=clean)
    assert done.returncode == 0, done.stderr
    assert "advice     " in done.stdout and "2 ranks, gloo on cpu" in done.stdout
    found = json.loads(path.read_text())["advice"]
    link = Link(**found["link"])
    assert link.world_size == 2 and 1e-6 < link.latency_s < 1 and 1e6 < link.bytes_per_s < 1e12
    candidates = [Candidate(**one) for one in found["candidates"]]
    assert [one.codec for one in candidates] == ["bf16", "int8", "int4"]
    assert [round(one.wire_share, 2) for one in candidates] == [0.5, 0.25, 0.13]
    assert all(1e-12 < one.encode_s_per_byte < 1e-6 for one in candidates)
    best = advice.choose(candidates, link)
    assert found["try"] == {"codec": best.codec, "exchange": best.exchange, "bucket_mb": advice.bucket_mb(best, link)}
    assert all(len(line) <= 80 for line in found["lines"])


def test_a_file_in_no_folder_is_told_before_anything_is_looked_at(tmp_path: Path):
    command = [sys.executable, "-m", "gsync.doctor", "--json", str(tmp_path / "nowhere" / "a.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2 and done.stdout == "" and "there is no folder" in done.stderr
