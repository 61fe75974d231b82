"""What makes a host unfit to be patched, and that patching an instance can be undone."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ds_byzantine.adapters._patch import TRUST_ENVIRONMENT, Bindings, PatchPoint, digest_of, innermost, verify
from ds_byzantine.adapters.deepspeed import points
from ds_byzantine.errors import HostStateError, UnsupportedHostError

Load = Callable[[str], ModuleType]

HOST = """
class Engine:
    def reduce(self, bucket, size=3):
        total = bucket * size  # a comment
        return total
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Write source to a module `host` of its own and import it."""
    count = 0

    def import_source(source: str) -> ModuleType:
        nonlocal count
        count += 1
        path = tmp_path / f"host{count}.py"  # a new file each time: inspect caches lines by path
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("thrown_away_host", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "thrown_away_host", module)
        spec.loader.exec_module(module)
        return module

    return import_source


def point(module: ModuleType, name: str = "reduce", versions: str = ">=1.0,<2") -> PatchPoint:
    """A patch point that accepts `Engine.reduce` as the module has it now."""
    digests = frozenset({digest_of(module.Engine.reduce)})
    return PatchPoint("thrown_away_host", "Engine", name, (("bucket", "size"),), digests, versions, "reduces")


def test_nothing_is_wrong_with_the_host_that_was_examined(load: Load) -> None:
    assert point(load(HOST)).problem("1.5") is None


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("class Engine", "class Motor", "does not exist"),
        ("def reduce(", "def other(", "does not exist"),
        ("size=3", "size=3, group=None", "takes (bucket, size, group)"),
        ("bucket, size=3", "size, bucket=3", "takes (size, bucket)"),
        ("bucket * size", "bucket + size", "never examined"),
        ("size=3", "size=4", "never examined"),
        ("total = bucket * size", "total = bucket * size; self.x = 1", "never examined"),
    ],
)
def test_a_changed_host_is_a_problem(load: Load, before: str, after: str, said: str) -> None:
    known = point(load(HOST))
    load(HOST.replace(before, after))
    problem = known.problem("1.5")
    assert problem is not None
    assert said in problem
    assert "thrown_away_host.Engine.reduce" in problem


def test_a_missing_module_is_not_passed_over(load: Load) -> None:
    known = point(load(HOST))
    del sys.modules["thrown_away_host"]
    with pytest.raises(ModuleNotFoundError):
        known.problem("1.5")


@pytest.mark.parametrize(
    ("version", "asked"),
    [("1.0", True), ("1.9.3", True), ("1.5+cpu", True), ("1.5.dev3", True), ("0.9", False), ("2.0", False)],
)
def test_versions_without_the_point_are_not_asked_for_it(load: Load, version: str, asked: bool) -> None:
    absent = point(load(HOST), name="vanished")
    assert (absent.problem(version) is not None) is asked


def test_several_signatures_and_bodies_may_be_known(load: Load) -> None:
    old, new = load(HOST), HOST.replace("size=3", "size=3, log=None")
    known = point(old)
    both = PatchPoint(
        known.module,
        known.owner,
        known.name,
        (*known.parameters, ("bucket", "size", "log")),
        known.digests | {digest_of(load(new).Engine.reduce)},
        known.versions,
        known.why,
    )
    assert both.problem("1.5") is None
    load(HOST)
    assert both.problem("1.5") is None


@pytest.mark.parametrize(
    "same",
    [
        HOST.replace("# a comment", "# another, longer comment"),
        HOST.replace("  # a comment", ""),
        HOST.replace("        total", "\n        # said above\n\n        total"),
        HOST.replace("bucket * size", "bucket*size"),
        HOST.replace("bucket, size=3", "bucket,\n               size=3"),
        HOST.replace("class Engine:\n", "class Engine:\n    other = 1\n\n"),
    ],
)
def test_digest_ignores_comments_and_layout(load: Load, same: str) -> None:
    assert digest_of(load(HOST).Engine.reduce) == digest_of(load(same).Engine.reduce)


def test_digest_tells_strings_and_names_apart(load: Load) -> None:
    digests = {
        digest_of(load(HOST.replace("return total", line)).Engine.reduce)
        for line in ("return total", "return 'total'", "return 'to tal'", "return bucket", "return")
    }
    assert len(digests) == 5


DECORATED = """
import functools

