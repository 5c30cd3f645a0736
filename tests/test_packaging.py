"""What the build decides on made-up machines, and what the import says about an extension that does not fit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import build_plan  # noqa: E402
from gsync import _native  # noqa: E402

CUDA_TORCH = build_plan.Torch("2.14.1+cu130", "13.0", Path("torch"))
CPU_TORCH = build_plan.Torch("2.13.0+cpu", None, Path("torch"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine with a C++ compiler and a CUDA build of torch, but no CUDA toolkit."""
    for name in ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build_plan, "find_torch", lambda: (CUDA_TORCH, ""))
    monkeypatch.setattr(build_plan, "find_compiler", lambda: (("g++",), ""))
    monkeypatch.setattr(build_plan, "_nvidia_folders", list)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *rest: None if name == "nvcc" else which(name, *rest))
    return monkeypatch


def make_toolkit(home: Path, release: str) -> Path:
    """Make a folder that looks like a CUDA toolkit; its nvcc tells its version and nothing else."""
    for folder in ("bin", "include", "lib"):
        (home / folder).mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    (home / "include" / "cuda_runtime_api.h").touch()
    (home / "lib" / f"libcudart.so.{release.split('.')[0]}").touch()
    return home


def test_cuda_torch_with_toolkit_builds_everything(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda", "13.0")))
    plan = build_plan.choose()
    assert (plan.kind, plan.archs, plan.warnings) == ("cuda", "8.0;9.0;10.0+PTX", ())
    summary = plan.summary().splitlines()
    assert summary[0] == "gsync build: cuda (torch has CUDA, nvcc found)"
    assert any("nvcc      13.0" in line for line in summary)
    assert len(summary) <= 6


def test_cuda_torch_without_toolkit_builds_for_the_cpu(machine: pytest.MonkeyPatch) -> None:
    plan = build_plan.choose()
    assert plan.kind == "cpu"
    assert "nvcc" in plan.reason
    assert "Triton" in plan.reason


def test_cpu_torch_builds_for_the_cpu_whatever_cuda_home_says(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(build_plan, "find_torch", lambda: (CPU_TORCH, ""))
    machine.setenv("CUDA_HOME", "/nowhere")
    assert build_plan.choose().kind == "cpu"


def test_no_torch_gives_pure_python_and_says_how_to_get_more(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(build_plan, "find_torch", lambda: (None, "torch is not visible to the build"))
    plan = build_plan.choose()
    assert plan.kind == "python"
    assert plan.summary().count("\n") == 0
    assert "pip install --no-build-isolation ." in plan.summary()


def test_no_compiler_gives_pure_python_and_says_how_to_get_more(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(build_plan, "find_compiler", lambda: ((), "there is no C++ compiler (install g++ or set CXX)"))
    plan = build_plan.choose()
    assert plan.kind == "python"
    assert "install g++" in plan.summary()
    assert "pip install --no-build-isolation ." in plan.summary()


@pytest.mark.parametrize("request_", ["cpu", "cuda"])
def test_an_explicit_request_never_falls_back(machine: pytest.MonkeyPatch, request_: str) -> None:
    machine.setattr(build_plan, "find_torch", lambda: (None, "torch is not visible to the build"))
    with pytest.raises(build_plan.BuildError, match=f"GSYNC_BUILD={request_} cannot be built: torch is not visible"):
        build_plan.choose(request_)


def test_cuda_asked_for_and_not_possible_says_what_is_missing(machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(build_plan.BuildError, match="needs nvcc: set CUDA_HOME"):
        build_plan.choose("cuda")
    machine.setattr(build_plan, "find_torch", lambda: (CPU_TORCH, ""))
    with pytest.raises(build_plan.BuildError, match=r"needs a CUDA build of torch, and torch 2\.13\.0\+cpu is none"):
        build_plan.choose("cuda")


def test_less_than_possible_can_be_asked_for(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda", "13.0")))
    assert build_plan.choose("cpu").kind == "cpu"
    assert build_plan.choose("python").kind == "python"


def test_cuda_home_that_leads_nowhere_is_named(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setenv("CUDA_HOME", str(tmp_path / "missing"))
    with pytest.raises(build_plan.BuildError, match=r"CUDA_HOME=.*missing has no bin/nvcc.*GSYNC_BUILD=cpu"):
        build_plan.choose()


def test_toolkit_of_another_major_version_stops_with_both_numbers(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda", "11.8")))
    with pytest.raises(build_plan.BuildError, match=r"nvcc is CUDA 11\.8, torch was built with CUDA 13\.0"):
        build_plan.choose()


def test_toolkit_of_another_minor_version_warns_with_both_numbers(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda", "13.2")))
    plan = build_plan.choose()
    assert plan.kind == "cuda"
    assert "nvcc is CUDA 13.2, torch was built with CUDA 13.0" in plan.summary()


def test_toolkit_made_of_pip_packages_is_found(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "nvidia" / "cu13", "13.0")
    machine.setattr(build_plan, "_nvidia_folders", lambda: [home])
    plan = build_plan.choose()
    assert plan.kind == "cuda"
    assert plan.toolkit is not None and plan.toolkit.home == home


def test_broken_nvcc_is_named(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda", "13.0")
    (home / "bin" / "nvcc").write_text("#!/bin/sh\nexit 3\n")
    machine.setenv("CUDA_HOME", str(home))
    with pytest.raises(build_plan.BuildError, match="does not run"):
        build_plan.choose()


def test_architectures_asked_for_are_kept(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda", "13.0")))
    machine.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    assert build_plan.choose().archs == "9.0a"


@pytest.mark.parametrize(("toolkit", "archs"), [("11.7", "8.0+PTX"), ("12.6", "8.0;9.0+PTX"), ("12.8", "8.0;9.0;10.0+PTX")])
def test_default_architectures_are_those_the_toolkit_knows(toolkit: str, archs: str) -> None:
    assert build_plan.default_archs(toolkit) == archs


def test_compiler_keeps_its_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"{launcher} {compiler}")
    assert build_plan.find_compiler() == ((str(launcher), compiler), "")


def test_compiler_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'error: unrecognized option -std=c++20' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    command, reason = build_plan.find_compiler()
    assert command == ()
    assert "does not compile C++20 (error: unrecognized option -std=c++20)" in reason


def test_cxx_that_is_no_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build_plan.BuildError, match="CXX='no-such-compiler' is not a command"):
        build_plan.find_compiler()


def run_setup(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", *arguments], cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=120
    )


def test_wrong_request_stops_the_build_without_a_traceback() -> None:
    done = run_setup("build_py", GSYNC_BUILD="gpu")
    assert done.returncode != 0
    assert done.stderr.strip() == "gsync: GSYNC_BUILD='gpu': expected one of auto, cpu, cuda, python"


# The import.


def test_torch_outside_the_range_is_refused_or_warned_about() -> None:
    for good in ("2.11.0", "2.13.0+cpu", "2.14.1+cu130"):
        _native.check_torch(good)
    with pytest.raises(ImportError, match=r"gsync needs torch 2\.11 to 2\.14 and found 2\.10\.1"):
        _native.check_torch("2.10.1")
    with pytest.warns(UserWarning, match=r"tested with torch 2\.11 to 2\.14 and found 2\.15\.0"):
        _native.check_torch("2.15.0")


@pytest.mark.parametrize(
    ("built_for", "found", "fits"),
    [
        (("2.13.0+cpu", None), ("2.13.0+cpu", None), True),
        (("2.14.0+cu130", "13.0"), ("2.14.1+cu130", "13.0"), True),
        (("2.13.0+cpu", None), ("2.14.1+cpu", None), False),
        (("2.14.1+cu130", "13.0"), ("2.14.1+cpu", None), False),
        (("2.14.1+cu130", "13.0"), ("2.14.1+cu126", "12.6"), False),
        (("2.14.0a0+git1", None), ("2.14.0a0+git2", None), False),
    ],
)
def test_extension_fits_the_torch_it_was_built_for(
    built_for: tuple[str, str | None], found: tuple[str, str | None], fits: bool
) -> None:
    message = _native.explain_mismatch(*built_for, *found)
    assert (message == "") == fits
    if not fits:
        assert built_for[0] in message
        assert found[0] in message
        assert "pip install" in message


def import_copy(folder: Path, info: str | None, extension: bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Import a copy of gsync/ with the given _build_info.py and extension, and print why there is no extension."""
    package = folder / "gsync"
    package.mkdir()
    for file in (ROOT / "gsync").glob("*.py"):
        shutil.copy(file, package)
    (package / "_build_info.py").unlink(missing_ok=True)
    shutil.copytree(ROOT / "kernels", package / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    if info is not None:
        (package / "_build_info.py").write_text(info)
    if extension is not None:
        (package / "_C.abi3.so").write_bytes(extension)
    # An editable install would find the real extension.
    code = "import sys; sys.meta_path = [finder for finder in sys.meta_path if '__editable__' not in str(finder)];"
    code += "from gsync import _native; print(_native.C, _native.has_cuda(), _native.MISSING)"
    environ = os.environ | {"PYTHONPATH": str(folder), "GSYNC_NATIVE": "auto"}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environ, capture_output=True, text=True, timeout=120)


BUILD_INFO = 'KIND = {!r}\nTORCH = {!r}\nTORCH_CUDA = {!r}\nCUDA = None\nARCHS = ""\nREASON = "made up"\n'


def test_unbuilt_source_tree_imports(tmp_path: Path) -> None:
    done = import_copy(tmp_path, None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None False gsync was installed without its compiled extension (this is a source tree")
    assert "GsyncWarning" not in done.stderr


def test_pure_python_build_imports_without_a_warning(tmp_path: Path) -> None:
    done = import_copy(tmp_path, BUILD_INFO.format("python", None, None))
    assert done.returncode == 0, done.stderr
    assert "without its compiled extension (made up). Build it: in gsync's source tree, pip install" in done.stdout
    assert "GsyncWarning" not in done.stderr


def test_import_under_another_torch_explains_itself_once(tmp_path: Path) -> None:
    done = import_copy(tmp_path, BUILD_INFO.format("cpu", "2.11.0+cpu", "99.0"), b"never loaded")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was built for torch 2.11.0+cpu (CUDA 99.0), but this is torch") == 1
    assert "pip install --force-reinstall" in done.stderr


def test_damaged_extension_explains_itself(tmp_path: Path) -> None:
    import torch

    info = BUILD_INFO.format("cpu", str(torch.__version__), torch.version.cuda)
    done = import_copy(tmp_path, info, b"\x7fELF not really")
    assert done.returncode == 0, done.stderr
    assert "does not load under torch" in done.stderr
    assert "pip install --force-reinstall" in done.stderr


def test_extension_for_another_python_explains_itself(tmp_path: Path) -> None:
    import torch

    done = import_copy(tmp_path, BUILD_INFO.format("cpu", str(torch.__version__), torch.version.cuda))
    assert done.returncode == 0, done.stderr
    assert "extension is missing, perhaps built for another Python" in done.stderr


@pytest.mark.skipif(_native.C is None, reason=_native.MISSING or "built")
def test_extension_imports_before_torch() -> None:
    code = "import gsync._C; print(gsync._C.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "gsync._C", done.stderr


def test_extension_can_be_switched_off() -> None:
    code = "from gsync import _native; print(_native.C, _native.MISSING)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"GSYNC_NATIVE": "off"}, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "None GSYNC_NATIVE=off", done.stderr
