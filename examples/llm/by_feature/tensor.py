"""Robust aggregation under tensor parallelism: a small Llama whose layers DeepSpeed's AutoTP cuts over two ranks.

A replica is the ranks that hold one copy of the model, here two neighbours. Nothing here is about robust aggregation
but the last line: the `"byzantine"` section of the JSON does it.

    deepspeed --num_gpus 6 examples/llm/by_feature/tensor.py
    DS_ACCELERATOR=cpu deepspeed --num_gpus 6 examples/llm/by_feature/tensor.py --drill sign_flip

Ranks / autotp_size = replicas: six ranks are three replicas, of which one may be bad.
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from common import VOCABULARY, batches, load_config, most_distant, options
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel


def build_model() -> PreTrainedModel:
    """Heads, key-value heads and all cut dimensions have to be divisible by the tensor-parallel size."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=4, use_cache=False, **sizes))


def main() -> None:
    args = options(__doc__, "tensor.json").parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model, config = build_model(), load_config(args)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    size = engine.train_micro_batch_size_per_gpu()
    data = batches(size, args.seq_len, args.seed, replica=engine.mpu.get_data_parallel_rank())
    for step in range(1, args.steps + 1):
        tokens = next(data).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        average = loss.detach().clone()
        dist.all_reduce(average)
        if dist.get_rank() == 0 and (step % 5 == 0 or step in (1, args.steps)):
            print(f"step {step}: loss {float(average) / dist.get_world_size():.3f}", flush=True)
    if dist.get_rank() == 0:
        print(most_distant(config), flush=True)


if __name__ == "__main__":
    main()
