"""What fits, what is refused and in which words, and what it costs."""

from __future__ import annotations

from math import comb

import pytest

from ds_byzantine.config import parse_section
from ds_byzantine.errors import ConfigError, InfeasibleError
from ds_byzantine.plan import Plan, default_f, plan, rules_that_fit
from ds_byzantine.rules.catalog import MOST_SUBSETS, RULES, Kind, RuleInfo


def made(section: dict[str, object], n: int, **job: object) -> Plan:
    return plan(parse_section(section), n, **{"stage": 2, **job})  # type: ignore[arg-type]


def refusal(section: dict[str, object], n: int, **job: object) -> str:
    with pytest.raises(InfeasibleError) as caught:
        made(section, n, **job)
    return str(caught.value)


# -- f ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "f"),
    [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 1), (8, 1), (9, 1), (15, 1), (16, 2), (17, 2), (24, 3), (64, 8)],
)
def test_f_left_out_follows_the_table(n: int, f: int) -> None:
    assert default_f(n) == f
    assert made({}, n).f == f


@pytest.mark.parametrize(
    ("section", "n", "f"),
    [
        ({"rule": "krum"}, 3, 0),
        ({"rule": "krum"}, 4, 0),
        ({"rule": "krum"}, 5, 1),
        ({"rule": {"name": "krum", "neighbors": "n-f-1"}}, 3, 1),
        ({"rule": "bulyan"}, 6, 0),
        ({"rule": "bulyan"}, 7, 1),
        ({"rule": "mean"}, 8, 0),
        ({"pre": ["bucketing"]}, 4, 0),
        ({"pre": ["bucketing"]}, 5, 1),
        ({"pre": [{"name": "bucketing", "size": 4}]}, 64, 7),
    ],
)
def test_f_left_out_is_never_more_than_the_rule_allows(section: dict[str, object], n: int, f: int) -> None:
    assert made(section, n).f == f


def test_f_zero_is_said_to_protect_from_nothing() -> None:
    (warning,) = made({"rule": "bulyan"}, 4).warnings
    assert warning.startswith("byzantine.f: f=0 (bulyan tolerates none of 4 replicas)")
    assert made({"f": 1}, 4).warnings == ()


# -- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(RULES) - {"mean"}))
@pytest.mark.parametrize("f", [1, 2, 3])
def test_every_rule_holds_from_its_bound_on_and_not_below(name: str, f: int) -> None:
    least = RULES[name].needs[0] * f + RULES[name].needs[1]
    assert made({"rule": name, "f": f}, least).f == f
    message = refusal({"rule": name, "f": f}, least - 1)
    assert (
        f"{name} with f={f} needs at least {least} replicas ({RULES[name].bound}); this job has {least - 1}." in message
    )


@pytest.mark.parametrize(
    ("section", "n", "message"),
    [
        (
            {"rule": "krum", "f": 1},
            4,
            "byzantine.f: krum with f=1 needs at least 5 replicas (2f+3); this job has 4. "
            'Use f=0, rule "median" (2f+1), or more ranks.',
        ),
        (
            {"rule": "krum", "f": 2},
            4,
            "byzantine.f: krum with f=2 needs at least 7 replicas (2f+3); this job has 4. "
            'Use f=0, rule "median" (2f+1) with f=1, or more ranks.',
        ),
        (
            {"rule": "median", "f": 2},
            4,
            "byzantine.f: median with f=2 needs at least 5 replicas (2f+1); this job has 4. Use f=1 or more ranks.",
        ),
        (
            {"f": 1},
            2,
            "byzantine.f: centered_clip with f=1 needs at least 3 replicas (2f+1); this job has 2. "
            "Use f=0 or more ranks.",
        ),
        (
            {"rule": "mean", "f": 1},
            4,
            "byzantine.rule: mean tolerates no bad replica, but f=1. "
            'Use f=0, which only watches, or rule "centered_clip" (2f+1).',
        ),
        (
            {"pre": ["bucketing"], "rule": "median", "f": 1},
            4,
            "byzantine.f: median with f=1 needs at least 3 rows (2f+1); of this job's 4 replicas the pre-aggregations "
            "leave 2 rows. Use f=0, smaller buckets, or more ranks.",
        ),
        (
            {"pre": ["nnm"], "rule": "median", "f": 2},
            4,
            "byzantine.pre[0]: nnm with f=2 needs at least 5 replicas (2f+1); this job has 4. Use f=1 or more ranks.",
        ),
        (
            {"rule": "krum"},
            2,
            "byzantine.f: krum with f=0 needs at least 3 replicas (2f+3); this job has 2. "
            'Use rule "median" (2f+1) or more ranks.',
        ),
    ],
)
def test_a_refusal_says_what_why_and_what_to_do(section: dict[str, object], n: int, message: str) -> None:
    assert refusal(section, n) == message


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", sorted(RULES))
def test_one_or_two_replicas_tolerate_no_fault(n: int, name: str) -> None:
    assert "f=1" in refusal({"rule": name, "f": 1}, n)


