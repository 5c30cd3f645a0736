"""The CUDA kernels on the CPU: `csrc/cuda` compiled by the host's compiler, run by `tests/emulation/cuda`.

The files are those that nvcc compiles. CUDA's headers have to be there; nvcc and a GPU need not. `EmulatedBackend` is a backend
(gsync/backends.py) over them for tensors on the CPU. There are two libraries: a plain one, and one with sanitizers (address, UB),
which only a process that was started for it can load (`run_sanitized`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsync.backends import BucketLayout
from gsync.encoding import NEAREST, EncodeOptions

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "emulated-kernels"
SOURCES = ("csrc/cuda/block.cu", "csrc/cuda/elementwise.cu", "csrc/cuda/launch.cpp")
EMULATION = ("tests/emulation/cuda/faults.cu", "tests/emulation/cuda/grid.cpp", "tests/emulation/cuda/operations.cpp")
ORDERS = ("ascending", "descending", "shuffled")
PATTERNS = (0xEE, 0x11)
# Addresses that go with a launch by value (csrc/cuda/launch.h); more are in a table.
MAX_ADDRESSES_BY_VALUE = 4000
# As in setup.py, where it bears on values. Kernels read 16 bytes as uint4 whatever lies there, which nvcc allows.
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing", "-Wall", "-Wextra")
FLAGS += ("-Wno-unknown-pragmas", "-Wno-unused-parameter")
# All of UBSan, or -O1, takes the compiler four times as long.
SANITIZE = ("-fsanitize=address,alignment,bounds,bool,shift", "-fno-sanitize-recover=all", "-g1", "-O0")
_SUCCESS, _COMPILE_S = 0, 500


def _build_plan() -> Any:
    sys.path.insert(0, str(ROOT))
    try:
        import build_plan
    finally:
        sys.path.remove(str(ROOT))
    return build_plan


@functools.cache
def find_headers() -> tuple[Path, ...]:
    """The folders of CUDA's headers: the toolkit's, else those of pip's packages; () if there are none."""
    plan = _build_plan()
    toolkit = plan.find_toolkit()
    if toolkit is not None:
        return tuple(toolkit.include_dirs)
    folders = [folder / "include" for folder in plan._nvidia_folders()]
    needed = ("cuda_runtime.h", "crt/host_defines.h")
    return tuple(folder for folder in folders if all((folder / name).is_file() for name in needed))


@functools.cache
def why_not() -> str:
    """Return why the kernels cannot be emulated here, or ""."""
    if platform.machine() != "x86_64":
        return f"fibers are written for x86_64, and this is {platform.machine()}"
    compiler, missing = _build_plan().find_compiler()
    if not compiler:
        return str(missing)
    return "" if find_headers() else "CUDA's headers are not installed"


@functools.cache
def build(sanitized: bool = False, root: Path = ROOT, folder: Path = FOLDER) -> Path:
    """Return the library; compiled again when a source, the compiler or CUDA has changed.

    Args:
        root: whose csrc and tests/emulation/cuda are compiled.
        folder: for what is built.
    """
    compiler = _build_plan().find_compiler()[0]
    extra = SANITIZE if sanitized else tuple(shlex.split(os.environ.get("GSYNC_EMULATION_FLAGS", "")))
    includes = [f"-I{root / 'csrc'}", f"-I{root / 'tests/emulation/cuda'}", *(f"-isystem{path}" for path in find_headers())]
    command = [*compiler, *FLAGS, *extra, *includes]
    stamp = _stamp(command, root)
    folder = folder / ("sanitized" if sanitized else "plain")
    library = folder / f"{stamp}.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.so"):
        old.unlink()

    def compile_one(source: str) -> str:
        made = folder / f"{Path(source).name}.o"
        # The scheduler switches stacks, which it does better unwatched.
        words = [word for word in command if not (source.endswith("grid.cpp") and word in SANITIZE[:2])]
        _run([*words, "-x", "c++", "-include", "nvcc.h", "-c", "-o", str(made), str(root / source)])
        return str(made)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, (*SOURCES, *EMULATION)))
    unfinished = library.with_suffix(".new")
    _run([*compiler, *extra, "-shared", "-Wl,-Bsymbolic", "-o", str(unfinished), *objects])
    unfinished.rename(library)
    return library


def _stamp(command: Sequence[str], root: Path) -> str:
    """A name for what would be built."""
    told = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(repr((command, told)).encode())
    for folder in (root / "csrc", root / "tests" / "emulation" / "cuda"):
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".cu", ".cuh", ".h") or file.parent.name == "cuda":
                digest.update(str(file).encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(list(command), capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-6000:]}"


@functools.cache
def sanitizer_runtime() -> tuple[str, ...]:
    """What a process with sanitizers has to load first; () if the compiler has no AddressSanitizer of GCC's kind."""
    compiler = _build_plan().find_compiler()[0]
    found = [
        subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")  # without the second, a C++ exception ends the process
    ]
    return tuple(found) if all(Path(name).is_absolute() for name in found) else ()


