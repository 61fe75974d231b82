"""What every rule and pre-aggregation is called, needs and accepts. Plain data: importing it does not import torch.

The functions themselves live beside this file and are looked up by name (`base.py`); the config models, the plan and
the documentation read this table, so that a rule is described in one place only.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ds_byzantine.errors import ConfigError

MOST_SUBSETS = 200_000  # that a rule may search


class Kind(Enum):
    """How a rule meets the data (rules.md calls them S, G and G->S)."""

    COORDINATE = "coordinate"  # rows_ND -> D, each coordinate on its own
    GRAM = "gram"  # Geometry -> one point: weights from inner products alone
    GRAM_COORDINATE = "gram_coordinate"  # Geometry -> K points, then coordinate-wise over them
    PRE = "pre"  # Geometry -> Geometry, before a rule


@dataclass(frozen=True)
class Param:
    """One parameter of a rule: the keyword-only argument of its function with the same name."""

    name: str
    type: type
    default: Any
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False
    choices: tuple[str, ...] = ()
    whole: tuple[int, int] | None = None  # besides the choices, any whole number between these two


@dataclass(frozen=True)
class RuleInfo:
    """Facts about a rule: `needs = (a, b)` means that it holds for n >= a f + b rows."""

    name: str
    kind: Kind
    needs: tuple[int, int]
    summary: str
    reference: str
    params: tuple[Param, ...] = ()
    searches_subsets: bool = False  # enumerates all (n-f)-subsets
    stochastic: bool = False  # takes `generator`, a torch.Generator seeded alike on every rank
    tolerates_faults: bool = True  # False: only for f = 0
    needs_when: tuple[str, Any, tuple[int, int]] | None = None  # (parameter, value, needs): the bound of a variant
    rows_per_point: str = ""  # parameter that says how many rows a pre merges into one point

    def variant(self, params: Mapping[str, Any]) -> RuleInfo:
        """This entry with the bound that holds for `params` (validated or as given)."""
        if self.needs_when is None or params.get(self.needs_when[0]) != self.needs_when[1]:
            return self
        return replace(self, needs=self.needs_when[2], needs_when=None)

    def points_after(self, n: int, params: Mapping[str, Any]) -> int:
        """Points that a pre makes of n rows; what follows has to be feasible with so many, and the same f."""
        return -(-n // int(params[self.rows_per_point])) if self.rows_per_point else n

    def least_replicas(self, f: int) -> int:
        """Fewest rows with which the rule tolerates f bad ones."""
        return max(1, self.needs[0] * f + self.needs[1])

    @property
    def bound(self) -> str:
        """The bound as text, for messages: "2f+3"."""
        a, b = self.needs
        return (f"{a}f" if a > 1 else "f") + (f"+{b}" if b else "") if a else str(b)

    def most_faulty(self, n: int) -> int:
        """Largest f that the rule tolerates with n rows; -1 if it cannot run with n rows at all."""
        if n < self.least_replicas(0):
            return -1
        if not self.tolerates_faults:
            return 0
        if self.needs[0] == 0:
            return n - 1
        return (n - self.needs[1]) // self.needs[0]

    def check_params(self, given: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Validated parameters, defaults filled in.

        Raises:
            ConfigError: an unknown name (the nearest known one is suggested), a wrong type or a value out of range.
        """
        known = {p.name: p for p in self.params}
        for name in given:
            if name not in known:
                raise ConfigError(_unknown(f"{path}.{name}", name, list(known), f"parameter of {self.name}"))
        return {name: _checked(p, given.get(name, p.default), f"{path}.{name}") for name, p in known.items()}


def _unknown(path: str, name: str, known: list[str], what: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    listed = ", ".join(known) if known else "none"
    return f"{path}: no such {what}.{hint} Known: {listed}."


def _checked(param: Param, value: Any, path: str) -> Any:
    if value is None and param.default is None:
        return None
    if param.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if param.whole is not None and type(value) is int and param.whole[0] <= value <= param.whole[1]:
        return value
    if not isinstance(value, param.type) or (isinstance(value, bool) and param.type is not bool):
        kind = param.type.__name__ + (" or a whole number from {} to {}".format(*param.whole) if param.whole else "")
        raise ConfigError(f"{path}: got {value!r}, but this is a {kind}. {param.doc}")
    if param.choices and value not in param.choices:
        raise ConfigError(f"{path}: got {value!r}. Use one of: {', '.join(param.choices)}.")
    low, high, got = param.minimum, param.maximum, float(value) if isinstance(value, (int, float)) else 0.0
    too_low = low is not None and (got <= low if param.exclusive_minimum else got < low)
    if too_low or (high is not None and got > high) or not math.isfinite(got):
        span = f"{'>' if param.exclusive_minimum else '>='} {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{path}: got {value!r}, but it has to be {span}. {param.doc}")
    return value