@pytest.mark.parametrize("name", sorted(RULES))
def test_one_replica_passes_through_whatever_the_rule(name: str) -> None:
    done = made({"rule": name}, 1, numel=1000)
    assert (done.f, done.bytes_sent_per_rank, done.traffic_ratio, done.extra_memory) == (0, 0, None, 0)
    assert "pass through unchanged" in done.warnings[0]


def test_rules_that_fit_are_exactly_those_that_plan_accepts() -> None:
    for n in (1, 2, 3, 4, 5, 7, 8, 16, 40):
        for f in range(4):
            fitting = set(rules_that_fit(n, f))
            for name in RULES:
                if n == 1 and f == 0:
                    continue  # anything passes
                if name in fitting:
                    assert name in made({"rule": name, "f": f}, n).rules_that_fit()
                else:
                    refusal({"rule": name, "f": f}, n)


@pytest.mark.parametrize("name", ["mda", "min_variance", "smea"])
def test_subset_searches_are_bounded(name: str) -> None:
    assert comb(24, 6) <= MOST_SUBSETS < comb(25, 6) + comb(25, 5)
    assert made({"rule": name, "f": 6}, 24).f == 6
    message = refusal({"rule": name, "f": 8}, 64)
    assert message.startswith(f"byzantine.rule: {name} with f=8 would search C(64,8) = 4,426,165,368 subsets")
    assert '"caf_gated"' in message
    # Bucketing leaves 32 rows of 64, which is still too many for f=8, but 16 rows of 64 are not.
    assert made({"rule": name, "f": 4, "pre": [{"name": "bucketing", "size": 4}]}, 64).f == 4


def test_no_rule_holds_against_half_of_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    boast = RuleInfo("boast", Kind.COORDINATE, (0, 1), "Claims to hold for any f.", "-")
    monkeypatch.setitem(RULES, "boast", boast)
    assert made({"rule": "boast", "f": 2}, 5).f == 2
    assert refusal({"rule": "boast", "f": 2}, 4) == (
        "byzantine.f: f=2 needs at least 5 replicas (2f+1) whatever the rule; this job has 4. Use f=1 or more ranks."
    )
    assert "boast" not in rules_that_fit(4, 2)


def test_the_path_is_that_of_the_caller() -> None:
    with pytest.raises(InfeasibleError, match=r"^config\.f: "):
        plan(parse_section({"f": 1}), 2, stage=0, path="config")


@pytest.mark.parametrize("job", [{"n": 0, "stage": 2}, {"n": 4, "stage": 4}])
def test_a_job_that_cannot_be(job: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="plan: got replicas="):
        plan(parse_section({}), job["n"], stage=job["stage"])


# -- scope and warnings ------------------------------------------------------------------------------------------------


def test_scope_means_nothing_to_coordinate_rules() -> None:
    assert "changes nothing" in made({"rule": "median", "scope": "model"}, 4).warnings[0]
    assert made({"rule": "median", "pre": ["nnm"], "scope": "shard"}, 4).warnings == ()


def test_replicas_of_several_ranks_are_explained() -> None:
    assert "(A replica is expert 2 here" in refusal({"f": 1}, 2, within="expert 2")
    settled = made({}, 3, within="pipeline 2 x tensor 2")
    assert "over 3 replicas (ZeRO-2, pipeline 2 x tensor 2 in a replica, scope tensor)" in settled.describe()
    wide = made({}, 3, stage=3, ranks=6, numel=600, within="sequence 2")
    assert wide.bytes_sent_per_rank == wide.stock_bytes_per_rank == 500 * 4


def test_krum_alone_is_warned_of_and_krum_after_mixing_is_not() -> None:
    assert "7-15 times" in made({"rule": "krum"}, 5).warnings[0]
    assert made({"rule": "krum", "pre": ["nnm"]}, 5).warnings == ()


@pytest.mark.parametrize(("stage", "warned"), [(0, False), (1, False), (2, True), (3, True), (None, False)])
def test_micro_steps_are_mentioned_where_they_are_reduced_one_by_one(stage: int | None, warned: bool) -> None:
    assert bool(made({}, 4, stage=stage, accumulation=4).warnings) is warned
    assert made({}, 4, stage=stage, accumulation=1).warnings == ()


def test_more_rows_than_can_be_averaged_are_mentioned() -> None:
    (warning,) = made({"rule": {"name": "multi_krum", "m": 5}}, 5).warnings
    assert warning == "byzantine.rule.m: multi_krum averages at most n-f = 4 rows, not 5."
    assert made({"rule": {"name": "multi_krum", "m": 4}}, 5).warnings == ()


