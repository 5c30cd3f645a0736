"""The timeline: a file that viewers take, in which spans nest, stages follow each other, arrows pair up and clocks agree."""

from __future__ import annotations

import json
import os
import resource
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ddp_cases import mlp, wrap
from ranks import run_on_ranks
from reducer_cases import each_engine

import gsync
from gsync.trace_file import RankTrace, check_place, trace_of

STEPS = 3


def _door(door, backend):
    if door == "ddp":
        return wrap(mlp(width=129), backend, ddp={"bucket_cap_mb": 0.02}, slice_mb=0.03)
    module = mlp(width=129)
    return module, gsync.GradReducer(module, backend=backend, bucket_mb=0.02, slice_mb=0.03)


def _train(model, rank, steps):
    for step in range(steps):
        model(torch.randn(5, 31, generator=torch.Generator().manual_seed(1000 * rank + step))).sum().backward()
        model.zero_grad()


def _trace(rank, world_size, path, backend, door):
    """Traces from before the first step, and later ones."""
    model, sync = _door(door, backend)
    with sync.trace(f"{path}.first" if rank == 0 else "/nowhere/that/is/looked/at"):
        _train(model, rank, 2)
    _train(model, rank, 1)
    with sync.trace(path):
        _train(model, rank, STEPS)
    _train(model, rank, 1)
    dist.barrier()
    return sync.stats().steps


def events_of(path: Path) -> list[dict]:
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] == "ms"
    return content["traceEvents"]


