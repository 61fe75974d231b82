"""A user's script: Hugging Face Trainer with a DeepSpeed JSON. It does not know ds_byzantine."""

import argparse
import json
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--lora", action="store_true")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--metrics", action="store_true")  # the one option for which the script has to know ds_byzantine
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
os.environ["TENSORBOARD_LOGGING_DIR"] = f"{args.out}/board"


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        start = torch.randint(0, 40, (1,), generator=torch.Generator().manual_seed(i)).item()
        row = (torch.arange(16) * 3 + start) % 48
        return {"input_ids": row, "labels": row}


training = TrainingArguments(
    args.out,
    deepspeed=args.deepspeed,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=args.steps,
    learning_rate=5e-3,
    lr_scheduler_type="constant",
    logging_steps=1,
    logging_nan_inf_filter=False,
    save_strategy="steps",
    save_steps=3,
    report_to=["tensorboard"] if args.metrics else [],
    use_cpu=True,
    disable_tqdm=True,
    seed=3,
)
set_seed(3)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=48, num_key_value_heads=4, use_cache=False, **size))
if args.lora:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
trainer = Trainer(model, training, train_dataset=Rows(), eval_dataset=Rows())
if args.metrics:
    from ds_byzantine.adapters.hf import ByzantineCallback

    ByzantineCallback.attach(trainer)
trainer.train(resume_from_checkpoint=args.resume)
final = trainer.evaluate()["eval_loss"]
if training.process_index == 0:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    names = sorted({name for entry in trainer.state.log_history for name in entry})
    found = {"losses": losses, "final": final, "steps": trainer.state.global_step, "logged": names}
    print("RESULT" + json.dumps(found))
sys.stdout.flush()
os._exit(0)  # gloo aborts now and then in the interpreter's exit
