"""All attacks: dtypes, determinism, and that they change nothing that is not theirs; the formulas of the simple ones.

Those that try out or measure the honest rows, and hardware faults, have files of their own beside this one.
"""

from __future__ import annotations

import inspect
import math
import statistics

import pytest
import torch

from ds_byzantine.attacks.base import AttackInfo, find
from ds_byzantine.attacks.catalog import ATTACKS, z_max
from ds_byzantine.attacks.labels import flip_labels
from ds_byzantine.errors import ConfigError
from ds_byzantine.rules.aggregate import aggregate

NAMES = sorted(ATTACKS)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def trimmed_mean(rows_ND: torch.Tensor) -> torch.Tensor:
    return aggregate(rows_ND, rule="trimmed_mean", f=2)


def info(seed: int = 0, n: int = 8, f: int = 2, step: int = 0, **known: object) -> AttackInfo:
    generator = torch.Generator().manual_seed(seed)
    return AttackInfo(n=n, f=f, step=step, generator=generator, seed=seed, aggregate=trimmed_mean, **known)  # type: ignore[arg-type]


def rows(dtype: torch.dtype, count: int = 6, width: int = 257) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


def run(name: str, honest_HD: torch.Tensor, seed: int = 0, **params: object) -> torch.Tensor:
    attack = find(name)
    return attack.function(honest_HD[0], honest_HD if attack.spec.needs_honest else None, info(seed), **params)


@pytest.mark.parametrize("name", NAMES)
def test_the_function_takes_the_catalog_s_parameters_with_its_defaults(name: str) -> None:
    signature = inspect.signature(find(name).function)
    keywords = {p.name: p.default for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keywords == {p.name: p.default for p in ATTACKS[name].params}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_inputs_stay_and_the_output_is_a_new_row_of_the_same_kind(name: str, dtype: torch.dtype) -> None:
    honest_HD = rows(dtype)
    before = honest_HD.clone()
    out = run(name, honest_HD)
    assert torch.equal(honest_HD, before)
    assert out.dtype == dtype
    assert out.shape == honest_HD[0].shape
    assert out.untyped_storage().data_ptr() != honest_HD.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_row(name: str) -> None:
    honest_HD = rows(torch.float32)
    first, again = run(name, honest_HD, seed=3), run(name, honest_HD, seed=3)
    assert torch.equal(first.nan_to_num(7.0), again.nan_to_num(7.0))


@pytest.mark.parametrize("width", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_few_elements(name: str, dtype: torch.dtype, width: int) -> None:
    out = run(name, rows(dtype, width=width))
    assert (out.dtype, out.shape) == (dtype, (width,))


@pytest.mark.parametrize("name", [n for n in NAMES if ATTACKS[n].needs_honest])
def test_colluders_send_the_same_row_whatever_their_own(name: str) -> None:
    honest_HD = rows(torch.bfloat16)
    sent = [
        find(name).function(own_D, honest_HD, info(replica=6 + i, member=i, seed=i))
        for i, own_D in enumerate((honest_HD[0], torch.zeros_like(honest_HD[0])))
    ]
    assert torch.equal(*sent)


@pytest.mark.parametrize("name", [n for n in NAMES if not ATTACKS[n].needs_honest])
def test_a_strided_row(name: str) -> None:
    own_D = rows(torch.float32)[0]
    strided_D = torch.stack([own_D, own_D], 1)[:, 0]
    assert not strided_D.is_contiguous()
    out, expected = (find(name).function(x_D, None, info()).nan_to_num(7.0) for x_D in (strided_D, own_D))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "params", "formula"),
    [
        ("sign_flip", {"factor": 3.0}, lambda x: [-3.0 * v for v in x[0]]),
        ("scale", {"factor": -10.0}, lambda x: [-10.0 * v for v in x[0]]),
        ("zero", {}, lambda x: [0.0 for _ in x[0]]),
        (
            "alie",
            {"z": 1.5},
            lambda x: [statistics.fmean(c) - 1.5 * statistics.stdev(c) for c in zip(*x, strict=True)],
        ),
        ("ipm", {"epsilon": 0.5}, lambda x: [-0.5 * statistics.fmean(c) for c in zip(*x, strict=True)]),
    ],
)
def test_formulas(name: str, params: dict[str, float], formula: object, dtype: torch.dtype) -> None:
    honest_HD = rows(dtype, width=33)
    expected = torch.tensor(formula(honest_HD.double().tolist()), dtype=torch.float64)  # type: ignore[operator]
    out = run(name, honest_HD, **params).double()
    # Arithmetic is at least float32, so that of a narrow dtype only the final rounding is left: half a unit.
    units = 0.51 if dtype.itemsize == 2 else 4.0
    exact = 1e-14 if dtype == torch.float64 else 1e-6
    assert torch.allclose(out, expected, rtol=units * torch.finfo(dtype).eps, atol=exact)


