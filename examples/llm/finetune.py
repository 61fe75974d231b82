"""Fine-tune any causal language model with the Hugging Face Trainer and DeepSpeed, on text that ships with Python.

An ordinary script: everything about robust aggregation comes from the `"byzantine"` section of the DeepSpeed JSON.

    deepspeed --num_gpus 8 examples/llm/finetune.py --model PATH --deepspeed configs/zero2.json --out runs/mine
    DS_ACCELERATOR=cpu deepspeed --num_gpus 5 examples/llm/finetune.py --tiny --deepspeed configs/zero2.json

Rank 0 writes `<out>/metrics.jsonl`: for every step and every evaluation a line
`{"kind": "train" | "heldout", "step": ..., "loss": ..., "seconds": ...}`. A loss that is not finite is null.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import deepspeed
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="a folder or hub name that from_pretrained accepts")
    source.add_argument("--tiny", action="store_true", help="a 0.5M-parameter byte-level Llama with random weights")
    parser.add_argument("--deepspeed", required=True, help="the DeepSpeed JSON")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and micro-step")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-steps per optimizer step")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--warmup", type=int, default=4, help="steps over which the learning rate rises")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train LoRA adapters of this rank (peft)")
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--heldout", type=int, default=40, help="held-out sequences")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="save the model to <out>/model at the end")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the launcher adds it
    return parser.parse_args()


def token_ids(args: argparse.Namespace) -> list[int]:
    """The text as token ids: Python's own language reference, about 110,000 tokens of a usual vocabulary."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    if args.tiny:
        return list(text.encode())
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return ids


def split_blocks(ids: list[int], args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Blocks of equal length, shuffled over the whole text so that every rank sees all subjects: (train, held out)."""
    blocks = torch.tensor(ids[: len(ids) // args.seq_len * args.seq_len]).view(-1, args.seq_len)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(args.seed))
    rows = [{"input_ids": block, "labels": block} for block in blocks[order]]
    return rows[args.heldout :], rows[: args.heldout]


def build_model(args: argparse.Namespace) -> PreTrainedModel:
    if args.tiny:
        sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes)
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16 if args.bf16 else torch.float32)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear"))
    return model


class MetricsFile(TrainerCallback):  # type: ignore[misc]
    """Writes the Trainer's logs to metrics.jsonl as they come."""

    def __init__(self, path: Path) -> None:
        self.path, self.began = path, time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        logs = logs or {}
        for key, kind in (("loss", "train"), ("eval_loss", "heldout")):
            if state.is_world_process_zero and key in logs:
                loss = logs[key] if math.isfinite(logs[key]) else None
                seconds = round(time.monotonic() - self.began, 2)
                record = {"kind": kind, "step": state.global_step, "loss": loss, "seconds": seconds}
                with open(self.path, "a") as file:
                    file.write(json.dumps(record) + "\n")


def main() -> None:
    args = parse_args()
    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()
    training = TrainingArguments(  # before the model: ZeRO-3 then builds the model in shards
        output_dir=str(args.out),
        deepspeed=args.deepspeed,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=args.warmup,
        bf16=args.bf16,
        use_cpu=on_cpu,
        seed=args.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=args.eval_every,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    deepspeed.init_distributed()  # before the model too: ZeRO-3 has to know over how many ranks it shards
    torch.manual_seed(args.seed)
    train, heldout = split_blocks(token_ids(args), args)
    args.out.mkdir(parents=True, exist_ok=True)
    metrics = args.out / "metrics.jsonl"
    if training.process_index == 0:
        metrics.unlink(missing_ok=True)
    trainer = Trainer(build_model(args), training, train_dataset=train, eval_dataset=heldout)
    trainer.add_callback(MetricsFile(metrics))
    trainer.train()
    if args.save:
        trainer.save_model(str(args.out / "model"))


if __name__ == "__main__":
    main()
