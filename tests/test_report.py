"""Reading events.jsonl in every state it can be in, and what is concluded from it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_events import Job, events, run_event, write

from ds_byzantine.monitor import events as schema
from ds_byzantine.report import records
from ds_byzantine.report.model import Summary, log10_chance, summarize
from ds_byzantine.report.read import Reader, find, read
from ds_byzantine.report.records import Malformed, ReportError, parse
from ds_byzantine.report.series import MOST_COLUMNS, ranks
from ds_byzantine.trust import ledger

BAD = Job(bad=4, start=30)


def summary(folder: Path, *jobs: Job) -> Summary:
    for job in jobs:
        write(folder, job)
    return summarize(read(folder), "a run")


def rewrite(path: Path, change: Any) -> None:
    """Change every record of a file."""
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_a_healthy_run_names_nobody(tmp_path: Path) -> None:
    found = summary(tmp_path, Job(steps=200))
    assert (found.status, found.cases, found.steps, found.last) == ("quiet", (), 200, 199)
    assert found.suspect is not None
    assert found.suspect.log10_e == max(r.strongest or 0.0 for r in found.replicas)
    assert found.bound == pytest.approx(math.log10(5 * 4 / 0.001))


def test_a_bad_replica_is_named_with_its_evidence(tmp_path: Path) -> None:
    made = events(BAD)
    verdict = next(e for e in made if isinstance(e, schema.VerdictEvent))
    found = summary(tmp_path, BAD)
    (case,) = found.cases
    assert found.status == "named"
    assert (case.replica, case.ranks, case.hosts, case.kind) == (4, (4,), ("node-00",), "outlying")
    assert (case.since, case.decided, case.action) == (30, verdict.step, "log")
    last = [e for e in made if isinstance(e, schema.StepEvent)][-1]
    assert case.log10_e == pytest.approx(last.evidence["outlying"][4])
    assert case.log10_chance == pytest.approx(math.log10(5 * 4) - last.evidence["outlying"][4])
    assert [r.named for r in found.replicas] == [False] * 4 + [True]


def test_rows_that_are_not_finite(tmp_path: Path) -> None:
    found = summary(tmp_path, Job(bad=2, nonfinite=True))
    assert found.cases[0].kind == "nonfinite"
    assert [r.dropped_steps for r in found.replicas] == [0, 0, 15, 0, 0]


def test_quarantine_is_seen(tmp_path: Path) -> None:
    found = summary(tmp_path, replace(BAD, action="quarantine"))
    assert [r.quarantined for r in found.replicas] == [False] * 4 + [True]
    assert found.columns[-1].quarantined == (False,) * 4 + (True,)
    assert found.columns[-1].farness[4] is None


def test_a_replica_that_is_named_without_a_verdict_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, BAD)
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["kind"] != "verdict"]
    path.write_text("\n".join(kept) + "\n")
    (case,) = summarize(read(tmp_path)).cases
    assert (case.replica, case.kind, case.since) == (4, "outlying", None)
    assert case.log10_e is not None


def test_chance_is_what_villes_inequality_gives(tmp_path: Path) -> None:
    bound = math.log10(5 * 4 / 0.001)
    assert log10_chance(bound, bound, 0.001) == pytest.approx(-3)
    assert log10_chance(0.0, bound, 0.001) == 0.0


# -- states of the file ------------------------------------------------------------------------------------------------


def test_a_growing_file_is_read_piece_by_piece(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", BAD).read_bytes()
    growing = tmp_path / "events.jsonl"
    growing.write_bytes(b"")
    reader = Reader(growing)
    for start in range(0, len(whole), 777):
        with growing.open("ab") as file:
            file.write(whole[start : start + 777])
        reader.poll()
    assert not reader.poll()
    assert summarize(reader.story) == summarize(read(tmp_path / "whole"))
    assert reader.story.unreadable == 0


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, Job(steps=10))
    path.write_bytes(path.read_bytes()[:-40])
    found = summarize(read(tmp_path))
    assert (found.last, found.unreadable) == (8, 0)


def test_a_resumption_after_a_torn_line_is_not_lost(tmp_path: Path) -> None:
    path = write(tmp_path, Job(steps=10))
    path.write_bytes(path.read_bytes()[:-40])
    found = summary(tmp_path, Job(first=9, steps=5))
    assert found.resumptions == ((9, 5),)
    assert (found.steps, found.last, found.unreadable) == (14, 13, 1)


def test_a_replaced_file_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path, Job(steps=30))
    reader = Reader(path)
    reader.poll()
    path.unlink()
    write(tmp_path, Job(steps=3))
    assert reader.poll()
    assert summarize(reader.story).steps == 3


def test_steps_done_again_after_a_resumption_count_once(tmp_path: Path) -> None:
    found = summary(tmp_path, Job(steps=20), Job(first=15, steps=10, seed=1))
    assert (found.steps, found.redone, found.earlier_runs) == (25, 5, 0)
    assert [c.first for c in found.columns] == list(range(25))


def test_only_the_last_run_counts(tmp_path: Path) -> None:
    found = summary(tmp_path, BAD, Job(steps=7))
    assert (found.status, found.steps, found.earlier_runs) == ("quiet", 7, 1)


def test_resumed_with_fewer_replicas(tmp_path: Path) -> None:
    found = summary(tmp_path, Job(bad=1), Job(replicas=4, first=50, steps=20))
    (case,) = found.cases
    assert (case.replica, case.of, case.current) == (1, 5, False)
    assert not any(r.named for r in found.replicas)
    assert (len(found.columns[0].farness), len(found.columns[-1].farness)) == (5, 4)
    assert found.resumptions == ((50, 4),)


def test_a_named_replica_that_is_found_again_by_its_host_is_one_case(tmp_path: Path) -> None:
    path = write(tmp_path, Job(bad=1))
    resumed = Job(replicas=4, first=50, steps=20)
    log = schema.EventLog(tmp_path)
    log.write(run_event(resumed))
    for event in events(resumed):
        assert isinstance(event, schema.StepEvent)
        high = {**event.evidence, "outlying": [9.0, 0.0, 0.0, 0.0]}
        log.write(replace(event, named=[0], evidence=high))
    log.close()
    (case,) = summarize(read(path)).cases
    assert (case.replica, case.of, case.since, case.current) == (0, 4, 30, True)


def test_files_of_older_versions(tmp_path: Path) -> None:
    path = write(tmp_path, BAD)
    new = {"step_ms", "time", "loss", "evidence", "named", "quarantined", "norms", "cosine_min", "norm_dispersion"}
    new |= {"regime_ratio", "duplicates", "alpha", "on_suspect", "started", "devices"}
    kept = [r for r in map(json.loads, path.read_text().splitlines()) if r["kind"] != "verdict"]
    path.write_text("".join(json.dumps({k: v for k, v in r.items() if k not in new}) + "\n" for r in kept))
    found = summarize(read(tmp_path))
    assert (found.status, found.cases, found.bound) == ("no_evidence", (), None)
    assert found.suspect is not None
    assert found.suspect.replica == 4
    assert found.suspect.farthest == pytest.approx(found.replicas[4].farthest)
    assert found.cost.share is None
    assert found.cost.ratio == pytest.approx(1_973_632 / 3_149_824)


def test_unknown_kinds_and_fields_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, Job(steps=5))
    expected = summarize(read(tmp_path))
    rewrite(path, lambda record: {**record, "weather": {"sunny": [1, None]}})
    with path.open("a") as file:
        file.write('{"schema": 1, "kind": "weather", "step": "noon"}\n')
    assert summarize(read(tmp_path)) == expected


def test_a_newer_schema_is_refused_in_plain_words(tmp_path: Path) -> None:
    path = write(tmp_path, Job(steps=2))
    rewrite(path, lambda record: {**record, "schema": 2})
    with pytest.raises(ReportError, match="schema 2; this version of ds_byzantine reads schema 1 and older"):
        read(tmp_path)


@pytest.mark.parametrize("replicas", [1, 2, 64])
def test_one_to_many_replicas(tmp_path: Path, replicas: int) -> None:
    found = summary(tmp_path, Job(replicas=replicas, f=0, steps=8))
    assert len(found.replicas) == replicas
    assert found.status == ("single" if replicas == 1 else "quiet")


def test_a_long_run_is_binned_and_keeps_the_evidence(tmp_path: Path) -> None:
    found = summary(tmp_path, Job(replicas=16, steps=5000, bad=9, start=4000, f=2))
    assert len(found.columns) <= MOST_COLUMNS
    assert (found.columns[0].first, found.columns[-1].last) == (0, 4999)
    assert found.columns[-1].farness[9] == 1.0
    healthy = found.columns[10].farness[9]
    assert healthy is not None
    assert 0.2 < healthy < 0.8
    assert found.columns[-1].evidence[9] == pytest.approx(found.replicas[9].strongest)


def test_an_empty_file_and_one_without_its_head(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.touch()
    assert summarize(read(path)).status == "empty"
    whole = write(tmp_path / "whole", Job(replicas=4, steps=6)).read_text().splitlines(keepends=True)
    path.write_text("".join(whole[3:]))
    found = summarize(read(path))
    assert (found.steps, len(found.replicas), found.first) == (4, 4, 2)


def test_where_to_look_is_said(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "mine", Job(steps=1))
    assert find(tmp_path / "runs" / "mine").name == "events.jsonl"
    with pytest.raises(ReportError, match=r"There are some in: .*mine"):
        find(tmp_path / "runs")
    with pytest.raises(ReportError, match="no such file or folder"):
        find(tmp_path / "elsewhere")


# -- untrusted ---------------------------------------------------------------------------------------------------------

PLAIN = st.sampled_from([None, True, 0, 3, -1, 2**70, 0.5, 1e308, math.inf, math.nan, "", "text", "\ud800"])
JSON = (
    PLAIN
    | st.lists(PLAIN, max_size=4)
    | st.dictionaries(st.sampled_from(["0", "1", "9", "x", "outlying"]), PLAIN, max_size=3)
)
FIELDS = sorted({f.name for event in (schema.RunEvent, schema.StepEvent, schema.VerdictEvent) for f in fields(event)})


@settings(deadline=None)
@given(st.sampled_from(["run", "step", "verdict"]), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8))
def test_no_record_can_break_the_reader(kind: str, values: dict[str, Any]) -> None:
    from ds_byzantine.report.read import Story

    story = Story()
    for base in ({"replicas": 3}, {"step": 4}, values):
        try:
            record = parse({"schema": 1, "kind": kind, "replica": 0, **base})
        except Malformed:
            continue
        assert record is not None
        story.add(record)
    json.dumps(summarize(story).as_json(), allow_nan=False)


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"null\n",
        b"\xff\xfe\x00\n",
        b"[" * 100_000 + b"\n",
        b'{"schema": 1, "kind": "step", "step": ' + b"9" * 5000 + b"}\n",
        b'{"schema": 1, "kind": "step", "step": -1}\n',
        b'{"schema": 1, "kind": "run", "replicas": 1000000000}\n',
        b'{"schema": "1", "kind": "run"}\n',
    ],
)
def test_lines_that_are_no_records_are_counted(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path, Job(steps=3))
    path.write_bytes(path.read_bytes() + line)
    found = summarize(read(tmp_path))
    assert (found.unreadable, found.steps) == (1, 3)


def test_numbers_that_are_none_become_gaps() -> None:
    record = parse({"schema": 1, "kind": "step", "step": 0, "distances": [1, "2", None, True, 10**400], "loss": "low"})
    assert isinstance(record, records.Step)
    assert [math.isnan(d) for d in record.distances] == [False, True, True, True, True]
    assert math.isnan(record.loss)


def test_ranks_share_ties() -> None:
    assert ranks([2.0, 2.0, 2.0]) == (0.5, 0.5, 0.5)
    assert ranks([math.nan, 3.0, 1.0]) == (None, 1.0, 0.0)


# -- in step with the writer -------------------------------------------------------------------------------------------


def test_the_reader_knows_the_schema_and_every_kind_of_evidence() -> None:
    from ds_byzantine.report import words

    assert records.SCHEMA == schema.SCHEMA
    assert set(ledger.KINDS) <= set(words._SEEN)


def test_every_field_that_is_written_is_read() -> None:
    renamed = {"evidence": "kind"}  # of a verdict
    ignored = {"kept", "nonfinite", "suspect_ranks", "stage"}
    for event, record in (
        (schema.RunEvent, records.Run),
        (schema.StepEvent, records.Step),
        (schema.VerdictEvent, records.Verdict),
    ):
        known = {f.name for f in fields(record)}
        rename = renamed if event is schema.VerdictEvent else {}
        missing = {f.name for f in fields(event) if rename.get(f.name, f.name) not in known}
        assert missing <= ignored, f"{event.__name__}: {missing - ignored} is written but not read"


def test_no_torch_is_imported() -> None:
    names = ("read", "model", "words", "charts", "page", "png", "terminal")
    code = (
        f"import sys; {'; '.join(f'import ds_byzantine.report.{n}' for n in names)}; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
