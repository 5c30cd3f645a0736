"""What GSYNC_DEBUG=1 checks in every step, on all ranks together.

1. Before a bucket leaves: all ranks hand over the same one. Step, index, names, numbers of elements and codecs are compared.
2. When all gradients of the step are in place: the norm that synchronisation computed on the way is that of the gradients.
3. Then: all parameters, frozen ones too, are the same bytes on all ranks.

Ranks compare a digest, and send what it stands for only where digests differ. All of this goes through a Gloo group that nothing
else uses, from the thread that hands buckets over, so that its order is the order of buckets. Every message is as long as the
others' at that place: where ranks are in different places, they read that instead of hanging.

A rank that cannot go on drops its group; the others' next exchange then fails at once, or else after `timeout_s`.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from .engine import Engine
from .errors import InternalError
from .gradient_list import fill_nan_gradients
from .groups import Meeting, cause_of
from .model import Model

_BUCKET, _END = 0, 1
_EPS = 2.0**-52
Message = list[torch.Tensor]


class StepChecks:
    """The checks of one engine.

    Args:
        engine: fails, and with it the step on every rank, when a check does.
        model: its parameters, in the order of names.
        meeting: where the ranks meet; None for one rank, which checks its norm only.
        generation: of the engine.
    """

    def __init__(self, engine: Engine, model: Model, meeting: Meeting | None, generation: int) -> None:
        self._engine, self._model, self._world_size = engine, model, 1
        self._lane: Any = None
        if meeting is not None:
            self._world_size = meeting.size
            (self._lane,) = meeting.private_gloo(f"{generation}/debug", 1)
        self._entries = {id(param): (name, codec) for param, name, codec, _ in zip(*model.columns(), strict=True)}
        self._buffers: list[torch.Tensor] = []

    def close(self) -> None:
        """Lets the other ranks know that this one takes part no more."""
        self._lane = None

    # DDP's buckets.

    def submit(self, bucket: Any) -> Any:
        """`Engine.submit`, checked."""
        in_backward = torch._C._current_graph_task_id() != -1
        if bucket.index() == 0:
            self._buffers = []
        self.before_bucket(bucket.index(), bucket.parameters())
        future = self._engine.submit(bucket)
        self._buffers.append(bucket.buffer())
        if bucket.is_last():
            if in_backward:
                _at_end_of_backward(self, self._before_ddp)
            elif not self._engine.failed:  # without a batch, in DDP's join: its parameters are not trained either
                self._buffers = []
                self._compare_ends(self._engine.step, "", (0.0, 0.0), is_absent=True)
        return future

    def _before_ddp(self) -> None:
        _at_end_of_backward(self, self._after_ddp)

    def _after_ddp(self) -> None:
        buffers, self._buffers = self._buffers, []
        self.end_of_step(buffers)

    # What both doors call.

    def before_bucket(self, number: int, params: Sequence[torch.Tensor]) -> None:
        """Compares the bucket with the other ranks' before it is sent. Where they differ, the engine fails."""
        if self._world_size == 1 or self._has_ended():
            return
        if number == 0 and torch._C._current_graph_task_id() != -1:
            _at_end_of_backward(self, lambda: None)
        step = self._engine.step
        entries = [self._describe(param) for param in params]
        message = self._gather_header(_BUCKET, step, number, "\n".join(entries))
        if message is None:
            return
        if any(header[:3].tolist() != message[0][:3].tolist() for header in message):
            return self._fail(_different_places(message))
        if all(torch.equal(header, message[0]) for header in message):
            return
        lists = self._gather_text("\n".join(entries))
        if lists is not None:
            self._fail(_different_buckets(step, number, [text.split("\n") for text in lists]))

    def end_of_step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Checks norm and parameters.

        Args:
            gradients: all that were synchronised, as they are now; dense, sparse, real or complex.

        Raises:
            SyncError: ranks differ, or one did not come. The gradients are NaN.
            InternalError: the norm is not that of `gradients`.
        """
        fused = self._engine.sum_of_squares().sum().sqrt().item()
        plain, numel = _plain_norm(gradients)
        both_finite = math.isfinite(fused) and math.isfinite(plain)
        is_right = abs(fused - plain) <= numel * _EPS * plain if both_finite else math.isfinite(fused) == math.isfinite(plain)
        if self._world_size == 1:
            if not is_right:
                self._raise_norm([(fused, plain)], 0)
            return
        if not self._has_ended():
            hashes = [_hash(param) for param in self._model.alive()]
            self._compare_ends(self._engine.step - 1, hashes, (fused, plain), is_wrong=not is_right)
        if self._engine.failed:
            fill_nan_gradients(self._model.alive())
            self._engine.raise_pending()

    # Exchanges.

    def _compare_ends(
        self,
        step: int,
        hashes: Sequence[int] | str,
        norms: tuple[float, float],
        is_wrong: bool = False,
        is_absent: bool = False,
    ) -> None:
        # A rank without a batch hands over the last bucket and does not wait for it, so it does not know the step for sure.
        message = self._gather_header(_END, step, int(is_wrong) + 2 * int(is_absent), repr(hashes))
        if message is None:
            return
        if any(header[0] != _END for header in message):
            return self._fail(_different_places(message))
        if any(header[2] & 1 for header in message):
            found = self._gather(torch.tensor(norms, dtype=torch.float64))
            if found is not None:
                return self._raise_norm([tuple(pair.tolist()) for pair in found], [int(h[2]) & 1 for h in message].index(1))
            return
        present = [rank for rank, header in enumerate(message) if not header[2] & 2]
        if len({int(message[rank][3]) for rank in present}) <= 1:
            return
        mine = torch.tensor(hashes if not isinstance(hashes, str) else [0] * len(self._entries), dtype=torch.int64)
        found = self._gather(mine)
        if found is not None:
            self._fail(self._different_parameters(present, found))

    def _gather_header(self, kind: int, step: int, number: int, text: str) -> Message | None:
        return self._gather(torch.tensor([kind, step, number, _digest(text.encode())], dtype=torch.int64))

    def _gather_text(self, text: str) -> list[str] | None:
        data = text.encode()
        lengths = self._gather(torch.tensor([len(data)]))
        if lengths is None:
            return None
        longest = max(int(length) for length in lengths)
        padded = torch.tensor(list(data.ljust(longest)), dtype=torch.uint8)
        found = self._gather(padded)
        if found is None:
            return None
        return [bytes(row.tolist())[: int(length)].decode() for row, length in zip(found, lengths, strict=True)]

    def _gather(self, mine: torch.Tensor) -> Message | None:
        """Every rank's tensor; None where the exchange failed, and with it the engine."""
        found = [torch.empty_like(mine) for _ in range(self._world_size)]
        try:
            self._lane.allgather([found], [mine]).wait()
        except RuntimeError as error:
            self._fail(f"GSYNC_DEBUG: the ranks could not be compared: {cause_of(error)}")
            return None
        return found

    def _has_ended(self) -> bool:
        if self._engine.failed:
            self.close()
        elif self._lane is None:
            self._engine.abort("GSYNC_DEBUG: the backward pass before this one ended by an exception")
        return self._lane is None

    def _fail(self, text: str) -> None:
        self._engine.abort(text)
        self.close()

    def _raise_norm(self, norms: Sequence[tuple[float, ...]], rank: int) -> None:
        fused, plain = norms[rank]
        text = (
            f"GSYNC_DEBUG: on rank {rank} the norm computed in synchronisation is {fused!r}, "
            f"that of the synchronised gradients {plain!r}"
        )
        self._fail(text)
        fill_nan_gradients(self._model.alive())
        raise InternalError(f"gsync: {text}; please report this")

    # Words.

    def _describe(self, param: torch.Tensor) -> str:
        name, codec = self._entries.get(id(param), ("a parameter of another model", "no codec"))
        return f"{name!r} of {param.numel()} elements, {codec}"

    def _different_parameters(self, present: list[int], hashes: Message) -> str:
        first = present[0]
        differing = [i for i in range(len(self._entries)) if len({int(hashes[rank][i]) for rank in present}) > 1]
        ranks = [rank for rank in present if hashes[rank][differing[0]] != hashes[first][differing[0]]]
        return (
            f"GSYNC_DEBUG: parameter {self._model.names[differing[0]]!r} on {_ranks(ranks)} is not what it is on rank {first}; "
            f"{len(differing)} of {len(self._entries)} parameters differ"
        )


