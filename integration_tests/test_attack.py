"""One replica of five sends wrong gradients: with the default rule training ends as if it had not."""

from __future__ import annotations

import math

import pytest
import torch
from scenarios import ATTACK_REPLICAS, ATTACKED_HOSTS, ATTACKS, attacked
from world import run_world

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def results():
    return run_world(attacked(), ATTACK_REPLICAS, timeout=900)


def ended(results, name):
    for result in results[name]:
        assert not result.get("error"), f"{result.get('error')}\n{result.get('trace')}"
    return results[name]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("host", ATTACKED_HOSTS)
def test_the_rule_holds_and_the_mean_does_not(results, host, attack):
    clean = ended(results, f"{host}.clean")[0]["held_out"]
    mean = ended(results, f"{host}.{attack}.mean")[0]["held_out"]
    robust = ended(results, f"{host}.{attack}.rule")
    assert robust[0]["held_out"] == pytest.approx(clean, rel=0.05)
    assert math.isnan(mean) or mean > 1.05 * clean, "the attack does no harm, so surviving it proves nothing"
    assert all(torch.equal(result["checksum"], robust[0]["checksum"]) for result in robust)
    assert robust[0]["skipped"] == 0


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("host", ATTACKED_HOSTS)
def test_the_log_points_at_the_bad_replica(results, host, attack):
    events = ended(results, f"{host}.{attack}.rule")[0]["events"]
    steps = [event for event in events if event["kind"] == "step"]
    assert len(steps) == ATTACKED_HOSTS[host].get("steps", 30)
    suspects = [step["suspect"] for step in steps]
    assert suspects.count(3) >= 0.9 * len(suspects)
    if attack == "nan":
        assert all(step["dropped"] == [3] and step["nonfinite"][3] > 0 for step in steps)
        assert all(step["distances"][3] is None for step in steps)
    else:
        assert all(step["kept"] == [0, 1, 2, 3, 4] for step in steps)
        assert all(step["distances"][3] > 0 for step in steps)


def test_training_learns_something(results):
    """Held-out loss of a model that was never trained is ln(96) = 4.56."""
    for host in ATTACKED_HOSTS:
        assert ended(results, f"{host}.clean")[0]["held_out"] < 4.0