def test_float16_sums_do_not_overflow_on_the_way() -> None:
    honest_HD = torch.full((8, 3), 60_000.0, dtype=torch.float16)
    assert torch.equal(run("ipm", honest_HD, epsilon=1.0), -honest_HD[0])
    assert torch.isfinite(run("alie", honest_HD, z=1.5)).all()


def test_nan_and_inf() -> None:
    assert torch.isnan(run("nan", rows(torch.bfloat16))).all()
    assert torch.isposinf(run("nan", rows(torch.bfloat16), kind="inf")).all()


def test_gaussian_noise_has_the_size_asked_for_and_forgets_the_gradient() -> None:
    own_D = torch.full((200_000,), 0.01)
    for sigma, relative, expected in ((2.0, True, 0.02), (3.0, False, 3.0)):
        noise_D = run("gaussian", own_D[None], sigma=sigma, relative=relative)
        assert float(noise_D.std()) == pytest.approx(expected, rel=0.02)
        assert abs(float(noise_D.mean())) < expected / 50
    assert not torch.equal(run("gaussian", own_D[None], seed=1), run("gaussian", own_D[None], seed=2))
    assert run("gaussian", torch.zeros(1, 0)).shape == (0,)


def test_alie_with_one_honest_row_sends_that_row() -> None:
    honest_HD = rows(torch.float32, count=1)
    assert torch.equal(run("alie", honest_HD, z=1.5), honest_HD[0])


def test_alie_derives_z_from_n_and_f() -> None:
    honest_HD = rows(torch.float64, count=26)
    fixed = find("alie").function(honest_HD[0], honest_HD, info(n=50, f=24), z=z_max(50, 24))
    derived = find("alie").function(honest_HD[0], honest_HD, info(n=50, f=24))
    assert torch.equal(fixed, derived)
    assert not torch.equal(derived, honest_HD.mean(0))


@pytest.mark.parametrize(("n", "f"), [(50, 24), (50, 12), (25, 5), (10, 4), (100, 20)])
def test_z_max_is_the_largest_z_that_the_paper_allows(n: int, f: int) -> None:
    supporters = math.floor(n / 2 + 1) - f
    share = (n - f - supporters) / (n - f)
    below = 0.5 * (1 + math.erf(z_max(n, f) / math.sqrt(2)))
    assert below == pytest.approx(share, abs=1e-9)


@pytest.mark.parametrize(("n", "f"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (8, 2), (2, 1), (5, 4)])
def test_z_max_is_a_number_for_every_job(n: int, f: int) -> None:
    assert 0.0 <= z_max(n, f) < 8.0


@pytest.mark.parametrize("name", [n for n in NAMES if ATTACKS[n].needs_honest])
def test_colluders_need_honest_rows(name: str) -> None:
    for missing in (None, torch.zeros(0, 3)):
        with pytest.raises(ValueError, match="honest_HD"):
            find(name).function(torch.zeros(3), missing, info())


def test_parameters_are_checked() -> None:
    with pytest.raises(ConfigError, match=r'drill\.facter: no such parameter of scale\. Did you mean "factor"\?'):
        ATTACKS["scale"].check_params({"facter": 2.0}, "drill")
    with pytest.raises(ConfigError, match=r"drill\.kind: got 'nul'"):
        ATTACKS["nan"].check_params({"kind": "nul"}, "drill")
    assert ATTACKS["alie"].check_params({}, "drill") == {"z": None}


# -- attackers that are honest most of the time or in most places ------------------------------------------------------


def spoiled(name: str, own_D: torch.Tensor, known: dict[str, int], **params: object) -> list[int]:
    """Where the row is not the true one; there it has to be factor = -3 times that."""
    out_D = find(name).function(own_D, None, info(**known), factor=-3.0, **params)
    places = (out_D != own_D).nonzero()[:, 0]
    assert torch.equal(out_D[places], own_D[places] * -3.0)
    return places.tolist()


@pytest.mark.parametrize(("share", "width"), [(0.1, 26), (0.001, 1), (1.0, 257), (0.5, 129)])
def test_concentrated_spoils_one_run_of_the_size_asked_for(share: float, width: int) -> None:
    own_D = rows(torch.float64)[0]
    places = spoiled("concentrated", own_D, {}, share=share)
    assert places == list(range(places[0], places[0] + width))


