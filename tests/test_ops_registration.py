"""torch.ops.gsync: schemas, fakes and compilation."""

import pytest
import torch
from ops_cases import CODECS, gradient, same_bits

from gsync import ops

OPS = torch.ops.gsync
ENDINGS = ("", "_out", "_feedback", "_feedback_out")


def samples():
    # Without NaN: opcheck compares values.
    gradients = [torch.randn(n) for n in (0, 5, 4097)] + [torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last)]
    gradients += [torch.randn(257, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)]
    numels = [g.numel() for g in gradients]
    names = [str(i) for i in range(len(gradients))]
    codecs = [("int4", "bf16", "int8")[i % 3] for i in range(len(gradients))]
    size = ops.payload_bytes(numels, codecs, num_chunks=2)
    payload = ops.pack(gradients, codecs, num_chunks=2)
    payloads = [payload[: size // 2]] * 3
    pack = (codecs, 0.5, 2, names, "auto", 0, "stochastic", 7, 3, 1)
    reduce = (numels, codecs, 2, 0, 1.0, names, "auto", 0, "stochastic", 7, 3)
    residuals = [torch.zeros(n) for n in numels]
    held = [torch.zeros(n) for n in ops.chunk_numels(numels, codecs, 2, 0)]
    out, chunk_out = torch.empty(size, dtype=torch.uint8), torch.empty(size // 2, dtype=torch.uint8)
    return {
        "pack": (gradients, *pack),
        "pack_out": (gradients, *pack, out),
        "pack_feedback": (gradients, residuals, *pack),
        "pack_feedback_out": (gradients, residuals, *pack, out),
        "reduce": (payloads, *reduce),
        "reduce_out": (payloads, *reduce, chunk_out),
        "reduce_feedback": (payloads, held, *reduce),
        "reduce_feedback_out": (payloads, held, *reduce, chunk_out),
        "unpack": (payload, [g.clone() for g in gradients], codecs, 2, names, "auto", 0),
    }


@pytest.mark.parametrize("name", [f"{op}{kind}" for op in ("pack", "reduce") for kind in ENDINGS] + ["unpack"])
def test_operators_pass_opcheck(name):
    torch.library.opcheck(getattr(OPS, name).default, samples()[name])


def test_all_operators_are_checked():
    registered = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("gsync::")}
    assert registered == set(samples())


def round_trip(gradients, codec, num_chunks, residuals=None):
    payload = ops.pack(gradients, codec, 0.5, num_chunks, residuals=residuals)
    summed = ops.reduce([payload.view(num_chunks, -1)[0]] * 2, [g.numel() for g in gradients], codec, num_chunks, 0)
    found, squares = ops.unpack(payload, gradients, codec, num_chunks)
    return summed, found, squares, payload


@pytest.mark.parametrize("codec", [*CODECS, "int8"])
def test_compiled_by_inductor_it_gives_the_same_bits(codec):
    compiled = torch.compile(round_trip, fullgraph=True, backend="inductor")
    for num_chunks in (1, 2):
        eager = [gradient(n, torch.float32, seed=n) for n in (5, 4097)]
        eager.append(torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last))
        copies = [g.clone() for g in eager]
        residuals = [None] if codec != "int8" else [[torch.zeros(g.numel()) for g in eager] for _ in range(2)]
        expected = round_trip(eager, codec, num_chunks, residuals[0])
        got = compiled(copies, codec, num_chunks, residuals[-1])
        assert codec != "int8" or all(same_bits(a, b) for a, b in zip(*residuals, strict=True))
        assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))
        assert all(same_bits(a, b) for a, b in zip(eager, copies, strict=True))


def test_compiled_it_fuses_into_a_graph_that_makes_the_gradients():
    def step(x, w):
        gradients = [(x @ w).t(), x.sum(0) * 2]
        payload = ops.pack(gradients, "bf16", 0.5)
        back = [torch.empty_like(g) for g in gradients]
        _, squares = ops.unpack(payload, back, "bf16")
        return payload, squares, back[0] + 1

    x, w = torch.randn(17, 9), torch.randn(9, 33)
    expected = step(x, w)
    got = torch.compile(step, fullgraph=True, backend="inductor")(x, w)
    assert all(torch.allclose(a.float(), b.float()) for a, b in zip(expected[1:], got[1:], strict=True))
    assert torch.equal(expected[0], got[0])


def test_fake_tensors_give_the_shapes_without_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        gradients = [torch.empty(4097), torch.empty(3, dtype=torch.complex64)]
        payload = ops.pack(gradients, "bf16", num_chunks=3)
        found, squares = ops.unpack(payload, gradients, "bf16", 3)
    assert payload.shape == (ops.payload_bytes([4097, 6], "bf16", num_chunks=3),) and payload.dtype == torch.uint8
    assert found.dtype == torch.bool and squares.dtype == torch.float64


def test_operators_ignore_autograd():
    weight = torch.ones(3, requires_grad=True)
    payload = ops.pack([weight * 2], "fp32")
    assert not payload.requires_grad
    double = weight * 2
    ops.unpack(payload, [double], "fp32")
    double.sum().backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
