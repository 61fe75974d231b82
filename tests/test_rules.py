"""One suite for all rules and pre-aggregations: definitions, symmetries, breakdown, dtypes, shards."""

from __future__ import annotations

import doctest
import importlib
import inspect
import math
import pkgutil

import naive
import numpy as np
import pytest
import torch
from rule_cases import CASES, ROBUST, Case, deciding_cases, every_case, relative, robust_cases, sample
from torch import Tensor

from ds_byzantine import rules
from ds_byzantine.errors import InfeasibleError
from ds_byzantine.rules import base, catalog
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.rules.catalog import Kind
from ds_byzantine.rules.gram import partial_basis

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-9}


def reference(case: Case, rows: Tensor) -> Tensor:
    x = rows.double().numpy()
    for name in case.pre:
        x = naive.rule(name)(x, case.f)
    # After a pre-aggregation the start is still the median of the rows themselves.
    origin = (
        {"origin": np.median(rows.double().numpy(), axis=0)} if case.pre and case.rule == "geometric_median" else {}
    )
    return torch.from_numpy(np.asarray(naive.rule(case.rule)(x, case.f, **case.params, **origin)))


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(rules.__path__)])
def test_examples_in_docstrings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "RULES", dict(catalog.RULES))  # an example registers a rule
    assert doctest.testmod(importlib.import_module(f"ds_byzantine.rules.{name}")).failed == 0


@pytest.mark.parametrize(("name", "pre"), [(n, False) for n in catalog.RULES] + [(n, True) for n in catalog.PRES])
def test_keyword_arguments_are_the_parameters_of_the_catalog(name: str, pre: bool) -> None:
    rule = base.find(name, pre=pre)
    for function in filter(None, (rule.function, rule.finish)):
        keywords = {
            p.name: p.default
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name != "generator"
        }
        assert keywords == {p.name: p.default for p in rule.info.params}


def test_every_rule_and_pre_has_its_function() -> None:
    for name, info in catalog.RULES.items():
        found = base.find(name)
        assert found.info is info
        assert (found.finish is not None) == (info.kind is Kind.GRAM_COORDINATE)
    for name in catalog.PRES:
        assert base.find(name, pre=True).info.kind is Kind.PRE


@pytest.mark.parametrize("d", [1, 3, 23, 200])
@every_case
def test_agrees_with_the_definition(case: Case, d: int) -> None:
    rows = sample(d=d, seed=d)
    assert relative(case(rows), reference(case, rows)) < 1e-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_case
def test_keeps_the_dtype_and_its_accuracy(case: Case, dtype: torch.dtype) -> None:
    rows = sample(dtype=dtype, d=64)
    got = case(rows)
    assert got.dtype == dtype
    assert got.shape == (64,)
    assert relative(got, reference(case, rows)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@every_case
def test_neither_writes_to_its_input_nor_aliases_it(case: Case, dtype: torch.dtype) -> None:
    rows = sample(dtype=dtype)
    before = rows.clone()
    got = case(rows)
    assert torch.equal(rows, before)
    got.fill_(7.0)
    assert torch.equal(rows, before)


# With f = 2 the last picks of Bulyan look at one neighbour only: mutual neighbours tie, and the lower index wins.
@pytest.mark.parametrize("case", [c for c in CASES if c.rule != "bulyan" or c.params], ids=str)
def test_the_order_of_the_rows_does_not_matter(case: Case) -> None:
    rows = sample(seed=1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))
    assert relative(case(rows[order]), case(rows)) < 1e-9


@pytest.mark.parametrize("case", [c for c in CASES if c.translates], ids=str)
def test_moves_with_the_rows(case: Case) -> None:
    rows, shift = sample(seed=2), 100.0 * sample(1, seed=4)[0]
    assert relative(case(rows + shift) - shift, case(rows)) < 1e-8


@pytest.mark.parametrize("factor", [1e-6, -1.0, 1e6])
@pytest.mark.parametrize("case", [c for c in CASES if c.scales], ids=str)
def test_scales_with_the_rows(case: Case, factor: float) -> None:
    rows = sample(seed=5)
    assert relative(case(factor * rows), factor * case(rows)) < 1e-8


