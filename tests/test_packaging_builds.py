"""Real builds: the sdist has what it takes, and wheels made from it work, with and without torch at build time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gsync import _native

ROOT = Path(__file__).resolve().parent.parent


def run(command: list[str | Path], cwd: Path, timeout_s: int = 120, **environ: str) -> str:
    """Run `command` and return what it printed. A failure shows all of that."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT], folder)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


def test_sdist_has_every_file_of_the_repository(sdist: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode or not listed.stdout:
        pytest.skip("this tree is not a git repository")
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    missing = sorted(name for name in tracked if not (sdist / name).exists())
    assert not missing, f"not in the sdist: {missing}; see MANIFEST.in"
    built = [file for file in sdist.rglob("*") if file.suffix in (".so", ".o", ".pyc") or file.name == "_build_info.py"]
    assert not built


def make_wheel(source: Path, folder: Path, python: str | Path, timeout_s: int = 120, **environ: str) -> tuple[Path, str]:
    """Return the wheel that `python` makes of `source`, without fetching anything, and what pip printed."""
    told = run(
        [python, "-m", "pip", "wheel", "-v", "--no-index", "--no-deps", "--no-build-isolation", "-w", folder, source],
        folder,
        timeout_s,
        **environ,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel, told


def import_wheel(wheel: Path, folder: Path, code: str) -> str:
    """Unpack `wheel`, run `code` with it alone (no editable install beside it), and return what it printed."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    code = "import sys; sys.meta_path = [finder for finder in sys.meta_path if '__editable__' not in str(finder)]\n" + code
    return run([sys.executable, "-c", code], folder, PYTHONPATH=str(folder))


def test_without_torch_at_build_time_a_pure_wheel_is_made(sdist: Path, tmp_path: Path) -> None:
    """As under pip's build isolation, imitated with an interpreter that sees setuptools and no torch."""
    venv = tmp_path / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", venv], tmp_path)
    (packages,) = venv.glob("lib/python*/site-packages")
    names = ("pip", "setuptools", "setuptools-*", "wheel", "wheel-*", "packaging", "pkg_resources", "_distutils_hack")
    for name in (*names, "distutils-precedence.pth"):
        found = [file for folder in map(Path, sys.path) if folder.is_dir() for file in folder.glob(name)]
        if found:
            (packages / found[0].name).symlink_to(found[0])
    wheel, told = make_wheel(sdist, tmp_path, venv / "bin" / "python", GSYNC_BUILD="auto")
    assert wheel.name == "torch_gsync-0.1.0-py3-none-any.whl"
    lines = [line for line in told.splitlines() if "gsync build: python" in line]
    assert len(lines) == 1, told
    assert "torch is not visible" in lines[0]
    assert "pip install --no-build-isolation ." in lines[0]
    code = "import gsync, gsync.kernels, gsync.benchmarks; print(gsync._native.C, gsync._native.MISSING)"
    told = import_wheel(wheel, tmp_path / "installed", code)
    assert told.startswith("None gsync was installed without its compiled extension (torch is not visible")


@pytest.mark.timeout(900)
@pytest.mark.skipif(_native.C is None, reason=_native.MISSING or "built")
def test_native_wheel_has_the_extension(tmp_path: Path) -> None:
    """The build that is installed here, as a wheel: its object files are used again. The short lane of .ci/run runs this in the
    unpacked sdist."""
    info = _native.build_info()
    assert info is not None
    wheel, told = make_wheel(ROOT, tmp_path, sys.executable, 800, GSYNC_BUILD=info.KIND)
    assert f"gsync build: {info.KIND} (GSYNC_BUILD={info.KIND})" in told
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read("torch_gsync-0.1.0.dist-info/entry_points.txt").decode()
    assert any(name.startswith("gsync/_C.") for name in names)
    assert {"gsync/py.typed", "gsync/kernels/__init__.py", "gsync/benchmarks/__init__.py", "gsync/_build_info.py"} <= set(names)
    assert not [name for name in names if name.startswith(("csrc", "tests", "build"))]
    assert "gsync = gsync.cli:main" in entry_points
    code = "import gsync; print(gsync._native.C.__file__, gsync._native.has_cuda())"
    told = import_wheel(wheel, tmp_path / "installed", code)
    assert told.startswith(str(tmp_path / "installed" / "gsync" / "_C."))
    assert told.strip().endswith(str(info.KIND == "cuda"))


def test_editable_install_finds_the_folders_outside_the_package() -> None:
    """kernels/ and benchmarks/ lie beside gsync/ and are its subpackages."""
    code = "import gsync, gsync.kernels, gsync.benchmarks\n"
    code += "from importlib.metadata import version; print(version('torch-gsync'), gsync.__version__)"
    if shutil.which("gsync", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("gsync is not installed in this environment")
    told = run([sys.executable, "-c", code], Path("/"))
    installed, stated = told.split()
    assert installed == stated
