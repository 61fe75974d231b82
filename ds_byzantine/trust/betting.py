"""E-processes: evidence that may be looked at after every step. Plain arithmetic, no torch.

An e-process starts at 1 and is multiplied, step by step, by bets whose expectation is 1 as long as the null hypothesis
holds. By Ville's inequality it reaches 1/a with probability at most a, however often one looks (Ville 1939; Shafer
2021, "Testing by betting"). Nobody knows in advance how strongly to bet nor in which step the trouble begins, so the
capital is spread over several strengths and over all starting steps; a mixture of e-processes is an e-process.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

STRENGTHS = (0.5, 0.75, 0.95)  # the share of the capital put on the event that is expected of a bad replica


class Betting:
    """One e-process against one replica.

    Args:
        strengths: what to bet, in (0, 1); the capital is divided evenly among them.

    `bet` also takes arrays of events (and of chances), for many processes at once.

    Example:
        >>> process = Betting()
        >>> for _ in range(8):
        ...     process.bet(True, 1 / 8)  # the most outlying of eight, eight times in a row
        >>> process.value > 1e4
        True
    """

    def __init__(self, strengths: Sequence[float] = STRENGTHS) -> None:
        self.strengths = tuple(strengths)
        self.staked = [0.0] * len(self.strengths)  # the capital in play, by strength
        self.started = 0  # steps in which a part of the capital was put into play
        self.value = 1.0

    def bet(self, event: bool | float, chance: float) -> None:
        """Bet on an event that under the null hypothesis has probability `chance`, 0 < chance < 1, given the past.

        Args:
            event: whether it happened; with ties, the probability that it happened.
        """
        fresh = _remaining(self.started) - _remaining(self.started + 1)
        self.started += 1
        for k, strength in enumerate(self.strengths):
            pays, costs = strength / chance, (1.0 - strength) / (1.0 - chance)
            factor = event * pays + (1.0 - event) * costs
            self.staked[k] = (self.staked[k] + fresh) * factor
        self.value = sum(self.staked) / len(self.staked) + _remaining(self.started)


def _remaining(steps: int) -> float:
    """The capital not in play after so many steps: it falls slowly, so that trouble that begins late is found too."""
    return 1.0 / (1.0 + log(1.0 + steps))