RULES: dict[str, RuleInfo] = {}
PRES: dict[str, RuleInfo] = {}


def lookup(name: str, path: str = "byzantine.rule", *, pre: bool = False) -> RuleInfo:
    """The entry called `name`.

    Raises:
        ConfigError: there is none; the message suggests the nearest name.
    """
    table = PRES if pre else RULES
    if name not in table:
        raise ConfigError(_unknown(path, name, sorted(table), "pre-aggregation" if pre else "rule"))
    return table[name]


def add(info: RuleInfo) -> RuleInfo:
    """Enter a rule into the table. Raises ConfigError if the name is taken."""
    table = PRES if info.kind is Kind.PRE else RULES
    if info.name in table:
        raise ConfigError(f'rule "{info.name}": the name is taken. Choose another one, e.g. "my_{info.name}".')
    table[info.name] = info
    return info


# --- the built-in rules ------------------------------------------------------------------------------------------

_NEIGHBORS = Param(
    "neighbors",
    str,
    "n-f-2",
    'How many nearest others a score sums over: "n-f-2" (the paper) or "n-f-1" (ByzFL).',
    choices=("n-f-2", "n-f-1"),
)
_VARIANT = ("neighbors", "n-f-1", (2, 1))  # kappa <= 6 (n-f)/(n-2f), docs/caf_gated.md


def _iterations(default: int, doc: str) -> Param:
    return Param("iterations", int, default, doc, minimum=1, maximum=1000)


