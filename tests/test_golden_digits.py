"""A deterministic training run under five attacks: final loss and accuracy are known to six digits for six rules.

Softmax regression on scikit-learn's bundled digits, float64, full local batches, 8 honest workers and 2 attackers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from ds_byzantine.rules.aggregate import aggregate

ATTACKS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "alie": lambda honest_HD: honest_HD.mean(0) - 1.5 * honest_HD.std(0),
    "ipm_half": lambda honest_HD: -0.5 * honest_HD.mean(0),
    "ipm_3": lambda honest_HD: -3.0 * honest_HD.mean(0),
    "sign_flip": lambda honest_HD: -honest_HD.mean(0),
}

# rule -> (arguments, final train loss and test accuracy under each attack, in the order above)
GOLDEN: dict[str, tuple[dict[str, Any], list[tuple[float, float]]]] = {
    "mean": (
        {"rule": "mean", "f": 0},
        [(0.276026, 0.9471), (0.255378, 0.9526), (0.336845, 0.9387), (0.732663, 0.9220), (0.368346, 0.9359)],
    ),
    "median": (
        {"rule": "median", "f": 2},
        [(0.298657, 0.9387), (0.273900, 0.9415), (0.387761, 0.9164), (0.396469, 0.9220), (0.392557, 0.9304)],
    ),
    "trimmed_mean": (
        {"rule": "trimmed_mean", "f": 2},
        [(0.295627, 0.9387), (0.258490, 0.9471), (0.368863, 0.9387), (0.412692, 0.9248), (0.384571, 0.9359)],
    ),
    "multi_krum": (
        {"rule": "multi_krum", "f": 2, "neighbors": "n-f-1"},
        [(0.283201, 0.9443), (0.275775, 0.9471), (0.374123, 0.9331), (0.316765, 0.9415), (0.412010, 0.9359)],
    ),
    "nnm+trimmed_mean": (
        {"rule": "trimmed_mean", "f": 2, "pre": ("nnm",)},
        [(0.277544, 0.9443), (0.270362, 0.9471), (0.369182, 0.9331), (0.312920, 0.9415), (0.396965, 0.9331)],
    ),
    "caf": (
        {"rule": "caf", "f": 2},
        [(0.281764, 0.9415), (0.276144, 0.9471), (0.351473, 0.9359), (0.281304, 0.9443), (0.357831, 0.9331)],
    ),
}


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train inputs [1438, 65] and labels, test inputs [359, 65] and labels."""
    data = load_digits()
    inputs = torch.cat([torch.from_numpy(data.data) / 16, torch.ones(len(data.data), 1, dtype=torch.float64)], 1)
    labels = torch.from_numpy(data.target)
    test = torch.arange(len(labels)) % 5 == 4
    return inputs[~test], labels[~test], inputs[test], labels[test]


def train(x: Tensor, labels: Tensor, attack: Callable[[Tensor], Tensor] | None, **rule: Any) -> Tensor:
    """200 steps of gradient descent from zeros; returns the weights, [65, 10]."""
    targets = torch.nn.functional.one_hot(labels, 10).double()
    weights = torch.zeros(65, 10, dtype=torch.float64)
    for _ in range(200):
        error = torch.softmax(x @ weights, 1) - targets
        rows = torch.stack([(x[i::8].T @ error[i::8] / len(x[i::8])).flatten() for i in range(8)])
        if attack is not None:
            rows = torch.cat([rows, attack(rows).expand(2, -1)])
        weights = weights - 0.5 * aggregate(rows, **rule).view(65, 10)
    return weights


@pytest.mark.parametrize("attack", list(ATTACKS))
@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_run(name: str, attack: str, digits: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, labels, test_x, test_labels = digits
    rule, results = GOLDEN[name]
    loss, accuracy = results[list(ATTACKS).index(attack)]
    weights = train(x, labels, ATTACKS[attack], **rule)
    assert torch.nn.functional.cross_entropy(x @ weights, labels).item() == pytest.approx(loss, abs=1e-5)
    found = ((test_x @ weights).argmax(1) == test_labels).double().mean().item()
    assert found == pytest.approx(accuracy, abs=1e-4)
