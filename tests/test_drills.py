"""Drills: who, when and what, read from a section; and the tap, with replicas that gather in one process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_byzantine.attacks.base import AttackInfo, find
from ds_byzantine.attacks.catalog import ATTACKS
from ds_byzantine.config import parse_section
from ds_byzantine.drills import injector as injector_module
from ds_byzantine.drills.injector import Injector, RuleInUse
from ds_byzantine.drills.scenario import DrillConfig
from ds_byzantine.errors import ConfigError

ROOT = Path(__file__).parents[1]
DRILLS = ROOT / "configs/drills"
Gather = Callable[[torch.Tensor, object], torch.Tensor]


# -- scenario ----------------------------------------------------------------------------------------------------------


def test_a_name_an_object_and_a_file_give_the_same_drill(tmp_path: Path) -> None:
    file = tmp_path / "my drill.json"
    file.write_text('{"name": "sign_flip"}', encoding="utf-8")
    expected = DrillConfig(name="sign_flip", params={"factor": 1.0})
    for value in ("sign_flip", {"name": "sign_flip"}, str(file), expected):
        assert DrillConfig.load(value) == expected
        assert parse_section({"drill": value}).drill == expected


@pytest.mark.parametrize("file", sorted(DRILLS.glob("*.json")), ids=lambda p: p.stem)
def test_the_ready_files_are_drills_of_their_name(file: Path) -> None:
    assert DrillConfig.load(str(file)).name == file.stem
    assert DrillConfig.load(str(file)).warnings(5, 1) == ()


def test_there_are_ready_files_for_the_usual_attacks() -> None:
    usual = {"sign_flip", "scale", "nan", "gaussian", "alie", "ipm", "min_max", "ipm_search"}
    faults = {"stale", "lazy_copy", "concentrated", "bit_flip", "gemm_tile"}
    assert {p.stem for p in DRILLS.glob("*.json")} == usual | faults


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_the_page_on_drills_tells_of_every_attack(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs/drills.md").read_text(encoding="utf-8")


def test_the_collator_of_the_page_flips_the_labels_of_a_bad_replica() -> None:
    block = (ROOT / "docs/drills.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(block, names)
    for bad, expected in ((False, [0, -100, 9]), (True, [9, -100, 0])):
        batch = names["collate"]([0, -100, 9], inner=lambda y: {"labels": torch.tensor(y)}, bad=bad, classes=10)
        assert batch["labels"].tolist() == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("sign_flp", r'd\.name: no such attack "sign_flp"\. Did you mean "sign_flip"\?'),
        ("none.json", r"d: no such file: none\.json"),
        ("alie.json", r'd: no such file: alie\.json .* Did you mean the attack "alie"\?'),
        (["nan"], r"d: got \[\"nan\"\], but a drill is a name"),
        ({"factor": 2.0}, r"d\.name: this key is missing"),
        (
            {"name": "scale", "facter": 2.0},
            r'd\.facter: no such key of the scale drill "facter"\. Did you mean "factor"\?',
        ),
        ({"name": "scale", "strat": 2}, r'd\.strat: .* Did you mean "start"\?'),
        ({"name": "scale", "params": {}}, r"d\.params: no such key of the scale drill"),
        ({"name": "scale", "factor": "2"}, r"d\.factor: got '2', but this is a float"),
        ({"name": "scale", "replicas": []}, r"d\.replicas: got \[\]"),
        ({"name": "scale", "replicas": [-1]}, r"d\.replicas: got \[-1\]"),
        ({"name": "scale", "replicas": [True]}, r"d\.replicas: got \[true\]"),
        ({"name": "scale", "replicas": [1, 1]}, r"d\.replicas: got \[1, 1\]"),
        ({"name": "scale", "replicas": 1}, r"d\.replicas: got 1"),
        ({"name": "scale", "start": -1}, r"d\.start: got -1, but this has to be >= 0"),
        ({"name": "scale", "every": 0}, r"d\.every: got 0, but this has to be >= 1"),
        ({"name": "scale", "seed": 0.5}, r"d\.seed: got 0\.5, but this has to be a whole number"),
        ({"name": "scale", "start": 5, "stop": 5}, r"d: stop=5 is not after start=5"),
        ({"name": "scale", "factor": "auto"}, r'd\.factor: got "auto"'),
        ("label_flip", r'd\.name: got "label_flip", but this spoils the data.*flip_labels.*docs/drills\.md'),
        ({"name": "label_flip", "replicas": [1]}, r'd\.name: got "label_flip"'),
        ({"name": "gemm_tile", "cols": 9, "pitch": 8}, r"d\.cols: got 9, but rows of the tile are pitch=8 apart"),
        ({"name": "bit_flip", "where": 64}, r"d\.where: got 64, but this is a str or a whole number from 0 to 63"),
    ],
)
def test_a_wrong_drill_is_refused_with_its_path(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrillConfig.load(value, "d")


@pytest.mark.parametrize(("content", "message"), [("{", "cannot be read as JSON"), ("[1]", "holds \\[1\\]")])
def test_a_broken_file(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        DrillConfig.load(str(tmp_path / "x.json"))


def test_a_wrong_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"name": "scale", "facter": 1}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"byzantine\.drill\(.*x\.json\)\.facter"):
        parse_section({"drill": str(tmp_path / "x.json")})


def test_the_last_replicas_are_bad_unless_named() -> None:
    drill = DrillConfig.load("nan")
    assert drill.bad_replicas(8, 2) == (6, 7)
    assert drill.bad_replicas(4, 0) == (3,)
    assert drill.bad_replicas(1, 0) == (0,)
    assert DrillConfig.load({"name": "nan", "replicas": [2, 0]}).bad_replicas(4, 1) == (2, 0)


def test_replicas_are_checked_against_the_job() -> None:
    with pytest.raises(ConfigError, match=r"replicas: got \[4, 9\], but this job has replicas 0 to 3"):
        DrillConfig.load({"name": "nan", "replicas": [0, 4, 9]}).bad_replicas(4, 1)
    for copied, honest in ((4, "[0, 1, 2]"), (3, "[0, 1, 2]")):
        for name, param in (("mimic", "replica"), ("lazy_copy", "of")):
            drill = DrillConfig.load({"name": name, param: copied})
            with pytest.raises(
                ConfigError, match=rf"byzantine\.drill\.{param}: got {copied}, but .* are {re.escape(honest)}"
            ):
                drill.bad_replicas(4, 1)
    with pytest.raises(ConfigError, match="all 2 replicas are bad"):
        DrillConfig.load({"name": "ipm", "replicas": [0, 1]}).bad_replicas(2, 0)


def test_warnings() -> None:
    assert DrillConfig.load("nan").warnings(5, 1) == ()
    assert "more than f=1" in DrillConfig.load({"name": "nan", "replicas": [0, 1]}).warnings(5, 1)[0]
    assert "sends the honest mean" in DrillConfig.load("alie").warnings(5, 1)[0]
    assert DrillConfig.load("alie").warnings(50, 20) == ()


def test_active_steps() -> None:
    drill = DrillConfig.load({"name": "nan", "start": 3, "stop": 10, "every": 3})
    assert [step for step in range(20) if drill.active(step)] == [3, 6, 9]
    assert [step for step in range(20) if drill.over(step)] == list(range(10, 20))
    assert all(DrillConfig.load("nan").active(step) and not DrillConfig.load("nan").over(step) for step in (0, 1, 1000))


# -- the tap -----------------------------------------------------------------------------------------------------------


class Replicas:
    """n replicas in one process whose taps run one after the other; the gather gives everybody's untouched rows."""

    def __init__(
        self,
        drill: object,
        n: int,
        f: int,
        numel: int,
        dtype: torch.dtype = torch.float32,
        rule: RuleInUse | None = None,
    ) -> None:
        scenario = DrillConfig.load(drill)
        self.sent = torch.randn(n, numel, generator=torch.Generator().manual_seed(1)).to(dtype)
        self.flats = [row.clone() for row in self.sent]
        self.gathered = [0] * n
        self.taps = [Injector(scenario, n, f, i, self._gather(i), aggregate=rule) for i in range(n)]

    def _gather(self, replica: int) -> Gather:
        offset = 0

        def gather(block_D: torch.Tensor, _: object) -> torch.Tensor:
            nonlocal offset
            start, offset = offset, (offset + block_D.numel()) % max(self.sent.shape[1], 1)
            self.gathered[replica] += 1
            assert torch.equal(block_D, self.sent[replica, start : start + block_D.numel()])
            return self.sent[:, start : start + block_D.numel()].clone()

        return gather

    def tap(self, step: int) -> list[bool]:
        return [tap.tap(flat, step) for tap, flat in zip(self.taps, self.flats, strict=True)]