def test_drills_are_checked_against_the_job() -> None:
    with pytest.raises(ConfigError, match=r"byzantine\.drill\.replicas: got \[5\], but this job has replicas 0 to 4"):
        made({"drill": {"name": "nan", "replicas": [5]}}, 5)
    (warning,) = made({"drill": {"name": "nan", "replicas": [3, 4]}}, 5).warnings
    assert "more than f=1" in warning


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5, 8, 64])
@pytest.mark.parametrize("numel", [64 * 15, 7_000_000_000 // 960 * 960])
def test_bytes_per_stage(n: int, numel: int) -> None:
    """Counted message by message: who sends how many elements to whom."""
    section: dict[str, object] = {"f": 0}
    chunk = numel // n
    to_aggregators = (n - 1) * chunk
    ring = 2 * (n - 1) * chunk
    one_owner = (n - 1) * chunk / n  # all but the owner send their chunk to it: the mean over ranks
    expected = {0: (to_aggregators + (n - 1) * chunk, ring), 3: (to_aggregators, (n - 1) * chunk)}
    expected |= dict.fromkeys((1, 2), (to_aggregators + one_owner, ring))
    for stage, (ours, stock) in expected.items():
        done = made(section, n, stage=stage, numel=numel, dtype_bytes=2)
        assert done.bytes_sent_per_rank == pytest.approx(2 * ours, abs=n * n)
        assert done.stock_bytes_per_rank == pytest.approx(2 * stock, abs=n * n)
        assert done.traffic_ratio == pytest.approx(ours / stock, rel=0.02)
        assert done.bytes_sent_per_rank <= done.stock_bytes_per_rank + 1
    assert made(section, n, stage=2, everyone=True).traffic_ratio == pytest.approx(1.0)
    assert made(section, n, stage=None).traffic_ratio == pytest.approx(1.0)


def test_partial_statistics_are_counted_when_the_tensors_are_known() -> None:
    job = {"numel": 1_000_000, "stage": 3}
    without = made({}, 4, **job).bytes_sent_per_rank
    records = 7  # ceil(22 / 4) tensors of a chunk and one that is cut
    for section, record in (({}, 8 * (4 + 5 * 6 // 2)), ({"rule": "median"}, 4), ({"scope": "shard"}, 0)):
        sent = made(section, 4, tensors=22, **job).bytes_sent_per_rank
        assert sent is not None
        assert sent - (without or 0) == 3 * records * record


@pytest.mark.parametrize("rule", ["median", "krum"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_exchange_sends_as_many_bytes_as_planned(stage: int, rule: str) -> None:
    import torch

    from ds_byzantine.exchange.groups import Peers
    from ds_byzantine.exchange.local import LocalTransport, LocalWorld
    from ds_byzantine.pipeline import ShardAggregator
    from ds_byzantine.rules.apply import Aggregator
    from ds_byzantine.types import Bucket, Delivery, Layout, Segment, Slice, even_bounds

    n, width, tensors = 5, 200, 20
    numel = width * tensors
    segments = tuple(Segment(f"w{t}", t * width, (t + 1) * width) for t in range(tensors))
    delivery = (Delivery.EVERYONE, Delivery.OWNERS, Delivery.OWNERS, Delivery.AGGREGATOR)[stage]
    owners = (Slice(1, 0, numel),) if delivery is Delivery.OWNERS else ()
    layout = Layout(segments, even_bounds(numel, n), delivery, owners)

    def counted(transport: LocalTransport) -> int:
        aggregator = ShardAggregator(Peers.plain(transport), Aggregator.create(rule, 1))
        flat = torch.randn(numel, generator=torch.Generator().manual_seed(transport.rank))
        aggregator.submit(Bucket(flat, layout), lambda aggregate: None)
        return transport.bytes_sent

    done = made({"rule": rule, "f": 1}, n, stage=stage, numel=numel, tensors=tensors)
    # Here no chunk cuts a tensor: the plan allows for one record more.
    statistics = (n - 1) * (8 * (n + 21) if rule == "krum" else n)
    assert sum(LocalWorld(n).run(counted)) / n == (done.bytes_sent_per_rank or 0) - statistics


def test_memory() -> None:
    job = {"numel": 1000, "bucket_numel": 100, "dtype_bytes": 4}
    assert made({}, 4, **job).extra_memory == 400
    assert made({"scope": "model"}, 4, **job).extra_memory == 4400
    assert made({"scope": "model", "rule": "median"}, 4, **job).extra_memory == 400
    assert made({"aggregate_at": "boundary"}, 4, **job).extra_memory == 4400
    assert made({"aggregate_at": "boundary"}, 4, **{**job, "stage": 1}).extra_memory == 400
    assert made({}, 4).extra_memory is None


def test_the_banner() -> None:
    section = {"rule": "krum", "monitor": {"dir": "runs/demo"}}
    assert made(section, 5).describe("0.1.0") == (
        "ds_byzantine 0.1.0: krum f=1 over 5 replicas (ZeRO-2, scope tensor), reduce traffic x0.6 of stock, "
        "log runs/demo"
    )
    drilled = made(
        {"rule": "trimmed_mean", "pre": ["nnm"], "drill": {"name": "nan", "start": 3, "stop": 9}}, 8, stage=3
    )
    assert drilled.describe("0.1.0") == (
        "ds_byzantine 0.1.0: nnm + trimmed_mean f=1 over 8 replicas (ZeRO-3, scope tensor), reduce traffic x1 of "
        "stock, log runs/byzantine, drill nan on replica 7 from step 3 to 8"
    )
    assert "1 replica (data parallel, scope tensor), no traffic" in made({}, 1, stage=None).describe()
