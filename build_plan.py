"""What the build makes, decided from what the machine has. setup.py acts on it; tests call it with made-up machines.

    cuda    C++ for the CPU, CUDA C++, NCCL transport    CUDA build of torch, C++ compiler, nvcc
    cpu     C++ for the CPU                              any torch, C++ compiler
    python  nothing compiled                             no torch to be seen, or no C++ compiler

GSYNC_BUILD (gsync/env.py) asks for one of them: then it is built, or the build stops and says what is missing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# What each toolkit can compile for. The last one is added as PTX too, for GPUs that come later.
ARCHS = ((8, 0, (11, 0)), (9, 0, (11, 8)), (10, 0, (12, 8)))
NATIVE_INSTALL = "pip install --no-build-isolation ."


class BuildError(SystemExit):
    """The build cannot go on; the message says why and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(f"gsync: {message}")


@dataclass(frozen=True)
class Torch:
    """What the build has to know about the torch it sees."""

    version: str
    cuda: str | None  # version of CUDA it was built with
    folder: Path


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: a system one, or the one that pip's packages make up."""

    nvcc: Path
    version: str
    include_dirs: tuple[Path, ...]
    cudart: Path

    @property
    def home(self) -> Path:
        return self.nvcc.parent.parent


@dataclass(frozen=True)
class Plan:
    """What is built, and why."""

    kind: str  # "cuda", "cpu", "python"
    reason: str
    torch: Torch | None = None
    compiler: tuple[str, ...] = ()  # as CXX names it, launcher included
    toolkit: Toolkit | None = None
    archs: str = ""
    warnings: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return a few lines for the build's log."""
        lines = [f"gsync build: {self.kind} ({self.reason})"]
        if self.kind == "python":
            lines[0] += f"; for the compiled extension: {NATIVE_INSTALL}"
        elif self.torch:
            lines.append(f"  torch     {self.torch.version}, CUDA {self.torch.cuda or 'none'}")
            lines.append(f"  compiler  {shlex.join(self.compiler)}")
        if self.toolkit:
            lines.append(f"  nvcc      {self.toolkit.version} at {self.toolkit.nvcc}")
            lines.append(f"  archs     {self.archs}")
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def choose(request: str = "auto") -> Plan:
    """Return the plan for `request` ("auto", "cuda", "cpu", "python") on this machine.

    Raises:
        BuildError: what was asked for cannot be built here, or a setting contradicts what is installed.
    """
    if request == "python":
        return Plan("python", "GSYNC_BUILD=python")
    torch, missing = find_torch()
    compiler: tuple[str, ...] = ()
    if torch is not None:
        compiler, missing = find_compiler()
    if torch is None or not compiler:
        if request != "auto":
            raise BuildError(f"GSYNC_BUILD={request} cannot be built: {missing}")
        return Plan("python", missing, torch)
    if request == "cpu":
        return Plan("cpu", "GSYNC_BUILD=cpu", torch, compiler)
    if torch.cuda is None:
        if request == "cuda":
            raise BuildError(f"GSYNC_BUILD=cuda needs a CUDA build of torch, and torch {torch.version} is none")
        return Plan("cpu", "torch has no CUDA", torch, compiler)
    toolkit = find_toolkit()
    if toolkit is None:
        if request == "cuda":
            raise BuildError("GSYNC_BUILD=cuda needs nvcc: set CUDA_HOME, or put it on PATH, or install pip's nvidia-cuda-nvcc")
        return Plan("cpu", "torch has CUDA but nvcc is not to be found; on GPUs Triton takes its place", torch, compiler)
    warnings = check_versions(toolkit.version, torch.cuda)
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST") or default_archs(toolkit.version)
    reason = "GSYNC_BUILD=cuda" if request == "cuda" else "torch has CUDA, nvcc found"
    return Plan("cuda", reason, torch, compiler, toolkit, archs, warnings)


def find_torch() -> tuple[Torch | None, str]:
    """Return the torch of this interpreter, or None and the reason."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            return None, f"torch does not import ({error})"
        return None, "torch is not visible to the build (pip isolates it, or torch is not installed)"
    except (ImportError, OSError) as error:
        return None, f"torch does not import ({error})"
    return Torch(str(torch.__version__), torch.version.cuda, Path(torch.__file__).parent), ""


def find_compiler() -> tuple[tuple[str, ...], str]:
    """Return the C++ compiler's command, as CXX names it if it is set, or () and what is missing."""
    if sys.platform != "linux":
        return (), f"the compiled extension is for Linux, and this is {sys.platform}"
    named = os.environ.get("CXX", "").strip()
    candidates = [named] if named else [sysconfig.get_config_var("CXX") or "", "c++", "g++", "clang++"]
    for candidate in candidates:
        words = shlex.split(candidate)
        if words and all(shutil.which(word) for word in words if not word.startswith("-")):
            return _try_compiler(tuple(words))
    if named:
        raise BuildError(f"CXX={named!r} is not a command on this machine; correct it or unset it")
    return (), "there is no C++ compiler (install g++ or set CXX)"