def check_trace(path: Path, world_size: int, steps: int) -> None:
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {e["pid"] for e in spans} == set(range(world_size))
    assert min(e["ts"] for e in spans) == 0 and all(e["dur"] >= 0 for e in spans)
    slack = 0.002  # two roundings to a nanosecond
    for track in {(e["pid"], e["tid"]) for e in spans}:
        here = sorted((e for e in spans if (e["pid"], e["tid"]) == track), key=lambda e: (e["ts"], -e["dur"]))
        open_spans: list[dict] = []
        for event in here:
            while open_spans and open_spans[-1]["ts"] + open_spans[-1]["dur"] <= event["ts"] + slack:
                open_spans.pop()
            if open_spans:  # inside of the one around it, never across its end
                assert event["ts"] + event["dur"] <= open_spans[-1]["ts"] + open_spans[-1]["dur"] + slack, (event, open_spans[-1])
                assert names[track] == "compute", event
            open_spans.append(event)
    for rank in range(world_size):
        mine = [event for event in spans if event["pid"] == rank]
        kinds = {names[rank, event["tid"]].split()[0] for event in mine}
        assert kinds == {"compute", "pack", "exchange", "unpack"}
        compute = [event for event in mine if event["tid"] == 0]
        assert sum(event["name"] == "forward" for event in compute) == steps
        backward = [event for event in compute if event["name"] == "backward"]
        waits = [event for event in compute if event["name"] == "wait for the mean"]
        assert len(backward) == len(waits) == steps
        assert all(event["dur"] > 0 for event in backward)
        for one, wait in zip(backward, waits, strict=True):
            inner = [e for e in compute if e["name"].startswith("gradients") and e["args"]["step"] == one["args"]["step"]]
            assert abs(sum(event["dur"] for event in inner) - one["dur"]) < 0.01 * len(inner)
            assert abs(one["ts"] + one["dur"] - wait["ts"]) < slack

    flows: dict[int, list[dict]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
    slices = {(e["pid"], e["args"]["step"], e["args"]["bucket"], e["args"]["slice"]) for e in spans if "slice" in e["args"]}
    assert len(flows) == len(slices) > steps * world_size
    for points in flows.values():
        assert [point["ph"] for point in points] == ["s", "t", "t", "f"]
        stages = [names[point["pid"], point["tid"]].split()[0] for point in points]
        assert stages == ["compute", "pack", "exchange", "unpack"]
        assert [point["ts"] for point in points] == sorted(point["ts"] for point in points)
        for point in points:  # each is bound to a span
            assert any(
                (e["pid"], e["tid"]) == (point["pid"], point["tid"]) and e["ts"] <= point["ts"] <= e["ts"] + e["dur"]
                for e in spans
            ), point
    # All ranks are on one machine and have one clock: what was measured may be off by what it says.
    about = content["otherData"]
    assert about["spans_without_room"] == 0
    for rank in range(world_size):
        offset, error = abs(about["clock_offset_us"][str(rank)]), about["clock_error_us"][str(rank)]
        assert offset <= error + 0.2 and (error == 0 if rank == 0 else error < 50_000)
    # What one rank ends, another has begun: a bucket's exchange cannot end before every rank has packed it.
    for _, step, bucket, idx in slices:
        same = [e for e in spans if e["args"].get("slice") == idx and (e["args"]["step"], e["args"]["bucket"]) == (step, bucket)]
        packed = max(e["ts"] for e in same if e["name"].startswith("pack"))
        exchanged = min(e["ts"] + e["dur"] for e in same if e["name"].startswith("exchange"))
        assert packed <= exchanged + 2 * max(about["clock_error_us"].values())


@pytest.mark.parametrize("door", ["ddp", "reducer"])
@pytest.mark.parametrize("backend", each_engine())
def test_a_timeline_of_all_ranks(backend, door, tmp_path):
    path = tmp_path / "trace.json"
    assert run_on_ranks(_trace, 3, args=(str(path), backend, door)) == [STEPS + 4] * 3
    check_trace(path, 3, STEPS)
    assert events_of(Path(f"{path}.first"))
    assert sorted(os.listdir(tmp_path)) == ["trace.json", "trace.json.first"]


def _refused(rank, world_size, backend, folder):
    model, sync = wrap(mlp(), backend)
    texts = []
    for path in (f"{folder}/nowhere/trace.json", folder):
        with pytest.raises(ValueError, match="trace: ") as refused, sync.trace(path):
            pytest.fail("the block was entered")
        texts.append(str(refused.value))
    with pytest.raises(TypeError, match="expected the path of a file, got int"), sync.trace(7):
        pass
    with sync.trace(f"{folder}/trace.json"):
        with pytest.raises(ValueError, match="being taken already"), sync.trace(f"{folder}/other.json"):
            pass
        _train(model, rank, 1)
    assert sync.stats().steps == 1  # training went on
    return texts


def test_a_place_that_cannot_be_written_is_told_on_every_rank(tmp_path):
    texts = run_on_ranks(_refused, 2, args=("auto", str(tmp_path)))
    assert texts[0] == texts[1]
    assert "there is no folder" in texts[0][0] and "is a folder" in texts[0][1]
    assert (tmp_path / "trace.json").exists()


def _left_by_an_error(rank, world_size, folder, bad):
    model, sync = wrap(mlp(), "auto")
    _train(model, rank, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == bad:
            with pytest.raises(KeyError), sync.trace(f"{folder}/trace.json"):
                raise KeyError
        else:
            with sync.trace(f"{folder}/trace.json"):
                pass
    _train(model, rank, 1)
    dist.barrier()
    return [str(one.message) for one in caught if one.category is gsync.GsyncWarning], sync.stats().steps


@pytest.mark.parametrize("bad", [0, 1])
def test_a_block_left_by_an_error_on_one_rank_hangs_no_other(bad, tmp_path):
    told = run_on_ranks(_left_by_an_error, 2, args=(str(tmp_path), bad))
    assert told[bad] == ([], 2)
    (text,), steps = told[1 - bad]
    assert f"was not written: rank {bad} left it by an error" in text and steps == 2
    assert not list(tmp_path.iterdir())


def _full_disk(rank, world_size, path):
    model, sync = wrap(mlp(), "auto")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sync.trace(path):
            _train(model, rank, 1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, unlimited[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    _train(model, rank, 1)
    return [str(one.message) for one in caught], sync.stats().steps


def test_a_file_that_finds_no_room_is_a_warning_and_leaves_nothing(tmp_path):
    told = run_on_ranks(_full_disk, 2, args=(str(tmp_path / "trace.json"),))
    (text,), steps = told[0]
    assert "was not written" in text and "File too large" in text
    assert steps == 2 and told[1] == ([], 2)
    assert not list(tmp_path.iterdir())


def test_spans_without_room_are_counted(tmp_path):
    (path,) = run_on_ranks(_little_room, 1, args=(str(tmp_path / "trace.json"),))
    about = json.loads(Path(path).read_text())["otherData"]
    assert about["spans_without_room"] > 0


def _little_room(rank, world_size, path):
    model, sync = wrap(mlp(), "auto")
    with sync.trace(path, max_spans=4):
        _train(model, rank, 3)
    return path


def _profiled(rank, world_size, backend):
    from torch._C._profiler import _ExperimentalConfig

    model, sync = wrap(mlp(), backend)
    _train(model, rank, 2)
    config = _ExperimentalConfig(profile_all_threads=True) if backend == "reference" else None
    with torch.profiler.profile(experimental_config=config) as profiler:
        _train(model, rank, 2)
    names = [event.name for event in profiler.events()]
    return {name: names.count(name) for name in ("gsync::pack", "gsync::exchange", "gsync::unpack")}, sync.stats().buckets


@pytest.mark.parametrize("backend", each_engine())
def test_spans_are_in_the_profiler(backend):
    for counted, buckets in run_on_ranks(_profiled, 2, args=(backend,)):
        assert buckets == 4
        assert counted["gsync::pack"] == counted["gsync::unpack"] == 2
        assert counted["gsync::exchange"] == (2 if backend == "native" else 0)  # there Gloo's own name stands for it


def test_clocks_are_put_together():
    """Rank 1's clock is 100 s behind; what happened at one time has one time."""
    span = [("bucket", 0, 0, 0, 1.0, 5.0), ("pack", 0, 0, 0, 1.0, 2.0), ("exchange", 0, 0, 0, 2.0, 4.0)]
    span += [("unpack", 0, 0, 0, 4.0, 5.0), ("exposed", 0, 0, 0, 1.0, 5.0)]
    marks = [("forward", 0.0), ("forward ended", 0.25), ("backward", 0.5)]
    late = [(*one[:4], one[4] - 100, one[5] - 100) for one in span]
    content = trace_of([RankTrace(1, late, [], offset_s=100.0), RankTrace(0, span, marks)], {})
    for name, begin, end in (("pack bucket 0", 1.0, 2.0), ("exchange bucket 0", 2.0, 4.0), ("wait for the mean", 1.0, 5.0)):
        found = [(e["pid"], e["ts"], e["dur"]) for e in content["traceEvents"] if e["name"] == name]
        assert found == [(rank, 1e6 * begin, 1e6 * (end - begin)) for rank in (0, 1)]


def test_a_step_that_is_not_whole_has_no_backward_pass():
    assert trace_of([RankTrace(0, [("bucket", 3, 1, 0, 1.0, 2.0)], [])], {})["traceEvents"][2:] == []


def test_a_place_is_looked_at_before(tmp_path):
    assert check_place(tmp_path / "new.json") == ""
    assert "no folder" in check_place(tmp_path / "a" / "b.json")
    assert "is a folder" in check_place(tmp_path)
