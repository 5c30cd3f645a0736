"""The engine over a library whose collectives belong to the calling thread, and its rules for what comes when.

torch's fake process group stands in for the library: its collectives leave the payload as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from engine_setup import Listed, rows
from torch.testing._internal.distributed.fake_pg import FakeStore

from gsync import _native
from gsync.errors import SyncError

pytestmark = pytest.mark.skipif(_native.C is None, reason=_native.MISSING or "native build")

NUMELS = (300_000, 300_000)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def make(module, owned=False, exchange="all_reduce"):
    transport = _native.C.C10dTransport(
        main=dist.group.WORLD, gather=dist.group.WORLD, rank=0, size=2, timeout_s=5.0, owned=owned
    )
    engine = _native.C.Engine(
        transport, device="cpu", world_size=2, rank=0, exchange=exchange, scale=0.5, slice_bytes=100_000, timeout_s=5.0
    )
    named = list(module.named_parameters())
    engine.set_parameters([parameter for _, parameter in named], [name for name, _ in named], ["fp32"] * len(named))
    return engine


def test_collectives_of_other_libraries_run_in_the_calling_thread(group):
    module = Listed(NUMELS)
    engine = make(module)
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    _native.C.register_ddp_hook(ddp.reducer, lambda: engine)
    ddp(rows(NUMELS, 0)).backward()
    for parameter, row in zip(module.parameters(), rows(NUMELS, 0), strict=True):
        assert torch.equal(parameter.grad, row * 0.5)
    stats = engine.stats()
    assert stats["steps"] == 1 and stats["wire_bytes"] > 0 and stats["exposed_ms"] > 0
    engine.close()


def test_all_exchanges_ask_such_a_library(group):
    module = Listed((100,))
    engine = make(module, exchange="scatter_gather")
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    _native.C.register_ddp_hook(ddp.reducer, lambda: engine)
    ddp(rows((100,), 0)).backward()
    assert engine.stats()["steps"] == 1  # what the fake library leaves in the buffers is anything
    engine.close()


def test_a_library_that_fails_is_an_error_of_the_step(group):
    """The group is owned, and the library cannot abort it: letting go is all there is."""
    module = Listed((100,))
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    engine = make(module, owned=True)
    _native.C.register_ddp_hook(ddp.reducer, lambda: engine)
    ddp(rows((100,), 0)).backward()
    engine.abort("enough")
    with pytest.raises(SyncError, match="enough"):
        ddp(rows((100,), 0)).backward()
    assert module.parts[0].grad.isnan().all()
    engine.close()


def test_a_transport_that_was_aborted_says_so(group):
    module = Listed((100,))
    transport = _native.C.C10dTransport(dist.group.WORLD, dist.group.WORLD, 0, 2, 5.0, owned=False)
    engine = _native.C.Engine(transport, "cpu", 2, 0, "all_reduce", 0.5, 100_000, 5.0)
    engine.set_parameters(list(module.parameters()), ["a"], ["fp32"])
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    _native.C.register_ddp_hook(ddp.reducer, lambda: engine)
    transport.abort()
    with pytest.raises(SyncError, match="the process group was aborted"):
        ddp(rows((100,), 0)).backward()
    assert engine.failed and module.parts[0].grad.isnan().all()
    engine.close()


def test_a_library_of_nccl_that_is_not_there_is_named():
    with pytest.raises(RuntimeError, match=r"cannot load NCCL: libgsync-has-none\.so"):
        _native.C.NcclTransport(dist.HashStore(), 0, 1, "cpu", 1.0, library="libgsync-has-none.so")


def buckets_of(module):
    ddp = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1)
    engine = make(module)
    _native.C.register_ddp_hook(ddp.reducer, lambda: engine)
    for step in range(2):
        ddp(rows(NUMELS, 0, step)).backward()
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    assert len(buckets) == 2
    return buckets


def test_a_backward_that_was_left_in_the_middle_is_an_error(group):
    module = Listed(NUMELS)
    engine = make(module)
    buckets = buckets_of(module)
    assert engine.submit(buckets[0]).done()
    again = engine.submit(buckets[0])
    with pytest.raises(SyncError, match="bucket 1 was due, bucket 0 came"):
        again.wait()
    assert buckets[0].buffer().isnan().all()
    with pytest.raises(SyncError):
        engine.raise_pending()


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="exchange must be all_reduce, scatter_gather or hierarchical, got ring"):
        _native.C.Engine(None, device="cpu", world_size=1, rank=0, exchange="ring", scale=1.0, slice_bytes=1, timeout_s=1.0)
    with pytest.raises(ValueError, match="needs a transport"):
        _native.C.Engine(None, device="cpu", world_size=2, rank=0, exchange="all_reduce", scale=1.0, slice_bytes=1, timeout_s=1.0)
    engine = _native.C.Engine(
        None, device="cpu", world_size=1, rank=0, exchange="all_reduce", scale=1.0, slice_bytes=1, timeout_s=1.0
    )
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"codec must be fp32, .*int8 or int4, got int7"):
        engine.set_parameters([parameter], ["a"], ["int7"])
    with pytest.raises(ValueError, match="1 parameters, 1 names, 1 codecs, 2 block sizes"):
        engine.set_parameters([parameter], ["a"], ["int8"], [0, 0])
    with pytest.raises(ValueError, match="rounding must be nearest or stochastic, got up"):
        _native.C.Engine(None, "cpu", 1, 0, "all_reduce", 1.0, 1, 1.0, rounding="up")
    with pytest.raises(ValueError, match="two parameters are named a"):
        engine.set_parameters([parameter, torch.nn.Parameter(torch.zeros(1))], ["a", "a"], ["fp32", "fp32"])
    engine.close()
