"""`register`, `hook` and `SyncState` from the outside: registration, wrong use, life and death, copies, checkpoints."""

import copy
import gc
import io
import pickle
import random
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ddp_cases import (
    ENGINES,
    Branches,
    Scalars,
    assert_same_bits,
    assert_same_on_all_ranks,
    batch,
    gradients,
    mlp,
    stock,
    why_no_engine,
    wrap,
)
from ranks import run_on_ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gsync


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    reason = why_no_engine(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def _refused(error, words, call, *args, **options):
    with pytest.raises(error) as caught:
        call(*args, **options)
    assert words in str(caught.value), str(caught.value)


def _wrong_use(backend):
    """One clear error each, on every rank, and no collective: the ranks go on together afterwards."""

    def new(**ddp):
        return DistributedDataParallel(Scalars(), **ddp)

    register = gsync.register
    _refused(ValueError, "codec='fp31' is unknown; expected one of", register, new(), codec="fp31")
    _refused(TypeError, "unknown option 'compress'", register, new(), compress=True)
    _refused(ValueError, "block_size=0 is out of range", register, new(), block_size=0)
    _refused(ValueError, "bucket_mb=10: DDP makes the buckets", register, new(), bucket_mb=10)
    _refused(ValueError, "bucket_mb=10: DDP makes the buckets", gsync.SyncState, bucket_mb=10)
    _refused(ValueError, "stream_priority=-1 acts on CUDA only", register, new(), stream_priority=-1)
    _refused(ValueError, "nccl_max_ctas=4 acts on CUDA only", register, new(), nccl_max_ctas=4)
    _refused(ValueError, "transport='nccl' needs a model on CUDA", register, new(), transport="nccl")
    _refused(ValueError, "scaler: it scales residuals", register, new(), scaler=torch.amp.GradScaler("cpu"))
    _refused(TypeError, "expected a torch.nn.parallel.DistributedDataParallel, got Scalars", register, Scalars())
    _refused(TypeError, "expected a SyncConfig, got str", register, new(), "bf16")
    _refused(ValueError, "matches none of the patterns ['bias']", register, new(), codec={"bias": "fp32"})
    _refused(
        ValueError, "pattern 'bias' is the first to match for no parameter", register, new(), codec={"bias": "fp32", "*": "bf16"}
    )
    _refused(TypeError, "module: expected a torch.nn.Module, got int", gsync.SyncState, module=3)

    model = new()
    gsync.register(model, backend=backend)
    _refused(ValueError, "has a communication hook already (hook)", register, model)
    _refused(RuntimeError, "only be called once", model.register_comm_hook, gsync.SyncState(), gsync.hook)
    model(torch.ones(1)).backward()
    model = new()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    _refused(ValueError, "has a communication hook already (allreduce_hook)", register, model)
    model = new()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    _refused(ValueError, "one built into torch", register, model)

    frozen = new()
    frozen.requires_grad_(False)
    _refused(ValueError, "has no parameter that requires a gradient", register, frozen)
    _refused(ValueError, "has no parameter that requires a gradient", gsync.SyncState, module=frozen)

    class Tagged(torch.Tensor):
        pass

    odd = new()
    odd.module.weight = nn.Parameter(torch.ones(1, dtype=torch.float8_e5m2))
    _refused(ValueError, "parameter 'weight' has dtype torch.float8_e5m2; expected one of float32", register, odd)
    odd.module.weight = nn.Parameter(torch.ones(1, device="meta"))
    _refused(ValueError, "parameter 'weight' is on meta; expected cpu or cuda", register, odd)
    odd.module.weight = nn.Parameter(torch.ones(1).to_sparse())
    _refused(ValueError, "parameter 'weight' has layout torch.sparse_coo", register, odd)
    odd.module.weight = nn.Parameter(torch.ones(1).as_subclass(Tagged))
    _refused(TypeError, "parameter 'weight' is a Tagged; expected a plain tensor", register, odd)

    model = new()
    model.register_comm_hook(None, gsync.hook)
    _refused(TypeError, "the state must be a gsync.SyncState, got NoneType", lambda: model(torch.ones(1)).backward())
    state = gsync.SyncState(backend=backend)
    _refused(ValueError, "was not registered on a DistributedDataParallel", state.engine_for, [])
    _refused(gsync.GsyncError, "no backward pass has been synchronised yet", state.grad_norm)
    _refused(gsync.GsyncError, "no backward pass has been synchronised yet", state.found_nonfinite)
    left, right = new(), new()
    left.register_comm_hook(state, gsync.hook)
    right.register_comm_hook(state, gsync.hook)
    _refused(ValueError, "on 2 DistributedDataParallel instances", lambda: left(torch.ones(1)).backward())
    state = gsync.SyncState(backend=backend)
    first, second = new(), new()
    first.register_comm_hook(state, gsync.hook)
    first(torch.ones(1)).backward()
    second.register_comm_hook(state, gsync.hook)
    _refused(ValueError, "belongs to another model", lambda: second(torch.ones(1)).backward())
    first(torch.ones(1)).backward()

    other = dist.new_group([0, 1])
    state = gsync.SyncState(process_group=other, backend=backend)
    model = new()
    model.register_comm_hook(state, gsync.hook)
    _refused(ValueError, "but the DDP instance was made with", lambda: model(torch.ones(1)).backward())
    assert model.module.weight.grad.isnan().all()
    _refused(ValueError, "consolidate=True adds up residuals", state.state_dict, consolidate=True)
    _refused(ValueError, "factor=0", state.scale_residuals, 0)
    _refused(ValueError, "expected a state_dict of gsync, but version", state.load_state_dict, {})


def _python_reducer(backend):
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        model = DistributedDataParallel(Scalars())
        _refused(ValueError, "python_reducer", gsync.register, model)
    finally:
        torch._dynamo.config.optimize_ddp = True
    _refused(TypeError, "expected a dist.GradBucket, got tuple", gsync.hook, gsync.SyncState(), (torch.ones(1), torch.ones(1)))


def _disagreeing(backend):
    """Ranks with other options or models: the same error on every rank, before any gradient is sent."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Scalars())
    gsync.register(model, backend=backend, codec=["bf16", "fp16"][rank])
    _refused(ValueError, "rank 1: codec is", lambda: model(torch.ones(1)).backward())
    assert model.module.weight.grad.isnan().all()


def _registration(backend):
    """All ways to register give the same, with DDP's books in order."""
    rank = dist.get_rank()
    x = torch.full((1,), rank + 1.0)
    early = pickle.loads(pickle.dumps(gsync.SyncState(codec="fp32", backend=backend)))
    for state in (early, gsync.SyncState(codec="fp32", backend=backend), copy.deepcopy(early)):
        model = DistributedDataParallel(Scalars())
        model.register_comm_hook(state, gsync.hook)
        model(x).backward()
        assert model.module.weight.grad.item() == 1.5 and state.stats().steps == 1
    model = DistributedDataParallel(Scalars())
    state = gsync.SyncState(codec="fp32", backend=backend, module=model)
    model.register_comm_hook(state, gsync.hook)
    model(x).backward()
    assert model.module.weight.grad.item() == 1.5 and state.stats().steps == 1

    model = DistributedDataParallel(Scalars())
    model(x).backward()
    sync = gsync.register(model, codec="fp32", backend=backend)  # after the first backward pass
    assert model._comm_hooks == [(gsync.hook, sync)]
    model.zero_grad()
    model(x).backward()
    assert model.module.weight.grad.item() == 1.5 and sync.stats().steps == 1
    assert model._get_ddp_logging_data()["comm_hook"] == "gsync.hook"
    assert "SyncConfig(codec='fp32'" in repr(sync) and "step 1" in repr(sync)

    compiled = torch.compile(DistributedDataParallel(Scalars()), backend="eager")
    assert gsync.register(compiled, backend=backend).parameters() == [compiled._orig_mod.module.weight]


def _closing(backend):
    """After close a plain mean; register starts gsync again, with other options."""
    x = torch.full((1,), (dist.get_rank() + 1) * 1.0)
    model, sync = wrap(Scalars(), backend, codec="bf16")
    reference = stock(Scalars())
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
        sync.close()
        sync.close()
        assert sync.closed and sync.stats().steps == 1
        fine = x * (1 + 2.0**-15)
        for each in (model, reference):
            each.zero_grad()
            each(fine).backward()
        assert_same_bits(gradients(model), gradients(reference))
        assert gsync.register(model, codec="bf16", backend=backend) is sync and not sync.closed
    again = gsync.register(_closed(model, sync), codec="fp32", average=False, backend=backend)
    model.zero_grad()
    model(x).backward()
    assert model.module.weight.grad.item() == 3.0 and again.config.codec == "fp32"
    _refused(ValueError, "has a communication hook already", gsync.register, model)


def _closed(model, sync):
    sync.close()
    return model


def _copies(backend):
    """A copy of a model is a plain one until it is registered; a copied or pickled state has no group and no engine."""
    x = torch.full((1,), dist.get_rank() + 1.0)
    model, sync = wrap(Scalars(), backend)
    model(x).backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(x).backward()
    assert twin.module.weight.grad.item() == 1.5 and sync.stats().steps == 1
    twin_sync = gsync.register(twin, codec="fp32", backend=backend)
    twin.zero_grad()
    twin(x).backward()
    assert twin.module.weight.grad.item() == 1.5 and twin_sync.stats().steps == 1 and sync.stats().steps == 1
    model.zero_grad()
    model(x).backward()
    assert sync.stats().steps == 2

    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    loaded.zero_grad()
    gsync.register(loaded, backend=backend)
    loaded(x).backward()
    assert loaded.module.weight.grad.item() == 1.5

    back = pickle.loads(pickle.dumps(sync))
    assert back.config == sync.config and back.state_dict()["step"] == 2


def _checkpoint(backend):
    rank = dist.get_rank()
    model, sync = wrap(mlp(), backend)
    for step in range(3):
        model(batch(rank, step)).sum().backward()
    buffer = io.BytesIO()
    torch.save(sync.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    head = {"version": 1, "rank": rank, "world_size": 2, "seed": 0, "step": 3}
    assert saved == {**head, "consolidated": False, "loss_scale": 1.0, "residuals": {}}
    model, sync = wrap(mlp(), backend)
    sync.load_state_dict(saved)
    assert sync.state_dict()["step"] == 3
    model(batch(rank, 0)).sum().backward()
    assert sync.state_dict()["step"] == 4
    sync.load_state_dict({**saved, "step": 10, "rank": 7, "world_size": 64})
    model(batch(rank, 0)).sum().backward()
    assert sync.state_dict()["step"] == 11
    sync.scale_residuals(0.5)


def _statistics(backend):
    model, sync = wrap(Scalars(1000), backend, codec="bf16", exchange="scatter_gather")
    for _ in range(3):
        model(torch.ones(1000)).backward()
    stats = sync.stats()
    assert (stats.steps, stats.buckets, stats.gradient_bytes, stats.relative_error) == (3, 3, 12000, None)
    # Two chunks of 2 blocks of 256 and 1 of 256 + 232 elements in 2 bytes, and their flags: what one rank sends, twice.
    assert 3 * 2 * 1000 <= stats.wire_bytes <= 3 * 2 * (1024 + 32)
    assert stats.exposed_ms >= 0 and 0 <= stats.overlap_share <= 1 and stats.exchange_ms > 0
    sync.reset_stats()
    assert sync.stats().to_dict() == gsync.SyncStats().to_dict()
    model(torch.ones(1000)).backward()
    assert sync.stats().steps == 1


def _random_state(backend):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    model = DistributedDataParallel(Branches())
    torch.set_rng_state(states[0])
    for codec in ("fp16", "bf16"):
        model, _ = wrap(Scalars(3000), backend, codec=codec, exchange="scatter_gather")
        for _ in range(3):
            model(torch.ones(3000)).backward()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def _leaks(backend):
    """Models that are made, trained and deleted one after another are collected, with threads and engines."""
    import threading

    threads = threading.active_count()
    sizes = []
    for _ in range(20):
        model, sync = wrap(mlp(width=200), backend)
        for step in range(2):
            model(batch(0, step)).sum().backward()
        alive = weakref.ref(model), weakref.ref(model.module), weakref.ref(sync)
        del model, sync
        gc.collect()
        assert [reference() for reference in alive] == [None, None, None]
        with open("/proc/self/statm") as file:
            sizes.append(int(file.read().split()[1]) * 4096)
    until = time.monotonic() + 20
    while threading.active_count() > threads and time.monotonic() < until:  # a closed engine's thread ends soon, not at once
        time.sleep(0.05)
    assert threading.active_count() <= threads, threading.enumerate()
    assert sizes[-1] - sizes[9] < 30 * 2**20, sizes


def _stock_wrapper(backend):
    """torch's fp16 wrapper around gsync.hook: gsync sees fp16 buckets and hands them back."""
    model = DistributedDataParallel(Scalars(100))
    state = gsync.SyncState(codec="fp32", backend=backend)
    model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(gsync.hook))
    for _ in range(2):
        model.zero_grad()
        model(torch.full((100,), 1.0 + dist.get_rank())).backward()
        assert model.module.weight.grad.dtype == torch.float32
        assert model.module.weight.grad.tolist() == [1.5] * 100
    assert state.stats().steps == 2
    assert_same_on_all_ranks(model.module.weight.grad)


def _surface(rank, world_size, backend):
    _wrong_use(backend)
    _python_reducer(backend)
    _registration(backend)
    _closing(backend)
    _copies(backend)
    _checkpoint(backend)
    _statistics(backend)
    _random_state(backend)
    _stock_wrapper(backend)
    _disagreeing(backend)


def _leak_world(rank, world_size, backend):
    _leaks(backend)


def test_surface(engine):
    run_on_ranks(_surface, 2, timeout_s=120, args=(engine,))


def test_models_are_collected(engine):
    run_on_ranks(_leak_world, 2, timeout_s=120, args=(engine,))


def test_without_a_process_group():
    """A state may be built before the group; the first use without one says what is missing."""
    module = mlp()  # a state holds it weakly
    state = gsync.SyncState(module=module)
    assert state.state_dict()["rank"] == -1
    with pytest.raises(gsync.GsyncError, match=r"call torch\.distributed.init_process_group first"):
        state.engine_for([])
    assert state.parameters  # a method, not looked up in the group
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(mlp())
    finally:
        dist.destroy_process_group()
    with pytest.raises(gsync.GsyncError, match="is not initialised"):
        gsync.register(model)
