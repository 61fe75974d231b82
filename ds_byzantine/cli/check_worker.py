"""One rank of `ds-byzantine check --launch`: in each stage two steps of stock DeepSpeed and two of the rule "mean"."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

STEPS = 2


def main(folder: str, stages: str) -> None:
    """Write `<folder>/stage<S>.rank<R>.json` for each stage of a list like "0,1,2,3"."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    # The CPU shared-memory all-reduce would be compiled at start; only inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    rank = torch.distributed.get_rank()
    for stage in map(int, stages.split(",")):
        try:
            result = _compare(stage, Path(folder))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        (Path(folder) / f"stage{stage}.rank{rank}.json").write_text(json.dumps(result))
        if "error" in result:
            raise SystemExit(f"ZeRO-{stage}: {result['error']}")  # the others may be waiting for this rank


def _compare(stage: int, folder: Path) -> dict[str, Any]:
    section = {"rule": "mean", "f": 0, "monitor": {"dir": str(folder / f"log{stage}")}}
    before = _model().state_dict()
    stock, stock_bound = _train(stage, None)
    ours, bound = _train(stage, section)
    return {
        "difference": _largest({k: stock[k] - ours[k] for k in before}),
        "change": _largest({k: stock[k] - before[k] for k in before}),
        "bound": bound,
        "stock_bound": stock_bound,
    }


def _largest(tensors: dict[str, Tensor]) -> float:
    """The largest absolute value; NaN if there is one."""
    import torch

    return float(torch.stack([t.abs().max() for t in tensors.values()]).max())


def _model() -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 8))


def _train(stage: int, section: dict[str, Any] | None) -> tuple[dict[str, Tensor], bool]:
    """Weights after the steps, in float32 on the CPU, and whether a rule was bound."""
    import deepspeed
    import torch

    from ds_byzantine.activation import attachment_of

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if section is not None:
        config["byzantine"] = section
    model = _model()
    engine = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, dist_init_required=False
    )[0]
    draw = torch.Generator().manual_seed(100 + torch.distributed.get_rank())
    for _ in range(STEPS):
        rows, target = torch.randn(4, 24, generator=draw), torch.randn(4, 8, generator=draw)
        loss = torch.nn.functional.mse_loss(engine(rows.to(engine.device)), target.to(engine.device))
        engine.backward(loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        weights = {name: p.detach().float().cpu().clone() for name, p in model.named_parameters()}
    bound = attachment_of(engine) is not None
    engine.destroy()
    return weights, bound


if __name__ == "__main__":
    code = 0
    try:
        main(*[a for a in sys.argv[1:] if not a.startswith("--local_rank")])
    except BaseException as error:
        print(error if isinstance(error, SystemExit) else repr(error), file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo aborts now and then at exit, after all is done
