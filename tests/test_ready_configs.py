"""The ready DeepSpeed files in configs/: complete, accepted, and found by a reader of the documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_byzantine.config import parse_section
from ds_byzantine.plan import plan

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs").glob("*.json"))
PARALLEL = {"pipeline", "tensor", "pipeline_tensor", "experts", "sequence", "hosts"}
REPLICAS = 3  # the fewest that f=1 allows


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "configs" / f"{name}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_a_ready_file_protects_three_replicas(file: Path) -> None:
    config = read(file.stem)
    settled = plan(
        parse_section(config["byzantine"]),
        REPLICAS,
        stage=config["zero_optimization"]["stage"],
        numel=10_000,
        dtype_bytes=4,
        tensors=10,
        bucket_numel=1_000,
    )
    assert (settled.n, settled.f) == (REPLICAS, 1)


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_no_ready_file_needs_an_op_that_has_to_be_compiled(file: Path) -> None:
    optimizer = read(file.stem)["optimizer"]
    assert (optimizer["type"], optimizer["params"]["torch_adam"]) == ("AdamW", True)


def test_there_is_a_ready_file_for_every_kind_of_job() -> None:
    assert {p.stem for p in FILES} == {"adversary", "lora", "zero0", "zero1", "zero2", "zero3"} | PARALLEL


def test_each_kind_of_parallelism_is_told_as_it_has_to_be() -> None:
    assert read("tensor")["tensor_parallel"] == {"autotp_size": 2}
    assert read("hosts")["byzantine"]["fault_domain"] == "node"
    for name in ("pipeline", "pipeline_tensor"):
        assert read(name)["zero_optimization"]["stage"] <= 1, "DeepSpeed's pipelines cannot cut gradients"
    assert read("experts")["zero_optimization"]["stage"] <= 2, "DeepSpeed's MoE layer cannot shard parameters"
    assert "sequence_parallel_size" not in read("sequence"), "the mpu says it; from the config it would be refused"


@pytest.mark.parametrize("name", sorted(PARALLEL))
def test_the_document_on_parallelism_names_the_file(name: str) -> None:
    assert f"configs/{name}.json" in (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["pipeline", "tensor"])
def test_the_examples_are_named_where_they_are_looked_for(name: str) -> None:
    path = f"examples/llm/by_feature/{name}.py"
    assert (ROOT / path).is_file()
    for document in ("README.md", "docs/parallelism.md"):
        assert path in (ROOT / document).read_text(encoding="utf-8"), document
