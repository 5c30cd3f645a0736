"""Stats on their way to TensorBoard and Prometheus: read back by their own libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from ddp_cases import Scalars
from ranks import run_on_ranks

import gsync
from gsync.integrations.prometheus import PrometheusFile
from gsync.integrations.tensorboard import TensorBoard
from gsync.integrations.windows import Window
from gsync.stats import SyncStats


def _train(step, reducer, module):
    module(torch.full((1000,), 1.0 + step)).backward()
    module.zero_grad()


def _tensorboard(rank, world_size, folder):
    module = Scalars(1000)
    sync = gsync.GradReducer(module, codec="bf16", measure_every=1)
    board = TensorBoard(sync, f"{folder}/{rank}", every=2)
    for step in range(6):
        _train(step, sync, module)
        board.after_step(step)
    board.close()
    return sync.stats().to_dict()


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    total = run_on_ranks(_tensorboard, 2, args=(str(tmp_path),))[0]
    events = EventAccumulator(str(tmp_path / "0")).Reload()
    names = set(events.Tags()["scalars"])
    assert {"gsync/wire_bytes_per_step", "gsync/exposed_ms_per_step", "gsync/relative_error", "gsync/overlap_share"} <= names
    points = events.Scalars("gsync/wire_bytes_per_step")
    assert [point.step for point in points] == [1, 3, 5]
    assert sum(2 * point.value for point in points) == pytest.approx(total["wire_bytes"])
    assert sum(2 * point.value for point in events.Scalars("gsync/exposed_ms_per_step")) == pytest.approx(total["exposed_ms"])


def _prometheus(rank, world_size, folder):
    module = Scalars(1000)
    sync = gsync.GradReducer(module)
    file = PrometheusFile(sync, f"{folder}/{rank}.prom", labels={"rank": str(rank), "job": 'a "job"'}, every=3)
    for step in range(3):
        _train(step, sync, module)
        file.after_step(step)
    return sync.stats().to_dict()


def test_prometheus_reads_what_was_written(tmp_path):
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    total = run_on_ranks(_prometheus, 2, args=(str(tmp_path),))[1]
    families = {family.name: family for family in text_string_to_metric_families((tmp_path / "1.prom").read_text())}
    (sample,) = families["gsync_steps"].samples
    assert (sample.name, sample.labels, sample.value) == ("gsync_steps_total", {"rank": "1", "job": 'a "job"'}, 3.0)
    assert families["gsync_wire_bytes"].samples[0].value == total["wire_bytes"]
    assert families["gsync_exposed_seconds"].samples[0].value == pytest.approx(1e-3 * total["exposed_ms"])
    assert families["gsync_overlap_share"].type == "gauge" and "gsync_relative_error" not in families


def test_windows_are_what_came_since():
    window = Window()
    assert window.look(SyncStats()) == {}
    first = window.look(SyncStats(steps=2, wire_bytes=10, exchange_ms=4.0, exposed_ms=1.0))
    assert (first["wire_bytes_per_step"], first["overlap_share"]) == (5.0, 0.75)
    second = window.look(SyncStats(steps=6, wire_bytes=50, exchange_ms=14.0, exposed_ms=11.0))
    assert (second["wire_bytes_per_step"], second["overlap_share"]) == (10.0, 0.0)
    assert second["bandwidth_mb_per_s"] == 40 / 10.0 / 1e3
    after_reset = window.look(SyncStats(steps=1, wire_bytes=3))
    assert after_reset["wire_bytes_per_step"] == 3.0 and "relative_error" not in after_reset


@pytest.mark.parametrize(
    ("libraries", "module", "make", "message"),
    [
        (["tensorboard"], "tensorboard", "TensorBoard(None, 'runs')", "needs TensorBoard (pip install tensorboard)"),
        (
            ["prometheus_client"],
            "prometheus",
            "PrometheusFile(None, 'x.prom')",
            "needs Prometheus's client (pip install prometheus-client)",
        ),
        (["lightning", "pytorch_lightning"], "lightning", "GsyncCallback()", "needs Lightning (pip install lightning)"),
        (["accelerate"], "accelerate", "register(None, None)", "needs Accelerate (pip install accelerate)"),
        (["transformers"], "transformers", "GsyncCallback()", "needs transformers (pip install transformers)"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_a_missing_extra_is_named(libraries, module, make, message, tmp_path):
    hide = "; ".join(f"sys.modules[{library!r}] = None" for library in libraries)
    code = f"import sys; {hide}\nfrom gsync.integrations.{module} import *\n{make}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and f"gsync.errors.GsyncError: gsync.integrations.{module} {message}" in done.stderr


def test_wrong_use_is_told(tmp_path):
    with pytest.raises(ValueError, match="every=0"):
        TensorBoard(None, object(), every=0)
    with pytest.raises(ValueError, match="every=0"):
        PrometheusFile(None, tmp_path / "a.prom", every=0)
    with pytest.raises(ValueError, match="there is no folder"):
        PrometheusFile(None, tmp_path / "nowhere" / "a.prom")
