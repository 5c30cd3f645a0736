"""What `stats` tells of the error of encoding: against the same numbers worked out by hand, and at no cost in bits."""

import pytest
import torch
from blockcodec_cases import codecs_by, latest, local_gradients, train
from ddp_cases import ENGINES, assert_same_bits, batch, gradients, mlp, why_no_engine, wrap
from ranks import run_on_ranks

from gsync import ops
from gsync.layout import CODEC_KINDS, Segment, hash64, share_of
from gsync.stats import SyncStats


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    reason = why_no_engine(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


class Sums:
    """Squares of what was lost and of what was encoded, values that were not zero and those that became zero."""

    def __init__(self):
        self.lost, self.encoded, self.nonzero, self.zeroed = 0.0, 0.0, 0, 0

    def add(self, x, decoded):
        self.lost += float((x - decoded).double().square().sum())
        self.encoded += float(x.double().square().sum())
        self.nonzero += int((x != 0).sum())
        self.zeroed += int(((x != 0) & (decoded == 0)).sum())

    def compare(self, error, share):
        assert error == pytest.approx((self.lost / self.encoded) ** 0.5, rel=1e-6)
        assert share == pytest.approx(self.zeroed / self.nonzero, rel=1e-12)


def _decoded(gradient, codec, world_size, name):
    shared = {"codec": codec, "num_chunks": world_size, "names": [name], "backend": "reference"}
    back = torch.empty_like(gradient)
    ops.unpack(ops.pack([gradient], scale=1 / world_size, **shared), [back], **shared)
    return back


def _measured(rank, world_size, backend):
    for codec in ("int4", "fp8_e5m2", "bf16"):
        options = {"codec": codec, "exchange": "scatter_gather", "measure_every": 1}
        patterns = {"*.bias": "bf16", "*": codec}
        model, sync = wrap(mlp(), backend, ddp={"bucket_cap_mb": 0.02}, slice_mb=0.02, **options)
        plain = mlp()
        packed, reduced = Sums(), Sums()
        for step in range(4):  # DDP's rebuild included
            if step == 2:
                sync.reset()  # keeps totals
            model.zero_grad()
            model(batch(rank, step)).square().sum().backward()
            everyone = local_gradients(plain, world_size, step)
            for name, parameter in model.module.named_parameters():
                kind = codecs_by(plain, patterns)[name]
                decoded = [_decoded(gradient, kind, world_size, name) for gradient in everyone[name]]
                packed.add(everyone[name][rank] * torch.tensor(1 / world_size), decoded[rank])
                first, numel = share_of(Segment(parameter.numel(), 0, CODEC_KINDS[kind], hash64(name)), rank, world_size)
                total = decoded[0]
                for other in decoded[1:]:
                    total = total + other
                mine = slice(first, first + numel)
                reduced.add(total.reshape(-1)[mine], parameter.grad.reshape(-1)[mine])
        stats = sync.stats()
        packed.compare(stats.relative_error, stats.zeroed_share)
        reduced.compare(stats.relative_error_of_sums, stats.zeroed_share_of_sums)
        assert "relative error" in str(stats)
        sync.reset_stats()
        stats = sync.stats()
        assert (stats.relative_error, stats.zeroed_share, stats.relative_error_of_sums) == (None, None, None)


def _not_measured(rank, world_size, backend):
    """Without asking nothing is measured; asking changes no bit. Under all_reduce the sums are the library's."""
    for options in ({"codec": "int4", "error_feedback": True}, {"codec": "bf16"}):
        expected, sync = train(rank, backend, range(3), options)
        assert sync.stats().relative_error is None
        got, measuring = train(rank, backend, range(3), {**options, "measure_every": 2})
        assert_same_bits(got, expected)
        stats = measuring.stats()
        assert 0 < stats.relative_error < 0.2 and stats.to_dict()["relative_error"] == stats.relative_error
        assert (stats.relative_error_of_sums is None) == (options["codec"] == "bf16")
        # Steps 0 and 2 are measured, 1 is not.
        measuring.reset_stats()
        for step in (3, 4):
            assert measuring.stats().relative_error is None
            latest[0](batch(rank, step)).square().sum().backward()
        assert measuring.stats().relative_error is not None
    # NaN does not count, and does not stay.
    model, sync = wrap(mlp(), backend, codec="int8", measure_every=1)
    for step in range(2):
        model.zero_grad()
        loss = model(batch(rank, step)).square().sum()
        (loss * float("nan") if step == 0 else loss).backward()
    assert gradients(model)[0].isfinite().all()
    assert 0 < sync.stats().relative_error < 0.02


@pytest.mark.parametrize("world_size", [2, 3])
def test_errors_are_those_of_the_encodings(engine, world_size):
    run_on_ranks(_measured, world_size, timeout_s=90, args=(engine,))


def test_measuring_is_asked_for_and_changes_nothing(engine):
    run_on_ranks(_not_measured, 2, timeout_s=60, args=(engine,))


def test_stats_add_up_engines():
    one = {"steps": 1, "error_sums": [1.0, 100.0, 10.0, 1.0, 0.0, 0.0, 0.0, 0.0]}
    other = {"steps": 2, "error_sums": [3.0, 300.0, 30.0, 1.0, 4.0, 1.0, 8.0, 2.0]}
    stats = SyncStats.of(one, other, {"steps": 1, "error_sums": []})
    assert (stats.steps, stats.relative_error, stats.zeroed_share) == (4, 0.1, 0.05)
    assert (stats.relative_error_of_sums, stats.zeroed_share_of_sums) == (2.0, 0.25)
    assert SyncStats.of().relative_error is None and SyncStats.of(one).relative_error_of_sums is None