def _try_compiler(command: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return `command` if it compiles C++20 against Python's headers, else () and why not."""
    headers = sysconfig.get_path("include")
    if not (Path(headers) / "Python.h").is_file():
        return (), f"Python.h is not in {headers} (install python3-dev)"
    check = [*command, "-std=c++20", "-fsyntax-only", f"-I{headers}", "-x", "c++", "-"]
    source = "#include <Python.h>\n#include <concepts>\nstatic_assert(std::integral<int>);\n"
    try:
        done = subprocess.run(check, input=source, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"{shlex.join(command)} does not run ({error})"
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        return (), f"{shlex.join(command)} does not compile C++20 ({first})"
    return command, ""


def find_toolkit() -> Toolkit | None:
    """Return the toolkit that CUDA_HOME names, else the one on PATH, else pip's; None if there is none.

    Raises:
        BuildError: CUDA_HOME names a folder without nvcc, or nvcc does not run.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        named = os.environ.get(variable, "").strip()
        if named:
            nvcc = Path(named) / "bin" / "nvcc"
            if not nvcc.is_file():
                raise BuildError(
                    f"{variable}={named} has no bin/nvcc; point it to a CUDA toolkit, or unset it, or set GSYNC_BUILD=cpu"
                )
            return _toolkit(nvcc)
    on_path = shutil.which("nvcc")
    if on_path:
        return _toolkit(Path(on_path))
    for folder in _nvidia_folders():
        if (folder / "bin" / "nvcc").is_file():
            return _toolkit(folder / "bin" / "nvcc")
    return None


def _nvidia_folders() -> list[Path]:
    """Return the folders of pip's NVIDIA packages (nvidia/cu13, nvidia/cuda_runtime, nvidia/nccl ...)."""
    try:
        import nvidia
    except ImportError:
        return []
    return [folder for root in nvidia.__path__ for folder in sorted(Path(root).iterdir()) if folder.is_dir()]


def _toolkit(nvcc: Path) -> Toolkit:
    try:
        told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{nvcc} does not run ({error}); correct CUDA_HOME, or set GSYNC_BUILD=cpu") from None
    release = re.search(r"release (\d+\.\d+)", told)
    if not release:
        raise BuildError(f"{nvcc} --version names no release; correct CUDA_HOME, or set GSYNC_BUILD=cpu")
    # A wrapper on PATH lies elsewhere than the toolkit; nvcc knows its own folder.
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, timeout=60, check=False)
    here = re.search(r"_HERE_=(.+)", dry.stderr)
    real = Path(here.group(1).strip()) / "nvcc" if here else nvcc.resolve()
    nvcc = real if real.is_file() else nvcc
    roots = [nvcc.parent.parent, *_nvidia_folders()]
    include_dirs = tuple(root / "include" for root in roots if (root / "include" / "cuda_runtime_api.h").is_file())
    include_dirs += tuple(root / "include" for root in roots if (root / "include" / "nccl.h").is_file())
    include_dirs = tuple(dict.fromkeys(include_dirs))
    # By its full name: pip's package has no libcudart.so without a number.
    name = f"libcudart.so.{release.group(1).split('.')[0]}*"
    found = [library for root in roots for sub in ("lib64", "lib") for library in sorted((root / sub).glob(name))]
    if include_dirs and found:
        return Toolkit(nvcc, release.group(1), include_dirs, found[0])
    raise BuildError(f"{nvcc} comes without cuda_runtime_api.h or libcudart: install the whole toolkit, or set GSYNC_BUILD=cpu")


def check_versions(toolkit: str, torch_cuda: str) -> tuple[str, ...]:
    """Return warnings about a toolkit of another minor version than torch's CUDA.

    Raises:
        BuildError: the major versions differ.
    """
    if toolkit.split(".")[0] != torch_cuda.split(".")[0]:
        raise BuildError(
            f"nvcc is CUDA {toolkit}, torch was built with CUDA {torch_cuda}: the major versions must be equal. "
            f"Point CUDA_HOME to a {torch_cuda} toolkit, install pip's nvidia-cuda-nvcc of that version, or set GSYNC_BUILD=cpu"
        )
    if toolkit != torch_cuda:
        return (f"nvcc is CUDA {toolkit}, torch was built with CUDA {torch_cuda}; minor versions usually fit together",)
    return ()


def default_archs(toolkit: str) -> str:
    """Return the architectures built when TORCH_CUDA_ARCH_LIST is not set, as that variable writes them."""
    version = tuple(int(part) for part in toolkit.split("."))
    known = [f"{major}.{minor}" for major, minor, since in ARCHS if version >= since]
    return ";".join(known) + "+PTX"


def default_jobs() -> int:
    """Return how many files are compiled at a time when MAX_JOBS is not set: one per core, and 2 GB of memory for each."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores, memory // 2_000_000_000))
