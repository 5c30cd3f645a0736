"""Budgets of the CUDA kernels: what counts as a loss and what as a gain. The kernels' own: tests/test_cuda_static.py."""

from __future__ import annotations

import json

import kernel_report
import pytest

NOW = {"registers": 60, "spill_bytes": 0, "local_bytes": 0, "shared_bytes": 32, "generic": 0, "loads_16": 8, "stores_16": 4}


def compare(**changes: int) -> tuple[list[str], list[str]]:
    return kernel_report.compare({"sm_90": {"pack_kernel<128>": {**NOW, **changes}}}, {"sm_90": {"pack_kernel<128>": NOW}})


def test_the_budget_itself_is_neither_loss_nor_gain() -> None:
    assert compare() == ([], [])


@pytest.mark.parametrize("name", [*kernel_report.COSTS, *kernel_report.WIDTHS])
def test_a_loss_is_told_from_a_gain(name: str) -> None:
    sign = 1 if name in kernel_report.COSTS else -1
    losses, gains = compare(**{name: NOW[name] + sign})
    assert losses == [f"sm_90 pack_kernel<128>: {name} {NOW[name] + sign}, budget {NOW[name]}"] and gains == []
    losses, gains = compare(**{name: NOW[name] - sign})
    assert losses == [] and len(gains) == 1


def test_a_kernel_without_a_budget_is_a_loss_and_so_is_one_that_is_gone() -> None:
    one = {"sm_90": {"a": NOW}}
    assert kernel_report.compare(one, {}) == (["sm_90 a: it has no budget"], [])
    assert kernel_report.compare({}, one) == (["sm_90 a: it is gone"], [])


def test_every_kernel_has_a_budget_without_spills() -> None:
    budgets = json.loads(kernel_report.BUDGETS.read_text())["kernels"]
    operations = ("pack", "reduce", "unpack", "block_pack", "block_reduce", "block_unpack", "shard_reduce")
    names = {f"{operation}_kernel<{capacity}>" for operation in operations for capacity in (0, 128, 4000)}
    assert set(budgets) == {f"sm_{arch}" for arch in kernel_report.ARCHS}
    for kernels in budgets.values():
        assert set(kernels) == names and all(set(kernel) == set(NOW) for kernel in kernels.values())
        assert all(kernel["spill_bytes"] == 0 == kernel["local_bytes"] for kernel in kernels.values())
