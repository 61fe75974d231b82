"""The evidence against a replica: valid at any time, found fast, kept over restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ds_byzantine.exchange.groups import Membership, Roster
from ds_byzantine.guard import Guard
from ds_byzantine.monitor.events import StepEvent
from ds_byzantine.monitor.metrics import metrics_of
from ds_byzantine.monitor.regime import Regime, regime
from ds_byzantine.rules.gram import partial_basis
from ds_byzantine.trust.betting import Betting
from ds_byzantine.trust.digest import Repeats, row_digests
from ds_byzantine.trust.ledger import KINDS, Finding, Ledger, Observation

N = 5


def play(
    ledger: Ledger, steps: int, bad: int | None = None, start: int = 0, first: int = 0
) -> list[tuple[int, Finding]]:
    """Feed steps in which the replicas take turns at being the most distant one, but for a bad one."""
    found = []
    for step in range(first, first + steps):
        distances = [1.0] * ledger.n
        distances[step % ledger.n if bad is None or step < start else bad] = 2.0
        found += [(step, finding) for finding in ledger.observe(Observation(step, distances))]
    return found


# -- betting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chance", [0.01, 0.25, 0.5, 0.9])
def test_a_bet_is_fair(chance: float) -> None:
    """The expectation of the next value, over the two outcomes, is the value now: in any state."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        history = generator.random(int(generator.integers(0, 30))) < 0.3
        after = []
        for event in (True, False):
            process = Betting()
            for past in history:
                process.bet(bool(past), 0.3)
            before = process.value
            process.bet(event, chance)
            after.append(process.value)
        assert chance * after[0] + (1 - chance) * after[1] == pytest.approx(before, rel=1e-12)


def test_a_tie_is_the_average_of_its_outcomes() -> None:
    won, lost, tied = Betting(), Betting(), Betting()
    won.bet(True, 0.2)
    lost.bet(False, 0.2)
    tied.bet(0.25, 0.2)
    assert tied.value == pytest.approx(0.25 * won.value + 0.75 * lost.value)


def test_trouble_that_begins_late_is_found_too() -> None:
    for start, within in ((0, 12), (1000, 25), (100_000, 40)):
        process = Betting()
        for _ in range(start):
            process.bet(False, 0.2)
        assert process.value > 1e-3, "the capital is never lost"
        steps = 0
        while process.value < 15_000:
            process.bet(True, 0.2)
            steps += 1
        assert steps <= within


def healthy(runs: int, n: int, heavy: bool) -> Iterator[np.ndarray]:
    """Distances of n exchangeable replicas in many runs at once, [runs, n], step by step."""
    generator = np.random.default_rng(n)
    while True:
        yield np.abs(generator.standard_cauchy((runs, n)) if heavy else generator.standard_normal((runs, n)))


@pytest.mark.parametrize(("n", "heavy"), [(4, True), (8, False)])
def test_false_alarms_in_ten_thousand_healthy_runs(n: int, heavy: bool) -> None:
    """2,000 steps each, looked at after every step. At most alpha of the runs may name anybody, alpha = 0.001 and 0.05.

    Outlying rows, and rows that are not finite in some steps; both kinds, and all replicas, share the bound.
    """
    runs, steps = 10_000, 2_000
    outlying, nonfinite = Betting(), Betting()
    highest = np.zeros((runs, n))
    generator = np.random.default_rng(1)
    for step, distances in zip(range(steps), healthy(runs, n, heavy), strict=False):
        outlying.bet((distances == distances.max(1, keepdims=True)).astype(float), 1 / n)
        highest = np.maximum(highest, outlying.value)
        if step % 10 == 0:  # one row of the n is NaN, whichever
            nonfinite.bet((np.arange(n) == generator.integers(0, n, (runs, 1))).astype(float), 1 / n)
            highest = np.maximum(highest, nonfinite.value)
    for alpha in (0.001, 0.05):
        alarms = int((highest.max(1) >= n * len(KINDS) / alpha).sum())
        assert alarms <= alpha * runs, f"{alarms} of {runs} runs"
    assert (highest.max(1) >= n).any(), "the e-values do move"


# -- ledger ------------------------------------------------------------------------------------------------------------


def test_nobody_is_named_without_reason() -> None:
    assert play(Ledger(N, 1), 2000) == []


@pytest.mark.parametrize(("start", "within"), [(0, 9), (50, 14), (1000, 20)])
def test_a_bad_replica_is_named(start: int, within: int) -> None:
    [(step, finding)] = play(Ledger(N, 1), start + 50, bad=3, start=start)
    assert (finding.replica, finding.kind) == (3, "outlying")
    assert step - start < within
    assert start - 2 <= finding.since <= start
    assert finding.log10_e >= Ledger(N, 1).bound


