"""Wrong use: one error that names operation, argument, what came and what was expected."""

import pytest
import torch

from gsync import _native, backends, ops
from gsync.errors import GsyncError

ONE = [torch.ones(300)]
REST = ("auto", 0, "nearest", 0, 0, 0)  # backend, block_size, rounding, seed, step, rank
PAYLOAD = ops.pack(ONE, "bf16", backend="reference")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.pack(ONE, "int2"), ValueError, "pack: codec='int2': expected one of fp32, fp16, bf16, fp8_e4m3"),
        (lambda: ops.pack(ONE, "bfloat16"), ValueError, "codec='bfloat16': expected one of"),
        (lambda: ops.pack(ONE, ["bf16", "bf16"]), ValueError, "codec has 2 entries, expected 1"),
        (lambda: ops.pack(ONE, ["x"]), ValueError, r"codec\[0\]='x': expected one of"),
        (lambda: ops.pack(ONE, 16), TypeError, "codec is int, expected one of"),
        (lambda: ops.pack(torch.ones(3), "bf16"), TypeError, "gradients is Tensor, expected a list of tensors"),
        (lambda: ops.pack([None], "bf16"), TypeError, r"gradients\[0\] is NoneType, expected a tensor"),
        (lambda: ops.pack([torch.ones(3).int()], "bf16"), TypeError, r"gradients\[0\] is torch.int32, expected float32"),
        (lambda: ops.pack([torch.ones(3).to_sparse()], "bf16"), TypeError, "layout torch.sparse_coo, expected a strided"),
        (lambda: ops.pack([torch.ones(3), torch.ones(3, device="meta")], "bf16"), ValueError, r"gradients\[1\] is on meta"),
        (lambda: ops.pack(ONE, "bf16", float("nan")), ValueError, "scale=nan: expected a finite number"),
        (lambda: ops.pack(ONE, "bf16", 1e300), ValueError, "scale=1e.300: expected a finite number that fp32 can hold"),
        (lambda: ops.pack(ONE, "bf16", "1"), TypeError, "scale is str, expected a number"),
        (lambda: ops.pack(ONE, "bf16", num_chunks=0), ValueError, "num_chunks=0: expected at least 1"),
        (lambda: ops.pack(ONE, "bf16", num_chunks=1.5), TypeError, "num_chunks is float, expected an integer"),
        (lambda: ops.pack(ONE, "bf16", rank=-1), ValueError, "rank=-1: expected 0 to 4294967295"),
        (lambda: ops.pack(ONE, "bf16", names=["a", "b"]), ValueError, "names has 2 entries, expected 1"),
        (lambda: ops.pack(ONE, "bf16", names="a"), TypeError, "names is str, expected a list of strings"),
        (lambda: ops.pack(ONE, "bf16", names=[1]), TypeError, r"names\[0\] is int, expected a string"),
        (lambda: ops.pack(ONE * 2, "bf16", names=["a", "a"]), ValueError, "names has 'a' twice"),
        (lambda: ops.pack(ONE, "bf16", block_size=64), ValueError, "block_size=64: codec bf16 has no blocks, expected None"),
        (lambda: ops.pack(ONE, block_size=16), ValueError, "block_size=16: expected 32 to 4096"),
        (lambda: ops.pack(ONE, block_size=48), ValueError, "block_size=48: expected a power of two from 32 to 4096"),
        (lambda: ops.pack(ONE, residuals=torch.ones(300)), TypeError, "residuals is Tensor, expected a list of tensors or None"),
        (lambda: ops.pack(ONE, residuals=ONE * 2), ValueError, "residuals has 2 entries, expected 1, one per gradient"),
        (lambda: ops.pack(ONE, residuals=[None]), TypeError, r"residuals\[0\] is NoneType, expected a tensor"),
        (lambda: ops.pack(ONE, residuals=[ONE[0].half()]), TypeError, r"residuals\[0\] is torch.float16, expected float32"),
        (lambda: ops.pack(ONE, residuals=[torch.ones(3)]), ValueError, r"residuals\[0\] has shape \(3,\) .* expected 300 contig"),
        (lambda: ops.pack(ONE, residuals=[ONE[0].to("meta")]), ValueError, r"residuals\[0\] is on meta, expected cpu"),
        (lambda: ops.pack(ONE, rounding="up"), ValueError, "rounding='up': expected 'nearest' or 'stochastic'"),
        (lambda: ops.pack(ONE, "fp32", rounding="stochastic"), ValueError, "'stochastic': codec fp32 does not round"),
        (lambda: ops.pack(ONE, "bf16", seed=0.5), TypeError, "seed is float, expected an integer"),
        (lambda: ops.pack(ONE, "bf16", step=-1), ValueError, "step=-1: expected at least 0"),
        (lambda: ops.pack(ONE, "bf16", backend="cuda"), ValueError, "backend='cuda': expected one of auto, native, triton"),
        (lambda: ops.pack(ONE, "bf16", out=PAYLOAD[1:]), ValueError, r"out has shape \(623,\) .* expected contiguous \[624\]"),
        (lambda: ops.pack(ONE, "bf16", out=torch.ones(624)), TypeError, "out is torch.float32, expected uint8"),
        (lambda: ops.unpack(PAYLOAD[:-1], ONE, "bf16"), ValueError, r"payload has shape \(623,\)"),
        (lambda: ops.unpack(PAYLOAD, ONE, "fp32"), ValueError, r"expected contiguous \[1216\]"),
        (lambda: ops.unpack(PAYLOAD.char(), ONE, "bf16"), TypeError, "payload is torch.int8, expected uint8"),
        (lambda: ops.unpack(PAYLOAD.repeat(2)[::2], ONE, "bf16"), ValueError, r"strides \(2,\), expected contiguous"),
        (lambda: ops.unpack(PAYLOAD, ONE, "bf16", block_size=256), ValueError, "block_size=256: codec bf16 has no blocks"),
        (lambda: ops.reduce([ops.pack(ONE)], [300], residuals=ONE, num_chunks=2), ValueError, "as many as chunk 0 holds"),
        (lambda: ops.reduce([], [300], "bf16"), ValueError, r"payloads=\[\]: expected a list with one tensor per rank"),
        (lambda: ops.reduce([PAYLOAD, PAYLOAD[1:]], [300], "bf16"), ValueError, r"payloads\[1\] has shape \(623,\)"),
        (lambda: ops.reduce([PAYLOAD], [-1], "bf16"), ValueError, r"numels\[0\]=-1: expected at least 0"),
        (lambda: ops.reduce([PAYLOAD], 300, "bf16"), TypeError, "numels is int, expected a list of integers"),
        (lambda: ops.reduce([PAYLOAD], [300], "bf16", 2, 2), ValueError, "chunk_idx=2: expected 0 to 1"),
        (lambda: ops.payload_bytes([3.5], "bf16"), TypeError, r"numels\[0\] is float, expected an integer"),
        (lambda: ops.payload_bytes([3], "int8", 100), ValueError, "payload_bytes: block_size=100: expected a power of two"),
        (lambda: ops.chunk_numels([3], "int8", 2, 2), ValueError, "chunk_numels: chunk_idx=2: expected 0 to 1"),
        (lambda: torch.ops.gsync.pack([torch.ones(4, 4)[:, 1]], ["bf16"], 1.0, 1, ["0"], *REST), ValueError, "expected a dense"),
    ],
)
def test_wrong_use_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_wrapper_subclass_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(TypeError, match=r"gradients\[0\] is a TwoTensor, expected a plain tensor"):
        ops.pack([TwoTensor(torch.ones(3), torch.ones(3))], "bf16")


def test_native_without_the_extension_says_why(monkeypatch):
    monkeypatch.setattr(_native, "C", None)
    backends._has_native.cache_clear()
    try:
        with pytest.raises(GsyncError, match='backend="native" needs'):
            ops.pack(ONE, "bf16", backend="native")
        assert backends.resolve("auto", torch.device("cpu")) == "reference"
    finally:
        backends._has_native.cache_clear()


def test_backend_that_cannot_serve_a_device_raises(monkeypatch):
    with pytest.raises((ValueError, GsyncError), match="native"):
        backends.resolve("native", torch.device("meta"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="backend='triton': "):
        backends.resolve("triton", torch.device("cpu"))
    assert backends.resolve("auto", torch.device("meta")) == "reference"
