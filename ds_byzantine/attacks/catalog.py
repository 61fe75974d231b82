"""What every attack is called, needs and accepts. Plain data: importing it does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from ds_byzantine.errors import ConfigError
from ds_byzantine.rules.catalog import Kind, Param, RuleInfo

Conflict = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class AttackSpec:
    """Facts about an attack; its function has the same name, and the parameters as keyword-only arguments."""

    name: str
    summary: str
    reference: str
    params: tuple[Param, ...] = ()
    needs_honest: bool = False  # colluding: computed from the honest rows, which the attackers know
    remembers: bool = False  # has to see the good steps as well
    names_replica: str = ""  # parameter that names an honest replica
    conflict: Conflict | None = None  # "<parameter>: <problem>" if the parameters do not fit together, else ""

    def check_params(self, given: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Validated parameters, defaults filled in. Raises ConfigError as for the parameters of a rule."""
        as_rule = RuleInfo(self.name, Kind.PRE, (0, 1), self.summary, self.reference, self.params)
        params = as_rule.check_params(given, path)
        problem = self.conflict(params) if self.conflict is not None else ""
        if problem:
            raise ConfigError(f"{path}.{problem}")
        return params


def z_max(n: int, f: int) -> float:
    """Largest z for which f rows at mean - z sigma still look nearer the mean than enough honest ones; never below 0.

    Args:
        n: all rows.
        f: colluding rows among them, f < n.

    Returns:
        The standard normal quantile of (n - f - s) / (n - f), s = floor(n/2 + 1) - f. It is 0 for
        small n such as n = 5, f = 1 (the attack then sends the honest mean, which harms nobody): give z there.

    Example:
        >>> round(z_max(50, 24), 4)
        1.4261
        >>> z_max(5, 1)
        0.0

    Reference:
        Baruch, Baruch and Goldberg (2019), "A Little Is Enough", algorithm 3.
    """
    honest = n - f
    supporters = n // 2 + 1 - f
    share = (honest - supporters) / honest
    if share <= 0.5:
        return 0.0
    return NormalDist().inv_cdf(min(share, 1.0 - 1e-12))


def _too_few_bits(params: Mapping[str, Any]) -> str:
    bits, where = params["bits"], params["where"]
    if bits > 1 and (where == "sign" or isinstance(where, int)):
        return f'bits: got {bits}, but where={where!r} is one bit. Use 1, or where="any".'
    return ""


def _no_such_lane(params: Mapping[str, Any]) -> str:
    lane, period = params["lane"], params["period"]
    if lane is not None and lane >= period:
        return f"lane: got {lane}, but with period={period} there are lanes 0 to {period - 1}."
    return ""


def _rows_overlap(params: Mapping[str, Any]) -> str:
    cols, pitch = params["cols"], params["pitch"]
    return f"cols: got {cols}, but rows of the tile are pitch={pitch} apart. Use at most that." if cols > pitch else ""


_BUCKET = Param(
    "bucket", int, None, "The only bucket of a step that is spoiled, from 0; left out: all of them.", minimum=0
)
_INTERMITTENT = (
    Param("probability", float, 1.0, "Of a step in which it happens.", minimum=0.0, maximum=1.0),
    _BUCKET,
)
_WHERE = Param(
    "where",
    str,
    "exponent",
    "Which bits of a word: exponent, mantissa, sign, any, or the number of one bit, 0 for the lowest.",
    choices=("exponent", "mantissa", "sign", "any"),
    whole=(0, 63),
)
_PERTURBATION = Param(
    "perturbation",
    str,
    "std",
    "Direction off the mean: std (-sigma per coordinate), unit (-mean / norm) or sign (-sign of the mean).",
    choices=("std", "unit", "sign"),
)
_TRIES = Param("tries", int, 16, "How often the rule is run at most, for each block.", minimum=1, maximum=1000)


def _most(default: float, what: str) -> Param:
    return Param("most", float, default, f"Largest {what} that is tried.", minimum=0.0, exclusive_minimum=True)