def marker(func):  # does not use functools.wraps, like DeepSpeed's nvtx marker
    def wrapped(*args, **kwargs):
        return func(*args, **kwargs)
    return wrapped

def polite(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapped

class Engine:
    @polite
    @marker
    def reduce(self, bucket, size=3):
        total = bucket * size
        return total

    @staticmethod
    def plain(bucket):
        return bucket
"""


def test_the_function_under_its_decorators_is_looked_at(load: Load) -> None:
    module = load(DECORATED)
    assert innermost(module.Engine.reduce).__name__ == "reduce"
    known = point(module)
    assert known.problem("1.5") is None
    load(DECORATED.replace("bucket * size", "bucket - size"))
    assert "never examined" in str(known.problem("1.5"))


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_accepts_what_was_examined(load: Load) -> None:
    verify([point(load(HOST))], "1.5", ">=1.0,<2")


def test_verify_names_the_versions_that_were_checked(load: Load) -> None:
    with pytest.raises(UnsupportedHostError, match=r'DeepSpeed 2\.1 is not supported.*>=1\.0,<2.*"enabled": false'):
        verify([point(load(HOST))], "2.1", ">=1.0,<2")


def test_verify_lists_all_that_differs(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRUST_ENVIRONMENT, raising=False)
    known = point(load(HOST))
    load(HOST.replace("bucket * size", "bucket + size"))
    with pytest.raises(UnsupportedHostError) as caught:
        verify([known, point(load(HOST), name="vanished"), known], "1.5", ">=1.0,<2")
    text = str(caught.value)
    assert "vanished does not exist, but it is where DeepSpeed 1.5 reduces" in text
    assert TRUST_ENVIRONMENT in text


def test_trust_lets_unknown_bodies_through_and_nothing_else(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    known = point(load(HOST))
    load(HOST.replace("bucket * size", "bucket + size"))
    monkeypatch.setenv(TRUST_ENVIRONMENT, "0")
    with pytest.raises(UnsupportedHostError, match="never examined"):
        verify([known], "1.5", ">=1.0,<2")
    monkeypatch.setenv(TRUST_ENVIRONMENT, "1")
    verify([known], "1.5", ">=1.0,<2")
    with pytest.raises(UnsupportedHostError, match="not supported"):
        verify([known], "2.0", ">=1.0,<2")
    for changed in (HOST.replace("size=3", "size, more"), HOST.replace("def reduce(", "def other(")):
        load(changed)
        with pytest.raises(UnsupportedHostError, match=r"takes|does not exist"):
            verify([known], "1.5", ">=1.0,<2")


# -- bindings ---------------------------------------------------------------------------------------------------------


class Host:
    def step(self) -> str:
        return "host"


def test_bind_and_undo_a_method() -> None:
    one, other, bindings = Host(), Host(), Bindings()
    bindings.bind(one, "step", lambda: "bound")
    assert (one.step(), other.step()) == ("bound", "host")
    bindings.undo()
    assert one.step() == "host"
    assert vars(one) == {}
    bindings.undo()
    assert one.step() == "host"


def test_undo_restores_an_attribute_of_the_instance() -> None:
    host, bindings = SimpleNamespace(step=1), Bindings()
    bindings.bind(host, "step", 2)
    bindings.bind(host, "step", 3)
    assert host.step == 3
    bindings.undo()
    assert host.step == 1


def test_undo_after_the_host_removed_the_name() -> None:
    host, bindings = Host(), Bindings()
    bindings.bind(host, "step", lambda: "bound")
    del host.step
    bindings.undo()
    assert host.step() == "host"


def test_a_name_that_the_host_does_not_have_is_not_made_up() -> None:
    host, bindings = Host(), Bindings()
    with pytest.raises(HostStateError, match="Host has no reduce"):
        bindings.bind(host, "reduce", lambda: None)
    assert vars(host) == {}


# -- the DeepSpeed that is installed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("patched", points.ALL_POINTS, ids=lambda p: p.name)
def test_the_installed_deepspeed_was_examined(patched: PatchPoint) -> None:
    deepspeed = pytest.importorskip("deepspeed")
    assert patched.problem(deepspeed.__version__) is None
    assert patched.resolve() is not None
    assert digest_of(patched.resolve()) in patched.digests  # type: ignore[arg-type]


def test_every_body_belongs_to_a_point() -> None:
    assert {p.name for p in points.ALL_POINTS} == set(points.BODIES)
