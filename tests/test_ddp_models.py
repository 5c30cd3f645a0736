"""Models of every kind under DDP and gsync, two ranks, both engines: sparse, complex, mixed dtypes, odd layouts, odd graphs."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ddp_cases import (
    CODECS,
    ENGINES,
    EXCHANGES,
    assert_same_bits,
    assert_same_on_all_ranks,
    batch,
    gradients,
    mlp,
    norm_of,
    stock,
    why_no_engine,
    wrap,
)
from ranks import run_on_ranks
from torch.utils.checkpoint import checkpoint


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    reason = why_no_engine(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


class Everything(nn.Module):
    """fp32, fp16, bf16, fp64 and complex parameters, channels_last and transposed ones, tied, empty and frozen ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.in_fp16 = nn.Parameter(torch.randn(257).half())
        self.in_bf16 = nn.Parameter(torch.randn(300).bfloat16())
        self.in_fp64 = nn.Parameter(torch.randn(129, dtype=torch.float64))
        self.complex = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.complex_vector = nn.Parameter(torch.randn(33, dtype=torch.complex128))
        self.empty = nn.Parameter(torch.empty(0))
        self.no_outputs = nn.Linear(4, 0)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied_too = nn.Linear(4, 4, bias=False)
        self.tied_too.weight = self.tied.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.expanded = nn.Parameter(torch.randn(11))

    def forward(self, x, factor):
        image = x[:, :, None, None].expand(-1, -1, 5, 5).to(memory_format=torch.channels_last)
        parts = [
            self.conv(image).square().sum(),
            (self.transposed * torch.arange(35.0).view(7, 5)).sum(),
            (self.in_fp16 * torch.linspace(-1, 1, 257).half()).sum(),
            (self.in_bf16 * torch.linspace(-1, 1, 300).bfloat16()).sum(),
            (self.in_fp64 * torch.linspace(-1, 1, 129, dtype=torch.float64)).sum(),
            torch.view_as_real(self.complex).mul(torch.arange(30.0).view(3, 5, 2)).sum(),
            (self.complex_vector.abs() ** 2).sum(),
            self.empty.sum(),
            self.no_outputs(x).sum(),
            self.frozen(self.tied_too(self.tied(x))).sum(),
            self.expanded.sum(),
        ]
        return factor * sum(part.double() for part in parts)


def _everything(backend):
    rank = dist.get_rank()
    for codec in CODECS:
        for exchange in EXCHANGES:
            for as_view in (False, True):
                ddp = {"gradient_as_bucket_view": as_view}
                ours, sync = wrap(Everything(), backend, ddp=ddp, codec=codec, exchange=exchange)
                theirs = stock(Everything(), **ddp)
                for step in range(2):
                    for model in (ours, theirs):
                        model.zero_grad()
                        model(batch(rank, step, 4), 1.0 + rank).backward()
                pairs = zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True)
                for (name, mine), other in pairs:
                    if mine.grad is None:
                        assert other.grad is None and name.startswith("frozen")
                        continue
                    assert mine.grad.dtype == mine.dtype and mine.grad.stride() == other.grad.stride(), name
                    a, b = (torch.view_as_real(g) if g.is_complex() else g for g in (mine.grad, other.grad))
                    if codec == "fp32" and a.dtype == torch.float32:
                        assert_same_bits(a, b)
                    elif a.numel():
                        # Twice the rounding of the codec, and of stock's sum in the gradient's own dtype.
                        bits = {torch.float16: 11, torch.bfloat16: 8}.get(a.dtype, 24)
                        bound = 2 * 2.0 ** -{"fp32": 24, "fp16": 11, "bf16": 8}[codec] + 2 * 2.0**-bits
                        assert (a.double() - b.double()).abs().max() <= bound * b.double().abs().max() * 2, name
                assert_same_on_all_ranks([*gradients(ours), sync.grad_norm()])
                assert sync.grad_norm().item() == pytest.approx(norm_of(ours), rel=1e-12)


class Lookup(nn.Module):
    def __init__(self, sparse=True, dim=2):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(6, dim, sparse=sparse, padding_idx=5)
        self.linear = nn.Linear(dim, 1)

    def forward(self, index):
        return self.linear(self.embedding(index)).sum() + self.embedding(index).sum()