def _factor(default: float, doc: str = "Size relative to the true gradient; may be negative.") -> Param:
    return Param("factor", float, default, doc)


def _count(name: str, default: int, doc: str, maximum: int | None = None) -> Param:
    return Param(name, int, default, doc, minimum=1, maximum=maximum)


ATTACKS: dict[str, AttackSpec] = {
    spec.name: spec
    for spec in (
        AttackSpec(
            "sign_flip",
            "The own gradient with the opposite sign, times factor.",
            "Li et al. (2019), RSA",
            (Param("factor", float, 1.0, "Size of the flipped gradient relative to the true one.", minimum=0.0),),
        ),
        AttackSpec(
            "scale",
            "The own gradient times factor, as after a wrong loss scale or a flipped exponent bit.",
            "Blanchard et al. (2017)",
            (Param("factor", float, 100.0, "What the gradient is multiplied by; may be negative."),),
        ),
        AttackSpec("zero", "Nothing but zeros, as from a replica that lost its batch.", "Li et al. (2019), RSA"),
        AttackSpec(
            "nan",
            "Every element is NaN or Inf.",
            "IEEE 754; the few silent corruptions that are easy to see",
            (Param("kind", str, "nan", "What fills the gradient.", choices=("nan", "inf")),),
        ),
        AttackSpec(
            "gaussian",
            "Gaussian noise in place of the gradient.",
            "Blanchard et al. (2017)",
            (
                Param(
                    "sigma",
                    float,
                    1.0,
                    "Standard deviation of the noise; see relative.",
                    minimum=0.0,
                ),
                Param("relative", bool, True, "true: sigma counts in root mean squares of the own gradient."),
            ),
        ),
        AttackSpec(
            "alie",
            "A little is enough: mean - z sigma of the honest gradients, per coordinate.",
            "Baruch, Baruch and Goldberg (2019)",
            (
                Param(
                    "z",
                    float,
                    None,
                    "Standard deviations off the mean; left out: the largest that hides among n rows, 0 for small n.",
                ),
            ),
            needs_honest=True,
        ),
        AttackSpec(
            "ipm",
            "Inner product manipulation: -epsilon times the mean of the honest gradients.",
            "Xie, Koyejo and Gupta (2019), Fall of Empires",
            (Param("epsilon", float, 0.5, "Size relative to the honest mean.", minimum=0.0),),
            needs_honest=True,
        ),
        AttackSpec(
            "concentrated",
            "The true gradient except in one run of coordinates, the same in every step, which is taken times factor.",
            "El Mhamdi, Guerraoui and Rouault (2018)",
            (
                Param(
                    "share",
                    float,
                    0.01,
                    "Part of a bucket's coordinates that is spoiled.",
                    minimum=0.0,
                    maximum=1.0,
                    exclusive_minimum=True,
                ),
                _factor(-100.0),
                _BUCKET,
            ),
        ),
        AttackSpec(
            "split",
            "Each bad replica spoils another part of the model, times factor, and is honest in the others' parts.",
            "Baruch, Baruch and Goldberg (2019)",
            (
                _factor(-10.0),
                Param("parts", int, None, "How many; left out: as many as bad replicas, at least 2.", minimum=1),
                Param(
                    "by",
                    str,
                    "bucket",
                    "What is shared out: the buckets of a step in turn, or of each bucket an equal share.",
                    choices=("bucket", "share"),
                ),
            ),
        ),
        AttackSpec(
            "stale",
            "The own gradient of some steps ago, as from a replica that hangs behind; true until there is one.",
            "Xie, Koyejo and Gupta (2020), Zeno++",
            (_count("delay", 1, "How many steps ago; so many gradients are kept in memory."),),
            remembers=True,
        ),
        AttackSpec(
            "mimic",
            "The row of one honest replica, which then counts f + 1 times. Harmful if replicas have different data.",
            "Karimireddy, He and Jaggi (2022)",
            (Param("replica", int, 0, "Which replica is imitated, an honest one.", minimum=0),),
            needs_honest=True,
            names_replica="replica",
        ),
        AttackSpec(
            "lazy_copy",
            "A copy of another replica's row, as from a replica that does no work or reads another's data.",
            "Li et al. (2022), BLADE-FL",
            (Param("of", int, None, "Which replica is copied; left out: the lowest honest one.", minimum=0),),
            needs_honest=True,
            names_replica="of",
        ),
        AttackSpec(
            "min_max",
            "As far off the honest mean as no honest row is further away than two honest rows are apart.",
            "Shejwalkar and Houmansadr (2021)",
            (_PERTURBATION,),
            needs_honest=True,
        ),
        AttackSpec(
            "min_sum",
            "As far off the honest mean as its squared distances add up to no more than those of an honest row.",
            "Shejwalkar and Houmansadr (2021)",
            (_PERTURBATION,),
            needs_honest=True,
        ),
        AttackSpec(
            "alie_search",
            "alie with the z that moves the rule in use furthest from the honest mean.",
            "Baruch, Baruch and Goldberg (2019); Allouah et al. (2023)",
            (_most(8.0, "z"), _TRIES),
            needs_honest=True,
        ),
        AttackSpec(
            "ipm_search",
            "ipm with the epsilon that moves the rule in use furthest from the honest mean.",
            "Xie, Koyejo and Gupta (2019); Allouah et al. (2023)",
            (_most(16.0, "epsilon"), _TRIES),
            needs_honest=True,
        ),
        AttackSpec(
            "bit_flip",
            "Hardware: bits of some words flip; by default one exponent bit of one word of each bucket.",
            "Li et al. (2017)",
            (
                _count("bits", 1, "Bits that flip in each word.", maximum=8),
                _count("words", 1, "Words of a bucket in which they do."),
                _WHERE,
                *_INTERMITTENT,
            ),
            conflict=_too_few_bits,
        ),
        AttackSpec(
            "lanes",
            "Hardware: every 32nd element is wrong, as from one broken lane, the same one in all steps.",
            "Hochschild et al. (2021)",
            (
                Param("how", str, "xor", "One flipped bit, or times factor.", choices=("xor", "scale")),
                Param("lane", int, None, "Which lane, from 0; left out: drawn from the seed.", minimum=0),
                _count("period", 32, "How many lanes there are."),
                _WHERE,
                _factor(-1.0),
                *_INTERMITTENT,
            ),
            conflict=_no_such_lane,
        ),
        AttackSpec(
            "gemm_tile",
            "Hardware: one tile of a matrix product is wrong: runs of elements, pitch apart, are multiplied by factor.",
            "Rech et al. (2013)",
            (
                _count("rows", 16, "Height of the tile."),
                _count("cols", 16, "Width of the tile, at most pitch."),
                _count("pitch", 1024, "Elements from row to row: the width of the weight matrix."),
                _factor(64.0),
                *_INTERMITTENT,
            ),
            conflict=_rows_overlap,
        ),
        AttackSpec(
            "single_element",
            "Hardware: one element is factor times the root mean square of its bucket.",
            "Dixit et al. (2021)",
            (_factor(1e4, "Size relative to the root mean square; may be negative."), *_INTERMITTENT),
        ),
        AttackSpec(
            "stuck",
            "Hardware: some words hold the same value in every step.",
            "Schroeder, Pinheiro and Weber (2009)",
            (
                _count("words", 1, "Words of a bucket that do."),
                Param("value", float, 1.0, "What they hold."),
                *_INTERMITTENT,
            ),
        ),
    )
}

# What happens before there is a gradient: no drill in front of the exchange can do it. Name -> what does.
IN_THE_DATA = {
    "label_flip": "this spoils the data, which a drill does not see: it changes gradients only. Call "
    "ds_byzantine.attacks.labels.flip_labels on the bad replica's batches; docs/drills.md shows how."
}
