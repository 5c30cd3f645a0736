"""Who computes pack, reduce and unpack: the table of backends, and which one `auto` takes.

    reference   plain PyTorch, any device
    native      C++ on the CPU, CUDA C++ on NVIDIA GPUs, from the compiled extension
    triton      Triton kernels on GPUs; on the CPU in Triton's interpreter, which is slow and for tests (TRITON_INTERPRET=1)

All three write the same bytes. Sums of squares may differ between backends in their last bits.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from . import _native, reference
from .encoding import NEAREST, EncodeOptions
from .errors import GsyncError, GsyncWarning
from .layout import Layout, Segment, build_layout

BACKEND_NAMES = ("auto", "native", "triton", "reference")


class BucketLayout:
    """The layout of a bucket, or of a slice of it, in the forms that the backends want; each is made when first asked for."""

    def __init__(
        self, segments: Sequence[Segment], num_chunks: int, slice_idx: int = 0, num_slices: int = 1, num_shards: int = 1
    ) -> None:
        self.segments = tuple(segments)
        self.num_chunks = num_chunks
        self._slice = (slice_idx, num_slices)
        self._num_shards = num_shards
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    @functools.cached_property
    def python(self) -> Layout:
        """The layout as gsync/layout.py builds it."""
        return build_layout(self.segments, self.num_chunks, *self._slice, self._num_shards)

    @functools.cached_property
    def native(self) -> Any:
        """The layout as the extension builds it: a `_C.Layout`."""
        columns = zip(*((s.numel, s.dtype, s.codec, s.name_hash, s.block_size) for s in self.segments), strict=True)
        numels, dtypes, codecs, hashes, block_sizes = map(list, columns) if self.segments else ([], [], [], [], [])
        layout = _native.require('backend="native"').layout
        return layout(numels, dtypes, codecs, hashes, self.num_chunks, *self._slice, block_sizes, self._num_shards)

    @functools.cached_property
    def uncompressed(self) -> BucketLayout:
        """The same slice with its elements as fp32; see `Layout.uncompressed`."""
        return _Uncompressed(self)

    @property
    def sizes(self) -> Any:
        """Whichever form is cheaper, for payload_bytes, chunk_bytes, num_partials, num_segments."""
        return self.python if _native.C is None else self.native

    def tables_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Shares [n, 8] int64, tiles [n, 2] int32, partials [num_segments, 2] int64, on `device`."""
        if device not in self._tables:
            layout = self.python
            tables = (layout.share_table(), layout.tile_table(), layout.partial_table())
            self._tables[device] = tuple(table.to(device) for table in tables)  # type: ignore[assignment]
        return self._tables[device]


class _Uncompressed(BucketLayout):
    def __init__(self, layout: BucketLayout) -> None:
        super().__init__(layout.segments, layout.num_chunks, *layout._slice, layout._num_shards)
        self._compressed = layout

    @functools.cached_property
    def python(self) -> Layout:
        return self._compressed.python.uncompressed

    @functools.cached_property
    def native(self) -> Any:
        return self._compressed.native.uncompressed()


class Backend(Protocol):
    """What a backend offers; arguments as in gsync/reference.py, the layout as a `BucketLayout`.

    Payloads and `out` begin at multiples of 16 bytes.
    """

    def pack(
        self,
        layout: BucketLayout,
        gradients: Sequence[Tensor | None],
        payload: Tensor,
        scale: float,
        counters: Tensor | None = None,
        options: EncodeOptions = NEAREST,
    ) -> None: ...

    def reduce(
        self,
        layout: BucketLayout,
        chunk: int,
        payloads: Sequence[Tensor],
        out: Tensor,
        scale: float,
        options: EncodeOptions = NEAREST,
        uncompressed: bool = False,
    ) -> None: ...

    def unpack(
        self,
        layout: BucketLayout,
        payload: Tensor,
        gradients: Sequence[Tensor | None],
        partials: Tensor,
        found_nonfinite: Tensor,
        sum_of_squares: Tensor | None,
    ) -> None: ...


