"""GradReducer from outside: what construction does and refuses, models that change, optimizers, buffers, copies, state."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ddp_cases import Branches, Scalars, assert_same_on_all_ranks, batch, gradients, mlp
from ranks import run_on_ranks
from reducer_cases import alone, assert_gradients, each_engine
from torch.nn.parallel import DistributedDataParallel

import gsync

engines = pytest.mark.parametrize("backend", each_engine())


def _construction(rank, world_size, backend):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(rank + 1)
    reducer = gsync.GradReducer(model, gsync.SyncConfig(codec="fp32", backend=backend))
    assert_same_on_all_ranks([t.float() for t in (*model.parameters(), *model.buffers())])
    assert model[1].num_batches_tracked.item() == 1  # rank 0's
    assert reducer.config.codec == "fp32" and not reducer.closed
    assert repr(reducer).startswith("GradReducer(SyncConfig(") and repr(reducer).endswith("step 0)")
    with pytest.raises(ValueError, match=r"parameter '0.bias' belongs to a GradReducer already; close\(\)"):
        gsync.GradReducer(model, backend=backend)
    with pytest.raises(ValueError, match="belongs to a GradReducer already"):
        gsync.GradReducer(nn.Sequential(model[0]), backend=backend)
    reducer.close()
    reducer.close()
    assert reducer.closed and "closed" in repr(reducer)
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend)
    model(torch.randn(5, 3)).sum().backward()
    reducer.close()
    model.zero_grad()
    model(torch.full((2, 3), float(rank))).sum().backward()  # nobody synchronises any more, and nothing hangs


@engines
def test_construction(backend):
    run_on_ranks(_construction, 2, args=(backend,))


def _refused(rank, world_size, backend):
    def refused(kind, message, module, **options):
        with pytest.raises(kind, match=message):
            gsync.GradReducer(module, backend=backend, **options)

    refused(TypeError, "expected a torch.nn.Module, got str", "model")
    ddp = DistributedDataParallel(mlp())
    refused(TypeError, r"ddp.module and broadcast_buffers=True.*gsync.register\(ddp\)", ddp)
    refused(TypeError, "submodule '1' is a DistributedDataParallel", nn.Sequential(nn.Linear(1, 1), ddp))
    refused(ValueError, r"the model \(ReLU\) has no parameter that requires a gradient", nn.ReLU())
    refused(ValueError, r"\(Scalars\) has no parameter that requires a gradient", Scalars().requires_grad_(False))
    refused(ValueError, "bucket_mb", mlp(), bucket_mb=-1)
    refused(ValueError, "codec", mlp(), codec="int3")
    refused(TypeError, "unknown option 'bucket_cap_mb'", mlp(), bucket_cap_mb=1)
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, got int"):
        gsync.GradReducer(model := mlp(), backend=backend).attach(3)
    with pytest.raises(ValueError, match="none of the parameters"):
        gsync.GradReducer(Scalars(), backend=backend).attach(torch.optim.SGD(model.parameters(), 0.1))


@engines
def test_wrong_use_raises_before_anything_is_sent(backend):
    run_on_ranks(_refused, 2, args=(backend,))


def _differences(rank, world_size, backend):
    def different(message, module, **options):
        with pytest.raises(ValueError, match="different things on different ranks: rank 1: " + message):
            gsync.GradReducer(module, backend=backend, **options)

    wider = nn.ModuleDict({"a": nn.Linear(2, 2 + rank, bias=False)})
    different(r"parameters\[0\] is a.weight \(3, 2\).*on rank 0 it is a.weight \(2, 2\)", wider)
    different("parameters.* is b.weight.*on rank 0 it is a.weight", nn.ModuleDict({"ab"[rank]: nn.Linear(2, 2, bias=False)}))
    different("4 parameters, on rank 0 2", nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)]))
    different("parameters.*float64.*float32", Scalars(2, (torch.float32, torch.float64)[rank]))
    different("codec", mlp(), codec=("bf16", "fp16")[rank])
    different("exchange", mlp(), exchange=("all_reduce", "scatter_gather")[rank])
    different("bucket_mb", mlp(), bucket_mb=1 + rank)
    different("broadcast_buffers", mlp(), broadcast_buffers=rank == 1)
    different(r"requires_grad\[0\] is bias True, on rank 0 it is bias False", _one_frozen(rank == 0))
    layouts = nn.Conv2d(2, 2, 2)
    if rank == 1:
        layouts.weight.data = layouts.weight.data.to(memory_format=torch.channels_last)
    different(r"strides of parameters\[1\] is weight \(8, 1, 4, 2\)", layouts)


def _one_frozen(frozen):
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(not frozen)
    return model


@engines
def test_the_first_difference_between_ranks_is_told_on_every_rank(backend):
    run_on_ranks(_differences, 2, args=(backend,))


def _frozen_later(rank, world_size, backend):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    model[1].requires_grad_(False)
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend, bucket_mb=1e-6)

    def step():
        model.zero_grad()
        model(_x(rank)).square().sum().backward()
        assert_gradients(model, alone(model, world_size, lambda m, r: m(_x(r)).square().sum()))

    def trained():
        return sum(len(bucket.parameters) for bucket in reducer._buckets)

    step()
    assert trained() == 4
    model[1].requires_grad_(True)  # unfrozen
    step()
    step()
    assert trained() == 6
    model[2].requires_grad_(False)  # frozen
    step()
    for param in model.parameters():
        param.requires_grad_(False)
    model[1].weight.requires_grad_(True)  # only one that was frozen at the start
    step()
    model.requires_grad_(True)
    step()
    # Frozen on one rank only: told on that rank by name, and to the others.
    if rank == 1:
        model[0].bias.requires_grad_(False)
    with pytest.raises(gsync.SyncError, match="'0.bias' is frozen on this rank and trained on another" if rank else ""):
        for _ in range(2):
            model.zero_grad()
            model(_x(rank)).square().sum().backward()


def _x(rank):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))


@engines
def test_parameters_frozen_and_unfrozen_later(backend):
    run_on_ranks(_frozen_later, 2, args=(backend,))


def _residuals_of_unfrozen(rank, world_size, backend):
    """What a parameter that was unfrozen loses is kept from then on, and sent later."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    reducer = gsync.GradReducer(model, codec="int4", error_feedback=True, exempt=(), backend=backend)
    held = reducer.stats().residual_bytes
    model[0].requires_grad_(True)
    total = torch.zeros(4, 4)
    for _ in range(8):
        model.zero_grad()
        model(_x(rank)).square().sum().backward()
        total += model[0].weight.grad
    assert reducer.stats().residual_bytes > held > 0
    assert sorted(reducer.state_dict()["residuals"]) == ["0.weight", "1.weight"]
    exact = 8 * alone(model, world_size, lambda m, r: m(_x(r)).square().sum())["0.weight"]
    # Without residuals every step loses the same again: up to 8 times absmax / 14.
    assert (total - exact).abs().max() <= 2 * exact.abs().max() / 8 / 14 * 1.02