def _sparse(backend):
    """Rows 0 on rank 0, 1 on rank 1, 3 on both; never densified, never narrowed."""
    rank = dist.get_rank()
    for codec in CODECS:
        for exchange in EXCHANGES:
            only = nn.Embedding(6, 2, sparse=True)
            model, sync = wrap(only, backend, codec=codec, exchange=exchange)
            model(torch.tensor([rank, 3])).sum().backward()
            assert only.weight.grad.is_sparse
            dense = only.weight.grad.to_dense()
            assert dense[:, 0].tolist() == [0.5, 0.5, 0.0, 1.0, 0.0, 0.0] and torch.equal(dense[:, 0], dense[:, 1])
            assert sync.grad_norm().item() == pytest.approx(norm_of(only), rel=1e-12)

            ours, sync = wrap(Lookup(), backend, codec=codec, exchange=exchange)
            theirs = stock(Lookup())
            for index in ([rank, 3], [5, 5] if rank == 0 else [2, 5], [5, 5]):  # the last: padding only, on both ranks
                for each in (ours, theirs):
                    each.zero_grad()
                    each(torch.tensor(index)).backward()
                got, expected = ours.module.embedding.weight.grad, theirs.module.embedding.weight.grad
                assert got.is_sparse and got.dtype == torch.float32
                assert_same_bits(got.to_dense(), expected.to_dense())
                assert not sync.found_nonfinite()
                assert_same_on_all_ranks(sync.grad_norm())
                norm = torch.stack(
                    [got.to_dense().double().norm(), *(p.grad.double().norm() for p in ours.module.linear.parameters())]
                )
                assert sync.grad_norm().item() == pytest.approx(norm.norm().item(), rel=1e-12)
            ours.zero_grad()
            loss = ours(torch.tensor([1, 2]))
            (loss * (float("inf") if rank == 1 else 1.0)).backward()
            assert sync.found_nonfinite()


def _rebuild(backend):
    """12 x Linear(200, 200): one bucket at first, two afterwards, other parameters in each. And one parameter above the cap."""
    for find_unused in (False, True):
        ddp = {"bucket_cap_mb": 1, "find_unused_parameters": find_unused}
        model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(12)))
        ours, sync = wrap(model, backend, ddp=ddp, codec="fp32")
        theirs = stock(model, **ddp)
        for step in range(4):
            for each in (ours, theirs):
                each.zero_grad()
                each(batch(dist.get_rank(), step, 200)).square().mean().backward()
            assert_same_bits(gradients(ours), gradients(theirs))
        assert sync.stats().buckets > sync.stats().steps == 4
    large = nn.Linear(1200, 1200)
    ours, _ = wrap(large, backend, ddp={"bucket_cap_mb": 1}, codec="fp32", exchange="scatter_gather", slice_mb=0.3)
    theirs = stock(large, bucket_cap_mb=1)
    for step in range(2):
        for each in (ours, theirs):
            each.zero_grad()
            each(batch(dist.get_rank(), step, 1200)).square().mean().backward()
        assert_same_bits(gradients(ours), gradients(theirs))