class ReferenceBackend:
    def pack(self, layout, gradients, payload, scale, counters=None, options=NEAREST):  # type: ignore[no-untyped-def]
        reference.pack(layout.python, gradients, payload, scale, counters, options)

    def reduce(self, layout, chunk, payloads, out, scale, options=NEAREST, uncompressed=False):  # type: ignore[no-untyped-def]
        reference.reduce(layout.python, chunk, payloads, out, scale, options, uncompressed)

    def unpack(self, layout, payload, gradients, partials, found_nonfinite, sum_of_squares):  # type: ignore[no-untyped-def]
        reference.unpack(layout.python, payload, gradients, partials, found_nonfinite, sum_of_squares)


class NativeBackend:
    def pack(self, layout, gradients, payload, scale, counters=None, options=NEAREST):  # type: ignore[no-untyped-def]
        encoding = (options.residuals, options.random_key, options.error_sums)
        _native.C.pack(layout.native, gradients, payload, scale, counters, *encoding)  # type: ignore[union-attr]

    def reduce(self, layout, chunk, payloads, out, scale, options=NEAREST, uncompressed=False):  # type: ignore[no-untyped-def]
        encoding = (options.residuals, options.random_key, options.error_sums)
        sent = layout.uncompressed.native if uncompressed else None
        _native.C.reduce(layout.native, chunk, payloads, out, scale, *encoding, sent=sent)  # type: ignore[union-attr]

    def unpack(self, layout, payload, gradients, partials, found_nonfinite, sum_of_squares):  # type: ignore[no-untyped-def]
        finalize = sum_of_squares is not None
        _native.C.unpack(  # type: ignore[union-attr]
            layout.native, payload, gradients, partials, found_nonfinite, finalize, sum_of_squares
        )


def empty_payload(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes], not initialised; on the CPU on huge pages where the extension is there."""
    if device.type == "cpu" and _has_native("cpu"):
        return _native.C.empty_payload(num_bytes)  # type: ignore[union-attr]
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


_REFERENCE = ReferenceBackend()
_NATIVE = NativeBackend()


def resolve(name: str, device: torch.device) -> str:
    """The backend that `name` means for tensors on `device`.

    Raises:
        ValueError: unknown name, or a backend that cannot serve the device.
        GsyncError: `native` without the extension, `triton` with a version of Triton that the kernels do not work with.
    """
    if name not in BACKEND_NAMES:
        raise ValueError(f"backend={name!r}: expected one of {', '.join(BACKEND_NAMES)}")
    if name == "auto":
        if _has_native(device.type):
            return "native"
        return "triton" if device.type == "cuda" and _takes_triton() else "reference"
    if name == "native":
        _native.require('backend="native"')
        if not _has_native(device.type):
            raise ValueError(f"backend='native': this build has no kernels for {device.type}; expected 'auto' or 'reference'")
    if name == "triton":
        if not _has_triton():
            raise ValueError("backend='triton': Triton is not installed; pip install triton, or use 'auto'")
        if problem := _triton_problem():
            raise GsyncError(f"backend='triton': {problem}")
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"backend='triton': tensors on {device.type}, expected cuda (TRITON_INTERPRET=1, set before the start, runs "
                "the kernels on the CPU, slowly)"
            )
    return name


def get(name: str, device: torch.device) -> Backend:
    """The backend that `name` means for tensors on `device`; raises as `resolve`."""
    resolved = resolve(name, device)
    if resolved == "native":
        return _NATIVE
    return _triton_backend() if resolved == "triton" else _REFERENCE


@functools.cache
def _has_native(device_type: str) -> bool:
    return _native.C is not None and bool(_native.C.has_kernels(device_type))


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _triton_problem() -> str:
    """Why the kernels cannot be used with the Triton that is installed, or "": one older or newer lacks what they use."""
    try:
        importlib.import_module("gsync.kernels.backend")
    except Exception as error:
        version = getattr(sys.modules.get("triton"), "__version__", "of unknown version")
        return f"Triton {version} does not work with gsync: {type(error).__name__}: {error}"
    return ""


@functools.cache
def _takes_triton() -> bool:
    """Whether `auto` takes Triton on a GPU without kernels in C++; warns once where it is installed and does not work."""
    if not _has_triton():
        return False
    if problem := _triton_problem():
        warnings.warn(f"{problem}; the reference backend computes instead, which is slower", GsyncWarning, stacklevel=2)
    return not problem


@functools.cache
def _triton_backend() -> Backend:
    kernels: ModuleType = importlib.import_module("gsync.kernels.backend")
    return kernels.TritonBackend()  # type: ignore[no-any-return]
