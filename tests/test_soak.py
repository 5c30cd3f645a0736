"""The soak test of tests/soak.py, shortened; `make soak` runs it at length."""

import pytest
import soak
from field_cases import DOORS

STEPS = 2000
# What the last steps' residuals and the failed steps' losses come to; measured at 20,000 steps: docs/robustness.md.
LOSS_BOUND = 0.02
# After the first fifth of the steps. A model of these has 24 KiB of parameters: one copy kept every ten steps would be 2400.
MEMORY_BOUND_KIB = 1200.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", DOORS)
def test_a_long_run_with_faults_keeps_memory_ranks_and_loss(kind):
    result = soak.soak(STEPS, kind)
    assert set(result["faults"]) == set(soak.FAULTS) and min(result["faults"].values()) > STEPS * soak.SHARE / 2
    assert result["steps_left_out"] == result["faults"]["nonfinite"]
    assert result["loss"] <= result["loss_without_gsync"] * (1 + LOSS_BOUND), result
    assert max(result["memory_kib_per_1000_steps"]) < MEMORY_BOUND_KIB, result


def test_the_slope_is_that_behind_the_first_fifth():
    assert soak.slope([100.0, 90.0, *(50.0 + 0.25 * i for i in range(8))]) == pytest.approx(0.25)
    assert soak.slope([1.0]) == 0.0