ALONE = [name for name in sorted(ATTACKS) if not ATTACKS[name].needs_honest and name != "stale"]


@pytest.mark.parametrize("name", ALONE)
def test_only_the_bad_replica_changes_and_nobody_gathers(name: str) -> None:
    job = Replicas(name, n=5, f=1, numel=100)
    assert job.tap(0) == [False, False, False, False, True]
    assert job.gathered == [0] * 5
    for i in range(4):
        assert torch.equal(job.flats[i], job.sent[i])
    assert not torch.equal(job.flats[4], job.sent[4])


def test_good_steps_change_nothing() -> None:
    job = Replicas({"name": "ipm", "start": 2, "stop": 3}, n=4, f=1, numel=10)
    assert job.tap(0) == job.tap(1) == job.tap(3) == [False] * 4
    assert job.gathered == [0] * 4
    assert all(torch.equal(flat, row) for flat, row in zip(job.flats, job.sent, strict=True))
    assert job.tap(2) == [False, False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "params"), [("alie", {"z": 1.5}), ("ipm", {"epsilon": 0.5}), ("mimic", {"replica": 3}), ("lazy_copy", {})]
)
def test_colluders_see_the_honest_rows_block_by_block(
    name: str, params: dict[str, float], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injector_module, "BLOCK", 16)
    job = Replicas({"name": name, "replicas": [1, 4], **params}, n=6, f=2, numel=50, dtype=dtype)
    assert job.tap(0) == [False, True, False, False, True, False]
    assert job.gathered == [4] * 6  # ceil(50 / 16), by every replica alike
    info = AttackInfo(n=6, f=2, step=0, generator=torch.Generator(), honest=(0, 2, 3, 5))
    expected = find(name).function(job.sent[1], job.sent[[0, 2, 3, 5]], info, **params)
    for i in range(6):
        assert torch.equal(job.flats[i], expected if i in (1, 4) else job.sent[i])


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_empty_buckets_pass(name: str) -> None:
    assert Replicas(name, n=3, f=1, numel=0).tap(0) == [False, False, True]