def test_alpha_sets_the_bound() -> None:
    strict, lax = (play(Ledger(N, 1, alpha), 60, bad=0)[0][0] for alpha in (1e-6, 0.1))
    assert strict > lax
    assert Ledger(N, 1, 1e-3).bound == pytest.approx(np.log10(5 * 4 / 1e-3))


def test_rows_that_are_not_finite() -> None:
    ledger = Ledger(N, 1)
    for step in range(20):
        found = ledger.observe(Observation(step, [1.0, 1.0, None, 1.0, 1.0], nonfinite=frozenset({2})))
        if found:
            break
    assert (found[0].replica, found[0].kind, found[0].since) == (2, "nonfinite", 0)
    assert step < 9


def test_zeros_are_evidence_unless_all_send_them() -> None:
    ledger = Ledger(N, 1)
    for step in range(20):
        found = ledger.observe(Observation(step, [1.0] * N, zeros=frozenset({0} if step % 2 else range(N))))
        if found:
            break
    assert (found[0].replica, found[0].kind) == (0, "zero")
    assert step < 20


def test_nan_everywhere_is_nobodys_fault() -> None:
    ledger = Ledger(N, 1)
    for step in range(200):
        assert ledger.observe(Observation(step, [None] * N, nonfinite=frozenset(range(N)))) == []
    assert ledger.evidence()["nonfinite"] == [0.0] * N


def test_duplicates_are_named_at_the_second_time() -> None:
    ledger = Ledger(N, 1)
    pair = frozenset({1, 4})
    assert ledger.observe(Observation(0, [1.0] * N, duplicates=pair)) == []
    found = ledger.observe(Observation(1, [1.0] * N, duplicates=pair))
    assert [(f.replica, f.kind, f.since) for f in found] == [(1, "duplicate", 0), (4, "duplicate", 0)]


def test_the_same_data_for_all_is_no_evidence() -> None:
    ledger = Ledger(N, 1)
    for step in range(50):
        assert ledger.observe(Observation(step, [1.0] * N, duplicates=frozenset(range(N)))) == []


def test_equal_distances_share_the_place() -> None:
    ledger = Ledger(4, 1)
    for step in range(500):
        assert ledger.observe(Observation(step, [0.0] * 4)) == []
    assert len(set(ledger.evidence()["outlying"])) == 1


@pytest.mark.parametrize("n", [1, 2])
def test_few_replicas(n: int) -> None:
    ledger = Ledger(n, 0)
    for step in range(100):
        assert ledger.observe(Observation(step, [1.0 + i for i in range(n)])) == [] or n == 2


def test_never_more_than_f_in_quarantine() -> None:
    ledger = Ledger(N, 1)
    assert [ledger.quarantine(i) for i in (2, 2, 4)] == [True, True, False]
    assert ledger.quarantined == [2]


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_a_restart_changes_nothing() -> None:
    whole, half = Ledger(N, 1), Ledger(N, 1)
    play(whole, 6, bad=3)
    play(half, 3, bad=3)
    again = Ledger(N, 1)
    again.load_state_dict(json.loads(json.dumps(half.state_dict())))
    play(again, 3, bad=3, first=3)
    assert again.evidence() == whole.evidence()
    assert play(again, 30, bad=3, first=6) == play(whole, 30, bad=3, first=6)


def test_evidence_follows_the_host() -> None:
    old = [["a"], ["a"], ["b"], ["c"]]
    ledger = Ledger(4, 1)
    play(ledger, 6, bad=2)
    ledger.quarantine(2)
    ledger.order.append(2)
    state = ledger.state_dict(hosts=old)
    fewer = Ledger(3, 1)
    assert fewer.load_state_dict(state, [["c"], ["b"], ["d"]]) == {0: 3, 1: 2}
    assert (fewer.quarantined, fewer.order) == ([1], [1])
    assert fewer.evidence()["outlying"][1] == ledger.evidence()["outlying"][2]
    assert fewer.evidence()["outlying"][2] == 0.0
    more = Ledger(6, 1)
    assert more.load_state_dict(state, [["a"], ["a"], ["a"], ["b"], ["b"], ["c"]]) == {0: 0, 1: 1, 3: 2, 5: 3}


