"""A user's script: a plain Accelerate loop. It does not know ds_byzantine."""

import json
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(256, 8, generator=generator)
targets = (inputs[:, :3].argmax(1)).long()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
with torch.no_grad():
    final = float(torch.nn.functional.cross_entropy(model(inputs), targets))
if accelerator.is_main_process:
    print("RESULT" + json.dumps({"final": final, "world": accelerator.num_processes, "engine": type(model).__name__}))
sys.stdout.flush()
os._exit(0)
