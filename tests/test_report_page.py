"""The HTML page, the terminal view and the pictures."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_events import Job, events, run_event, write
from rich.console import Console

from ds_byzantine.monitor.events import EventLog, RunEvent
from ds_byzantine.report import page, png, terminal, words
from ds_byzantine.report.charts import Axis, charts, heat_map
from ds_byzantine.report.model import Summary, summarize
from ds_byzantine.report.read import Story, read
from ds_byzantine.report.records import ReportError, clean

JOBS = {
    "healthy": Job(),
    "bad": Job(bad=4),
    "quarantine": Job(bad=4, action="quarantine", products_every=10),
    "nonfinite": Job(bad=2, nonfinite=True),
    "one": Job(replicas=1, f=0),
    "two": Job(replicas=2, f=0),
    "many": Job(replicas=64, steps=40, bad=37, start=20, f=8),
    "one step": Job(steps=1),
    "drill": Job(bad=4, drill="sign_flip on replica 4 from step 30"),
    "noisy": Job(noise=30.0),
}
HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e{{7*7}}[bold]$\\frac$"


class Page(HTMLParser):
    """Tags, attributes and text of a page; checks that tags are closed in order."""

    VOID = frozenset({"meta", "link", "img", "br", "hr", "input", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID or (tag == "path" and not self.get_starttag_text().endswith("/>")):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def summary(folder: Path, job: Job) -> Summary:
    write(folder, job)
    return summarize(read(folder), "runs/mine")


def shown(made: Summary, width: int = 100, *, unicode: bool = True) -> str:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(terminal.view(made, width, unicode=unicode))
    return captured.get()


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_page_stands_alone(tmp_path: Path, job: Job) -> None:
    text = page.render(summary(tmp_path, job))
    found = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "form", "a", "image", "use"} & set(found.tags)
    assert not [
        one for one in found.attributes if one[1] in ("src", "href", "srcset", "data") or one[1].startswith("on")
    ]
    assert not re.search(r"https?:|url\(|@import|javascript:", text)
    assert "nan" not in "".join(v or "" for _, name, v in found.attributes if name in ("d", "style")).lower()
    assert "None" not in found.text


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_paths_stay_in_the_drawing_area(tmp_path: Path, job: Job) -> None:
    found = Page(page.render(summary(tmp_path, job)))
    for _, name, value in found.attributes:
        if name == "d":
            assert re.fullmatch(r"[MLHVhvz0-9. ]+", value or "")
        if name == "style" and "%" in (value or ""):
            assert -1 <= float(re.findall(r":(-?[\d.]+)%", value or "")[0]) <= 100


def test_the_verdict_comes_first_in_plain_words(tmp_path: Path) -> None:
    made = summary(tmp_path, JOBS["bad"])
    text = Page(page.render(made)).text
    assert "Replica 4 is named as bad" in text
    assert "rank 4 on host node-00" in text
    assert words.one_in(made.cases[0].log10_chance or 0.0) in text
    order = [text.index(part) for part in ("is named as bad", "What to do now", "Evidence against", "What it cost")]
    assert order == sorted(order)
    assert "What this does not prove" in text


def test_a_healthy_run_accuses_nobody(tmp_path: Path) -> None:
    made = summary(tmp_path, JOBS["healthy"])
    text = Page(page.render(made)).text
    assert "No replica is named" in text
    assert "Take rank" not in text
    assert "That all replicas are healthy" in text


def test_the_most_suspicious_replica_is_told_with_how_far_the_evidence_is(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write(run_event(Job()))
    for event in events(Job(steps=6)):
        log.write(replace(event, evidence={"outlying": [0.0, 1.5, 0.0, 0.0, 0.2]}))  # type: ignore[arg-type]
    made = summarize(read(tmp_path))
    (sentence, _) = words.lead(made)
    assert sentence.startswith("The most suspicious is replica 1 (rank 1 on host node-00)")
    assert words.percent(1.5 / (made.bound or 1.0)) in sentence


def test_nobody_is_sent_to_a_machine_because_of_a_drill(tmp_path: Path) -> None:
    made = summary(tmp_path, JOBS["drill"])
    todo = words.what_to_do(made)
    assert "No machine has to be drained" in todo[0]
    assert not any("Take rank" in one for one in todo)
    assert "Drill: sign_flip" in Page(page.render(made)).text


def test_more_named_than_the_rule_tolerates(tmp_path: Path) -> None:
    made = summary(tmp_path, replace(JOBS["bad"], f=0))
    assert any(
        "the weights are in doubt. Go back to a checkpoint from before step 30" in s for s in words.what_to_do(made)
    )


def test_noise_above_signal_is_told(tmp_path: Path) -> None:
    todo = words.what_to_do(summary(tmp_path, JOBS["noisy"]))
    assert any("Raise the local batch" in one for one in todo)


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    base = run_event(Job())
    hosts = {str(i): [HOSTILE] for i in range(5)}
    log.write(RunEvent(**{**vars(base), "rule": HOSTILE, "hosts": hosts, "drill": HOSTILE, "parallel": HOSTILE}))
    for event in events(Job(bad=4)):
        log.write(replace(event, hosts=[HOSTILE], why=HOSTILE) if hasattr(event, "hosts") else event)  # type: ignore[call-arg]
    made = summarize(read(tmp_path), clean(HOSTILE))
    html, text = page.render(made), shown(made)
    assert "script" not in Page(html).tags
    assert "<script>alert(1)</script>" in Page(html).text
    assert "{{7*7}}" in Page(html).text
    for out in (html, text):
        assert "\x1b" not in out
        assert "\u202e" not in out
    assert "[bold]" in text
    assert png.write(made, tmp_path / "png")


def test_many_replicas_over_many_steps_stay_small(tmp_path: Path) -> None:
    made = summary(tmp_path, replace(JOBS["many"], steps=1500, products_every=50))
    text = page.render(made)
    assert len(text) < 1_500_000
    heat = heat_map(made)
    assert heat is not None
    assert len(heat.rows) == 64
    assert (37, 1) in heat.rows


def test_of_more_rows_than_fit_the_worst_are_kept(tmp_path: Path) -> None:
    made = summary(tmp_path, Job(replicas=100, steps=12, bad=93, start=2, f=3))
    heat = heat_map(made)
    assert heat is not None
    assert (len(heat.rows), heat.left_out) == (64, 36)
    assert 93 in [replica for replica, _ in heat.rows]
    assert "36 are left out" in Page(page.render(made)).text


def test_no_events_yet() -> None:
    made = summarize(Story())
    assert "No step has been written yet" in Page(page.render(made)).text
    assert "No step has been written yet" in shown(made)


def test_writing_replaces_the_page_at_once_and_asks_for_a_reload_only_while_watching(tmp_path: Path) -> None:
    made = summary(tmp_path, JOBS["bad"])
    target = tmp_path / "new" / "report.html"
    page.write(made, target, refresh=5)
    assert 'http-equiv="refresh" content="5"' in target.read_text(encoding="utf-8")
    page.write(made, target)
    assert 'http-equiv="refresh"' not in target.read_text(encoding="utf-8")
    assert [p.name for p in target.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("width", [40, 100])
def test_terminal(tmp_path: Path, job: Job, width: int) -> None:
    made = summary(tmp_path, job)
    out = shown(made, width)
    assert max(map(len, out.splitlines())) <= width
    assert words.headline(made).split()[0] in out


def test_terminal_in_ascii(tmp_path: Path) -> None:
    rows = [line for line in shown(summary(tmp_path, JOBS["bad"]), unicode=False).splitlines() if line.strip()]
    heat = [line for line in rows if re.match(r" {8}[0-4]  ", line)]
    assert len(heat) == 5
    assert all(line.isascii() for line in heat)
    assert heat[4].rstrip().endswith("#" * 25)


def test_pictures(tmp_path: Path) -> None:
    made = summary(tmp_path, JOBS["bad"])
    files = png.write(made, tmp_path / "png")
    assert {f.stem for f in files} == {*charts(made), "farthest"}
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)


def test_pictures_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"ds_byzantine\[report\]"):
        png.write(summary(tmp_path, JOBS["healthy"]), tmp_path / "png")


@pytest.mark.parametrize(
    ("low", "high", "log"),
    [(0, 0, False), (0, 1e-9, False), (-3, 1e12, False), (1e-200, 1e200, True), (1.0, 1.1, True), (3, 3, True)],
)
def test_axes_have_some_ticks_within(low: float, high: float, log: bool) -> None:
    axis = Axis(low, high, log=log)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 8
    assert all(low - 1e-9 <= t <= high * 1.000001 + 1e-9 for t in ticks)
    assert all(0 <= axis.at(t) <= 100 for t in ticks)
