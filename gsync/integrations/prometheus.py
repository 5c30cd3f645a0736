"""Synchronisation for Prometheus: a text file for node_exporter's textfile collector, or a collector for a registry of one's own.

from gsync.integrations.prometheus import PrometheusFile
file = PrometheusFile(sync, "/var/lib/node_exporter/gsync.prom", labels={"job": "train", "rank": "0"})
for step, batch in enumerate(batches):
    ...
    file.after_step(step)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from gsync.errors import GsyncError, GsyncWarning
from gsync.stats import SyncStats

_MS = 1e-3  # Prometheus counts seconds
# name, help, field of SyncStats, unit in those of Prometheus
_COUNTERS = (
    ("gsync_steps", "Backward passes synchronised", "steps", 1.0),
    ("gsync_buckets", "Buckets exchanged", "buckets", 1.0),
    ("gsync_nonfinite_steps", "Steps with Inf or NaN in a gradient", "nonfinite_steps", 1.0),
    ("gsync_gradient_bytes", "Bytes of gradients", "gradient_bytes", 1.0),
    ("gsync_wire_bytes", "Bytes sent by this rank", "wire_bytes", 1.0),
    ("gsync_waiting_seconds", "No bucket under way between the first and the last of a step", "waiting_ms", _MS),
    ("gsync_pack_seconds", "Encoding", "pack_ms", _MS),
    ("gsync_exchange_seconds", "Exchanging", "exchange_ms", _MS),
    ("gsync_unpack_seconds", "Decoding", "unpack_ms", _MS),
    ("gsync_exposed_seconds", "Waited for at the end of backward", "exposed_ms", _MS),
)
_GAUGES = (
    ("gsync_overlap_share", "Share of the work that backward did not wait for", "overlap_share", 1.0),
    ("gsync_residual_bytes", "Memory of error feedback", "residual_bytes", 1.0),
    ("gsync_arrival_spread_seconds", "How much the last rank comes after the first", "arrival_spread_ms", _MS),
    ("gsync_relative_error", "Relative error of encoding", "relative_error", 1.0),
)


def _library() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise GsyncError(
            f"gsync.integrations.prometheus needs Prometheus's client (pip install prometheus-client): {error}"
        ) from error
    return prometheus_client


class StatsCollector:
    """A collector of prometheus_client: its `collect` reads `stats` of `sync`.

    Args:
        sync: a `SyncState` or `GradReducer`.
        labels: names and values that every metric gets.

    Raises:
        GsyncError: prometheus_client is not installed.
    """

    def __init__(self, sync: Any, labels: Mapping[str, str] | None = None) -> None:
        self._core = _library().core
        self._sync, self._labels = sync, dict(labels or {})

    def collect(self) -> Iterator[Any]:
        """The metrics, totals as counters. What is None is left out."""
        stats: SyncStats = self._sync.stats()
        names, values = list(self._labels), [str(value) for value in self._labels.values()]
        kinds = ((_COUNTERS, self._core.CounterMetricFamily), (_GAUGES, self._core.GaugeMetricFamily))
        for table, make in kinds:
            for name, text, field, unit in table:
                value = getattr(stats, field)
                if value is not None:
                    metric = make(name, text, labels=names)
                    metric.add_metric(values, unit * value)
                    yield metric


class PrometheusFile:
    """Writes `path` anew every so many steps; a reader sees the old file or the new one, never a part.

    Args:
        sync, labels: see `StatsCollector`.
        path: of the file; its name must end in .prom for node_exporter.
        every: steps between two files.

    Raises:
        GsyncError: prometheus_client is not installed.
        ValueError: `every` is below 1, or there is no such folder.
    """

    def __init__(self, sync: Any, path: str | os.PathLike[str], labels: Mapping[str, str] | None = None, every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"PrometheusFile: every={every}: expected at least 1")
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            raise ValueError(f"PrometheusFile: {str(path)!r}: there is no folder {folder!r}")
        self._client = _library()
        self._path, self._every, self._warned = os.fspath(path), every, False
        self._registry = self._client.CollectorRegistry()
        self._registry.register(StatsCollector(sync, labels))

    def after_step(self, step: int) -> None:
        """To be called after each step, with its number. A file that cannot be written is a warning, once."""
        if (step + 1) % self._every:
            return
        try:
            self._client.write_to_textfile(self._path, self._registry)
        except OSError as error:
            if not self._warned:
                warnings.warn(f"gsync: {self._path!r} was not written: {error}", GsyncWarning, stacklevel=2)
            self._warned = True
