"""The tap in front of the exchange: spoils this replica's gradients when a drill says that it is bad now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_byzantine.attacks.base import AttackInfo, Memory, find, seeded
from ds_byzantine.drills.scenario import DrillConfig
from ds_byzantine.errors import ConfigError

BLOCK = 1 << 20  # elements that colluding attacks see at once: n rows of it are held for a moment

GatherRows = Callable[[Tensor, Any], Tensor]
RuleInUse = Callable[[Tensor, int], Tensor]


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
        aggregate: rows [n, D], row i from replica i, and the step -> [D]: the rule in use, for attacks that try it out.

    Raises:
        ConfigError: the scenario names a replica that the job does not have, or one that is not honest where it has to
            be.

    Example:
        >>> flat = torch.tensor([1.0, -2.0])
        >>> injector = Injector(DrillConfig.load("sign_flip"), n=3, f=1, replica=2, gather_rows=lambda block, _: block)
        >>> injector.tap(flat, step=0), flat
        (True, tensor([-1.,  2.]))
    """

    def __init__(
        self,
        scenario: DrillConfig,
        n: int,
        f: int,
        replica: int,
        gather_rows: GatherRows,
        place: int = 0,
        aggregate: RuleInUse | None = None,
    ) -> None:
        bad = scenario.bad_replicas(n, f)
        self.scenario = scenario
        self.replica = replica
        self.honest = [i for i in range(n) if i not in bad]
        self._bad = replica in bad and (scenario.model_ranks is None or place in scenario.model_ranks)
        self._member = bad.index(replica) if replica in bad else 0
        self._n, self._colluding = n, len(bad)
        self._by_replica = torch.tensor([*self.honest, *bad]).argsort()  # honest rows first -> replica order
        self._attack = find(scenario.name).function
        self._gather_rows, self._rule = gather_rows, aggregate
        self._step, self._calls = -1, 0
        self._memory: Memory = {}
        self._allowed: set[torch.dtype] = set()

    def tap(self, flat: Tensor, step: int, where: Any = None) -> bool:
        """Spoil the gradients in place if this replica is bad in this step.

        Args:
            flat: this replica's gradients, [D] floating; of the same length on all replicas.
            step: optimizer step, from 0.
            where: the reduction that they are for; passed on to `gather_rows`.

        Returns:
            Whether `flat` was changed.

        Raises:
            ConfigError: what the drill asks for cannot be done to this dtype; on all replicas alike.
        """
        self._calls = self._calls + 1 if step == self._step else 0
        self._step = step
        with torch.no_grad():
            self._check(flat)
            if not self.scenario.active(step):
                self._watch(flat)
                return False
            if self.scenario.spec.needs_honest:
                self._collude(flat, where)
            elif self._bad:
                flat.copy_(self._attack(flat, None, self._info(), **self.scenario.params))
        return self._bad

    def _collude(self, flat: Tensor, where: Any) -> None:
        info = self._info()
        for start in range(0, flat.numel(), BLOCK):
            block_D = flat[start : start + BLOCK]
            rows_ND = self._gather_rows(block_D, where)
            if self._bad:
                block_D.copy_(self._attack(block_D, rows_ND[self.honest], info, **self.scenario.params))

    def _check(self, flat: Tensor) -> None:
        """Try the attack on no elements of this dtype, on all replicas: one that failed alone would hang the others."""
        if flat.dtype in self._allowed or self.scenario.spec.needs_honest:
            return
        try:
            self._attack(flat[:0], None, AttackInfo(self._n, self._colluding, 0, seeded()), **self.scenario.params)
        except ValueError as error:
            raise ConfigError(f"byzantine.drill.{error}") from error
        self._allowed.add(flat.dtype)

    def _watch(self, flat: Tensor) -> None:
        """In a good step: what the attack will want to remember in a bad one."""
        if self.scenario.over(self._step):
            self._memory.clear()
        elif self._bad and self.scenario.spec.remembers:
            self._attack(flat, None, self._info(), **self.scenario.params)

    def _info(self) -> AttackInfo:
        """What this replica knows; its randomness depends on seed, step, replica and number of the call alone."""
        seed, step, replica, call = self.scenario.seed, self._step, self.replica, self._calls
        return AttackInfo(
            self._n,
            self._colluding,
            step,
            seeded(seed, step, replica, call),
            seed=seed,
            replica=replica,
            member=self._member,
            call=call,
            honest=tuple(self.honest),
            aggregate=self._try_out if self._rule is not None else None,
            memory=self._memory,
        )

    def _try_out(self, rows_ND: Tensor) -> Tensor:
        """The rule in use as an attack calls it: with the honest rows first."""
        assert self._rule is not None
        return self._rule(rows_ND[self._by_replica.to(rows_ND.device)], self._step)