def _others(rank, world_size, backend):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).to("meta").requires_grad_(False)})
    reducer = gsync.GradReducer(model, backend=backend)
    model["a"](torch.ones(2)).sum().backward()
    model["b"].weight.requires_grad_(True)
    with pytest.raises(gsync.GsyncError, match=r"parameter 'b\.weight' is trained now, but had another device"):
        reducer.wait()


@engines
def test_a_parameter_that_could_not_be_hooked_raises_once_it_is_trained(backend):
    run_on_ranks(_others, 1, args=(backend,))


@engines
def test_unfrozen_parameters_get_residuals(backend):
    run_on_ranks(_residuals_of_unfrozen, 2, args=(backend,))


def _all_frozen_but_new(rank, world_size, backend):
    """A head that is the only thing trained after a switch does not go unnoticed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    gsync.GradReducer(model, codec="fp32", backend=backend)
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)
    model(_x(rank)).square().sum().backward()
    assert_gradients(model, alone(model, world_size, lambda m, r: m(_x(r)).square().sum()))


@engines
def test_only_what_was_frozen_at_the_start_is_trained(backend):
    run_on_ranks(_all_frozen_but_new, 2, args=(backend,))


def _replaced(rank, world_size, backend):
    def fails(change, message, forward=True):
        model = mlp()
        reducer = gsync.GradReducer(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        reducer.attach(optimizer)
        model(batch(rank, 0)).sum().backward()
        optimizer.step()
        change(model)
        for call in (lambda: model(batch(rank, 0)), reducer.wait, optimizer.step):
            with pytest.raises(gsync.GsyncError, match=message):
                call()
        reducer.close()

    def replace(model):
        model[0].weight = nn.Parameter(torch.ones_like(model[0].weight))

    def add(model):
        model[0].extra = nn.Parameter(torch.ones(3))

    def swap(model):
        model[2] = nn.Linear(67, 129)

    def move(model):
        model.double()

    fails(replace, "parameter '0.weight' was replaced after the GradReducer was made")
    fails(add, "parameter '0.extra' was added after the GradReducer was made")
    fails(swap, "parameter '2.weight' was replaced")
    fails(move, "'0.bias' was moved to another device or dtype")
    # What has no parameters may be exchanged, and .grad may be replaced at any time.
    model = mlp()
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend)
    model[1] = nn.Tanh()
    expected = alone(model, world_size, lambda m, r: m(batch(r, 0)).square().sum())
    for param in model.parameters():
        param.grad = torch.full_like(param, 2.0 * rank).t().contiguous().t()  # another memory order, other values
    model(batch(rank, 0)).square().sum().backward()
    assert_gradients(model, {name: gradient + 1.0 for name, gradient in expected.items()}, 1e-5)
    assert_same_on_all_ranks(gradients(model))
    reducer.close()


@engines
def test_replaced_parameters_raise_and_replaced_gradients_do_not(backend):
    run_on_ranks(_replaced, 2, args=(backend,))


def _attach(rank, world_size, backend):
    model = mlp()
    reducer = gsync.GradReducer(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = reducer.attach(optimizer)
    with reducer.no_sync():
        model(batch(rank, 0)).sum().backward()
    with pytest.raises(gsync.GsyncError, match=r"accumulated under no_sync\(\).*'4.bias'"):
        optimizer.step()
    model(batch(rank, 0)).sum().backward()
    optimizer.step()
    assert_same_on_all_ranks(list(model.parameters()))
    reducer._engine.abort("the test asked for it")
    for _ in range(2):
        with pytest.raises(gsync.SyncError, match="the test asked for it"):
            optimizer.step()
        with pytest.raises(gsync.SyncError, match="the test asked for it"):
            reducer.wait()
    handle.remove()
    optimizer.step()
    dist.barrier()
    reducer.reset()
    reducer.attach(optimizer)
    model.zero_grad()
    model(batch(rank, 0)).sum().backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters()) and reducer.stats().steps == 2


@engines
def test_an_attached_optimizer_raises_what_is_wrong(backend):
    run_on_ranks(_attach, 2, args=(backend,))


def _stolen(rank, world_size, backend):
    model = Branches()
    gsync.GradReducer(model, backend=backend)

    def take(param):
        param.grad = None

    if backend == "native":
        model.a.weight.register_post_accumulate_grad_hook(take)
        with pytest.raises(gsync.SyncError, match=r"'a\.weight' was gone right after it came"):
            model(torch.ones(1, 1), "ab").backward()
    rows = nn.ParameterDict({"table": nn.Parameter(torch.ones(4, 2))})
    gsync.GradReducer(rows, backend=backend)
    loss = nn.functional.embedding(torch.tensor([rank]), rows["table"], sparse=True).sum()
    with pytest.raises(gsync.SyncError, match="the gradient of parameter 'table' is sparse, and was expected to be dense"):
        loss.backward()


@engines
def test_gradients_that_cannot_be_synchronised_raise_by_name(backend):
    run_on_ranks(_stolen, 2, args=(backend,))


def _gan(rank, world_size, backend):
    torch.manual_seed(rank)
    maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    of_maker = gsync.GradReducer(maker, codec="fp32", backend=backend, broadcast_buffers=True)
    of_critic = gsync.GradReducer(critic, codec="fp32", backend=backend, broadcast_buffers=True, bucket_mb=1e-4)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (maker, critic)]
    for reducer, optimizer in zip((of_maker, of_critic), optimizers, strict=True):
        reducer.attach(optimizer)
    for _ in range(4):
        noise, real = torch.randn(6, 4), torch.randn(6, 4) + 2
        fake = maker(noise)
        optimizers[1].zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean()).backward()  # two forward passes, one backward
        optimizers[1].step()
        optimizers[0].zero_grad()
        with of_critic.no_sync():
            (-critic(fake).mean()).backward()
        optimizers[0].step()
        assert_same_on_all_ranks([*maker.parameters(), *critic.parameters()])
    assert (of_maker.stats().steps, of_critic.stats().steps) == (4, 4)


@engines
def test_two_models_in_one_process(backend):
    run_on_ranks(_gan, 2, args=(backend,))


def _buffers(rank, world_size, backend):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    reducer = gsync.GradReducer(model, backend=backend, broadcast_buffers=True)

    def forward(times=1):
        for _ in range(times):
            model(torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)))
        return model[1].running_mean.clone()

    forward()
    before = [torch.empty(4) for _ in range(world_size)]
    dist.all_gather(before, model[1].running_mean)
    assert not torch.equal(before[0], before[1])
    with torch.no_grad():
        forward()  # not synchronised, so nothing is sent
    with reducer.no_sync():
        forward()
    model.eval()
    if rank == 0:
        model(torch.ones(2, 3))  # on one rank alone
    model.train()
    mine = forward()  # starts from rank 0's
    starts = [torch.empty(4) for _ in range(world_size)]
    dist.all_gather(starts, mine - 0.1 * _mean_of_batch(model, rank))
    assert torch.allclose(starts[0], starts[1], atol=1e-6)
    assert model[1].num_batches_tracked.item() == 4


def _mean_of_batch(model, rank):
    with torch.no_grad():
        return model[0](torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))).mean(0)


@engines
def test_buffers_are_those_of_rank_zero_before_each_synchronised_forward(backend):
    run_on_ranks(_buffers, 2, args=(backend,))


def _copies(rank, world_size, backend):
    model = mlp()
    gsync.GradReducer(model, codec="fp32", backend=backend)  # not kept: the module keeps it
    gc.collect()
    average = copy.deepcopy(model)
    average(batch(rank, 0)).sum().backward()  # a copy is not synchronised, and nothing hangs
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    torch.load(memory, weights_only=False)(batch(rank, 0)).sum().backward()
    model(batch(rank, 0)).sum().backward()
    assert_same_on_all_ranks(gradients(model))
    assert_gradients(model, alone(model, world_size, lambda m, r: m(batch(r, 0)).sum()))
    gone = weakref.ref(model)
    parameters = [weakref.ref(param) for param in model.parameters()]
    del model
    gc.collect()
    assert gone() is None and all(param() is None for param in parameters)


@engines
def test_copies_are_independent_and_nothing_is_kept(backend):
    run_on_ranks(_copies, 2, args=(backend,))


def _state(rank, world_size, backend):
    model = mlp()
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend)
    for step in range(3):
        model(batch(rank, step)).sum().backward()
    assert reducer.state_dict()["step"] == 3
    state = reducer.state_dict()
    reducer.close()
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend)
    reducer.load_state_dict(state)
    model(batch(rank, 0)).sum().backward()
    assert reducer.state_dict()["step"] == 4 and reducer.stats().steps == 1
    reducer.reset_stats()
    assert reducer.stats().steps == 0
    before = gsync.clip_grad_norm_(reducer, 1e-3)
    assert before.item() == pytest.approx(reducer.grad_norm().item())
    assert torch.cat([g.flatten() for g in gradients(model)]).norm().item() == pytest.approx(1e-3, rel=1e-3)
    reducer.scale_residuals(2.0)


@engines
def test_state_statistics_and_clipping(backend):
    run_on_ranks(_state, 2, args=(backend,))
