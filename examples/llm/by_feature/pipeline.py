"""Robust aggregation under pipeline parallelism: a small Llama cut into stages, several copies of which train together.

A replica is one copy of the model, all its stages. Nothing here is about robust aggregation but the last line: the
`"byzantine"` section of the JSON does it.

    deepspeed --num_gpus 6 examples/llm/by_feature/pipeline.py
    DS_ACCELERATOR=cpu deepspeed --num_gpus 6 examples/llm/by_feature/pipeline.py --drill sign_flip

Ranks / stages = replicas: six ranks are three replicas of two stages, of which one may be bad.
"""

from __future__ import annotations

from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from common import VOCABULARY, batches, load_config, loss_of, most_distant, options
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


class Block(LlamaDecoderLayer):  # type: ignore[misc]
    """A Llama layer that makes the angles of its positions itself, so that stages pass on hidden states alone."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        output = super().forward(hidden, position_embeddings=self.rotary(hidden, positions))
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output  # a tuple in older transformers
        return result


class Embedding(nn.Embedding):
    """Token embedding with weights small enough for an output layer, which they are as well."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def logits_of(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    """The output layer."""
    return hidden @ embedding.weight.T


def build_model(stages: int, blocks: int) -> PipelineModule:
    """A decoder as a list of layers; the first and the last hold copies of one weight, on different stages."""
    width = 64
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="sdpa",  # causal without a mask; the default outside a model, eager, would need one
    )
    tied = partial(TiedLayerSpec, "embedding", Embedding, VOCABULARY, width, tied_weight_attr="weight")
    layers = [
        tied(),
        *(LayerSpec(Block, config, index) for index in range(blocks)),
        LayerSpec(LlamaRMSNorm, width),
        tied(forward_fn=logits_of),
    ]
    return PipelineModule(layers, num_stages=stages, loss_fn=loss_of)


def main() -> None:
    parser = options(__doc__, "pipeline.json")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=4, help="layers of the decoder")
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model, config = build_model(args.stages, args.blocks), load_config(args)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    size = engine.train_micro_batch_size_per_gpu()
    tokens = batches(size, args.seq_len, args.seed, replica=engine.grid.data_parallel_id)
    data = ((batch, batch) for batch in tokens)  # input for the first stage, labels for the last
    for step in range(1, args.steps + 1):
        loss = float(engine.train_batch(data))
        if dist.get_rank() == 0 and (step % 5 == 0 or step in (1, args.steps)):
            print(f"step {step}: loss {loss:.3f}", flush=True)
    if dist.get_rank() == 0:
        print(most_distant(config), flush=True)


if __name__ == "__main__":
    main()
