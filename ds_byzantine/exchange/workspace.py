"""One receive buffer per dtype and device, grown to the largest bucket and used again for every bucket."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Memory that outlives a bucket: at most one bucket per dtype and device."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, numel: int, like: Tensor) -> Tensor:
        """[numel] of uninitialised memory of `like`'s dtype and device; valid until the next `take`."""
        key = like.dtype, like.device
        held = self._buffers.get(key)
        if held is None or held.numel() < numel:
            self._buffers.pop(key, None)  # free the small one before the large one is allocated
            held = self._buffers[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return held[:numel]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())
