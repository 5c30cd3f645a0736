"""Hosts with several ranks: the same gradients on all of them, those of the plain operations; residuals, failures, auto."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from blockcodec_cases import BLOCK_CODECS, STOCHASTIC, Simulation, codecs_by, local_gradients, train
from ddp_cases import (
    ENGINES,
    Branches,
    Scalars,
    assert_same_bits,
    assert_same_on_all_ranks,
    batch,
    gradients,
    mlp,
    norm_of,
    why_no_engine,
    wrap,
)
from ranks import RanksError, run_on_ranks

import gsync
from gsync import ops
from gsync.hosts import Place, place_among, word_of_host

HIERARCHICAL = {"exchange": "hierarchical"}


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    reason = why_no_engine(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def on_hosts(ranks_per_host):
    """From here on this process thinks that so many ranks of the world share a host."""
    os.environ["GSYNC_LOCAL_WORLD_SIZE"] = str(ranks_per_host)


def run_on_hosts(fn, world_size, *args, timeout_s=180):
    return run_on_ranks(fn, world_size, timeout_s=timeout_s, args=args, pool="hosts")


# ---- who shares a host -------------------------------------------------------------------------------------------------


def test_a_rank_stands_where_its_host_and_local_rank_say():
    words = ["a", "b", "a", "b", "c", "c"]
    places = [place_among(words, rank) for rank in range(6)]
    assert all(isinstance(place, Place) for place in places)
    assert [(p.host, p.local_rank) for p in places] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert places[3] == Place(1, 2, 1, 3, (1, 3), (2, 3, 5))
    assert sorted(place.chunk for place in places) == list(range(6))


def test_hosts_of_different_sizes_have_no_places():
    assert place_among(["a", "a", "b"], 0) == "hosts have different numbers of ranks: 2 on a, 1 on b"


def test_a_host_is_known_by_the_override_then_torchrun_then_its_name():
    assert word_of_host(5, {"GSYNC_LOCAL_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "7"}) == "host 2"
    assert word_of_host(5, {"LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "7"}) == "node 7"
    assert word_of_host(5, {"LOCAL_WORLD_SIZE": "4"}) == "host 1"
    assert word_of_host(5, {}) == os.uname().nodename
    for text in ("0", "two", "-1"):
        with pytest.raises(ValueError, match=f"GSYNC_LOCAL_WORLD_SIZE='{text}': expected a whole number above 0"):
            word_of_host(5, {"GSYNC_LOCAL_WORLD_SIZE": text})


# ---- values ------------------------------------------------------------------------------------------------------------


def _host_sums(everyone, ranks_per_host):
    """What each host encodes: the sum of its ranks' shares of the mean, in fp32 and rank order."""
    scaled = [gradient * torch.tensor(1 / len(everyone)) for gradient in everyone]
    return [sum(scaled[i + 1 : i + ranks_per_host], start=scaled[i]) for i in range(0, len(scaled), ranks_per_host)]


