"""The tap in front of the exchange: spoils this replica's gradients when a drill says that it is bad now."""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from ds_byzantine.attacks.base import AttackInfo, find
from ds_byzantine.drills.scenario import DrillConfig

BLOCK = 1 << 20  # elements that colluding attacks see at once: n rows of it are held for a moment

GatherRows = Callable[[Tensor, Any], Tensor]


class Injector:
    """One drill on one replica.

    Args:
        scenario: who, what, when.
        n: replicas in the job.
        f: bad replicas that the rule tolerates; gives the default of `scenario.replicas`.
        replica: index of this one.
        gather_rows: [D], where -> [n, D], row i from replica i; a collective call over all replicas. It is called only
            for colluding attacks and only in their active steps, by every replica alike, in the same order.
        place: index of this rank among those of its replica.

    Raises:
        ConfigError: the scenario names a replica that the job does not have.

    Example:
        >>> flat = torch.tensor([1.0, -2.0])
        >>> injector = Injector(DrillConfig.load("sign_flip"), n=3, f=1, replica=2, gather_rows=lambda block, _: block)
        >>> injector.tap(flat, step=0), flat
        (True, tensor([-1.,  2.]))
    """

    def __init__(
        self, scenario: DrillConfig, n: int, f: int, replica: int, gather_rows: GatherRows, place: int = 0
    ) -> None:
        bad = scenario.bad_replicas(n, f)
        self.scenario = scenario
        self.replica = replica
        self.honest = [i for i in range(n) if i not in bad]
        self._bad = replica in bad and (scenario.model_ranks is None or place in scenario.model_ranks)
        self._n, self._colluding = n, len(bad)
        self._attack = find(scenario.name).function
        self._gather_rows = gather_rows
        self._step, self._calls = -1, 0

    def tap(self, flat: Tensor, step: int, where: Any = None) -> bool:
        """Spoil the gradients in place if this replica is bad in this step.

        Args:
            flat: this replica's gradients, [D] floating; of the same length on all replicas.
            step: optimizer step, from 0.
            where: the reduction that they are for; passed on to `gather_rows`.

        Returns:
            Whether `flat` was changed.
        """
        self._calls = self._calls + 1 if step == self._step else 0
        self._step = step
        if not self.scenario.active(step):
            return False
        info = AttackInfo(self._n, self._colluding, step, self._generator())
        with torch.no_grad():
            if self.scenario.spec.needs_honest:
                self._collude(flat, info, where)
            elif self._bad:
                flat.copy_(self._attack(flat, None, info, **self.scenario.params))
        return self._bad

    def _collude(self, flat: Tensor, info: AttackInfo, where: Any) -> None:
        for start in range(0, flat.numel(), BLOCK):
            block_D = flat[start : start + BLOCK]
            rows_ND = self._gather_rows(block_D, where)
            if self._bad:
                block_D.copy_(self._attack(block_D, rows_ND[self.honest], info, **self.scenario.params))

    def _generator(self) -> torch.Generator:
        """Randomness that depends on nothing but seed, step, replica and the number of this call in the step."""
        key = struct.pack("<4q", self.scenario.seed, self._step, self.replica, self._calls)
        seed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1
        return torch.Generator().manual_seed(seed)
