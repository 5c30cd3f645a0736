"""Registration, saving, resuming, letting go: the contract of hook and state, through both doors."""

import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ddp_cases import Scalars, assert_same_bits, assert_same_on_all_ranks, batch, gradients, mlp
from field_cases import DOORS, Door, engines, feedback_modes, options_of
from ranks import run_on_ranks
from torch.nn.parallel import DistributedDataParallel

import gsync


@pytest.mark.parametrize("codec", [None, 3, print, ["int8"], {"*": print}, "mine"])
def test_only_named_codecs_are_taken(codec):
    """Case 70. No code of the user's stands between bucket and wire, so nothing can come back with a wrong type or length."""
    with pytest.raises((TypeError, ValueError), match="codec"):
        gsync.SyncConfig(codec=codec)


def _inner_hooks(rank, world_size, backend):
    """What wraps gsync's hook gets gsync's own result: the buffer, of its dtype and length."""
    seen = []

    def around(state, bucket):
        def look(done):
            seen.append((done.value()[0] if isinstance(done.value(), list) else done.value(), bucket.buffer()))
            return bucket.buffer()

        return gsync.hook(state, bucket).then(look)

    for dtype in (torch.float32, torch.float16, torch.float64):
        model = DistributedDataParallel(Scalars(9, dtype))
        model.register_comm_hook(gsync.SyncState(codec="int8", exempt=(), backend=backend), around)
        model(torch.full((9,), rank + 1.0, dtype=dtype)).backward()
        result, buffer = seen.pop()
        assert result.data_ptr() == buffer.data_ptr() and result.shape == buffer.shape and result.dtype == dtype
        assert model.module.weight.grad.tolist() == pytest.approx([1.5] * 9, rel=1e-6)


@engines
def test_the_future_holds_the_bucket_itself(backend):
    """Case 70. Whatever wraps `gsync.hook` gets one tensor: the bucket's memory, dtype and length."""
    run_on_ranks(_inner_hooks, 2, args=(backend,))


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # by default only plain things


def _train(door, rank, steps):
    found = []
    for step in steps:
        door.zero_grad()
        door(batch(rank, step)).square().sum().backward()
        found += [gradient.clone() for gradient in gradients(door.module)]
    return found


def _resumed(rank, world_size, backend):
    for options in feedback_modes():
        for kind in DOORS:
            whole = Door(kind, mlp(), backend, bucket_mb=0.02, **options)
            expected = _train(whole, rank, range(10))
            first = Door(kind, mlp(), backend, bucket_mb=0.02, **options)
            _train(first, rank, range(5))
            state = saved(first.sync.state_dict())
            assert state["step"] == 5 and state["residuals"]
            # Into buckets of another size.
            second = Door(kind, mlp(), backend, bucket_mb=0.05, **options)
            second.sync.load_state_dict(state)
            assert_same_bits(_train(second, rank, range(5, 10)), expected[30:])
            for door in (whole, first, second):
                door.close()


@engines
def test_resuming_in_the_middle_gives_the_same_bits(backend):
    """Cases 74 and 75. Saved at step 5 of 10 with residuals, loaded by torch.load as it is by default: as if unbroken."""
    run_on_ranks(_resumed, 2, timeout_s=120, args=(backend,))


def _pickled(rank, world_size, backend):
    door = Door("ddp", mlp(), backend, **options_of("int8", error_feedback=True))
    _train(door, rank, range(2))
    back = pickle.loads(pickle.dumps(door.sync))
    assert back.config == door.sync.config and back.state_dict()["step"] == 2
    for kind in DOORS:
        model = Door(kind, mlp(), backend).model
        model(batch(rank, 0)).sum().backward()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loaded.zero_grad()
        loaded(batch(0, 0)).sum().backward()  # the copy has no engine, and nothing hangs
        assert_same_on_all_ranks(gradients(loaded))


@engines
def test_states_and_models_can_be_pickled(backend):
    """Case 74. Group, engine and stream stay behind."""
    run_on_ranks(_pickled, 2, args=(backend,))


def _consolidated(rank, world_size, backend, states):
    # The exchange is given: under "auto" a state learns at its first bucket which residuals it has.
    options = options_of("int4", error_feedback=True, exchange="scatter_gather")
    results = []
    for kind in DOORS:
        door = Door(kind, mlp(), backend, bucket_mb=0.02 * world_size, **options)
        if states is None:
            _train(door, rank, range(3))
            results.append(saved(door.sync.state_dict(consolidate=True)))
            continue
        state = states[DOORS.index(kind)]
        if world_size == 1:
            door.sync.load_state_dict(state)
        else:
            door.sync.load_state_dict(state)
            for name, entry in door.sync.state_dict()["residuals"].items():
                assert_same_bits(entry["sender"], state["residuals"][name]["error"] / world_size)
        assert door.sync.state_dict()["step"] == 3
        _train(door, rank, range(3, 4))
        assert_same_on_all_ranks(gradients(door.module))
        door.close()
    return results


@engines
def test_resuming_in_a_smaller_world(backend):
    """Case 76. Saved by four ranks, loaded by two and by one: residuals are shared out by the parameter's name."""
    states = run_on_ranks(_consolidated, 4, args=(backend, None))[0]
    for world_size in (2, 1):
        run_on_ranks(_consolidated, world_size, args=(backend, states))


def _one_after_another(rank, world_size, backend):
    sizes = []
    for round_ in range(20):
        model = mlp(width=200)
        reducer = gsync.GradReducer(model, backend=backend, **options_of("int8", error_feedback=True))
        for step in range(2):
            model(batch(rank, step)).sum().backward()
        alive = weakref.ref(model), weakref.ref(reducer)
        if round_ % 2:
            reducer.close()
        del model, reducer
        gc.collect()
        assert [reference() for reference in alive] == [None, None]
        with open("/proc/self/statm") as file:
            sizes.append(int(file.read().split()[1]) * 4096)
    assert sizes[-1] - sizes[9] < 30 * 2**20, sizes


@engines
def test_reducers_made_one_after_another_are_collected(backend):
    """Case 78. Twenty models with residuals, closed or only dropped: none is kept, memory stays."""
    run_on_ranks(_one_after_another, 2, timeout_s=90, args=(backend,))


def _before_the_group(rank, world_size, backend, port):
    state = gsync.SyncState(codec="fp32", backend=backend)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    model = DistributedDataParallel(Scalars(3))
    model.register_comm_hook(state, gsync.hook)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((3,), rank + 1.0)).backward()
        assert model.module.weight.grad.tolist() == [1.5] * 3
    return state.state_dict()["world_size"]


@engines
def test_a_state_made_before_the_group(backend):
    """Case 80. As trainers make it: the group is found at the first bucket."""
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    assert run_on_ranks(_before_the_group, 2, backend=None, args=(backend, port)) == [2, 2]


def test_nothing_narrower_than_bf16_unless_asked_for():
    """Case 81. The default halves the bytes and no more; docs/tuning.md has the break-even, `gsync bench` measures it."""
    assert gsync.SyncConfig().codecs == ("bf16",) and gsync.SyncConfig().exchange_used(1, 1) == "all_reduce"


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(3)

    def forward(self, x):
        return self.layer(x).sum()


def _uninitialised(rank, world_size, backend):
    with pytest.raises((TypeError, ValueError), match=r"layer\.bias|layer\.weight"):
        gsync.GradReducer(Lazy(), backend=backend)


@engines
def test_parameters_that_have_no_shape_yet_are_named(backend):
    """Case 39. A lazy module before its first call is refused by the parameter's name."""
    run_on_ranks(_uninitialised, 1, args=(backend,))