@pytest.mark.parametrize("name", ["min_max", "min_sum"])
def test_colluders_measure_each_block_for_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injector_module, "BLOCK", 16)
    job = Replicas({"name": name, "replicas": [1]}, n=4, f=1, numel=40)
    job.tap(0)
    info = AttackInfo(n=4, f=1, step=0, generator=torch.Generator())
    blocks = [find(name).function(job.sent[1, s : s + 16], job.sent[[0, 2, 3], s : s + 16], info) for s in (0, 16, 32)]
    assert torch.equal(job.flats[1], torch.cat(blocks))


@pytest.mark.parametrize("bad", [[1, 4], [4, 1], [0], [5, 2]])
def test_the_rule_is_tried_out_on_rows_in_the_order_of_the_replicas(bad: list[int]) -> None:
    tried: list[torch.Tensor] = []

    def rule(rows_ND: torch.Tensor, step: int) -> torch.Tensor:
        assert step == 3
        tried.append(rows_ND)
        return rows_ND.mean(0)

    job = Replicas({"name": "ipm_search", "replicas": bad}, n=6, f=2, numel=10, rule=rule)
    job.tap(3)
    honest = [i for i in range(6) if i not in bad]
    for rows_ND in tried:
        assert torch.equal(rows_ND[honest], job.sent[honest])
        assert all(torch.equal(rows_ND[i], rows_ND[bad[0]]) for i in bad)
    assert len(tried) > 5
    assert all(torch.equal(job.flats[i], tried[1][i]) for i in bad)  # the mean follows the largest, tried second


def test_an_attack_that_tries_the_rule_out_needs_it() -> None:
    with pytest.raises(ValueError, match=r"info\.aggregate"):
        Replicas("alie_search", n=4, f=1, numel=10).tap(0)


