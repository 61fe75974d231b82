"""Replicas of several ranks: pipeline, tensor, expert and sequence parallelism on real DeepSpeed engines."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scenarios import (
    CUBE,
    CUBE_RANKS,
    CUBE_RULES,
    NODES,
    PARALLEL,
    PARALLEL_BF16,
    PARALLEL_RANKS,
    PARALLEL_REFUSED,
    SIXFOLD,
    SLICES,
    SPOILED,
    SPOILED_RULES,
    STAGES,
    STAGES_RULES,
    SURVIVED,
    TIED_RULES,
    cube,
    nodes,
    parallel_pairs,
    refused_parallel,
    slices,
    spoiled,
    stages,
    tied,
)
from world import run_world

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def sixfold():
    return run_world([*parallel_pairs(SIXFOLD), *tied(), *refused_parallel()], PARALLEL_RANKS, timeout=900)


@pytest.fixture(scope="module")
def cubes():
    return run_world(cube(), CUBE_RANKS, timeout=600)


@pytest.fixture(scope="module")
def bad():
    return run_world(spoiled(), PARALLEL_RANKS, timeout=900)


def good(results, name):
    for rank, result in enumerate(results[name]):
        assert not result.get("error"), f"{name}, rank {rank}: {result.get('error')}\n{result.get('trace')}"
    return results[name]


def worst(stock, ours):
    """The largest difference of any weight on any rank."""
    for a, b in zip(stock, ours, strict=True):
        assert a["weights"].keys() == b["weights"].keys()
    return max(
        float((a["weights"][name] - b["weights"][name]).abs().max())
        for a, b in zip(stock, ours, strict=True)
        for name in a["weights"]
    )


def assert_copies_agree(ranks):
    """All replicas hold the same weights, and all ranks of a replica the same bits of what they hold copies of."""
    places = list(zip(*ranks[0]["replicas"], strict=True))
    for place in places:
        first = ranks[place[0]]["weights"]
        expert = {name for name in first if "deepspeed_moe.experts" in name}
        for rank in place[1:]:
            assert all(torch.equal(first[name], ranks[rank]["weights"][name]) for name in first), (place[0], rank)
        assert not expert or len(places) > 1
    copies: dict[str, torch.Tensor] = {}
    for rank, result in enumerate(ranks):
        for name, weight in result["copies"].items():
            assert torch.equal(weight, copies.setdefault(name, weight)), f"{name} differs on rank {rank}"


@pytest.mark.parametrize("name", PARALLEL)
def test_mean_equals_stock(sixfold, name):
    stock, ours = good(sixfold, f"{name}.stock"), good(sixfold, f"{name}.ours")
    assert len(ours[0]["replicas"]) == PARALLEL_RANKS // 2
    assert worst(stock, ours) <= 1e-6
    assert ours[0]["losses"] == pytest.approx(stock[0]["losses"], abs=1e-5)
    assert_copies_agree(ours)


@pytest.mark.parametrize("name", PARALLEL_BF16)
def test_mean_equals_stock_in_bf16(sixfold, name):
    """Stock sums in bf16, the rule in float32; the bound is that of test_golden.py."""
    stock, ours = good(sixfold, f"{name}.stock"), good(sixfold, f"{name}.ours")
    assert worst(stock, ours) <= 2e-3
    assert_copies_agree(ours)


def test_copies_exist_where_they_should(sixfold):
    """Or the comparison of copies above would compare nothing."""
    for name in SIXFOLD:
        copies = good(sixfold, f"{name}.ours")[0]["copies"]
        assert bool(copies) == ("tie" in name or name.startswith(("tp_", "mpu_"))), name
    assert any("norm" in name for name in sixfold["mpu_z2.ours"][0]["copies"])


@pytest.mark.parametrize("rule", TIED_RULES)
def test_tied_weights_stay_equal_over_20_steps(sixfold, rule):
    """One replica shouts, so that every rule has to decide; the tied weight is cut differently on the two stages."""
    ranks = good(sixfold, f"tied.{rule}")
    assert len(ranks[0]["losses"]) == 20
    assert_copies_agree(ranks)
    assert ranks[0]["tied"].keys() == ranks[-1]["tied"].keys() == {"embed"}
    assert all(torch.equal(result["tied"]["embed"], ranks[0]["tied"]["embed"]) for result in ranks)
    assert not torch.equal(ranks[0]["tied"]["embed"], sixfold["tied.mean"][0]["tied"]["embed"]) or rule == "mean"


@pytest.mark.parametrize("name", PARALLEL_REFUSED)
def test_refused_on_all_ranks_before_the_first_step(sixfold, name):
    words = PARALLEL_REFUSED[name][1]
    errors = [result.get("error") or "" for result in sixfold[f"refused.{name}"]]
    assert all("byzantine" in error for error in errors), errors
    assert any(all(word in error for word in words) for error in errors), errors


@pytest.mark.parametrize("rule", CUBE_RULES)
@pytest.mark.parametrize("name", CUBE)
def test_three_dimensions(cubes, name, rule):
    stock, ours = good(cubes, f"{name}.stock"), good(cubes, f"{name}.{rule}")
    assert ours[0]["replicas"] == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert worst(stock, ours) <= 1e-6
    assert_copies_agree(ours)


@pytest.mark.parametrize("rule", SPOILED_RULES)
@pytest.mark.parametrize("name", SPOILED)
def test_a_bad_rank_is_survived_and_its_replica_named(bad, name, rule):
    clean, ranks = good(bad, f"{name}.clean"), good(bad, f"{name}.{rule}")
    assert ranks[0]["held_out"] <= SURVIVED[rule] * clean[0]["held_out"]
    assert_copies_agree(ranks)
    expected = SPOILED[name][1]
    steps = [e for e in ranks[0]["events"] if e["kind"] == "step" and e["step"] >= 2]
    suspects = Counter(e["suspect"] for e in steps)
    assert suspects[expected["replica"]] >= 0.8 * len(steps), suspects
    found = Counter(tuple(e["suspect_ranks"]) for e in steps)
    assert "ranks" not in expected or found[tuple(expected["ranks"])] >= 0.8 * len(steps), found


@pytest.mark.parametrize("name", SPOILED)
def test_the_mean_does_not_survive_it(bad, name):
    clean, mean = good(bad, f"{name}.clean")[0]["held_out"], good(bad, f"{name}.mean")[0]
    assert not mean["held_out"] <= 1.25 * clean or mean["skipped"] >= 20  # NaN: every step is skipped


def test_the_run_says_who_is_who(bad):
    run = good(bad, "pp_loss.default")[0]["events"][0]
    assert run["ranks"] == {"0": [0, 3], "1": [1, 4], "2": [2, 5]}
    assert run["parallel"] == "pipeline 2"
    assert all(len(hosts) == 1 for hosts in run["hosts"].values())
    assert good(bad, "tp_gradients.default")[0]["events"][0]["parallel"] == "tensor 2"


@pytest.fixture(scope="module")
def one_stage():
    return run_world([*stages(1), *slices(1)], 3, timeout=300)


@pytest.fixture(scope="module")
def two_stages():
    return run_world([*stages(2), *slices(2)], 6, timeout=400)


@pytest.mark.parametrize("rule", STAGES_RULES)
@pytest.mark.parametrize("name", STAGES)
def test_a_model_cut_in_two_stages_learns_the_same(one_stage, two_stages, name, rule):
    whole, halves = good(one_stage, f"{name}.{rule}"), good(two_stages, f"{name}.{rule}")
    seen = set()
    for result in halves:
        for tensor, weight in result["weights"].items():
            torch.testing.assert_close(weight, whole[0]["weights"][tensor], rtol=0, atol=1e-6, msg=tensor)
            seen.add(tensor)
    assert seen == whole[0]["weights"].keys()


@pytest.mark.parametrize("rule", STAGES_RULES)
@pytest.mark.parametrize("name", SLICES)
def test_a_model_cut_over_two_tensor_ranks_learns_the_same(one_stage, two_stages, name, rule):
    whole, halves = good(one_stage, f"{name}.{rule}"), good(two_stages, f"{name}.{rule}")
    for tensor, weight in whole[0]["weights"].items():
        first, second = (halves[rank]["weights"][tensor] for rank in (0, 1))
        if first.shape == weight.shape:
            joined = first
        else:
            joined = torch.cat([first, second], 1 if tensor.endswith("down.weight") else 0)
        torch.testing.assert_close(joined, weight, rtol=0, atol=1e-6, msg=tensor)
    assert_copies_agree(halves)


@pytest.fixture(scope="module")
def hosts():
    """Six ranks on three hosts, as a launcher would number them."""
    return run_world(nodes(), PARALLEL_RANKS, timeout=300, each=lambda rank: {"GROUP_RANK": str(rank // 2)})


@pytest.mark.parametrize("name", NODES)
def test_hosts_as_replicas(hosts, name):
    """The mean over a host first, then the rule over hosts: with the mean as the rule it is the mean of all."""
    stock, ours = good(hosts, f"{name}.stock"), good(hosts, f"{name}.mean")
    assert ours[0]["replicas"] == ((0, 1), (2, 3), (4, 5))
    assert worst(stock, ours) <= 1e-6
    robust = good(hosts, f"{name}.median")
    assert robust[0]["held_out"] <= 1.05 * stock[0]["held_out"]
    steps = [e for e in robust[0]["events"] if e["kind"] == "step"]
    assert sum(e["suspect"] == 1 for e in steps) >= 0.8 * len(steps)  # the host of ranks 2 and 3
