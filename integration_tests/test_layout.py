"""The same JSON but for stage and bucket size gives the same weights: a rule decides per tensor, not per bucket."""

from __future__ import annotations

import pytest
import torch
from scenarios import LAYOUT_REPLICAS, LAYOUT_RULES, LAYOUTS, layouts
from world import run_world

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def results():
    return run_world(layouts(), LAYOUT_REPLICAS, timeout=900)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "z0"])
@pytest.mark.parametrize("rule", LAYOUT_RULES)
def test_weights_do_not_depend_on_the_layout(results, rule, layout):
    reference, other = results[f"{rule}.z0"], results[f"{rule}.{layout}"]
    for result in reference + other:
        assert not result.get("error"), f"{result.get('error')}\n{result.get('trace')}"
    for name, weight in reference[0]["weights"].items():
        torch.testing.assert_close(other[0]["weights"][name], weight, rtol=0, atol=1e-6, msg=name)
    assert all(torch.equal(result["checksum"], other[0]["checksum"]) for result in other)


def test_rules_differ_from_each_other(results):
    """Or the test above would pass for a rule that is never applied."""
    seen = [results[f"{rule}.z0"][0]["weights"] for rule in LAYOUT_RULES]
    for i, a in enumerate(seen):
        for b in seen[:i]:
            assert max(float((a[name] - b[name]).abs().max()) for name in a) > 1e-5