class _Watch:
    """What autograd calls at the end of a backward pass, or drops where that ended by an exception: then the checks end."""

    def __init__(self, checks: StepChecks, action: Callable[[], None]) -> None:
        self._checks: StepChecks | None = checks
        self._action = action

    def __call__(self) -> None:
        self._checks = None
        self._action()

    def __del__(self) -> None:
        if self._checks is not None:
            self._checks.close()


def _at_end_of_backward(checks: StepChecks, action: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(_Watch(checks, action))


def _plain_norm(gradients: Sequence[torch.Tensor]) -> tuple[float, int]:
    """The 2-norm in fp64, and of how many numbers."""
    total, numel = 0.0, 1
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        total += real.detach().double().square().sum().item()
        numel += real.numel()
    return math.sqrt(total), numel


def _hash(param: torch.Tensor) -> int:
    """Of a tensor's bytes, in the logical order of its elements."""
    data = param.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if data.nbytes == 0:
        return 0
    return _digest((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))


def _digest(data: Any) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _different_places(message: Message) -> str:
    places = []
    for rank, header in enumerate(message):
        kind, step, number = header[:3].tolist()
        what = f"at the end of step {step}" if kind == _END else f"at bucket {number} of step {step}"
        places.append(f"rank {rank} is {what}")
    return f"GSYNC_DEBUG: the ranks are in different places: {', '.join(places)}"


def _different_buckets(step: int, number: int, lists: list[list[str]]) -> str:
    other = next(rank for rank, entries in enumerate(lists) if entries != lists[0])
    mine, theirs = lists[0], lists[other]
    begin = f"GSYNC_DEBUG: bucket {number} of step {step} is not the same on all ranks"
    for i, (a, b) in enumerate(zip(mine, theirs)):  # noqa: B905 (the lengths are compared below)
        if a != b:
            return f"{begin}: parameter {i} of it is {a} on rank 0, and {b} on rank {other}"
    longer, more = (0, mine[len(theirs) :]) if len(mine) > len(theirs) else (other, theirs[len(mine) :])
    counts = f"{len(mine)} parameters on rank 0 and {len(theirs)} on rank {other}"
    return f"{begin}: it has {counts}; {more[0]} is on rank {longer} only"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