def run_sanitized(arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run `python arguments` in a process that may load the library with sanitizers."""
    build(sanitized=True)
    environment = dict(os.environ, LD_PRELOAD=" ".join(sanitizer_runtime()), UBSAN_OPTIONS="print_stacktrace=1")
    # Python frees little when it ends. Fibers have stacks of their own.
    environment["ASAN_OPTIONS"] = "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0"
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT / "tests"
    )


# ---- the structures of csrc/common/kernels.h ---------------------------------------------------------------------------


class _LayoutView(ctypes.Structure):
    _fields_ = (
        ("shares", ctypes.c_void_p), ("tiles", ctypes.c_void_p), ("num_tiles", ctypes.c_int64), ("num_segments", ctypes.c_int64),
        ("chunk_bytes", ctypes.c_int64), ("has_scales", ctypes.c_bool), ("flag_bytes", ctypes.c_int32),
    )  # fmt: skip


class _EncodeOptions(ctypes.Structure):
    _fields_ = (
        ("residuals", ctypes.c_void_p), ("stochastic", ctypes.c_bool), ("random_key", ctypes.c_uint64),
        ("error_sums", ctypes.c_void_p),
    )  # fmt: skip


class _PackArgs(ctypes.Structure):
    _fields_ = (
        ("layout", _LayoutView), ("gradients", ctypes.c_void_p), ("payload", ctypes.c_void_p), ("scale", ctypes.c_float),
        ("counters", ctypes.c_void_p), ("encode", _EncodeOptions),
    )  # fmt: skip


class _ReduceArgs(ctypes.Structure):
    _fields_ = (
        ("layout", _LayoutView), ("payloads", ctypes.c_void_p), ("num_payloads", ctypes.c_int64), ("out", ctypes.c_void_p),
        ("scale", ctypes.c_float), ("encode", _EncodeOptions), ("sent_shares", ctypes.c_void_p),
        ("sent_chunk_bytes", ctypes.c_int64), ("first_chunk", ctypes.c_int64),
    )  # fmt: skip


class _UnpackArgs(ctypes.Structure):
    _fields_ = (
        ("layout", _LayoutView), ("payload", ctypes.c_void_p), ("gradients", ctypes.c_void_p), ("partials", ctypes.c_void_p),
        ("found_nonfinite", ctypes.c_void_p), ("segments", ctypes.c_void_p), ("sum_of_squares", ctypes.c_void_p),
        ("failed", ctypes.c_void_p),
    )  # fmt: skip


class _Workspace(ctypes.Structure):
    _fields_ = (("addresses", ctypes.c_void_p), ("ticket", ctypes.c_void_p))


@functools.cache
def load(sanitized: bool = False) -> ctypes.CDLL:
    """Return the library, built if need be."""
    return open_library(build(sanitized))


def open_library(path: Path) -> ctypes.CDLL:
    """Return a library that `build` made."""
    library = ctypes.CDLL(str(path))
    library.emulated_error.restype = ctypes.c_char_p
    library.emulated_schedule.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_int)
    library.emulated_fault.argtypes = (ctypes.c_char_p, ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    sizes = (ctypes.c_int64 * 4)()
    library.emulated_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(kind) for kind in (_PackArgs, _ReduceArgs, _UnpackArgs, _Workspace)]
    return library


# ---- the backend -------------------------------------------------------------------------------------------------------


class EmulatedBackend:
    """gsync's CUDA kernels as a backend for tensors on the CPU.

    Args:
        order: of the threads of a block between two barriers, and of blocks: one of ORDERS.
        pattern: every byte of shared memory when a block begins, and of outputs before each launch.
        failed: the word that tells `unpack` of a failure, or None.
        compiled: from `open_library`; None: that of this tree.
    """

    def __init__(
        self,
        order: str = "ascending",
        pattern: int = PATTERNS[0],
        seed: int = 0,
        sanitized: bool = False,
        failed: int | None = None,
        compiled: ctypes.CDLL | None = None,
    ) -> None:
        self.compiled = compiled or load(sanitized)
        self.schedule = (ORDERS.index(order), seed, pattern)
        self.pattern = pattern
        self.failed = None if failed is None else torch.tensor([failed], dtype=torch.int32)

    def pack(
        self,
        layout: BucketLayout,
        gradients: Sequence[Tensor | None],
        payload: Tensor,
        scale: float,
        counters: Tensor | None = None,
        options: EncodeOptions = NEAREST,
    ) -> None:
        payload.fill_(self.pattern)
        launch = _Launch(layout)
        table = launch.table([_address(g) for g in gradients], launch.residuals(options))
        encode = launch.encode(options, table, len(gradients))
        args = _PackArgs(launch.view(), table, payload.data_ptr(), scale, _address(counters), encode)
        self._run(self.compiled.emulated_pack, args, launch)

    def reduce(
        self,
        layout: BucketLayout,
        chunk: int,
        payloads: Sequence[Tensor],
        out: Tensor,
        scale: float,
        options: EncodeOptions = NEAREST,
        uncompressed: bool = False,
    ) -> None:
        out.fill_(self.pattern)
        launch = _Launch(layout)
        held = layout.python.held(chunk, is_shard=uncompressed)
        table = launch.table([_address(p) for p in payloads], launch.residuals(options, [first for first, _ in held]))
        encode = launch.encode(options, table, len(payloads))
        sent = (launch.sent_shares(), layout.uncompressed.python.chunk_bytes, chunk) if uncompressed else (None, 0, 0)
        count = layout.python.chunks_per_shard if uncompressed else 1
        args = _ReduceArgs(launch.view(chunk, count), table, len(payloads), out.data_ptr(), scale, encode, *sent)
        self._run(self.compiled.emulated_reduce, args, launch)

    def unpack(
        self,
        layout: BucketLayout,
        payload: Tensor,
        gradients: Sequence[Tensor | None],
        partials: Tensor,
        found_nonfinite: Tensor,
        sum_of_squares: Tensor | None,
    ) -> None:
        if layout._slice[1] == 1:  # else other slices have written their part
            for gradient in gradients:
                if gradient is not None and gradient.is_contiguous():
                    gradient.view(-1).view(torch.uint8).fill_(self.pattern)
        launch = _Launch(layout)
        table = launch.table([_address(g) for g in gradients], [])
        segments = None if sum_of_squares is None else launch.segments
        sums = (found_nonfinite.data_ptr(), segments, _address(sum_of_squares), _address(self.failed))
        args = _UnpackArgs(launch.view(), payload.data_ptr(), table, partials.data_ptr(), *sums)
        self._run(self.compiled.emulated_unpack, args, launch)

    def _run(self, function: Any, args: Any, launch: _Launch) -> None:
        self.compiled.emulated_schedule(*self.schedule)
        error = function(ctypes.byref(args), ctypes.byref(launch.workspace))
        assert error == _SUCCESS, f"error {error}: {self.compiled.emulated_error().decode()}"
        assert not launch.ticket.any(), "the ticket was not left zero"


class _Launch:
    """What goes with one launch: tables, and whatever has to live as long."""

    def __init__(self, layout: BucketLayout) -> None:
        self.layout = layout
        self.ticket = torch.zeros(1, dtype=torch.int32)
        self.workspace = _Workspace(None, self.ticket.data_ptr())
        self.tables = layout.tables_on(torch.device("cpu"))
        self.segments = self.tables[2].data_ptr()
        self._addresses: Any = None

    def table(self, addresses: list[int | None], residuals: list[int | None]) -> Any:
        """Addresses and residuals, one behind the other."""
        both = [*addresses, *residuals]
        self._addresses = (ctypes.c_void_p * max(len(both), 1))(*both)
        if len(both) > MAX_ADDRESSES_BY_VALUE:
            self.workspace.addresses = ctypes.addressof(self._addresses)
        return ctypes.addressof(self._addresses)

    def sent_shares(self) -> int:
        self.sent_tables = self.layout.uncompressed.tables_on(torch.device("cpu"))
        return self.sent_tables[0].data_ptr()

    def residuals(self, options: EncodeOptions, firsts: Sequence[int] | None = None) -> list[int | None]:
        """The address that element 0 of each parameter would have; `firsts`: what each residual begins with, None: with 0."""
        found: list[int | None] = []
        for i, residual in enumerate(options.residuals or ()):
            first = 0 if firsts is None else firsts[i]
            there = residual is not None and residual.numel() > 0
            found.append(residual.data_ptr() - 4 * first if there else None)  # type: ignore[union-attr]
        return found

    def encode(self, options: EncodeOptions, table: int, num_before: int) -> _EncodeOptions:
        residuals = None if options.residuals is None else table + 8 * num_before
        return _EncodeOptions(residuals, options.random_key is not None, options.random_key or 0, _address(options.error_sums))

    def view(self, chunk: int = 0, count: int | None = None) -> _LayoutView:
        """Of `count` chunks from `chunk` on; None: of all."""
        table = self.layout.python
        first, last = (table.chunk_first_tile[i] for i in (chunk, table.num_chunks if count is None else chunk + count))
        shares, tiles, _ = self.tables
        flag_bytes = table.shares[0].block_size if table.shares else 1
        return _LayoutView(
            shares.data_ptr(), tiles.data_ptr() + 8 * first, last - first, table.num_segments, table.chunk_bytes,
            table.has_scales, flag_bytes,
        )  # fmt: skip


_NOWHERE = ctypes.create_string_buffer(16)


def _address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's memory. An empty tensor has none, but None says that there is no tensor."""
    return None if tensor is None else tensor.data_ptr() or ctypes.addressof(_NOWHERE)