@every_case
def test_equal_rows_give_that_row(case: Case) -> None:
    row = sample(1, seed=6)[0]
    row = row / row.norm()  # so that clipping to length 1 leaves it alone
    got = case(row.expand(11, -1).contiguous())
    want = torch.sign(row) if case.params.get("scale") == "one" else row
    assert relative(got, want) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("size", [1.0, 1e3, 1e8, 1e30])
@robust_cases
def test_outliers_of_any_size_move_the_output_by_a_bounded_amount(
    case: Case, size: float, apart: bool, dtype: torch.dtype
) -> None:
    rows = sample(seed=7)
    honest = rows[: 11 - case.f]
    push = size * sample(2, seed=8)
    rows[-2:] = push if apart else push[0]
    off = (case(rows.to(dtype)).double() - honest.mean(0)).norm()
    # The honest rows have length and spread of about 5-7; no rule may leave their neighbourhood.
    assert off < 3 * honest.norm(dim=1).max()


# The bound of the n-f-1 variants of Krum has a test of its own below.
@pytest.mark.parametrize("case", [c for c in ROBUST if "neighbors" not in c.params or c.rule == "bulyan"], ids=str)
def test_works_at_its_breakdown_bound_and_not_below(case: Case) -> None:
    for f in (1, 2, 3):
        a, b = catalog.RULES[case.rule].needs
        rows = sample(a * f + b, seed=f)
        rows[:f] = 1e6
        assert (case(rows, f).double() - rows[f:].mean(0)).norm() < 3 * rows[f:].norm(dim=1).max()
        with pytest.raises(InfeasibleError, match="|".join([*case.pre, case.rule])):
            case(rows[1:], f)


@every_case
def test_one_row_and_no_fault(case: Case) -> None:
    least = catalog.RULES[case.rule].least_replicas(0)
    rows = sample(least, seed=9)
    assert torch.isfinite(case(rows, 0)).all()
    if least == 1 and case.rule not in ("sign_majority", "geometric_median") and not case.pre:
        assert relative(case(rows, 0), rows[0]) < 1e-12


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@robust_cases
def test_non_finite_rows_are_removed_and_counted_against_f(case: Case, bad: float) -> None:
    rows = sample(seed=10)
    rows[4, 3] = bad
    without = torch.cat([rows[:4], rows[5:]])
    assert torch.equal(case(rows), case(without, case.f - 1))
    rows[7] = bad
    rows[0, 0] = bad
    assert torch.isnan(case(rows)).all()


@deciding_cases
def test_partial_grams_of_shards_lead_to_the_same_decision(case: Case) -> None:
    rows = sample(d=1000, seed=11, dtype=torch.float32)
    ready = Aggregator.create({"name": case.rule, **case.params}, case.f, case.pre)
    whole = ready.decide(partial_basis(rows)[None])
    parts = [partial_basis(part) for part in rows.split([1, 300, 699], dim=1)]
    shards = ready.decide(sum(parts, torch.zeros(12, 12, dtype=torch.float64))[None])
    assert whole is not None
    assert shards is not None
    torch.testing.assert_close(whole, shards, rtol=1e-4, atol=1e-5)


@deciding_cases
def test_blocks_of_a_batch_are_decided_one_by_one(case: Case) -> None:
    ready = Aggregator.create({"name": case.rule, **case.params}, case.f, case.pre)
    # Quiet and attacked blocks together, so that data-dependent loops end at different steps.
    blocks = [sample(seed=s) * 10.0**s for s in range(4)]
    blocks[2][:2] *= 1e5
    bases = torch.stack([partial_basis(rows) for rows in blocks])
    together = ready.decide(bases)
    assert together is not None
    for t in range(4):
        alone = ready.decide(bases[t : t + 1])
        assert alone is not None
        torch.testing.assert_close(together[t], alone[0], rtol=1e-9, atol=1e-12)
