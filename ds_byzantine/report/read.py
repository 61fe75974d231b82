"""events.jsonl while it grows, after a kill, and over several runs in one file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_byzantine.report.records import Malformed, Record, ReportError, Run, Step, Verdict, parse

EVENTS = "events.jsonl"

_START = b'{"schema"'


@dataclass
class Segment:
    """From a start or a resumption to the next. Steps by number."""

    run: Run
    steps: dict[int, Step] = field(default_factory=dict)


@dataclass
class Story:
    """The last run of a file, with all its resumptions.

    Args:
        segments: in order; a resumption at step k takes the steps from k on out of the earlier ones.
        verdicts: each with the segment in which it was given: after a resumption with another number of replicas an
            index may stand for another machine. They stay although their steps were done again.
        earlier_runs: runs in the same file before this one.
        redone: steps that were done again after a resumption.
        unreadable: lines that are no records, e.g. torn by a kill.
    """

    segments: list[Segment] = field(default_factory=list)
    verdicts: list[tuple[Verdict, Segment]] = field(default_factory=list)
    earlier_runs: int = 0
    redone: int = 0
    unreadable: int = 0

    def add(self, record: Record) -> None:
        """Take in the next record of the file."""
        if isinstance(record, Run):
            self._begin(record)
            return
        if not self.segments:  # the head of the file is lost
            self.segments.append(Segment(Run(replicas=_replicas_in(record))))
        if isinstance(record, Step):
            self.segments[-1].steps[record.step] = record
        else:
            self.verdicts.append((record, self.segments[-1]))

    def _begin(self, run: Run) -> None:
        if run.step == 0:
            self.earlier_runs += bool(self.verdicts or any(s.steps for s in self.segments))
            self.segments, self.verdicts, self.redone = [], [], 0
        for segment in self.segments:
            again = [step for step in segment.steps if step >= run.step]
            for step in again:
                del segment.steps[step]
            self.redone += len(again)
        self.segments.append(Segment(run))


class Reader:
    """Reads a file of events as far as it is written.

    Args:
        path: events.jsonl.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.story = Story()
        self._offset = 0
        self._file: tuple[int, int] | None = None

    def poll(self) -> bool:
        """Take in the complete lines that were added since the last call; start over if the file was replaced.

        Returns:
            Whether there was anything new.

        Raises:
            ReportError: a line is of a newer schema.
            OSError: the file cannot be read.
        """
        before = self._offset
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._file or status.st_size < self._offset:
                replaced = self._file is not None
                self.story, self._offset, self._file = Story(), 0, identity
                before = -1 if replaced else 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # being written, or torn
                self._offset += len(line)
                self._take(line)
        return self._offset != before

    def _take(self, line: bytes) -> None:
        try:
            record = parse(_decoded(line))
        except Malformed:
            self.story.unreadable += 1
            again = line.rfind(_START)
            if again > 0:  # a line torn by a kill runs into the first one of the resumption
                self._take(line[again:])
            return
        if record is not None:
            self.story.add(record)


def find(where: str | os.PathLike[str]) -> Path:
    """The file of events of a run.

    Args:
        where: the file itself, or the folder that `monitor.dir` named.

    Raises:
        ReportError: there is none; the message says where there are some.
    """
    path = Path(where)
    if not path.is_dir():
        if path.is_file():
            return path
        raise ReportError(f"{path}: no such file or folder. Name the folder that monitor.dir in the section names.")
    if (path / EVENTS).is_file():
        return path / EVENTS
    near = sorted(str(p.parent) for depth in ("*", "*/*") for p in path.glob(f"{depth}/{EVENTS}"))[:8]
    hint = f"There are some in: {', '.join(near)}." if near else "Rank 0 writes it when the rule takes effect."
    raise ReportError(f"{path}: no {EVENTS} in this folder. {hint}")


def read(where: str | os.PathLike[str]) -> Story:
    """All that is in a file of events, or in the folder of a run.

    Raises:
        ReportError: there is no such file, or it is of a newer schema.
    """
    reader = Reader(find(where))
    reader.poll()
    return reader.story


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from None


def _replicas_in(record: Step | Verdict) -> int:
    if isinstance(record, Step):
        return max(1, len(record.distances), len(record.norms))
    return record.replica + 1
