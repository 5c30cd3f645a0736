"""What gradients may look like: order of elements, strides, complex and conjugated ones, alignment, empty lists."""

import pytest
import torch
from ops_cases import CODECS, gradient, same_bits

from gsync import ops


def laid_out():
    """(name, tensor, its elements in the order in which they are to be counted)"""
    base = gradient(4 * 6 * 3 * 3, torch.float32, seed=1)
    image = base.view(4, 6, 3, 3)
    channels_last = image.contiguous(memory_format=torch.channels_last)
    wide = gradient(40 * 8, torch.float32, seed=2).view(40, 8)
    steps = gradient(600, torch.float32, seed=3)
    yield "contiguous", image, image.reshape(-1)
    yield "channels_last", channels_last, channels_last.permute(0, 2, 3, 1).reshape(-1)
    yield "transposed", wide.t(), wide.reshape(-1)
    yield "columns", wide[:, 2:5], wide[:, 2:5].reshape(-1)
    yield "every other", steps[::2], steps[::2].reshape(-1)
    yield "one of size 1", steps[:300].view(300, 1).t(), steps[:300]
    yield "0-d", torch.tensor(1.5), torch.tensor([1.5])
    yield "offset", steps[1:], steps[1:]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", list(laid_out()), ids=lambda case: case[0])
def test_elements_are_counted_in_memory_order_if_dense_else_logically(backend, device, codec, case):
    _, tensor, flat = case
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)
    expected = ops.pack([flat.contiguous()], codec, 0.5, 2, backend="reference")
    assert torch.equal(ops.pack([moved], codec, 0.5, 2, backend=backend).cpu(), expected)
    reference_flat = [torch.zeros_like(flat)]
    found, _ = ops.unpack(expected, reference_flat, codec, 2, backend="reference")
    stride = moved.stride()
    got_found, _ = ops.unpack(expected.to(device), [moved], codec, 2, backend=backend)
    assert moved.stride() == stride
    again = ops.pack([moved], codec, 1.0, 2, backend=backend).cpu()
    assert torch.equal(again, ops.pack(reference_flat, codec, 1.0, 2, backend="reference"))
    assert bool(got_found) == bool(found)


def test_memory_around_a_strided_gradient_stays_as_it_is(backend, device):
    base = torch.arange(320.0, device=device).view(40, 8)
    before = base.clone()
    ops.unpack(ops.pack([torch.ones(40, 3, device=device)], "bf16", backend=backend), [base[:, 2:5]], "bf16", backend=backend)
    assert bool((base[:, 2:5] == 1).all())
    assert torch.equal(base[:, :2], before[:, :2]) and torch.equal(base[:, 5:], before[:, 5:])


def test_gradients_beside_each_other_in_memory_do_not_spill(backend, device):
    for numel in (1, 3, 255, 257, 4097):
        memory = torch.full((numel + 32,), 7.0, device=device)
        part = memory[13 : 13 + numel]
        ops.unpack(ops.pack([torch.ones(numel, device=device)], "bf16", backend=backend), [part], "bf16", backend=backend)
        assert bool((part == 1).all())
        assert bool((memory[:13] == 7).all()) and bool((memory[13 + numel :] == 7).all())


def test_expanded_gradient_packs_in_logical_order_and_cannot_be_written(backend, device):
    expanded = torch.tensor([[1.5], [2.5]], device=device).expand(2, 300)
    expected = ops.pack([expanded.contiguous()], "bf16", backend=backend)
    payload = ops.pack([expanded], "bf16", backend=backend)
    assert torch.equal(payload, expected)
    with pytest.raises(ValueError, match=r"gradients\[0\] has shape \(2, 300\) and strides \(1, 0\)"):
        ops.unpack(payload, [expanded], "bf16", backend=backend)


@pytest.mark.parametrize("codec", CODECS)
def test_complex_gradients_travel_as_pairs(backend, device, codec):
    for dtype in (torch.complex64, torch.complex128):
        value = gradient(4097, torch.complex64, seed=5).to(dtype).to(device)
        pairs = torch.view_as_real(value).reshape(-1)
        expected = ops.pack([pairs], codec, 0.5, 2, backend=backend)
        assert torch.equal(ops.pack([value], codec, 0.5, 2, backend=backend), expected)
        a, b = torch.empty_like(value), torch.empty_like(pairs)
        ops.unpack(expected, [a], codec, 2, backend=backend)
        ops.unpack(expected, [b], codec, 2, backend=backend)
        assert same_bits(torch.view_as_real(a).reshape(-1).cpu(), b.cpu())


def test_conjugated_and_negated_gradients_mean_what_they_say(backend, device):
    value = torch.complex(torch.randn(300), torch.randn(300)).to(device)
    conjugated, negated = value.conj(), value.conj().imag
    assert conjugated.is_conj() and negated.is_neg()
    for lazy in (conjugated, negated):
        plain = lazy.resolve_conj().resolve_neg()
        payload = ops.pack([lazy], "fp32", 0.5, backend=backend)
        assert torch.equal(payload, ops.pack([plain.clone()], "fp32", 0.5, backend=backend))
        ops.unpack(payload, [lazy], "fp32", backend=backend)
        assert torch.equal(lazy.resolve_conj().resolve_neg(), plain * 0.5)
        plain.mul_(0.5)
        payload = None


