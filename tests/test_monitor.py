"""The event file and the books of a step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_byzantine.monitor.events import SCHEMA, EventLog, RunEvent, StepEvent
from ds_byzantine.monitor.locate import concentrated
from ds_byzantine.monitor.recorder import Recorder, Tally

RUN = RunEvent("0.1.0", "nnm + median", f=1, replicas=4, scope="tensor", stage=2, host="DeepSpeed", ranks={"0": [0]})


def step(number: int = 0, **changes: Any) -> StepEvent:
    given: dict[str, Any] = {
        "step": number,
        "kept": [0, 1, 3],
        "dropped": [2],
        "nonfinite": [0, 0, 1, 0],
        "distances": [1.0, 2.0, None, 3.0],
        "suspect": 2,
        "suspect_ranks": [2],
        "unsafe": {},
        "bytes": 10,
        "stock_bytes": 20,
        "exchange_ms": 0.5,
        "rule_ms": 0.25,
    }
    return StepEvent(**(given | changes))


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_event_can_be_read_while_the_file_is_open(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "new" / "folder")
    log.write(RUN)
    assert [(e["kind"], e["schema"]) for e in lines(log.path)] == [("run", SCHEMA)]
    for number in range(3):
        log.write(step(number))
        assert lines(log.path)[-1]["step"] == number
    log.close()
    assert len(lines(log.path)) == 4


def test_fields_of_an_event(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write(RUN)
    log.write(step(7, unsafe={"layer.weight": [0, 2]}))
    log.close()
    run, one = lines(log.path)
    assert run["rule"] == "nnm + median"
    assert run["ranks"] == {"0": [0]}
    assert run["drill"] is None
    assert (one["kind"], one["step"], one["suspect"], one["distances"]) == ("step", 7, 2, [1.0, 2.0, None, 3.0])
    assert one["unsafe"] == {"layer.weight": [0, 2]}


def test_what_json_cannot_say_becomes_null(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write(step(distances=[math.nan, math.inf, -math.inf, 0.1234567891234], rule_ms=math.nan))
    log.close()
    [event] = lines(log.path)
    assert event["distances"] == [None, None, None, 0.123456789]
    assert event["rule_ms"] is None


def test_a_new_run_is_appended(tmp_path: Path) -> None:
    for _ in range(2):
        log = EventLog(tmp_path)
        log.write(RUN)
        log.close()
    assert [e["kind"] for e in lines(log.path)] == ["run", "run"]


def test_a_closed_log_and_a_folder_that_cannot_be_made_are_errors(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.write(RUN)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OSError, match="file"):
        EventLog(tmp_path / "file" / "below")


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


ONE = {(0, 0): ((0,), (1,), (2,))}


def event_of(recorder: Recorder, step: int = 0, **options: Any) -> StepEvent:
    totals = {(0, 0): recorder.tallies[0].totals()}
    measured = options.pop("measured", True)
    return recorder.event(step, totals, options.pop("sent", 0), f=1, measured=measured, ranks=ONE, **options)


def test_recorder_counts_rows_that_are_not_finite() -> None:
    recorder = Recorder(3)
    tally = recorder.tallies[0]
    tally.saw(flags(1, 1, 1))
    tally.saw(flags(1, 0, 1))
    tally.saw(flags(0, 0, 1))
    tally.is_unsafe("c", flags(0, 0, 1))
    tally.distances += torch.tensor([4.0, 9.0, 16.0])
    event = event_of(recorder, 4, sent=5)
    assert (event.step, event.bytes) == (4, 5)
    assert (event.kept, event.dropped, event.nonfinite) == ([2], [0, 1], [1, 2, 0])
    assert event.unsafe == {"c": [0, 1]}
    assert event.distances == [None, None, 4.0]
    assert event.suspect == 0


@pytest.mark.parametrize(
    ("distances", "suspect"),
    [([1.0, 4.0, 2.0], 1), ([4.0, 4.0, 1.0], 0), ([0.0, 0.0, 0.0], None), ([0.0, 0.0, 1e-30], 2)],
)
def test_suspect_is_the_farthest_replica(distances: list[float], suspect: int | None) -> None:
    recorder = Recorder(3)
    recorder.tallies[0].distances += torch.tensor(distances, dtype=torch.float64)
    event = event_of(recorder)
    assert event.suspect == suspect
    assert event.suspect_ranks == ([] if suspect is None else [suspect])
    assert event.distances == [d**0.5 for d in distances]
    assert event_of(recorder, measured=False).distances == [None] * 3
    assert event_of(recorder, measured=False).suspect is None


def test_recorder_starts_anew() -> None:
    recorder = Recorder(3)
    recorder.tallies[0].saw(flags(0, 0, 1))
    recorder.tallies[0].is_unsafe("a", flags(0, 0, 1))
    recorder.tallies[0].own_distances += 3.0
    recorder.tallies[0].distances += 3.0
    recorder.stock_bytes = 8
    with recorder.timed("rule"):
        pass
    assert recorder.milliseconds["rule"] > 0
    first = event_of(recorder)
    recorder.reset()
    assert event_of(recorder, 1) == event_of(Recorder(3), 1)
    assert first.nonfinite == [1, 1, 0]  # an event does not change afterwards
    assert first.unsafe == {"a": [0, 1]}


def test_sums_over_ranks() -> None:
    """Two ranks that know their own chunks only."""
    ranks = [Recorder(3), Recorder(3)]
    ranks[0].tallies[0].saw(flags(1, 0, 1))
    ranks[0].tallies[0].is_unsafe("a", flags(1, 0, 1))
    ranks[1].tallies[0].saw(flags(1, 1, 1))
    for rank, recorder in enumerate(ranks):
        recorder.tallies[0].own_distances += torch.tensor([1.0, 10.0, 1.0]) * (rank + 1)
    sums = ranks[0].tallies[0].own() + ranks[1].tallies[0].own()
    for recorder in ranks:
        recorder.tallies[0].take(sums, flags=True)
        event = event_of(recorder)
        assert event.nonfinite == [0, 1, 0]
        assert event.distances[0] == pytest.approx(3.0**0.5)
        assert list(event.unsafe.values()) == [[1]]
    assert "a" in ranks[0].tallies[0].unsafe


def test_sums_leave_the_flags_alone_where_they_are_known_everywhere() -> None:
    tally = Recorder(3).tallies[0]
    tally.saw(flags(1, 0, 1))
    tally.take(2 * tally.own(), flags=False)
    assert tally.nonfinite.tolist() == [0, 1, 0]
    assert tally.unsafe == {}


def test_a_replica_is_judged_by_all_its_reductions() -> None:
    """Two pipeline stages: neither alone tells, their sum does; where one stage is bad, its rank is named."""
    stages = {(0, 0): ((0,), (1,), (2,)), (0, 3): ((3,), (4,), (5,))}
    tallies = {(0, 0): Tally(3), (0, 3): Tally(3)}
    tallies[0, 0].distances += torch.tensor([5.0, 4.0, 4.0])
    tallies[0, 3].distances += torch.tensor([1.0, 1.0, 90.0])

    def told() -> StepEvent:
        totals = {key: tally.totals() for key, tally in tallies.items()}
        return Recorder(3).event(0, totals, 0, f=1, measured=True, ranks=stages)

    event = told()
    assert event.distances == pytest.approx([6**0.5, 5**0.5, 94**0.5])
    assert (event.suspect, event.suspect_ranks) == (2, [5])
    tallies[0, 0].saw(flags(1, 0, 1))  # a row of replica 1 that was not finite, in the first stage
    tallies[0, 0].is_unsafe("w", flags(1, 0, 1))
    event = told()
    assert (event.suspect, event.suspect_ranks, event.dropped) == (1, [1], [1])
    assert list(event.unsafe.values()) == [[1]]


def test_trouble_everywhere_names_all_ranks() -> None:
    ranks = {(0, 0): ((0,), (2,), (4,)), (0, 1): ((1,), (3,), (5,))}
    even = {key: torch.tensor([1.0, 8.0, 1.0]) for key in ranks}
    assert concentrated(even, 1, ranks) == [2, 3]
    assert concentrated({key: torch.ones(3) for key in ranks}, 1, ranks) == [2, 3]
    assert concentrated({(0, 0): torch.ones(1)}, 0, {(0, 0): ((0,),)}) == [0]