# -- digests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", [1, 7, 4096, 100_000])
def test_digests(dtype: torch.dtype, numel: int) -> None:
    rows = torch.randn(4, numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[2], rows[3] = rows[0], 0.0
    digests = row_digests(rows).tolist()
    assert digests[0] == digests[2] != digests[1]
    assert digests[3] == 0
    assert all(0 <= d < 1 << 40 for d in digests)
    swapped = row_digests(rows.flip(1)).tolist()
    assert numel == 1 or swapped[1] != digests[1]


def test_repeats() -> None:
    repeats = Repeats(4)
    assert repeats.observe([1, 2, 3, 0]) == (frozenset(), [])
    assert repeats.observe([5, 2, 6, 0]) == (frozenset({1}), [])
    assert repeats.observe([7, 8, 7, 0]) == (frozenset({0, 2}), [[0, 2]])
    for _ in range(600):
        repeats.observe([0, 0, 0, 0])
    assert repeats.observe([1, 2, 3, 4]) == (frozenset(), []), "what is long past is forgotten"


# -- regime ------------------------------------------------------------------------------------------------------------


def test_regime_of_known_rows() -> None:
    rows = torch.tensor([[3.0, 4.0, 0.0], [3.0, 0.0, 4.0], [3.0, 0.0, 0.0], [3.0, -4.0, 0.0]])
    seen = regime(partial_basis(rows), range(4), f=1)
    assert seen.norms == pytest.approx([5.0, 5.0, 3.0, 5.0])
    assert seen.cosine_min == pytest.approx((9 - 16) / 25)
    assert seen.norm_dispersion == pytest.approx(1.0)
    # inner products 9, 9, -7, 9, 9, 9: median 9; squares 25, 25, 9, 25: median 25; kappa = 1/2
    assert seen.regime_ratio == pytest.approx(0.5 * 16 / 9)


def test_regime_leaves_out_what_was_left_out() -> None:
    rows = torch.randn(5, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    basis = partial_basis(rows)
    basis[3], basis[:, 3] = 0.0, 0.0
    seen = regime(basis, [0, 1, 2, 4], f=1)
    assert seen.norms[3] is None
    assert seen.norms[4] == pytest.approx(float(rows[4].norm()))
    assert regime(basis, [0], f=1).cosine_min is None
    assert regime(torch.zeros(6, 6).double(), range(5), f=1) == Regime([0.0] * 5)


def test_noise_without_signal_is_a_finite_ratio() -> None:
    rows = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    ratio = regime(partial_basis(rows - rows.mean(0)), range(8), f=2).regime_ratio
    assert ratio is not None
    assert ratio > 100


# -- guard -------------------------------------------------------------------------------------------------------------


def roster() -> Roster:
    return Roster.of([Membership((i // 2,), (i % 2,), "abc"[i // 2]) for i in range(6)])


def step_event(step: int, distances: list[float | None], dropped: list[int]) -> StepEvent:
    bad = dropped[0] if dropped else int(np.argmax([d or 0 for d in distances]))
    return StepEvent(step, [0], dropped, [0] * 3, distances, bad, [2 * bad + 1], {}, 0, 0, 0.0, 0.0)


@pytest.mark.parametrize(("action", "done"), [("log", []), ("quarantine", [1]), ("checkpoint_exit", [])])
def test_guard(action: str, done: list[int]) -> None:
    guard = Guard(roster(), 1, 0.001, action)  # type: ignore[arg-type]
    verdicts = []
    for step in range(30):
        considered = guard.consider(step_event(step, [1.0, 5.0, 1.1], []), [step * 3 + 1, step * 3 + 2, step * 3 + 3])
        verdicts += considered.verdicts
    [verdict] = verdicts
    assert (verdict.replica, verdict.ranks, verdict.hosts, verdict.action) == (1, [3], ["b"], action)
    assert verdict.log10_e >= verdict.bound
    assert "replica 1" in verdict.why
    assert considered.event.named == [1]
    assert considered.event.quarantined == guard.ledger.quarantined == done
    assert metrics_of(considered.event)["byzantine/suspect"] == 1.0
    assert metrics_of(considered.event)["byzantine/e_value/1"] >= verdict.bound


def test_guard_tells_copies_from_nan() -> None:
    guard = Guard(roster(), 1, 0.001, "log")
    for step in range(3):
        considered = guard.consider(step_event(step, [1.0, None, 1.0], [1]), [step + 10, 77, step + 20])
        assert considered.event.duplicates == []
    assert considered.event.evidence["duplicate"][1] <= 0.0
    same = guard.consider(step_event(4, [1.0, 1.0, 1.0], []), [5, 5, 5])
    assert same.same_data
    assert same.event.duplicates == [[0, 1], [0, 2], [1, 2]]


def test_metrics_leave_out_what_is_unknown() -> None:
    found = metrics_of(step_event(0, [1.0, None, 2.0], [1]))
    assert found["byzantine/suspect"] == -1.0
    assert "byzantine/distance/1" not in found
    assert "byzantine/cosine_min" not in found
    assert not any("e_value" in name for name in found)
