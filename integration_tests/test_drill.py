"""`ds-byzantine drill` through its real entry point: real ranks, real training, results that are not made twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from world import environment

pytestmark = pytest.mark.launch
COMMAND = str(Path(sys.executable).parent / "ds-byzantine")


def drill(*arguments: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "drill", *arguments], env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def test_one_attack(tmp_path):
    """The mean breaks, the rule holds and names the bad replica; the same command again launches nothing."""
    spec = tmp_path / "loud.json"
    spec.write_text(json.dumps({"name": "sign_flip", "factor": 20.0, "start": 2}))
    arguments = [str(spec), "-n", "5", "--steps", "30", "--out", str(tmp_path / "out"), "--json"]
    done = drill(*arguments)
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    mean, rule = found["cells"]
    assert (mean["rule"], rule["rule"]) == ("mean", "centered_clip")
    assert not mean["held"]
    assert rule["held"]
    assert rule["named_at"] is not None
    assert rule["wrong"] == []
    (tmp_path / "out" / "launch.log").unlink()
    again = drill(*arguments)
    assert json.loads(again.stdout) == found
    assert not (tmp_path / "out" / "launch.log").exists()
    shown = drill(*[one for one in arguments if one != "--json"])
    assert "centered_clip held against sign_flip" in shown.stdout


def test_a_rule_that_does_not_hold_fails(tmp_path):
    done = drill("scale", "-n", "4", "--steps", "6", "--rule", "mean", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "the mean is the comparison that is always made" in done.stderr
    done = drill("alie_search", "-n", "3", "-f", "1", "--steps", "40", "--rule", "cge", "--out", str(tmp_path / "b"))
    assert done.returncode in (0, 1)
    assert ("FAIL cge" in done.stdout) == (done.returncode == 1)


def test_all_attacks(tmp_path):
    out = tmp_path / "matrix"
    asked = ["all", "-n", "5", "-f", "1", "-f", "2", "--steps", "2", "--rule", "median", "--rule", "krum"]
    done = drill(*asked, "--out", str(out), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert {(cell["rule"], cell["f"]) for cell in cells} == {
        *(("mean", f) for f in (1, 2)), *(("median", f) for f in (1, 2)), ("krum", 1),
    }  # krum holds for f=1 only  # fmt: skip
    attacks = {cell["attack"] for cell in cells}
    assert {"none", "bit_flip", "stale", "lazy_copy", "min_max"} <= attacks
    lines = (out / "matrix.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("|")]) == 2 * (2 + len(attacks))
    assert (out / "matrix.html").read_text().count("<table>") == 2


@pytest.mark.parametrize(("name", "words"), [("sign_flop", "no attack is called"), ("label_flip", "flip_labels")])
def test_what_is_no_drill(name, words, tmp_path):
    done = drill(name, "--out", str(tmp_path))
    assert done.returncode == 1
    assert words in done.stderr


SCRIPT = """
import sys, torch, deepspeed
section = {"rule": "median", "f": 1, "on_suspect": "checkpoint_exit", "monitor": {"dir": "nowhere"}}
config = {
    "train_micro_batch_size_per_gpu": 64, "zero_optimization": {"stage": 2}, "steps_per_print": 10**9,
    "optimizer": {"type": "SGD", "params": {"lr": 0.2}}, "zero_allow_untested_optimizer": True,
}
if "--bare" not in sys.argv:
    config["byzantine"] = section
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(verbose=False)
if "--nothing" in sys.argv:
    sys.exit(0)
torch.manual_seed(0)
model, truth = torch.nn.Linear(16, 4), torch.nn.Linear(16, 4)
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
noise = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
for _ in range(25):
    x = torch.randn(64, 16, generator=noise)
    loss = torch.nn.functional.mse_loss(engine(x), truth(x).detach() + torch.randn(64, 4, generator=noise))
    engine.backward(loss)
    engine.step()
if torch.distributed.get_rank() == 0:
    print("the script ends", sys.argv[1:])
"""


def test_the_users_own_script(tmp_path):
    """Three launches of an unchanged script: its section's rule holds, the mean does not; it is not cut short."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    spec = tmp_path / "loud.json"
    spec.write_text(json.dumps({"name": "sign_flip", "factor": 20.0}))
    out = tmp_path / "out"
    arguments = [str(spec), "-n", "4", "--script", str(script), "--out", str(out), "--json", "--", "--to", "{run}/x"]
    done = drill(*arguments)
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    mean, rule = found["cells"]
    assert (mean["rule"], rule["rule"], rule["f"]) == ("mean", "median", 1)
    assert not mean["held"]
    assert rule["held"]
    assert rule["named_at"] is not None
    for run in ("clean", "mean", "rule"):
        assert f"the script ends ['--local_rank=0', '--to', '{out / run}/x']" in (out / run / "launch.log").read_text()
        assert len((out / run / "events.jsonl").read_text().splitlines()) >= 26
    assert not (tmp_path / "nowhere").exists()
    (out / "clean" / "launch.log").unlink()
    assert json.loads(drill(*arguments).stdout) == found
    assert not (out / "clean" / "launch.log").exists(), "what is there is not run again"


def test_a_script_without_a_section(tmp_path):
    """The rehearsal brings the section; the rule and f come from the command line."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    asked = [
        "nan",
        "-n",
        "3",
        "-f",
        "1",
        "--rule",
        "trimmed_mean",
        "--script",
        str(script),
        "--out",
        str(tmp_path / "o"),
    ]
    done = drill(*asked, "--", "--bare")
    assert done.returncode == 0, done.stderr
    assert "ok   trimmed_mean held against nan (f=1)" in done.stdout
    failed = drill("nan", "-n", "2", "--script", str(script), "--out", str(tmp_path / "p"), "--", "--nothing")
    assert failed.returncode == 1
    assert "does it call deepspeed.initialize" in failed.stderr
    assert not list((tmp_path / "p").rglob("done.json")), "what failed is run again"
    (tmp_path / "q" / "clean").mkdir(parents=True)
    (tmp_path / "q" / "clean" / "precious.txt").touch()
    refused = drill("nan", "-n", "2", "--script", str(script), "--out", str(tmp_path / "q"))
    assert "holds something else already" in refused.stderr
    assert (tmp_path / "q" / "clean" / "precious.txt").exists()
    typed = drill("nan", "-n", "2", "--script", str(script), "--rule", "medain", "--out", str(tmp_path / "r"))
    assert 'Did you mean "median"' in typed.stderr
    assert not (tmp_path / "r").exists(), "refused before anything was launched"