def _against_the_operations(rank, world_size, backend, ranks_per_host, codec, feedback, **options):
    """Three steps over several buckets and slices, DDP's rebuild included."""
    on_hosts(ranks_per_host)
    plain = mlp()
    patterns = {"*.bias": "bf16", "*": codec}
    simulation = Simulation(world_size // ranks_per_host, codecs_by(plain, patterns), feedback, scale=1.0, **options)
    given = {"codec": codec, "error_feedback": feedback, **HIERARCHICAL, **options}
    if codec not in BLOCK_CODECS:
        simulation.codecs = dict.fromkeys(simulation.codecs, codec)
    model, sync = wrap(mlp(), backend, ddp={"bucket_cap_mb": 0.02}, slice_mb=0.02, **given)
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        assert_same_on_all_ranks([*gradients(model), sync.grad_norm(), sync.found_nonfinite()])
        if rank == 0:  # the others have the same
            everyone = local_gradients(plain, world_size, step)
            for name, parameter in model.module.named_parameters():
                assert_same_bits(parameter.grad, simulation.mean(name, _host_sums(everyone[name], ranks_per_host), step))
        assert sync.grad_norm().item() == pytest.approx(norm_of(model), rel=1e-12)
    assert sync.stats().wire_bytes > 0


def _bits(rank, world_size, backend, ranks_per_host):
    for codec in (*BLOCK_CODECS, "bf16", "fp32"):
        for feedback in (False, True) if codec != "fp32" else (False,):
            _against_the_operations(rank, world_size, backend, ranks_per_host, codec, feedback)
    _against_the_operations(rank, world_size, backend, ranks_per_host, "int8", True, block_size=64)


@pytest.mark.parametrize(("world_size", "ranks_per_host"), [(4, 2), (6, 3), (6, 2)])
def test_every_rank_has_the_bits_of_the_operations(world_size, ranks_per_host):
    if why_no_engine("native"):
        pytest.skip(why_no_engine("native"))
    run_on_hosts(_bits, world_size, "native", ranks_per_host)


def _one_host(rank, world_size, backend):
    """Then the sum is encoded once, and nothing is reduced between hosts."""
    on_hosts(world_size)
    for codec in BLOCK_CODECS:
        model, _ = wrap(mlp(), backend, codec=codec, exempt=(), **HIERARCHICAL)
        model(batch(rank, 0)).square().sum().backward()
        everyone = local_gradients(mlp(), world_size, 0)
        for name, parameter in model.module.named_parameters():
            (total,) = _host_sums(everyone[name], world_size)
            expected = torch.empty_like(total)
            ops.unpack(ops.pack([total], codec), [expected], codec)
            assert_same_bits(parameter.grad, expected)


def test_on_one_host_the_sum_is_encoded_once(engine):
    run_on_hosts(_one_host, 2, engine)


def _stochastic(rank, world_size, backend):
    on_hosts(2)
    options = {"codec": "int4", "error_feedback": True, **HIERARCHICAL, **STOCHASTIC}
    first, _ = train(rank, backend, range(3), options)
    assert_same_on_all_ranks(first)
    again, sync = train(rank, backend, range(3), {**options, "slice_mb": 0.004, "measure_every": 1}, ddp={"bucket_cap_mb": 25})
    assert_same_bits(first, again)  # neither buckets nor slices matter
    assert 0 < sync.stats().relative_error < 0.5


def test_results_do_not_depend_on_buckets_or_slices(engine):
    run_on_hosts(_stochastic, 4, engine)


def _engines_agree(rank, world_size):
    on_hosts(2)
    options = {"codec": "int8", "error_feedback": True, **HIERARCHICAL, **STOCHASTIC}
    results = [train(rank, backend, range(3), options)[0] for backend in ENGINES]
    assert_same_bits(*results)


@pytest.mark.skipif(bool(why_no_engine("native")), reason=why_no_engine("native") or "it is there")
def test_both_engines_write_the_same_bits():
    run_on_hosts(_engines_agree, 4)


def _special(rank, world_size, backend):
    on_hosts(2)
    model, sync = wrap(Scalars(600), backend, codec="int8", exempt=(), **HIERARCHICAL)
    x = torch.ones(600)
    if rank == 3:
        x[5] = float("inf")
    model(x).backward()
    assert sync.found_nonfinite()
    assert not model.module.weight.grad[:256].isfinite().any() and model.module.weight.grad[256:].isfinite().all()
    # A parameter that only some ranks used, and one that none did.
    branches, _ = wrap(Branches(), backend, ddp={"find_unused_parameters": True}, codec="int8", exempt=(), **HIERARCHICAL)
    branches(torch.ones(1, 1), "a" if rank == 1 else "b").backward()
    assert branches.module.a.weight.grad.item() == pytest.approx(1 / world_size, rel=0.01)
    alone = Branches()
    reducer = gsync.GradReducer(alone, codec="int8", exempt=(), backend=backend, **HIERARCHICAL)
    if rank == 2:
        alone(torch.ones(1, 1), "a").backward()
    reducer.wait()
    assert alone.a.weight.grad.item() == pytest.approx(1 / world_size, rel=0.01)
    assert alone.b.weight.grad is None
    # A sparse gradient goes over all ranks at once.
    table, _ = wrap(torch.nn.Embedding(8, 2, sparse=True), backend, codec="bf16", **HIERARCHICAL)
    table(torch.tensor([rank])).sum().backward()
    assert table.module.weight.grad.to_dense()[:world_size].eq(1 / world_size).all()


def test_infinities_unused_parameters_and_sparse_gradients(engine):
    run_on_hosts(_special, 4, engine)


# ---- what auto takes ---------------------------------------------------------------------------------------------------


def _auto(rank, world_size, backend):
    def used(**options):
        model, sync = wrap(mlp(), backend, **options)
        model(batch(rank, 0)).square().sum().backward()
        return sync._path[0]

    on_hosts(2)
    assert used(codec="int8") == "hierarchical"
    assert used(codec="bf16") == "all_reduce"
    assert used(codec="int8", exempt_codec="fp16") == "scatter_gather"
    on_hosts(1)
    assert used(codec="int8") == used(codec="int8", **HIERARCHICAL) == "scatter_gather"
    on_hosts(4)
    assert used(codec="int8") == "scatter_gather"
    assert used(codec="int8", **HIERARCHICAL) == "hierarchical"
    on_hosts(3)
    with pytest.warns(gsync.GsyncWarning, match="different numbers of ranks: 3 on host 0, 1 on host 1; scatter_gather is used"):
        assert used(codec="int8") == "scatter_gather"
    with pytest.raises(ValueError, match="exchange='hierarchical': hosts have different numbers of ranks"):
        used(codec="int8", **HIERARCHICAL)


def test_auto_takes_it_for_several_hosts_with_several_ranks(engine):
    run_on_hosts(_auto, 4, engine)


# ---- residuals ---------------------------------------------------------------------------------------------------------


def _state(rank, world_size, backend):
    on_hosts(2)
    options = {"codec": "int4", "error_feedback": True, **HIERARCHICAL, **STOCHASTIC}
    whole, _ = train(rank, backend, range(4), options)
    _, sync = train(rank, backend, range(2), options)
    state, consolidated = sync.state_dict(), sync.state_dict(consolidate=True)
    numel = sum(parameter.numel() for parameter in mlp().parameters())
    assert sum(entry["sender"].numel() for entry in state["residuals"].values()) < 0.7 * numel
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest, _ = train(rank, backend, range(2, 4), options, loaded=state)
    assert_same_bits(rest, whole[len(whole) // 2 :])
    # Every element's residuals, added up over all ranks, are in the consolidated state; loading it keeps their sum.
    total = {name: entry["error"].clone() for name, entry in consolidated["residuals"].items()}
    assert_same_on_all_ranks(list(total.values()))
    for kind in ({}, {"exchange": "scatter_gather"}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _, other = train(rank, backend, range(0), {**options, **kind})
            other.load_state_dict(consolidated)
            again = other.state_dict(consolidate=True)
        for name, entry in again["residuals"].items():
            torch.testing.assert_close(entry["error"], total[name], rtol=1e-5, atol=1e-9)
    # A rank's own state of another exchange: seed and step are taken, residuals are not.
    with pytest.warns(gsync.GsyncWarning, match="are dropped, since the exchange was another"):
        train(rank, backend, range(2, 3), {**options, "exchange": "scatter_gather"}, loaded=state)


def test_residuals_of_shards_are_saved_loaded_and_consolidated(engine):
    run_on_hosts(_state, 4, engine)


# ---- failures ----------------------------------------------------------------------------------------------------------


def _peer_dies(rank, world_size, backend):
    on_hosts(2)
    model, sync = wrap(mlp(), backend, codec="int8", timeout_s=5, **HIERARCHICAL)
    for step in range(2):  # DDP has rebuilt its buckets by then
        model(batch(rank, step)).square().sum().backward()
    if rank == 3:
        sync._engine.abort("told to")
        return "aborted"
    with pytest.raises(gsync.SyncError, match="bucket 0 of step 2 on rank") as caught:
        model(batch(rank, 2)).square().sum().backward()
    assert all(parameter.grad.isnan().all() for parameter in model.parameters())
    return str(caught.value)


def test_a_rank_that_fails_fails_all_hosts(engine):
    messages = run_on_hosts(_peer_dies, 4, engine)
    assert messages[3] == "aborted" and all("was not synchronised" in message for message in messages[:3])


def _disagree(rank, world_size):
    on_hosts(2)
    model, _ = wrap(mlp(), "auto", codec="int8", exchange="hierarchical" if rank else "scatter_gather")
    model(batch(rank, 0)).square().sum().backward()


def test_ranks_that_ask_for_different_exchanges_are_told():
    with pytest.raises(RanksError, match="exchange is \"'hierarchical'\", on rank 0 it is \"'scatter_gather'\""):
        run_on_hosts(_disagree, 2)


def _subgroup(rank, world_size, backend):
    """Ranks 1, 2, 3, 4 of six on three hosts: two of them share one, the others do not."""
    on_hosts(2)
    members = dist.new_group([0, 1, 4, 5])
    if rank in (2, 3):
        return
    model, sync = wrap(mlp(), backend, process_group=members, codec="int8")
    model(batch(rank, 0)).square().sum().backward()
    assert sync._path[0] == "hierarchical" and sync._path[1].num_hosts == 2
    assert_same_on_all_ranks(gradients(model), group=members)


def test_hosts_are_those_of_the_group(engine):
    run_on_hosts(_subgroup, 6, engine)