for _info in (
    RuleInfo(
        "mean",
        Kind.COORDINATE,
        (0, 1),
        "The plain mean: no protection, only for f = 0.",
        "-",
        tolerates_faults=False,
    ),
    RuleInfo(
        "median",
        Kind.COORDINATE,
        (2, 1),
        "Coordinate-wise median; for even n the mean of the two middle values.",
        "Yin et al. 2018",
    ),
    RuleInfo(
        "trimmed_mean",
        Kind.COORDINATE,
        (2, 1),
        "Per coordinate, the mean without the f smallest and the f largest values.",
        "Yin et al. 2018",
    ),
    RuleInfo(
        "meamed",
        Kind.COORDINATE,
        (2, 1),
        "Per coordinate, the mean of the n-f values nearest the median.",
        "Xie et al. 2018",
    ),
    RuleInfo(
        "phocas",
        Kind.COORDINATE,
        (2, 1),
        "Per coordinate, the mean of the n-f values nearest the trimmed mean.",
        "Xie et al. 2018",
    ),
    RuleInfo(
        "sign_majority",
        Kind.COORDINATE,
        (2, 1),
        "Per coordinate, the sign that most rows have, times the median magnitude of the rows.",
        "Bernstein et al. 2019",
        (
            Param(
                "scale",
                str,
                "median",
                'Magnitude: "median" (of the rows, per coordinate) or "one" (plain -1, 0, 1).',
                choices=("median", "one"),
            ),
        ),
    ),
    RuleInfo(
        "krum",
        Kind.GRAM,
        (2, 3),
        "The row with the least sum of squared distances to its nearest others. Has 7-15 times the mean's variance.",
        "Blanchard et al. 2017",
        (_NEIGHBORS,),
        needs_when=_VARIANT,
    ),
    RuleInfo(
        "multi_krum",
        Kind.GRAM,
        (2, 3),
        "The mean of the m rows with the lowest Krum scores.",
        "Blanchard et al. 2017",
        (_NEIGHBORS, Param("m", int, 0, "Rows to average, at most n-f; 0 stands for n-f.", minimum=0)),
        needs_when=_VARIANT,
    ),
    RuleInfo(
        "bulyan",
        Kind.GRAM_COORDINATE,
        (4, 3),
        "n-2f rows picked by iterated Krum; per coordinate the mean of the n-4f picks nearest their median.",
        "El Mhamdi et al. 2018",
        (_NEIGHBORS,),
    ),
    RuleInfo(
        "mda",
        Kind.GRAM,
        (2, 1),
        "The mean of the (n-f)-subset of least diameter.",
        "Rousseeuw 1985; El Mhamdi et al. 2021",
        searches_subsets=True,
    ),
    RuleInfo(
        "min_variance",
        Kind.GRAM,
        (2, 1),
        "The mean of the (n-f)-subset of least variance.",
        "El Mhamdi et al. 2021; Allouah et al. 2023",
        searches_subsets=True,
    ),
    RuleInfo(
        "smea",
        Kind.GRAM,
        (2, 1),
        "The mean of the (n-f)-subset whose covariance has the least top eigenvalue.",
        "Allouah et al. 2023 (SMEA)",
        searches_subsets=True,
    ),
    RuleInfo(
        "caf",
        Kind.GRAM,
        (2, 1),
        "Covariance-bound agnostic filter: weights shrink along the top eigenvector; the mean of least variance wins.",
        "Allouah et al. 2025",
    ),
    RuleInfo(
        "caf_gated",
        Kind.GRAM,
        (2, 1),
        "caf that stops as soon as no direction stands out: the top eigenvalue is at most psi times the median one.",
        "Allouah et al. 2025; docs/caf_gated.md",
        (Param("psi", float, 3.0, "How far the top eigenvalue may stand out.", minimum=1.0),),
    ),
    RuleInfo(
        "geometric_median",
        Kind.GRAM,
        (2, 1),
        "The point with the least sum of distances to the rows, by smoothed Weiszfeld steps.",
        "Weiszfeld 1937; Pillutla et al. 2019",
        (
            Param("nu", float, 0.0, "Smoothing distance; 0: 1e-6 x the median distance to the start.", minimum=0),
            _iterations(16, "Weiszfeld steps."),
            Param(
                "start",
                str,
                "median",
                'Where to start: "median" of the block (safe), "mean" or "zero" (as in other libraries).',
                choices=("median", "mean", "zero"),
            ),
        ),
    ),
    RuleInfo(
        "centered_clip",
        Kind.GRAM,
        (2, 1),
        "Steps from the block's median to the mean of the rows' offsets, each clipped to length tau.",
        "Karimireddy et al. 2021",
        (
            Param("tau", float, 0.0, "Clipping radius; 0 stands for factor x the rows' median distance.", minimum=0),
            _iterations(5, "Clipping steps."),
            Param("factor", float, 1.5, "Adaptive radius over the median distance.", minimum=0, exclusive_minimum=True),
        ),
    ),
    RuleInfo(
        "cge",
        Kind.GRAM,
        (2, 1),
        "The mean of the n-f rows of smallest norm. Blind to attacks of small norm.",
        "Gupta et al. 2021",
    ),
    RuleInfo(
        "dnc",
        Kind.GRAM,
        (2, 1),
        "Divide and conquer: drops the rows that lie farthest out on the top singular direction.",
        "Shejwalkar and Houmansadr 2021",
        (
            _iterations(3, "Rounds over which the drops are spread; each recomputes the direction over what is left."),
            Param("factor", float, 1.0, "Drops factor x f rows in all.", minimum=1.0),
        ),
    ),
    RuleInfo(
        "nnm",
        Kind.PRE,
        (2, 1),
        "Nearest-neighbour mixing: each row becomes the mean of its n-f nearest rows, itself included.",
        "Allouah et al. 2023",
    ),
    RuleInfo(
        "bucketing",
        Kind.PRE,
        (0, 1),
        "The means of buckets of rows, dealt out by a random permutation that all ranks share.",
        "Karimireddy et al. 2022",
        (Param("size", int, 2, "Rows in a bucket, s; the rule has to hold for ceil(n/s) points.", minimum=1),),
        stochastic=True,
        rows_per_point="size",
    ),
    RuleInfo(
        "arc",
        Kind.PRE,
        (2, 1),
        "Adaptive clipping: the floor(2f(n-f)/n) largest norms are cut to the next largest.",
        "Allouah et al. 2024",
    ),
    RuleInfo(
        "clip",
        Kind.PRE,
        (0, 1),
        "Rows longer than a fixed norm are cut to it.",
        "-",
        (Param("norm", float, 1.0, "The longest norm of a row, per block.", minimum=0, exclusive_minimum=True),),
    ),
):
    add(_info)