def test_empty_lists_and_empty_tensors_are_fine(backend, device):
    assert ops.pack([], "bf16", backend=backend).numel() == ops.payload_bytes([], "bf16") == 0
    found, squares = ops.unpack(ops.pack([], "bf16", backend=backend), [], "bf16", backend=backend)
    assert not bool(found) and float(squares) == 0.0
    for shape in [(0,), (4, 0), (0, 4)]:
        empty = [torch.empty(shape, device=device)]
        payload = ops.pack(empty, "bf16", num_chunks=2, backend=backend)
        assert payload.numel() == 2 * 16 and payload[:2].cpu().view(torch.bfloat16).tolist() == [1.0]
        found, squares = ops.unpack(payload, empty, "bf16", 2, backend=backend)
        assert not bool(found) and float(squares) == 0.0


def test_payload_may_begin_anywhere(backend, device):
    gradients = [torch.randn(5000, device=device), torch.randn(7, device=device)]
    expected = ops.pack(gradients, "bf16", backend=backend)
    memory = torch.full((expected.numel() + 64,), 255, dtype=torch.uint8, device=device)
    out = memory[3 : 3 + expected.numel()]
    assert ops.pack(gradients, "bf16", backend=backend, out=out) is out
    assert torch.equal(out, expected)
    assert bool((memory[:3] == 255).all()) and bool((memory[3 + out.numel() :] == 255).all())
    a, b = ([torch.empty_like(g) for g in gradients] for _ in range(2))
    results = ops.unpack(out, a, "bf16", backend=backend), ops.unpack(expected, b, "bf16", backend=backend)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and results[0][1] == results[1][1]
    reduced = ops.reduce([out, expected], [5000, 7], "bf16", backend=backend)
    target = memory[5 : 5 + expected.numel()]
    assert torch.equal(ops.reduce([expected, expected], [5000, 7], "bf16", backend=backend, out=target), reduced)


def test_parameters_themselves_can_be_packed_and_written(backend, device):
    parameter = torch.nn.Parameter(torch.randn(300, device=device))
    expected = parameter.detach().bfloat16().float()
    version = parameter._version
    payload = ops.pack([parameter], "bf16", backend=backend)
    assert not payload.requires_grad
    ops.unpack(payload, [parameter], "bf16", backend=backend)
    assert torch.equal(parameter.detach(), expected)
    assert parameter._version > version  # so that autograd notices


def test_sum_of_squares_is_added_in_the_order_of_the_names(backend):
    gradients = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (3000, 17, 5000)]
    names = ["b", "c", "a"]
    payload = ops.pack(gradients, "fp32", names=names, backend=backend)
    _, squares = ops.unpack(payload, gradients, "fp32", names=names, backend=backend)
    order = [2, 0, 1]
    payload = ops.pack([gradients[i] for i in order], "fp32", names=["a", "b", "c"], backend=backend)
    _, sorted_squares = ops.unpack(payload, [gradients[i] for i in order], "fp32", names=["a", "b", "c"], backend=backend)
    assert float(squares) == float(sorted_squares)


def test_random_state_is_untouched(backend):
    state = torch.get_rng_state()
    gradients = [torch.ones(5000)]
    ops.unpack(ops.pack(gradients, "bf16", backend=backend), gradients, "bf16", backend=backend)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_flush_to_zero_of_the_caller_has_no_effect(backend, num_threads):
    if backend == "triton":
        pytest.skip("a GPU has no such mode, and the interpreter computes in the caller's")
    tiny = torch.full((70000,), 1e-40)
    tiny[::2] = 3 * 2.0**-24  # subnormal in fp16
    double = tiny.double()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for codec in CODECS:
            expected = ops.pack([tiny, double], codec, 0.5, 2, backend=backend)
            clean = [torch.empty_like(tiny), torch.empty_like(double)]
            _, squares = ops.unpack(expected, clean, codec, 2, backend=backend)
            reduced = ops.reduce(list(expected.view(2, -1)[:1]) * 2, [70000, 70000], codec, 2, 0, 0.25, backend=backend)
            if not torch.set_flush_denormal(True):
                pytest.skip("this processor has no flush-to-zero mode")
            try:
                flushed = ops.pack([tiny, double], codec, 0.5, 2, backend=backend)
                written = [torch.empty_like(tiny), torch.empty_like(double)]
                _, flushed_squares = ops.unpack(expected, written, codec, 2, backend=backend)
                again = ops.reduce(list(expected.view(2, -1)[:1]) * 2, [70000, 70000], codec, 2, 0, 0.25, backend=backend)
                assert float(torch.tensor(1e-40) * 1.0) == 0.0  # the caller's mode is back
            finally:
                torch.set_flush_denormal(False)
            assert torch.equal(flushed, expected) and torch.equal(again, reduced)
            assert all(same_bits(a, b) for a, b in zip(clean, written, strict=True))
            assert float(squares) == float(flushed_squares) > 0
    finally:
        torch.set_num_threads(before)