def test_concentrated_stays_where_it_is_until_the_seed_or_the_bucket_changes() -> None:
    own_D = rows(torch.float64, width=10_000)[0]
    base = spoiled("concentrated", own_D, {})
    for same in ({"step": 9}, {"replica": 3, "member": 1}):
        assert spoiled("concentrated", own_D, same) == base
    for other in ({"seed": 1}, {"call": 1}):
        assert spoiled("concentrated", own_D, other) != base


def test_concentrated_in_one_bucket() -> None:
    own_D = rows(torch.float64)[0]
    assert [bool(spoiled("concentrated", own_D, {"call": c}, bucket=2)) for c in range(4)] == [
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("f", "parts", "of_member"), [(1, None, ["x-x-x-"]), (2, None, ["x-x-x-", "-x-x-x"]), (2, 3, ["x--x--", "-x--x-"])]
)
def test_split_by_bucket(f: int, parts: int | None, of_member: list[str]) -> None:
    own_D = rows(torch.float64)[0]
    for member, expected in enumerate(of_member):
        known = [{"f": f, "member": member, "call": call} for call in range(6)]
        places = [len(spoiled("split", own_D, one, parts=parts)) for one in known]
        assert places == [257 * (mark == "x") for mark in expected]


def test_split_by_share_spoils_each_place_once() -> None:
    own_D = rows(torch.float64)[0]
    shares = [spoiled("split", own_D, {"f": 3, "member": member}, by="share") for member in range(3)]
    assert [place for share in shares for place in share] == list(range(257))
    assert [len(s) for s in shares] == [85, 86, 86]
    assert spoiled("split", own_D, {"member": 4}, by="share", parts=3) == shares[1]


@pytest.mark.parametrize("delay", [1, 3])
def test_stale_sends_the_gradient_of_delay_steps_ago(delay: int) -> None:
    memory: dict[int, dict[int, torch.Tensor]] = {}
    sent = rows(torch.bfloat16, count=16).view(8, 2, 257)  # [step, bucket, D]
    for step in range(8):
        for call in range(2):
            out_D = find("stale").function(
                sent[step, call], None, info(step=step, call=call, memory=memory), delay=delay
            )
            assert torch.equal(out_D, sent[step - delay if step >= delay else step, call])
    assert {call: len(past) for call, past in memory.items()} == {0: delay + 1, 1: delay + 1}


def test_stale_is_honest_where_it_has_nothing_that_fits() -> None:
    memory: dict[int, dict[int, torch.Tensor]] = {}
    first_D = rows(torch.float32)[0]
    find("stale").function(first_D, None, info(step=0, memory=memory))
    for other_D in (first_D[:5], first_D.double()):
        assert torch.equal(find("stale").function(other_D, None, info(step=1, memory=memory)), other_D)
    missed_D = rows(torch.float32)[1]  # step 3: there was no step 2
    assert torch.equal(find("stale").function(missed_D, None, info(step=3, memory=memory)), missed_D)


def test_stale_keeps_a_copy_and_not_the_host_s_buffer() -> None:
    memory: dict[int, dict[int, torch.Tensor]] = {}
    buffer_D = torch.ones(3)
    find("stale").function(buffer_D, None, info(step=0, memory=memory))
    buffer_D.fill_(2.0)
    out_D = find("stale").function(buffer_D, None, info(step=1, memory=memory))
    out_D.fill_(9.0)
    assert memory[0][0].tolist() == [1.0, 1.0, 1.0]


# -- labels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_flipped_labels(dtype: torch.dtype) -> None:
    labels = torch.tensor([[0, 1, -100], [9, 5, 0]], dtype=dtype)
    flipped = flip_labels(labels, 10)
    assert flipped.tolist() == [[9, 8, -100], [0, 4, 9]]
    assert flipped.dtype == dtype
    assert labels[0, 0] == 0
    assert torch.equal(flip_labels(flipped, 10), labels)


def test_a_label_that_a_narrow_dtype_could_mistake_for_the_ignored_one() -> None:
    assert flip_labels(torch.tensor([156], dtype=torch.uint8), 256).tolist() == [99]
    assert flip_labels(torch.tensor([], dtype=torch.int64), 2).shape == (0,)
    assert flip_labels(torch.tensor([255, 1]), 2, ignore_index=255).tolist() == [255, 0]


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        ([0], 1, "classes: got 1"),
        ([0, 10], 10, "labels: got 10, but with classes=10 they are 0 to 9"),
        ([-1], 10, "labels: got -1"),
        ([0.0], 10, r"labels: got torch\.float32"),
        ([True], 10, r"labels: got torch\.bool"),
    ],
)
def test_wrong_labels(labels: list[int], classes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flip_labels(torch.tensor(labels), classes)