def sent_by_stale(drill: dict[str, object], steps: int, calls: int = 2) -> list[list[int]]:
    """From which step the gradient is that replica 1 sends, by step and call; call c of step s has 10 s + c."""
    injector = Injector(DrillConfig.load({"name": "stale", **drill}), 2, 0, 1, lambda block_D, _: block_D)
    found = []
    for step in range(steps):
        flats = [torch.full((3,), 10.0 * step + call) for call in range(calls)]
        for flat in flats:
            injector.tap(flat, step)
        values = [int(flat[0]) for flat in flats]
        assert [v % 10 for v in values] == list(range(calls))
        found.append([v // 10 for v in values])
    return found


@pytest.mark.parametrize(
    ("drill", "expected"),
    [
        ({"delay": 1}, [0, 0, 1, 2, 3, 4]),
        ({"delay": 2}, [0, 1, 0, 1, 2, 3]),
        ({"delay": 1, "start": 2}, [0, 1, 1, 2, 3, 4]),  # it has seen the good steps as well
        ({"delay": 1, "every": 3}, [0, 1, 2, 2, 4, 5]),
        ({"delay": 1, "start": 1, "stop": 3}, [0, 0, 1, 3, 4, 5]),
        ({"replicas": [0]}, [0, 1, 2, 3, 4, 5]),  # the other one
    ],
)
def test_stale_gradients_bucket_by_bucket(drill: dict[str, object], expected: list[int]) -> None:
    assert sent_by_stale(drill, 6) == [[step, step] for step in expected]


def test_only_bad_replicas_of_a_drill_that_goes_on_keep_gradients() -> None:
    for replica, expected in ((1, [1, 1, 1, 0, 0]), (0, [0, 0, 0, 0, 0])):
        drill = DrillConfig.load({"name": "stale", "start": 1, "stop": 3})
        injector = Injector(drill, 2, 0, replica, lambda block_D, _: block_D)
        kept = []
        for step in range(5):
            injector.tap(torch.ones(3), step)
            kept.append(len(injector._memory))
        assert kept == expected


def test_a_lasting_fault_depends_on_replica_and_seed() -> None:
    places = []
    for seed in (0, 1):
        job = Replicas({"name": "stuck", "replicas": [0, 1], "seed": seed}, n=5, f=2, numel=10_000)
        job.tap(0)
        places += [(job.flats[i] != job.sent[i]).nonzero()[:, 0].tolist() for i in (0, 1)]
    assert [len(one) for one in places] == [1, 1, 1, 1]
    assert len({one[0] for one in places}) == 4


def test_what_a_dtype_does_not_allow_is_refused_by_all_replicas_in_the_first_step() -> None:
    for replica in range(3):
        drill = DrillConfig.load({"name": "bit_flip", "bits": 6, "start": 100, "replicas": [1]})
        injector = Injector(drill, 3, 1, replica, lambda block_D, _: block_D)
        assert not injector.tap(torch.ones(3), 0)
        with pytest.raises(
            ConfigError, match=r"byzantine\.drill\.bits: got 6, but a word of torch\.float16 has 5 such"
        ):
            injector.tap(torch.ones(3, dtype=torch.float16), 0)


def test_attackers_split_the_buckets_among_them() -> None:
    job = Replicas({"name": "split", "replicas": [3, 0]}, n=4, f=2, numel=10)
    spoiled = []
    for _ in range(4):
        job.flats = [row.clone() for row in job.sent]
        job.tap(0)
        spoiled.append([i for i in range(4) if not torch.equal(job.flats[i], job.sent[i])])
    assert spoiled == [[3], [0], [3], [0]]


def noise(seed: int, step: int, replica: int, call: int) -> torch.Tensor:
    drill = DrillConfig.load({"name": "gaussian", "seed": seed, "replicas": [0, 1]})
    injector = Injector(drill, 4, 1, replica, lambda block_D, _: block_D)
    for _ in range(call + 1):
        flat = torch.ones(8)
        injector.tap(flat, step)
    return flat


def test_noise_depends_on_seed_step_replica_and_call_and_on_nothing_else() -> None:
    base = (0, 5, 1, 0)
    assert torch.equal(noise(*base), noise(*base))
    for other in ((1, 5, 1, 0), (0, 6, 1, 0), (0, 5, 0, 0), (0, 5, 1, 1)):
        assert not torch.equal(noise(*base), noise(*other))


def test_calls_are_counted_per_step() -> None:
    drill = DrillConfig.load({"name": "gaussian", "replicas": [0]})
    injector = Injector(drill, 2, 0, 0, lambda block_D, _: block_D)
    flats = [torch.ones(8) for _ in range(3)]
    for flat, step in zip(flats, (4, 5, 5), strict=True):
        injector.tap(flat, step)
    assert torch.equal(flats[1], first_tap(drill, 5))
    assert not torch.equal(flats[1], flats[2])


def first_tap(drill: DrillConfig, step: int) -> torch.Tensor:
    flat = torch.ones(8)
    Injector(drill, 2, 0, 0, lambda block_D, _: block_D).tap(flat, step)
    return flat


def test_a_tap_on_gradients_that_require_grad_leaves_no_graph() -> None:
    flat = torch.ones(4, requires_grad=True)
    Injector(DrillConfig.load("zero"), 2, 0, 1, lambda block_D, _: block_D).tap(flat.data, 0)
    assert flat.grad_fn is None
    assert torch.equal(flat.detach(), torch.zeros(4))


def test_an_unknown_replica_is_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match="this job has replicas 0 to 1"):
        Injector(DrillConfig.load({"name": "nan", "replicas": [2]}), 2, 0, 0, lambda block_D, _: block_D)
