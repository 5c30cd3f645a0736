"""The examples for clusters, as far as one machine can try them: Slurm's commands are stand-ins, nodes are local processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *EXAMPLES.rglob("*.sbatch")])
# srun starts the tasks that Slurm would, on this machine, and ends with the highest exit code. Slurm's signals go to the tasks.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
pids=()
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
  pids+=($!)
done
echo "${pids[@]}" > "$TASKS_FILE.new" && mv "$TASKS_FILE.new" "$TASKS_FILE"
code=0
for pid in "${pids[@]}"; do
  wait "$pid"
  last=$?
  if ((last > code)); then code=$last; fi
done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
  show) echo 127.0.0.1 ; echo not-the-first ;;
  requeue) echo "$2" >> "$REQUEUED_FILE" ;;
esac
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def free_job():
    """A job whose port, as train.sbatch works it out, is free."""
    for job in range(os.getpid() % 20000, 40000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 20000 + job % 20000))
            return str(job)
    raise AssertionError("no port is free")


def environment(**more):
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**plain, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHON": sys.executable, "USER": "me", **more}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_sound(script):
    """bash reads them; shellcheck, where there is one, has nothing to say."""
    assert os.access(script, os.X_OK)
    checkers = [["bash", "-n"]] + ([["shellcheck"]] if shutil.which("shellcheck") else [])
    for checker in checkers:
        done = subprocess.run([*checker, script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


class Slurm:
    """A job under stand-ins for Slurm's commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tasks, self.requeued = folder / "tasks", folder / "requeued"
        commands = folder / "commands"
        commands.mkdir(parents=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.environment = environment(
            PATH=f"{commands}:{os.environ['PATH']}",
            SLURM_JOB_ID=free_job(),
            SLURM_JOB_NODELIST="node[1-2]",
            SLURM_SUBMIT_DIR=str(ROOT),
            SLURM_NTASKS="2",
            SLURM_CPUS_PER_TASK="1",
            TASKS_FILE=str(self.tasks),
            REQUEUED_FILE=str(self.requeued),
        )

    def start(self, *arguments):
        """Slurm runs a copy of the script."""
        script = self.folder / "slurm_script"
        shutil.copy(EXAMPLES / "slurm" / "train.sbatch", script)
        self.tasks.unlink(missing_ok=True)
        return subprocess.Popen(
            ["bash", script, self.folder / "run", *arguments],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, job):
        """Exit code and output; no task outlives it."""
        try:
            output, errors = job.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            for pid in self.tasks.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            job.kill()
            raise
        return job.returncode, output, errors


def steps_of(output):
    return [int(step) for step in re.findall(r"^step (\d+):", output, re.MULTILINE)]


@pytest.mark.timeout(600)
def test_a_slurm_job_saves_when_told_to_and_goes_on_when_it_is_requeued(tmp_path):
    """SIGUSR1 to one task, as before a time limit: both save one step, the job queues itself, and ends as an unbroken one."""
    pytest.importorskip("sklearn")
    slurm = Slurm(tmp_path / "broken")
    job = slurm.start("--steps", "1000000", "--save-every", "1000000")
    output = ""
    while "step 100:" not in output:
        line = job.stdout.readline()
        assert line, job.stderr.read()
        output += line
    os.kill(int(slurm.tasks.read_text().split()[1]), signal.SIGUSR1)
    code, rest, errors = slurm.end(job)
    output += rest
    assert code == 0 and slurm.requeued.read_text() == f"{slurm.environment['SLURM_JOB_ID']}\n", output + errors
    saved = int(re.search(r"saved at step (\d+), to be started again", output).group(1))
    assert saved >= 100 and saved % 10 == 0
    state = torch.load(slurm.folder / "run" / "job.pt", weights_only=True)
    assert state["step"] == state["gsync"]["step"] == saved and state["gsync"]["consolidated"]

    end = saved + 100
    until = ("--steps", str(end), "--save-every", str(end))
    code, again, errors = slurm.end(slurm.start(*until))
    assert code == 0 and f"2 ranks, from step {saved}" in again, again + errors
    assert steps_of(output) + steps_of(again) == list(range(50, end + 1, 50))
    assert len(slurm.requeued.read_text().split()) == 1

    unbroken = Slurm(tmp_path / "unbroken")
    code, whole, errors = unbroken.end(unbroken.start(*until))
    assert code == 0, whole + errors
    ours, theirs = (
        torch.cat([p.flatten() for p in torch.load(each.folder / "run" / "job.pt", weights_only=True)["model"].values()])
        for each in (slurm, unbroken)
    )
    assert (ours - theirs).norm() < 1e-3 * theirs.norm()  # residuals were shared out evenly once more, none was lost
    assert float(re.search(r"accuracy (\d\.\d+)", again).group(1)) > 0.85


def test_a_slurm_job_that_fails_is_not_queued_again(tmp_path):
    slurm = Slurm(tmp_path)
    code, _, errors = slurm.end(slurm.start("--steps", "many"))
    assert code == 2 and "invalid int value: 'many'" in errors and not slurm.requeued.exists()


def agents(commands, envs, folder):
    """Runs a command for each node, and returns their output."""
    running = [
        subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, env in zip(commands, envs, strict=True)
    ]
    try:
        outputs = [each.communicate(timeout=150)[0] for each in running]
    finally:
        for each in running:
            if each.poll() is None:
                each.terminate()  # torchrun ends its ranks
    assert [each.returncode for each in running] == [0, 0], outputs
    return outputs


def assert_trained_once(outputs, world_size):
    both = "".join(outputs)
    assert f"{world_size} ranks, from step 0" in both and steps_of(both) == [50, 100], both
    assert float(re.search(r"accuracy (\d\.\d+)", both).group(1)) > 0.7, both


def test_two_nodes_under_torchrun(tmp_path):
    """The same line on two nodes, which are two agents on this machine; one rank each."""
    pytest.importorskip("sklearn")
    more = {"PROCESSES": "1", "PORT": str(free_port()), "LOCAL_ADDR": "127.0.0.1", "JOB": "test"}
    command = ["bash", EXAMPLES / "torchrun" / "launch.sh", "127.0.0.1", "--folder", tmp_path / "run", "--steps", "100"]
    assert_trained_once(agents([command] * 2, [environment(**more)] * 2, tmp_path), 2)


@pytest.mark.slow
def test_two_pods_of_the_kubernetes_job(tmp_path):
    """The containers' own command, with this machine's address and one process each."""
    pytest.importorskip("sklearn")
    job = manifests()["Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    shell = container["command"][-1]
    port = str(free_port())
    for old, new in (
        ("exec python", f"exec {sys.executable}"),
        ("--nproc-per-node 8", "--nproc-per-node 1"),
        ("gsync-train-0.gsync", "127.0.0.1"),
        ("29500", port),
        ("/checkpoints/run", f"{tmp_path}/run --steps 100"),
    ):
        assert old in shell
        shell = shell.replace(old, new)
    envs = [environment(JOB_COMPLETION_INDEX=str(index)) for index in range(2)]
    assert_trained_once(agents([[*container["command"][:-1], shell]] * 2, envs, ROOT), 2)


def manifests():
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((EXAMPLES / "kubernetes" / "job.yaml").read_text()))
    return {document["kind"]: document for document in documents}


def test_kubernetes_names_fit_together():
    """What the Service selects, calls its pods and opens is what the Job makes, names and uses."""
    service, job = manifests()["Service"], manifests()["Job"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    shell = container["command"][-1]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr {job['metadata']['name']}-0.{pod['subdomain']}" in shell
    assert f"--master-port {service['spec']['ports'][0]['port']}" in shell
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert f"--nnodes {spec['completions']}" in shell
    assert f"--nproc-per-node {container['resources']['limits']['nvidia.com/gpu']}" in shell
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["restartPolicy"] == "Never" and (ROOT / re.search(r"examples/\w+\.py", shell).group()).exists()


@pytest.mark.slow
def test_a_wheel_built_on_a_login_node_installs_without_a_network(tmp_path):
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    script = EXAMPLES / "slurm" / "build.sh"
    done = subprocess.run(
        ["bash", script, wheels], env=environment(GSYNC_BUILD="python"), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", wheels, "--no-deps", "--target", target]
    done = subprocess.run([*install, "torch-gsync"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (target / "gsync" / "__init__.py").exists() and (target / "gsync" / "kernels").is_dir()


def test_the_training_program_wants_a_launcher(tmp_path):
    plain = {name: value for name, value in environment().items() if not name.startswith("SLURM_")}
    command = [sys.executable, EXAMPLES / "cluster.py", "--folder", tmp_path]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "start it by torchrun or srun; neither RANK nor SLURM_PROCID is set" in done.stderr