class ThreeVectors(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_fp32, self.in_fp16, self.in_bf16 = (nn.Parameter(torch.zeros(300)) for _ in range(3))

    def forward(self, factor):
        return factor * (self.in_fp32 + self.in_fp16 + self.in_bf16).sum()


def _codecs_by_name(backend):
    """One model, three codecs: each parameter gets its own, in one bucket."""
    rank = dist.get_rank()
    values = [1.0 + 2.0**-9 + 2.0**-20 + 0.5 * r for r in (0, 1)]
    for exchange in EXCHANGES:
        codec = {"in_fp32": "fp32", "*_fp16": "fp16", "*": "bf16"}
        ours, sync = wrap(ThreeVectors(), backend, codec=codec, exchange=exchange)
        ours(values[rank]).backward()
        error = {n: (p.grad - sum(values) / 2).abs().max().item() for n, p in ours.module.named_parameters()}
        assert error["in_fp32"] <= 2.0**-22 < error["in_fp16"] <= 2.0**-10 < error["in_bf16"] <= 2.0**-7, error
        assert sync.grad_norm().item() == pytest.approx(norm_of(ours), rel=1e-12)


class Repeats(nn.Module):
    """A layer used twice, inside checkpoints."""

    def __init__(self, reentrant, shared):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.reentrant, self.shared = reentrant, shared

    def forward(self, x):
        x.requires_grad_()
        x = x + checkpoint(self.first, x, use_reentrant=self.reentrant)
        x = x + checkpoint(self.first if self.shared else self.second, x, use_reentrant=self.reentrant)
        return self.head(x).square().sum()


def _graphs(backend):
    """Checkpoints, gradient penalties, two forwards before one backward: as stock DDP."""
    rank = dist.get_rank()
    for reentrant, shared in ((False, False), (False, True), (True, False)):
        used = {"find_unused_parameters": True} if shared and not reentrant else {}
        ours, _ = wrap(Repeats(reentrant, shared), backend, ddp=used, codec="fp32")
        theirs = stock(Repeats(reentrant, shared), **used)
        for step in range(3):
            for each in (ours, theirs):
                each.zero_grad()
                each(batch(rank, step, 8)).backward()
            assert_same_bits(gradients(ours), gradients(theirs))
    ours, _ = wrap(mlp(), backend, codec="fp32")
    theirs = stock(mlp())
    for step in range(3):
        for each in (ours, theirs):
            each.zero_grad()
            x = batch(rank, step).requires_grad_()
            slope = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)[0]
            (slope.square().sum() + each(x).square().sum()).backward()
        assert_same_bits(gradients(ours), gradients(theirs))
    norm = nn.Sequential(nn.Linear(31, 9), nn.BatchNorm1d(9), nn.Linear(9, 1))
    ours, _ = wrap(norm, backend, ddp={"broadcast_buffers": False}, codec="fp32")
    theirs = stock(norm, broadcast_buffers=False)
    for step in range(3):
        for each in (ours, theirs):
            each.zero_grad()
            (each(batch(rank, step)).mean() - each(batch(rank, step + 50)).mean()).backward()
        assert_same_bits(gradients(ours), gradients(theirs))


def _compiled(backend):
    """torch.compile around DDP, with a checkpointed block: the gradients of eager mode."""
    for codec in ("fp32", "bf16"):
        eager, _ = wrap(Repeats(False, False), backend, codec=codec)
        inner, sync = wrap(Repeats(False, False), backend, codec=codec)
        compiled = torch.compile(inner, backend="aot_eager")
        for step in range(3):
            for each in (eager, compiled):
                each.zero_grad()
                each(batch(dist.get_rank(), step, 8)).backward()
            for a, b in zip(gradients(eager), gradients(compiled), strict=True):
                assert torch.allclose(a, b, rtol=1e-5 if codec == "fp32" else 2.0**-7, atol=1e-6)
        assert sync.stats().steps == 3
        assert sync.parameters()[0] is inner.module.first.bias
    inner, sync = wrap(torch.compile(mlp(), backend="aot_eager"), backend, codec={"0.*": "fp32", "*": "bf16"})
    inner(batch(0, 0)).sum().backward()
    assert sync.stats().steps == 1


def _amp_learns(backend):
    """fp16 under autocast and a GradScaler: the loss falls as in the uncompressed run."""
    losses = {}
    for codec in ("fp32", "fp16"):
        model, sync = wrap(mlp(7), backend, codec=codec)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        losses[codec] = []
        for step in range(30):
            optimizer.zero_grad()
            x = batch(dist.get_rank(), step % 5)
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(x).float() - x[:, :7].tanh()).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses[codec].append(loss.item())
        assert sync.stats().nonfinite_steps == 0
        assert_same_on_all_ranks(list(model.parameters()))
    assert losses["fp16"][-1] < 0.7 * losses["fp16"][0]
    assert losses["fp16"][-1] == pytest.approx(losses["fp32"][-1], rel=0.05)


def _zoo(rank, world_size, backend):
    _everything(backend)
    _sparse(backend)
    _rebuild(backend)
    _codecs_by_name(backend)
    _graphs(backend)
    _amp_learns(backend)


def _compile_world(rank, world_size, backend):
    _compiled(backend)


def test_models_of_every_kind(engine):
    run_on_ranks(_zoo, 2, timeout_s=240, args=(engine,))


def test_compiled_models(engine):
    run_on_ranks(_compile_world, 2, timeout_s=200, args=(engine,))
