"""The installed command `ds-byzantine`, started as a user would start it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_events import Job, write

from ds_byzantine.cli import check_launch, env
from ds_byzantine.cli.app import run
from ds_byzantine.cli.check_installed import versions
from ds_byzantine.cli.job import job_of, parameters
from ds_byzantine.config import json_schema, parse_section
from ds_byzantine.errors import ConfigError, HostStateError
from ds_byzantine.plan import plan

COMMAND = Path(sys.executable).parent / "ds-byzantine"
CONFIGS = Path(__file__).parents[1] / "configs"
COMMANDS = ["plan", "check", "report", "env", "config init", "config schema", "config validate"]


def start(*arguments: str, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    assert COMMAND.is_file(), "the entry point is not installed: pip install -e ."
    env = {**os.environ, "COLUMNS": "120", **extra}
    return subprocess.run(
        [COMMAND, *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


def fine(*arguments: str, **extra: Any) -> Any:
    """What a command prints with --json."""
    ended = start(*arguments, "--json", **extra)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return json.loads(ended.stdout)


def config(tmp_path: Path, section: Any, **more: Any) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**more, **({} if section is None else {"byzantine": section})}))
    return str(path)


# -- all commands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_json(command: str) -> None:
    ended = start(*command.split(), "--help")
    assert ended.returncode == 0
    assert f"Example: ds-byzantine {command}" in re.sub(r"\s+", " ", ended.stdout)
    assert "--json" in ended.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["plan", "nothing.json", "-n", "4"],
        ["plan", str(CONFIGS / "zero2.json")],
        ["plan", str(CONFIGS / "zero2.json"), "-n", "4", "--params", "many"],
        ["plan", str(CONFIGS / "zero2.json"), "-n", "0"],
        ["check", "--launch", "1"],
        ["report", "nowhere"],
        ["config", "init", "--stage", "4"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], tmp_path: Path) -> None:
    ended = start(*arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


def test_it_is_also_a_module_and_knows_its_version() -> None:
    command = [sys.executable, "-m", "ds_byzantine", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == start("--version").stdout != ""


def test_underscores_are_dashes() -> None:
    path = str(CONFIGS / "zero2.json")
    assert fine("plan", path, "--world_size", "8") == fine("plan", path, "--world-size", "8")


def test_no_color(tmp_path: Path) -> None:
    write(tmp_path, Job(bad=4, steps=50))
    colour = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-7]|9[0-7])(?:;[0-9]+)*m")
    assert colour.search(start("report", str(tmp_path), FORCE_COLOR="1", TERM="xterm").stdout)
    assert not colour.search(start("report", str(tmp_path), FORCE_COLOR="1", TERM="xterm", NO_COLOR="1").stdout)


def test_torch_is_imported_only_where_it_is_needed(tmp_path: Path) -> None:
    write(tmp_path, Job(steps=3))
    arguments = [["plan", str(CONFIGS / "zero2.json"), "-n", "8"], ["report", str(tmp_path)], ["config", "schema"]]
    for one in arguments:
        code = (
            f"import sys; sys.argv = {['ds-byzantine', *one]!r}\n"
            "from ds_byzantine.cli.app import app, run\n"
            "assert run(app) == 0\n"
            "sys.exit(bool({'torch', 'deepspeed'} & set(sys.modules)))"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0, one


def test_what_goes_wrong_is_one_message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ds-byzantine"])

    def fails(error: BaseException) -> Any:
        raise error

    assert run(lambda: fails(HostStateError("the reason"))) == 1
    assert capsys.readouterr().err == "the reason\n"
    assert run(lambda: fails(PermissionError(13, "Permission denied", "/x"))) == 1
    assert capsys.readouterr().err == "/x: Permission denied\n"
    assert run(lambda: fails(KeyError("odd"))) == 1
    assert "internal error: KeyError: 'odd'" in capsys.readouterr().err
    assert run(lambda: fails(KeyboardInterrupt())) == 130
    monkeypatch.setattr(sys, "argv", ["ds-byzantine", "--json"])
    assert run(lambda: fails(HostStateError("the reason"))) == 1
    assert json.loads(capsys.readouterr().out) == {"ok": False, "error": "the reason"}


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_says_what_the_plug_in_would_do() -> None:
    found = fine("plan", str(CONFIGS / "zero2.json"), "-n", "16", "--params", "7B")
    made = plan(parse_section({"f": 1}), 16, stage=2, numel=7_000_000_000, dtype_bytes=2, bucket_numel=50_000_000)
    assert (found["f"], found["replicas"], found["largest_f"]) == (1, 16, 7)
    assert found["bytes_sent_per_rank"] == made.bytes_sent_per_rank
    assert found["stock_bytes_per_rank"] == made.stock_bytes_per_rank
    assert found["extra_memory"] == made.extra_memory
    assert found["stock_memory"] == 7_000_000_000 * (2 + (2 + 12) / 16)
    assert [row["world_size"] for row in found["scaling"]] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert set(found["rules_that_fit"]) == set(made.rules_that_fit())


def test_plan_refuses_with_a_way_out(tmp_path: Path) -> None:
    ended = start("plan", config(tmp_path, {"f": 1, "rule": "krum"}), "-n", "4")
    assert ended.returncode == 1
    text = re.sub(r"\s+", " ", ended.stdout)
    assert "krum with f=1 needs at least 5 replicas (2f+3); this job has 4" in text
    assert "largest f 0 with this rule" in text
    assert "median" in text


def test_plan_with_model_parallel_ranks(tmp_path: Path) -> None:
    path = config(tmp_path, {}, zero_optimization={"stage": 1})
    found = fine("plan", path, "-n", "24", "--tp", "2", "--pp", "2", "--params", "8e9")
    assert (found["replicas"], found["host"]) == (6, "ZeRO-1, pipeline 2 x tensor 2 in a replica")
    assert found["bytes_sent_per_rank"] == plan(parse_section({}), 6, stage=1, numel=2 * 10**9).bytes_sent_per_rank
    assert [row["replicas"] for row in found["scaling"]] == [2, 4, 8, 16, 32, 64, 128, 256]
    ended = start("plan", path, "-n", "22", "--tp", "2", "--pp", "2")
    assert ended.returncode == 1
    assert "Use 20 or 24 ranks" in ended.stderr
    pipeline = config(tmp_path, {}, zero_optimization={"stage": 2})
    assert "DeepSpeed's pipeline runs with ZeRO 0 or 1" in fine_reason("plan", pipeline, "-n", "24", "--pp", "2")


def fine_reason(*arguments: str) -> str:
    """Why a plan cannot hold."""
    ended = start(*arguments, "--json")
    assert ended.returncode == 1
    return str(json.loads(ended.stdout)["reason"])


@pytest.mark.parametrize(("option", "word"), [("--sp", "sequence"), ("--ep", "expert")])
def test_plan_where_ranks_of_a_replica_are_averaged_first(option: str, word: str, tmp_path: Path) -> None:
    path = config(tmp_path, {}, zero_optimization={"stage": 2})
    found = fine("plan", path, "-n", "12", option, "2", "--params", "1B")
    made = plan(parse_section({}), 6, stage=2, numel=10**9, ranks=12)
    assert (found["replicas"], found["bytes_sent_per_rank"]) == (6, made.bytes_sent_per_rank)
    assert found["host"] == f"ZeRO-2, {word} 2 in a replica"
    assert "never examined" in fine_reason("plan", path, "-n", "24", option, "2", "--tp", "2")


def test_plan_predicts_time(tmp_path: Path) -> None:
    path = config(tmp_path, {}, zero_optimization={"stage": 2})
    found = fine("plan", path, "-n", "8", "--params", "7B", "--bandwidth", "200Gb/s", "--memory-bandwidth", "2TB/s")
    made = plan(parse_section({}), 8, stage=2, numel=7 * 10**9)
    assert found["extra_seconds"] == made.extra_seconds(25e9, 2e12)
    assert found["extra_seconds"] < 0, "half the bytes of stock's all-reduce"
    assert [row["world_size"] for row in found["scaling"]][-1] == 1024
    assert all(row["extra_seconds"] is not None for row in found["scaling"])
    slow_memory = fine(
        "plan", path, "-n", "8", "--params", "7B", "--bandwidth", "25GB/s", "--memory-bandwidth", "5GB/s"
    )
    assert slow_memory["extra_seconds"] > 0
    assert (
        "against stock in one reduction"
        in start("plan", path, "-n", "8", "--params", "7B", "--bandwidth", "1Gb/s").stdout
    )
    assert fine("plan", path, "-n", "8", "--params", "7B")["extra_seconds"] is None
    assert start("plan", path, "-n", "8", "--params", "7B", "--bandwidth", "fast").returncode == 2


def test_plan_with_hosts_as_replicas(tmp_path: Path) -> None:
    path = config(tmp_path, {"fault_domain": "node"}, zero_optimization={"stage": 2})
    found = fine("plan", path, "-n", "32", "--gpus-per-node", "4", "--params", "1B")
    made = plan(parse_section({"fault_domain": "node"}), 8, stage=2, numel=10**9, ranks=32)
    assert (found["replicas"], found["bytes_sent_per_rank"]) == (8, made.bytes_sent_per_rank)


@pytest.mark.parametrize(
    ("text", "number"),
    [("7B", 7 * 10**9), ("135m", 135 * 10**6), ("1.5e9", 1_500_000_000), ("1_000", 1000), ("0.5B", 5 * 10**8)],
)
def test_parameters(text: str, number: int) -> None:
    assert parameters(text) == number


@pytest.mark.parametrize("text", ["", "B", "-1", "0", "7 x", "1e99", "nan", "7BB"])
def test_no_parameters(text: str) -> None:
    with pytest.raises(ValueError, match="no number of parameters"):
        parameters(text)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, (0, 4, False)),
        ({"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}}, (3, 2, False)),
        ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, (1, 2, False)),
        (
            {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            (1, 2, True),
        ),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, (0, 4, False)),
    ],
)
def test_what_a_deepspeed_json_says_of_a_job(raw: dict[str, Any], expected: tuple[int, int, bool]) -> None:
    job = job_of(raw, params=None)
    assert (job.stage, job.dtype_bytes, job.everyone) == expected
    with pytest.raises(ConfigError, match=r"zero_optimization.stage"):
        job_of({"zero_optimization": {"stage": "two"}}, params=None)


# -- config ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_starter_file_is_valid(tmp_path: Path, stage: str) -> None:
    target = str(tmp_path / "ds.json")
    assert start("config", "init", target, "--stage", stage, "--rule", "median", "--plain").returncode == 0
    assert fine("config", "validate", target)["section"]["rule"] == {"name": "median"}
    assert "auto" not in Path(target).read_text()
    again = start("config", "init", target)
    assert again.returncode == 1
    assert "--force" in again.stderr


def test_a_starter_file_for_trainer_leaves_the_sizes_to_it() -> None:
    made = json.loads(start("config", "init").stdout)
    assert made["train_batch_size"] == "auto"
    assert "auto" not in json.dumps(made["byzantine"])


def test_schema() -> None:
    assert fine("config", "schema") == json_schema()


def test_validate_lists_all_problems(tmp_path: Path) -> None:
    path = config(tmp_path, {"f": "1", "rule": "krm", "alhpa": 0.1})
    ended = start("config", "validate", path)
    assert ended.returncode == 1
    for part in ("byzantine.f:", 'Did you mean "krum"?', 'Did you mean "alpha"?'):
        assert part in ended.stderr
    said = json.loads(start("config", "validate", path, "--json").stdout)
    assert (said["ok"], "byzantine.alhpa" in said["error"]) == (False, True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "line 1, column 2"),
        ("[]", "holds list"),
        ('{"a": 1, "a": 2}', 'The key "a" stands there twice'),
        ("{}", 'no "byzantine" section'),
        ('{"byzantine": []}', "this section is an object"),
        ("\\xff", "no valid JSON"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    ended = start("config", "validate", str(path))
    assert (ended.returncode, why in ended.stderr) == (1, True), ended.stderr


# -- report ------------------------------------------------------------------------------------------------------------


def test_report(tmp_path: Path) -> None:
    path = write(tmp_path / "run", Job(bad=4))
    html = tmp_path / "out" / "report.html"
    ended = start("report", str(path), "--html", str(html), "--png", str(tmp_path / "png"))
    assert ended.returncode == 0, ended.stderr
    assert "Replica 4 is named as bad" in ended.stdout
    assert "Replica 4 is named as bad" in html.read_text(encoding="utf-8")
    assert (tmp_path / "png" / "evidence.png").is_file()
    found = fine("report", str(tmp_path / "run"))
    assert (found["ok"], found["status"], found["cases"][0]["ranks"]) == (False, "named", [4])


def test_report_can_fail_a_pipeline(tmp_path: Path) -> None:
    write(tmp_path / "bad", Job(bad=4))
    write(tmp_path / "good", Job())
    assert start("report", str(tmp_path / "bad"), "--fail-if-named").returncode == 1
    assert start("report", str(tmp_path / "good"), "--fail_if_named").returncode == 0


def test_report_on_the_wrong_folder_says_where_to_look(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "mine", Job(steps=1))
    ended = start("report", str(tmp_path))
    assert ended.returncode == 1
    assert "mine" in ended.stderr


def test_report_follows_a_run_until_it_is_interrupted(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    command = [COMMAND, "report", tmp_path, "--watch", "--interval", "0.2", "--json", "--html", html]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["status"] == "empty"
        write(tmp_path, Job(steps=5))
        while (now := json.loads(watching.stdout.readline()))["steps"] < 5:
            pass
        assert now["status"] == "quiet"
        assert 'http-equiv="refresh"' in html.read_text(encoding="utf-8")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0
        assert 'http-equiv="refresh"' not in html.read_text(encoding="utf-8")
    finally:
        watching.kill()
        watching.communicate()


# -- env and check -----------------------------------------------------------------------------------------------------


def test_env_tells_versions_and_no_secrets() -> None:
    ended = start("env", NCCL_DEBUG="INFO", WORLD_SIZE="secret/path", HF_TOKEN="hf_secret", MY_API_KEY="key")
    assert ended.returncode == 0
    for name in ("ds_byzantine", "deepspeed", "torch", "transformers", "python", "os", "accelerator", "nccl"):
        assert re.search(rf"^{name}: .+", ended.stdout, re.MULTILINE), name
    assert "NCCL_DEBUG=INFO" in ended.stdout
    assert "WORLD_SIZE=(set, not shown)" in ended.stdout
    assert "secret" not in ended.stdout
    assert str(Path.home()) + os.sep not in ended.stdout


def test_settings_are_those_on_a_list() -> None:
    assert env.settings({"OMP_NUM_THREADS": "4", "AWS_SECRET": "x"}) == {"OMP_NUM_THREADS": "4"}


def test_check_finds_everything_in_order(tmp_path: Path) -> None:
    found = fine("check", config(tmp_path, {"rule": "median", "drill": "sign_flip"}))
    by_part: dict[str, list[str]] = {}
    for one in found["checks"]:
        by_part.setdefault(one["part"], []).append(one["status"])
    assert set(by_part["versions"]) == {"OKAY"}
    assert set(by_part["DeepSpeed's functions"]) <= {"OKAY", "SKIP"}
    assert len(by_part["DeepSpeed's functions"]) > 15
    assert by_part["config"] == ["OKAY", "WARN"]


def test_check_fails_with_a_fix(tmp_path: Path) -> None:
    ended = start("check", config(tmp_path, {"f": -1}), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    text = re.sub(r"\s+", " ", ended.stdout)
    assert ended.returncode == 1
    assert "[FAIL] byzantine.f" in text
    assert "[WARN] entry point switched off by TORCH_DEVICE_BACKEND_AUTOLOAD=0 fix: call ds_byzantine.install()" in text
    assert "1 failed" in text


def test_a_missing_or_old_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=99", "no_such_package_at_all>=1", 'rich>=13; extra == "demo"']
    monkeypatch.setattr("ds_byzantine.cli.check_installed.metadata.requires", lambda name: wanted)
    states = {one.what: (one.status, one.fix) for one in versions()}
    assert states["torch"] == ("FAIL", 'pip install "torch>=99"')
    assert states["no_such_package_at_all"][0] == "FAIL"
    assert "rich" not in states


GOOD = {"difference": 1e-9, "change": 0.01, "bound": True, "stock_bound": False}


@pytest.mark.parametrize(
    ("changes", "status", "why"),
    [
        ({}, "OKAY", "1.0e-07 of the largest change"),
        ({"difference": 0.01 * 1.1 * check_launch.TOLERANCE}, "FAIL", "1.1e-05 of the largest change, allowed 1e-05"),
        ({"difference": float("nan")}, "FAIL", "nan"),
        ({"change": 0.0}, "FAIL", "nothing was compared"),
        ({"bound": False}, "FAIL", "did not take effect"),
        ({"stock_bound": True}, "FAIL", "without a section was changed"),
        ({"error": "RuntimeError: no"}, "FAIL", "rank 1: RuntimeError: no"),
    ],
)
def test_what_the_ranks_found_is_judged(changes: dict[str, Any], status: str, why: str) -> None:
    found = check_launch.judge(2, [GOOD, {**GOOD, **changes}])
    assert (found.status, why in found.detail) == (status, True), found.detail
