"""A user's script with plain deepspeed.initialize, which knows nothing of ds_byzantine. Endless but for --steps."""

import argparse
import os
import sys

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config", required=True)
parser.add_argument("--steps", type=int, default=10**6)
parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
args = parser.parse_args()

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))
engine = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), optimizer=torch.optim.SGD(model.parameters(), 0.05),
    config=args.deepspeed_config,
)[0]  # fmt: skip
truth = torch.randn(20, generator=torch.Generator().manual_seed(1))
for step in range(args.steps):
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = (engine(x)[:, 0] - x @ truth).square().mean()
    engine.backward(loss)
    engine.step()
print(f"rank {rank} finished", flush=True)
sys.stdout.flush()
os._exit(0)
