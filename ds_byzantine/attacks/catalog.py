"""What every attack is called, needs and accepts. Plain data: importing it does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from ds_byzantine.rules.catalog import Kind, Param, RuleInfo


@dataclass(frozen=True)
class AttackSpec:
    """Facts about an attack; its function has the same name, and the parameters as keyword-only arguments."""

    name: str
    summary: str
    reference: str
    params: tuple[Param, ...] = ()
    needs_honest: bool = False  # colluding: computed from the honest rows, which the attackers know

    def check_params(self, given: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Validated parameters, defaults filled in. Raises ConfigError as for the parameters of a rule."""
        as_rule = RuleInfo(self.name, Kind.PRE, (0, 1), self.summary, self.reference, self.params)
        return as_rule.check_params(given, path)


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
    )
}
