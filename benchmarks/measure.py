"""The main job on one rank: arm every rival, check its results, train all of them side by side, time each step.

All rivals live in one process as DDP models with the same initial weights. In every round each takes one step on the same batch,
in an order shuffled by seed and so the same on all ranks, and starts it together with the other ranks. One more model takes part
without ever synchronising (DDP's no_sync): what a rival's step takes longer than this one's, in the same round, is its exposed
communication time. A step is forward, backward and optimizer; its time is that of the slowest rank.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gsync import _native

from . import checks, explain, network, one_step, timing
from .options import Options
from .progress import Progress
from .reduced import Reduced
from .rivals import REDUCER, STOCK, Armed, Rival
from .workloads import Workload, make_workload

NO_SYNC = "no_sync"
_NUM_CHECKS = 3  # DDP's first step is one bucket, the second rebuilds them, the third is as all that follow
_MOST_TO_SETTLE = 3000  # steps; more where they are short
_MIB = 2.0**20


@dataclass
class Contender:
    """One model that takes part. `rival` is None for the one that never synchronises."""

    rival: Rival | None
    model: DistributedDataParallel | Reduced
    optimizer: torch.optim.Optimizer
    armed: Armed
    error: float = 0.0
    problem: str = ""
    step_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    link_bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class Job:
    """The main job on this rank, in a process group that is there already.

    Args:
        options: the same on all ranks.
        device: this rank's.
        interface: network interface whose counters are read, "" for none.
        progress: told what is being done.
    """

    def __init__(self, options: Options, device: torch.device, interface: str, progress: Progress) -> None:
        self.options, self.device, self.interface, self.progress = options, device, interface, progress
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.workload: Workload = make_workload(options.model, options.sizes, options.seed)
        self.refused: dict[str, str] = {}
        self._flag = torch.zeros(1)

    def run(self) -> dict[str, Any]:
        """Do the job and return its results, which `report` knows how to read. Collective; the same on all ranks."""
        torch.set_num_threads(self.options.threads)
        rivals = self.options.make_rivals()
        contenders = self._arm(rivals)
        try:
            self._check(contenders)
            self._settle(contenders)
            racing = [one for one in contenders if not one.problem]
            self._train(racing, 0, self.options.warmup, measured=False)
            for one in racing:
                one.armed.reset()
            self._train(racing, self.options.warmup, self.options.num_steps, measured=True)
            self._check_weights(racing)
            results = self._results(rivals, contenders)
            rows = {rival.label: row for rival, row in zip(rivals, results["rows"], strict=True)}
            self._explain(racing, rows)
            if self.options.report:
                self._look_at_one_step(racing, rows)
            return results
        finally:
            for one in contenders:
                one.armed.close()

    # 1. Arm

    def _arm(self, rivals: list[Rival]) -> list[Contender]:
        """A model for each rival that accepts its hook here; the others go to `refused`."""
        contenders = [Contender(None, *self._model(None), Armed(lambda: 0.0))]
        for idx, rival in enumerate(rivals):
            self.progress.phase("arming", idx, len(rivals), rival.label)
            group: Any = dist.new_group() if rival.own_group else None
            model, optimizer = self._model(rival, group)
            armed, reason = None, ""
            try:
                armed = rival.arm(model)
            except Exception as error:  # whatever the reason, it belongs in the table
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            reasons: list[str] = [""] * self.world_size
            dist.all_gather_object(reasons, reason)
            if any(reasons):
                self.refused[rival.label] = next(text for text in reasons if text)
                if armed is not None:
                    armed.close()
            elif armed is not None:
                contenders.append(Contender(rival, model, optimizer, armed))
        return contenders

    def _model(
        self, rival: Rival | None, group: dist.ProcessGroup | None = None
    ) -> tuple[DistributedDataParallel | Reduced, torch.optim.Optimizer]:
        torch.manual_seed(self.options.seed)
        module = self.workload.build().to(self.device)
        optimizer = torch.optim.SGD(module.parameters(), self.workload.learning_rate, self.workload.momentum)
        bucket_cap_mb = self.options.bucket_cap_mb
        if rival is not None and rival.family == REDUCER:
            return Reduced(module, group, bucket_cap_mb), optimizer
        if rival is not None and rival.whole_model and self.device.type == "cpu":
            bucket_cap_mb = 1 + sum(parameter.numel() for parameter in module.parameters()) * 4 / _MIB
        model = DistributedDataParallel(
            module,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            process_group=group,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=self.options.gradient_as_bucket_view,
        )
        return model, optimizer

    # 2. Check

    def _check(self, contenders: list[Contender]) -> None:
        """Refuses every rival whose gradients are not the mean, or not the same on all ranks."""
        batch = self._batch(0)
        unsynced = contenders[0]
        found = []
        for _ in range(2):
            self._backward(unsynced, batch)
            found.append([gradient.clone() for gradient in checks.gradients(unsynced.model)])
        reference = checks.make_reference(*found)
        del found
        for idx, one in enumerate(contenders[1:]):
            assert one.rival is not None
            self.progress.phase("checking", idx, len(contenders) - 1, one.rival.label)
            for attempt in range(_NUM_CHECKS):
                self._backward(one, batch)
                if attempt == 1:
                    continue  # the same buckets as in the next
                verdict = checks.check_mean(checks.gradients(one.model), reference, one.rival.bound)
                one.error, one.problem = verdict.error, verdict.problem
                if one.problem:
                    break
            one.optimizer.zero_grad(set_to_none=True)

    def _settle(self, contenders: list[Contender]) -> None:
        """Lets those that choose by measuring do so, each alone; then they start with the weights of the others."""
        for one in contenders[1:]:
            if one.armed.is_settled():
                continue
            assert one.rival is not None
            weights = copy.deepcopy(one.model.module.state_dict())
            for step in range(_MOST_TO_SETTLE):
                self.progress.phase("choosing", step, _MOST_TO_SETTLE, one.rival.label)
                self._step(one, self._batch(step), measured=False)
                if one.armed.is_settled():
                    break
            else:
                one.problem = f"has not chosen after {_MOST_TO_SETTLE} steps"
            one.model.module.load_state_dict(weights)
            one.optimizer.state.clear()

    def _check_weights(self, contenders: list[Contender]) -> None:
        """Marks every rival under which the ranks' weights have drifted apart."""
        for one in contenders[1:]:
            odd = checks.odd_ranks(checks.digest(one.model.parameters()))
            if odd:
                one.problem = f"after training, ranks {', '.join(map(str, odd))} hold other weights than rank 0"

    # 3. Train and time

    def _train(self, contenders: list[Contender], first_step: int, num_steps: int, measured: bool) -> None:
        orders = timing.shuffled_rounds(len(contenders), num_steps, self.options.seed + first_step)
        gc.collect()
        gc.disable()  # a collection costs tens of ms and would meet one rival only
        try:
            for idx, order in enumerate(orders):
                self.progress.phase("measuring" if measured else "warming up", idx, num_steps)
                batch = self._batch(first_step + idx)
                for position in order:
                    self._step(contenders[position], batch, measured)
                if idx % 20 == 19:
                    gc.collect()
        finally:
            gc.enable()
        self._start_together()

    def _step(self, one: Contender, batch: tuple[Tensor, Tensor], measured: bool) -> None:
        self._start_together()
        sent = network.sent_bytes(self.interface) if self.interface else 0
        start = time.perf_counter()
        loss = self._backward(one, batch)
        middle = time.perf_counter()
        one.optimizer.step()
        self._wait_for_device()
        end = time.perf_counter()
        if not measured:
            return
        one.step_ms.append(1e3 * (end - start))
        one.backward_ms.append(1e3 * (middle - start))
        one.losses.append(float(loss))
        if self.interface:
            self._start_together()  # all that this step sends has left the host when every rank is here
            one.link_bytes.append(network.sent_bytes(self.interface) - sent)

    def _backward(self, one: Contender, batch: tuple[Tensor, Tensor]) -> Tensor:
        one.optimizer.zero_grad(set_to_none=True)
        with one.model.no_sync() if one.rival is None else contextlib.nullcontext():
            loss = self._loss(one.model, batch)
            loss.backward()
        self._wait_for_device()
        return loss.detach()

    def _loss(self, model: DistributedDataParallel | Reduced, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.workload.loss(model(batch[0]), batch[1])

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.workload.batch_at(step, self.rank, self.world_size)
        return inputs.to(self.device), targets.to(self.device)

    def _start_together(self) -> None:
        self._wait_for_device()
        dist.all_reduce(self._flag)

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # 4. Results

    def _results(self, rivals: list[Rival], contenders: list[Contender]) -> dict[str, Any]:
        by_label = {one.rival.label: one for one in contenders if one.rival is not None}
        baseline = by_label[f"ddp {STOCK}"]
        samples = {id(one): self._slowest(one) for one in contenders}
        alone = samples[id(contenders[0])]["step_ms"]
        rows = []
        for rival in rivals:
            row: dict[str, Any] = {"family": rival.family, "name": rival.name, "note": rival.note}
            one = by_label.get(rival.label)
            if one is None:
                row |= {"refused": self.refused[rival.label], "expected": rival.may_refuse}
            elif one.problem:
                row |= {"wrong": one.problem, "error": one.error}
            else:
                row |= self._row(one, samples[id(one)], samples[id(baseline)], alone)
            rows.append(row)
        module: nn.Module = contenders[0].model.module
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return {
            "world_size": self.world_size,
            "device": str(self.device.type),
            "parameters": sum(parameter.numel() for parameter in parameters),
            "batch": self.workload.batch,
            "no_sync_step_ms": {**vars(timing.summarize(alone)), "samples": alone},
            "rows": rows,
        }

    def _row(self, one: Contender, own: dict[str, Any], stock: dict[str, Any], alone: list[float]) -> dict[str, Any]:
        row: dict[str, Any] = {
            "step_ms": {**vars(timing.summarize(own["step_ms"])), "samples": own["step_ms"]},
            "backward_ms": {**vars(timing.summarize(own["backward_ms"])), "samples": own["backward_ms"]},
            "wire_bytes": one.armed.wire_bytes(),
            "wire_source": one.armed.wire_source,
            "error": one.error,
            "train_loss": one.losses[-1],
            "train_losses": one.losses,
            "stats": one.armed.stats(),
        }
        if own["link_bytes"]:
            row["link_bytes"] = timing.percentile(own["link_bytes"], 0.5)
            if stock["link_bytes"]:
                row["link_ratio"] = row["link_bytes"] / timing.percentile(stock["link_bytes"], 0.5)
        if stock["step_ms"]:
            for name in ("step", "backward"):
                ratios = timing.paired_ratios(own[f"{name}_ms"], stock[f"{name}_ms"])
                row[f"{name}_ratio"] = {**vars(timing.summarize(ratios)), "interval": timing.median_interval(ratios)}
        if alone:
            row["exposed_ms"] = vars(timing.summarize(timing.paired_differences(own["step_ms"], alone)))
        if self.workload.evaluate is not None:
            one.model.eval()
            row["loss"], row["accuracy"] = self.workload.evaluate(one.model.module, self.device)
        return row

    def _slowest(self, one: Contender) -> dict[str, Any]:
        """This contender's samples, of each step those of the slowest rank, of the link those of the busiest host."""
        mine = {"step_ms": one.step_ms, "backward_ms": one.backward_ms, "link_bytes": one.link_bytes}
        ranks: list[dict[str, Any]] = [{}] * self.world_size
        dist.all_gather_object(ranks, mine)
        return {name: [max(values) for values in zip(*(rank[name] for rank in ranks), strict=True)] for name in mine}

    # 5. Look closer: a few more steps, after everything has been measured

    def _explain(self, contenders: list[Contender], rows: dict[str, dict[str, Any]]) -> None:
        """A few steps of each of gsync's rivals under its own timeline."""
        batch = self._batch(self.options.warmup + self.options.num_steps)
        traced = [one for one in contenders[1:] if one.armed.trace is not None]
        for idx, one in enumerate(traced):
            assert one.rival is not None and one.armed.trace is not None
            self.progress.phase("tracing", idx, len(traced), one.rival.label)
            one.model.train()
            self._start_together()
            step = functools.partial(self._backward, one, batch)
            explained = explain.trace_steps(one.armed.trace, step, one.optimizer.step, self.rank)
            if explained:
                row = rows[one.rival.label]
                counted = self._cost_of_counting(row["stats"])
                row["explained"] = explained | {"counting_share": counted / row["step_ms"]["median"]}
        self._start_together()

    def _cost_of_counting(self, stats: dict[str, Any]) -> float:
        """What taking the times of a step's buckets costs, in ms: on the host, by the engine in C++."""
        native = _native.C
        if native is None:
            return 0.0
        return 1e3 * min(native.cost_of_clock(1000) for _ in range(5)) / 1000 * stats["buckets"] / max(1, stats["steps"])

    def _look_at_one_step(self, contenders: list[Contender], rows: dict[str, dict[str, Any]]) -> None:
        """One step of each rival under the profiler, on rank 0."""
        batch = self._batch(self.options.warmup + self.options.num_steps)
        for idx, one in enumerate(contenders[1:]):
            assert one.rival is not None
            self.progress.phase("looking", idx, len(contenders) - 1, one.rival.label)
            forward = functools.partial(self._loss, one.model, batch)
            step = functools.partial(one_step.run_step, forward, one.optimizer)
            one.model.train()
            for _ in range(2):  # the profiler is slow the first time
                self._start_together()
                if self.rank == 0:
                    rows[one.rival.label]["one_step"] = one_step.look_at(step, self.device.type == "cuda")
                else:
                    step()
        self._start_together()
