"""gsync's extension and the emulated device, built for ThreadSanitizer, and what it reports.

Both lie in a folder of their own under `build`; `load` puts the extension in the place of the ordinary one, in processes that
were started with `environment()`. Python and torch are not built so: what they read and write is not looked at, the locks that
they take are.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / f"threads-{sys.implementation.cache_tag}-torch{torch.__version__}"
EXTENSION = FOLDER / "_C.so"
EMULATION = FOLDER / "gsync_emulation.so"
SWITCH = "GSYNC_TESTS_THREADS"  # set where the processes are to load what is in FOLDER
_BUILD_S = 1200.0  # four minutes of processor time, and more on a busy machine

OPTIONS = (
    "exitcode=0",  # reports are counted
    "ignore_noninstrumented_modules=1",  # Python and torch
    "history_size=4",
    "suppress_equal_stacks=0",  # every report counts, also of what was reported for another lock
    "suppress_equal_addresses=0",
    "detect_deadlocks=1",
    "second_deadlock_stack=1",
)

FLAGS = "-std=c++20 -O1 -g1 -fPIC -fsanitize=thread -fvisibility=hidden -ffp-contract=off -fno-trapping-math -w"


def why_not() -> str:
    """Return why ThreadSanitizer cannot run here, or ""."""
    if runtime() is None:
        return "the compiler has no libtsan"
    return "" if _ninja() else "ninja is not installed"


@functools.cache
def runtime() -> Path | None:
    """Return ThreadSanitizer's library, which has to be there before Python starts."""
    compiler = os.environ.get("CXX", "g++").split()[-1]
    if shutil.which(compiler) is None:
        return None
    told = subprocess.run([compiler, "-print-file-name=libtsan.so"], capture_output=True, text=True, check=False).stdout.strip()
    return Path(told).resolve() if os.path.isabs(told) else None


@functools.cache
def build() -> None:
    """Compile both, or what has changed since."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    _write(FOLDER / "build.ninja", _rules())
    ninja = _ninja()
    assert ninja
    command = [ninja, "-C", str(FOLDER), "-j", str(len(os.sched_getaffinity(0)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False)
    assert done.returncode == 0, f"it does not build for ThreadSanitizer:\n{done.stdout[-6000:]}"


def _write(file: Path, text: str) -> None:
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def _rules() -> str:
    """Return ninja's file: every C++ file of csrc and of the emulated device, two libraries."""
    torch_folder = Path(torch.__file__).parent
    system = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    include = " ".join([*(f"-isystem {folder}" for folder in system), f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}"])
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    libraries = f"-L{torch_folder / 'lib'} -Wl,-rpath,{torch_folder / 'lib'} -lc10 -ltorch_cpu -ltorch -ltorch_python -ldl -lrt"
    lines = [
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"flags = {FLAGS} {abi} {include}",
        "rule compile",
        "  command = $cxx $flags $more -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "rule link",
        f"  command = $cxx -shared -fsanitize=thread $in {libraries} -o $out",
    ]
    kernels = {ROOT / "csrc/cuda"}
    gsync = [file for file in sorted((ROOT / "csrc").glob("**/*.cpp")) if file.parent not in kernels]
    gsync.append(ROOT / "tests/left_out_lock.cpp")
    emulation = sorted((ROOT / "tests/emulation").glob("*.cpp"))
    for library, sources, extra in ((EXTENSION, gsync, "-include left_out_lock.h"), (EMULATION, emulation, "")):
        objects = []
        for source in sources:
            objects.append(f"{library.stem}/{source.relative_to(ROOT)}.o")
            lines.append(f"build {objects[-1]}: compile {source}")
            lines.append(f"  more = -DTORCH_EXTENSION_NAME={library.stem} {extra}")
        lines.append(f"build {library.name}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def environment(reports: Path) -> dict[str, str]:
    """Return what processes need in order to run what was built; each writes its reports to a file in the folder `reports`."""
    options = [*OPTIONS, f"log_path={reports / 'of'}"]
    return {SWITCH: "1", "LD_PRELOAD": str(runtime()), "TSAN_OPTIONS": ":".join(options)}


def reports_of(folder: Path | None = None, pid: int | None = None) -> list[str]:
    """Return what was reported to the folder of `environment()`, by default that of this process; by one process or by all."""
    if folder is None:
        folder = Path(os.environ["TSAN_OPTIONS"].rpartition("log_path=")[2]).parent
    files = sorted(folder.glob(f"of.{pid or '*'}"))
    return [report for file in files for report in file.read_text().split("=" * 18 + "\n") if "WARNING" in report]


def load() -> None:
    """Put the extension in the place of gsync's own, before gsync is imported, in a process of `environment()`."""
    if SWITCH not in os.environ or "gsync._C" in sys.modules:
        return
    assert "gsync" not in sys.modules
    spec = importlib.util.spec_from_file_location("gsync._C", EXTENSION)
    assert spec and spec.loader
    sys.modules["gsync._C"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _ninja() -> str | None:
    return shutil.which("ninja", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
