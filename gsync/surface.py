"""What may be called on everything that synchronises one model, whichever the way in: `SyncState` and `GradReducer`.

A `Surface` has a configuration, and once it is known an engine: the rest is read from it. How the model and its group are found,
and when the engine is made, is the subclass's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from . import env
from .arrivals import Arrivals
from .checkpoint import Feedback
from .config import SyncConfig
from .debug import StepChecks
from .engine import Engine, check_device, choose, make_engine, why_not_hierarchical
from .errors import GsyncError, GsyncWarning, SyncError
from .groups import Meeting, as_sync_error, timeout_of
from .hosts import Place, flat_place, word_of_host
from .model import Model
from .stats import SyncStats, add_totals
from .timeline import Recording, make_recording
from .tuner import Tuner

_TRACE_SPANS = 1 << 16  # 64 MiB of JSON with eight ranks


class Surface(ABC):
    """See above. A subclass sets `config`, then calls `_set_up`."""

    config: SyncConfig

    def _set_up(self, scaler: Any = None) -> None:
        self._feedback = Feedback(self.config, scaler)
        self._engine: Engine | None = None
        self._failure: SyncError | None = None  # of the ranks' meeting, when there was no engine yet
        self._group: Any = None
        self._meeting: Meeting | None = None
        self._path: tuple[str, Place] | None = None  # the exchange, and where this rank stands in it
        self._model: Model | None = None
        self._generation = 0
        self._closed = False
        self._step, self._seed = 0, self.config.seed
        self._totals: list[dict[str, Any]] = []
        self._arrivals: Arrivals | None = None
        self._checks: StepChecks | None = None
        self._recording: Recording | None = None
        self._traces = 0
        self._tuner: Tuner | None = None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def is_settled(self) -> bool:
        """Whether codec="auto" has tried what there is and made its choice; True under any other codec."""
        return not self.config.is_auto or (self._tuner is not None and self._tuner.is_settled) or self._runs_alone()

    def stats(self) -> SyncStats:
        """What synchronisation cost since the last reset. On CUDA it waits for the device.

        Who comes late is known once every rank has called this: each call writes this rank's waiting time into the group's store
        and reads what the others wrote last, at most once a second. No collective, and no waiting for other ranks.
        """
        stats = SyncStats.of(*self._totals, *([self._engine.stats()] if self._engine is not None else []))
        stats.residual_bytes = self._feedback.num_bytes
        stats.choice = str(self._tuner) if self._tuner is not None else ""
        if self._arrivals is not None and stats.steps > 0:
            stats.set_arrivals(self._arrivals.exchange(stats.exposed_ms / stats.steps))
        return stats

    def reset_stats(self) -> None:
        """Sets the totals of `stats` to zero."""
        self._totals = []
        if self._arrivals is not None:
            self._arrivals.forget()
        if self._engine is not None:
            self._engine.reset_stats()

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str], max_spans: int = _TRACE_SPANS) -> Iterator[None]:
        """Writes a timeline of the steps in the block, of all ranks, to `path`: for https://ui.perfetto.dev or chrome://tracing.

        For a few steps. Every rank enters and leaves the block, between steps: ranks meet in the group's store, both times, and
        compare clocks when they leave. Rank 0 writes the file; it is there when rank 0 has left the block. A file that cannot be
        written in the end, or a rank that does not come, is a `GsyncWarning`. While no trace is taken nothing is kept.

        Args:
            path: of the file; only rank 0's counts.
            max_spans: how many are kept on each rank, a slice in a stage being one; those that come later are counted only.

        Raises:
            ValueError: on every rank, if rank 0 cannot write there; a trace is being taken; max_spans is below 1.
        """
        if self._recording is not None:
            raise ValueError("trace: a timeline is being taken already")
        model, group = self._read()
        about = {"what": "gsync timeline", "model": model.label, "ranks": group.size(), "config": repr(self.config)}
        self._traces += 1
        make = make_recording
        self._recording = make(path, self._meet, self._traces, self._traced_module(), model.device, max_spans, about)
        try:
            if self._engine is not None:
                self._recording.start(self._engine)
            yield
            if self._engine is not None:
                self._recording.take(self._engine)
        except BaseException:
            self._recording.give_up()
            self._recording = None
            raise
        recording, self._recording = self._recording, None
        recording.finish()

    def grad_norm(self) -> torch.Tensor:
        """[] fp64: the 2-norm of all gradients as synchronised in the last step, the same bits on every rank.

        Never waits for a device.

        Raises:
            GsyncError: no step has been synchronised yet.
        """
        sums = self._started().sum_of_squares()
        if sums.device.type == "cpu":  # added in the order of names
            return sums.cumsum(0)[-1].sqrt()
        return sums.sum().sqrt()

    def found_nonfinite(self) -> torch.Tensor:
        """[] bool: whether a synchronised gradient of the last step is Inf or NaN. Never waits for a device.

        Raises:
            GsyncError: no step has been synchronised yet.
        """
        return self._started().found_nonfinite()

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients are synchronised, in the order of names."""
        model = self._model or self._read()[0]
        return model.alive()

    def state_dict(self, consolidate: bool = False) -> dict[str, Any]:
        """This rank's own state in plain numbers and tensors, for ``torch.load(weights_only=True)``. No collective.

        Args:
            consolidate: add up the residuals of all ranks, so that a world of another size can go on without losing what they
                hold. Collective: every rank must do it, between steps; each gets the same.

        Raises:
            ValueError: consolidate without error_feedback.
        """
        if consolidate and self.config.error_feedback:
            model, group = self._read()
            self._feedback.attach(model, group, self._find_path(model, group)[1])
        return self._feedback.to_state(self._group, self._seed, self._step_now(), consolidate)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`: bit for bit from one of the same rank and world.

        Of one of another rank or world step and seed are taken, and residuals if it was consolidated. What is dropped, since
        rank, world or model are others, a `GsyncWarning` says: now, or at the first bucket where model and hosts are not known.

        Raises:
            ValueError: it is not a `state_dict` of gsync.
        """
        self._feedback.load(state)
        self._step, self._seed = int(state["step"]), int(state["seed"])
        if self._engine is not None:
            self._engine.set_step(self._step)
            self._engine.set_seed(self._seed)
        if self._model is not None and self._group is not None:
            place = flat_place(self._group.rank(), self._group.size())
            if self._path is not None:
                place = self._path[1]
            elif self.config.error_feedback and self.config.may_be_hierarchical:
                return  # which residuals this rank has is not known yet
            self._feedback.attach(self._model, self._group, place)

    def scale_residuals(self, factor: float) -> None:
        """Multiplies all residuals by `factor`, for a change of the loss's scale; a scaler that was given is followed without.

        Raises:
            ValueError: `factor` is not a finite number above 0.
        """
        self._feedback.scale(factor)

    def reset(self) -> None:
        """Makes it work again after an error, from the next backward pass on. To be called on every rank."""
        self._end_engine()
        self._failure = None
        self._generation += 1

    def close(self) -> None:
        """Ends the engine."""
        self._end_engine()
        self._closed = True

    # For subclasses.

    @abstractmethod
    def _read(self) -> tuple[Model, Any]:
        """Model and group, found if need be."""

    @abstractmethod
    def _traced_module(self) -> torch.nn.Module | None:
        """What is called in a forward pass, where it is known and still exists."""

    def _runs_alone(self) -> bool:
        return self._group is not None and self._group.size() == 1

    def _meet(self) -> Meeting | None:
        """Where the ranks meet; None for one rank. Every rank of the group has to call it."""
        model, group = self._read()
        if self._meeting is None and group.size() > 1:
            self._meeting = Meeting(group, self.config.timeout_s or timeout_of(group, model.device))
            self._arrivals = Arrivals(self._meeting)
        return self._meeting

    def _make_engine(
        self, model: Model, group: Any, description: Mapping[str, Any], on_failure: Callable[[], None] = lambda: None
    ) -> Engine:
        """Makes the engine, once every rank has come with the same description. Collective over the group."""
        check_device(self.config, model, group)
        kind = choose(self.config, model.device)
        timeout_s = self.config.timeout_s or timeout_of(group, model.device)
        if self._meet() is not None:
            assert self._meeting is not None
            seed = {"seed": self._seed} if self.config.rounding == "stochastic" else {}
            self._meeting.agree(_description(self.config, model, kind) | seed | dict(description), self._generation)
            self._step = self._meeting.of_first_rank("step", self._step, self._generation)
        exchange, place = self._find_path(model, group)
        self._feedback.attach(model, group, place)
        made = (self._meeting, exchange, place, self._generation, timeout_s, on_failure)
        engine = make_engine(kind, self.config, model, group, *made)
        self._feedback.hand_to(engine, model)
        engine.set_step(self._step)
        engine.set_seed(self._seed)
        if self.config.is_auto and self._meeting is not None:
            if self._tuner is None:
                self._tuner = Tuner(self.config, self._meeting, exchange, place, kind[1])
            try:
                self._tuner.start(engine, model, self._generation)
            except BaseException as error:
                engine.abort(str(error))  # the other ranks wait in a collective
                engine.close()
                if isinstance(error, RuntimeError):
                    raise as_sync_error(f"gsync: {model.label}: the calibration of codec='auto' failed", error) from error
                raise
        if self._recording is not None:
            self._recording.start(engine)
        if env.ENV.debug:
            self._checks = StepChecks(engine, model, self._meeting, self._generation)
        self._engine = engine
        return engine

    def _hand_over(self, engine: Engine, model: Model) -> None:
        """Tells an engine under way that the model's parameters are others now."""
        self._feedback.hand_to(engine, model)
        if self._tuner is not None:
            self._tuner.apply(model)

    def _find_path(self, model: Model, group: Any) -> tuple[str, Place]:
        """The exchange, and where this rank stands in it. The first call is collective where it depends on the hosts."""
        if self._path is not None:
            return self._path
        flat = flat_place(group.rank(), group.size())
        exchange, place = self.config.exchange_used(flat.num_hosts, flat.ranks_per_host), flat
        meeting = self._meet() if self.config.may_be_hierarchical else None
        if meeting is not None:
            found = self._find_hosts(meeting, model, group)
            if isinstance(found, str):
                if self.config.exchange == "hierarchical":
                    raise ValueError(f"exchange='hierarchical': {found}")
                if found:
                    instead = "hierarchical is left out" if self.config.is_auto else "scatter_gather is used"
                    warnings.warn(f"exchange='auto': {found}; {instead}", GsyncWarning, stacklevel=2)
            else:
                exchange = self.config.exchange_used(found.num_hosts, found.ranks_per_host)
                if found.ranks_per_host > 1 and (exchange == "hierarchical" or self.config.is_auto):
                    place = found
                elif exchange == "hierarchical":  # nothing to sum inside a host: the same
                    exchange = "scatter_gather"
        self._path = (exchange, place)
        return self._path

    def _find_hosts(self, meeting: Meeting, model: Model, group: Any) -> Place | str:
        """This rank's place, or why there is none: "" if nobody asked."""
        reason = why_not_hierarchical(choose(self.config, model.device), self.config, model, group)
        if reason:
            return reason if self.config.exchange == "hierarchical" else ""
        return meeting.place(word_of_host(dist.get_global_rank(group, group.rank())), self._generation)

    def _end_engine(self) -> None:
        self._end_checks()
        if self._tuner is not None:
            self._tuner.stop()
        if self._engine is not None:
            self._step = self._engine.step
            self._totals = [functools.reduce(add_totals, [*self._totals, self._engine.stats()])]
            if self._recording is not None:
                self._recording.take(self._engine)
            self._engine.close()
        self._engine = None

    def _end_checks(self) -> None:
        if self._checks is not None:
            self._checks.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _started(self) -> Engine:
        self._raise_failure()
        if self._engine is None:
            raise GsyncError("no backward pass has been synchronised yet")
        return self._engine

    def _step_now(self) -> int:
        return self._engine.step if self._engine is not None else self._step

    def __repr__(self) -> str:
        phase = "closed" if self._closed else "not started" if self._engine is None else f"step {self._step_now()}"
        return f"{type(self).__name__}({self.config}, {phase})"


def _description(config: SyncConfig, model: Model, kind: Any) -> dict[str, Any]:
    """What must be the same on every rank."""
    from . import __version__

    names = "codec auto_codecs exchange average slice_mb transport block_size rounding error_feedback start_step"
    options = {name: repr(getattr(config, name)) for name in names.split()}
    return {
        "version of gsync": __version__,
        "engine": str(kind),
        "GSYNC_DEBUG": env.ENV.debug,
        "parameters": model.description(),
        "strides of parameters": model.strides(),
        **options,
    }
