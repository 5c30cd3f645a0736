"""Installing and importing: what is too old, absent or half there is named; nothing is compiled behind anyone's back."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gsync import _native

ROOT = Path(__file__).resolve().parent.parent

FUNCTIONS = [
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommGetAsyncError",
    "ncclCommAbort",
    "ncclAllReduce",
    "ncclAllGather",
    "ncclSend",
    "ncclRecv",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclGetErrorString",
    "ncclGetLastError",
]


@pytest.mark.skipif(_native.C is None or not hasattr(_native.C, "NcclTransport"), reason=_native.MISSING or "no transport")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(("code", "words"), [(2903, "needs NCCL 2.18 or later, found version code 2903"), (None, "no function")])
def test_a_library_of_nccl_that_is_too_old_is_refused(tmp_path, code, words):
    """Case 11. With the version found, before any gradient; bf16 came with 2.10."""
    source, library = tmp_path / "old.c", tmp_path / "libnccl.so"
    functions = [f"int {name}(void) {{ return 1; }}" for name in FUNCTIONS]
    if code is not None:
        functions.append(f"int ncclGetVersion(int* version) {{ *version = {code}; return 0; }}")
    source.write_text("\n".join(functions))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    with pytest.raises(RuntimeError, match=words):
        _native.C.NcclTransport(dist.HashStore(), 0, 1, "cpu", 1.0, library=str(library))


def run(code: str, **environ: str) -> str:
    environment = os.environ | environ
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_compiled_at_run_time():
    """Case 113. No source of gsync builds an extension when it is imported or used, so there is no lock to be left behind."""
    for file in [*(ROOT / "gsync").glob("*.py"), *(ROOT / "kernels").glob("*.py")]:
        named = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        modules = {
            name
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        }
        assert not named & {"load_inline", "cpp_extension"} and not any("cpp_extension" in name for name in modules), file


def test_importing_at_once_and_after_a_kill(tmp_path):
    """Case 113. Four processes import at the same time with empty caches, one is killed in between: nothing waits for it."""
    caches = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    environment = os.environ | caches
    started = [subprocess.Popen([sys.executable, "-c", "import gsync"], env=environment) for _ in range(4)]
    try:
        started[0].kill()
        for process in started[1:]:
            assert process.wait(timeout=100) == 0
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not (tmp_path / "extensions").exists() and not (tmp_path / "triton").exists()


USE = """
import torch
from gsync import backends
print(backends.get("auto", torch.device("cpu")) is not None)
try:
    backends.get("triton", torch.device("cpu"))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_triton_all_but_triton_works():
    """Case 115. Importing needs no Triton; asking for it says that it is missing."""
    hide = "import importlib.util as u, sys\nsys.modules['triton'] = None\nfind = u.find_spec\n"
    hide += "u.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
    told = run(hide + USE, TRITON_INTERPRET="1").splitlines()
    assert told == ["True", "ValueError backend='triton': Triton is not installed; pip install triton, or use 'auto'"]


def test_a_triton_that_lacks_what_is_used_is_named(tmp_path):
    """Case 115. One that does not fit: the rest works, and asking for it tells which version was found and what it lacks."""
    stub = tmp_path / "triton"
    stub.mkdir()
    (stub / "__init__.py").write_text("__version__ = '0.0.1'\n")
    told = run(USE, PYTHONPATH=str(tmp_path), TRITON_INTERPRET="1").splitlines()
    assert told[0] == "True"
    assert told[1].startswith("GsyncError backend='triton': Triton 0.0.1 does not work with gsync: "), told


def test_the_torch_that_runs_here_is_one_of_those_supported():
    """Case 108. Checked at import."""
    _native.check_torch(str(torch.__version__))
