"""The command `gsync`: help, doctor alone and across ranks, and what it says when its extra is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gsync import doctor, launch

GSYNC = [sys.executable, "-m", "gsync.cli"]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD_SIZE", "MASTER_"))
    }
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=clean | environment)


@pytest.mark.parametrize("command", [[], ["bench"], ["bench", "kernels"], ["plan"], ["doctor"]])
def test_help_describes_every_command(command: list[str]) -> None:
    done = run([*GSYNC, *command, "--help"], COLUMNS="80", TERM="dumb")
    assert done.returncode == 0, done.stderr
    assert "Usage: gsync" in done.stdout
    if command == ["bench"]:
        for flag in ("--codec", "--exchange", "--slice-mb", "--hosts", "--rate", "--steps", "--json", "--quiet"):
            assert flag in done.stdout


def test_shells_can_complete_it() -> None:
    done = run([*GSYNC], _GSYNC_COMPLETE="complete_bash", COMP_WORDS="gsync be", COMP_CWORD="1")
    assert done.returncode == 0 and done.stdout.split() == ["bench"], done.stderr


def test_unknown_commands_are_refused() -> None:
    done = run([*GSYNC, "bunch"])
    assert done.returncode == 2 and "bunch" in done.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_names_it(missing: str) -> None:
    hide = f"import sys; sys.modules[{missing!r}] = None; import gsync; from gsync.cli import main; main()"
    done = run([sys.executable, "-c", hide])
    assert done.returncode == 2
    assert f"needs {missing}: pip install --no-build-isolation '.[bench]' in gsync's source folder" in done.stderr


def test_without_scikit_learn_other_models_are_named() -> None:
    hide = "import sys; sys.modules['sklearn'] = None; sys.modules['sklearn.datasets'] = None; sys.argv = ['gsync', 'bench']; "
    done = run([sys.executable, "-c", hide + "from gsync.cli import main; main()"])
    assert done.returncode == 2
    assert "pip install scikit-learn, or take --model mlp" in done.stderr


def test_doctor_says_what_would_be_used(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    done = run([*GSYNC, "doctor", "--json", str(path)])
    assert done.returncode == 0, done.stderr
    for word in ("gsync ", "torch ", "build ", "machine ", "GPUs ", "NCCL ", "Triton ", "on cpu ", "backend ", "transport "):
        assert word in done.stdout
    found = json.loads(path.read_text())
    assert found["choices"][0]["device"] == "cpu" and found["choices"][0]["trial"] == "works"
    assert found["versions"]["torch"]


def test_doctor_does_without_typer_and_rich() -> None:
    hide = "import sys; sys.modules['typer'] = None; sys.modules['rich'] = None; from gsync import doctor; sys.exit(doctor.run())"
    assert run([sys.executable, "-c", hide]).returncode == 0


def test_doctor_names_the_odd_rank_under_srun() -> None:
    slurm = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(_free_port())}
    command = [sys.executable, "-m", "gsync.doctor", "--no-measure"]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=os.environ | slurm | {"SLURM_PROCID": str(rank), "GSYNC_NATIVE": "off" if rank == 1 else "auto",
                                                        "SLURM_LOCALID": str(rank)}) for rank in range(3)]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    lines = said[0][0].splitlines()
    assert len(lines) == 4, said
    assert [line.split()[:2] for line in lines[:3]] == [["rank", "0"], ["rank", "1"], ["rank", "2"]]
    assert said[1][0] == said[2][0] == ""
    codes = [rank.returncode for rank in ranks]
    if "build python" in lines[0]:  # no extension here: then none is odd
        assert codes == [0, 0, 0] and lines[3] == "all ranks are alike"
    else:
        assert codes == [1, 1, 1] and lines[3] == "odd: rank 1"
        assert "odd: build python (others" in lines[1]


def test_a_missing_rank_is_named() -> None:
    signature = dict.fromkeys(doctor.SAME, "same")
    lines, odd = doctor.compare({0: {"host": "a", "signature": signature}, 2: {"host": "c", "signature": signature}}, 3)
    assert odd == [1]
    assert "rank 1" in lines[1] and "did not answer" in lines[1]


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # the shell of an sbatch script
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
         (3, 4, 1, 2, "torchrun", "h", 1)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "120003",
          "SLURM_STEP_NODELIST": "gpu[07-08,12]", "SLURM_STEP_TASKS_PER_NODE": "4,3"}, (5, 7, 1, 3, "srun", "gpu07", 29403)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "n1,n2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
         (0, 8, 0, 4, "srun", "n1", 29400)),
    ],
)  # fmt: skip
def test_the_place_is_read_from_the_launcher(environ: dict[str, str], wanted: tuple[object, ...] | None) -> None:
    place = launch.find_place(environ)
    assert (None if place is None else tuple(vars(place).values())) == wanted


def test_a_half_set_launcher_is_refused() -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR or MASTER_PORT"):
        launch.find_place({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="MASTER_PORT=0"):
        launch.find_place({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "0"})
    with pytest.raises(ValueError, match="WORLD_SIZE='two'"):
        launch.find_place({"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "h", "MASTER_PORT": "1"})


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
