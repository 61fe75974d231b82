"""Modules that mix the replicas' gradients before the rule could see them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_byzantine.adapters.deepspeed.refuse import _mixed_before


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def said(module: nn.Module) -> list[str]:
    return list(_mixed_before(SimpleNamespace(module=module)))


def test_ordinary_modules_are_accepted() -> None:
    assert said(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))) == []


def test_synchronised_batch_norm_is_refused_by_name() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    [reason] = said(model)
    assert "SyncBatchNorm at 1" in reason


def test_a_module_that_averages_by_itself_is_refused(alone: None) -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(torch.device("cpu")))
    [reason] = said(wrapped)
    assert "DistributedDataParallel around the model" in reason
    [inner] = said(nn.Sequential(wrapped))
    assert "around 0" in inner
