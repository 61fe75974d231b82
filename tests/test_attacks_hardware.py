"""Hardware faults: exactly what was asked for is wrong, where and when it was asked for."""

from __future__ import annotations

import pytest
import torch

from ds_byzantine.attacks.base import AttackInfo, find, seeded
from ds_byzantine.attacks.catalog import ATTACKS
from ds_byzantine.errors import ConfigError

FAULTS = ["bit_flip", "gemm_tile", "lanes", "single_element", "stuck"]
# dtype -> (integers of the same size, bits of a word, bits of its mantissa)
LAYOUT = {
    torch.float16: (torch.int16, 16, 10),
    torch.bfloat16: (torch.int16, 16, 7),
    torch.float32: (torch.int32, 32, 23),
    torch.float64: (torch.int64, 64, 52),
}


def info(seed: int = 0, step: int = 0, replica: int = 0, call: int = 0) -> AttackInfo:
    generator = seeded(seed, step, replica, call)
    return AttackInfo(n=5, f=1, step=step, generator=generator, seed=seed, replica=replica, call=call)


def row(dtype: torch.dtype = torch.float32, width: int = 1000) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def strike(name: str, own_D: torch.Tensor, known: AttackInfo | None = None, **params: object) -> torch.Tensor:
    return find(name).function(own_D, None, known or info(), **params)


def flipped(before_D: torch.Tensor, after_D: torch.Tensor) -> dict[int, list[int]]:
    """Place of each word that changed -> numbers of the bits that did, from the bits as Python integers."""
    ints, width, _ = LAYOUT[before_D.dtype]
    pairs = zip(before_D.view(ints).tolist(), after_D.view(ints).tolist(), strict=True)
    changed = {i: (a ^ b) & (2**width - 1) for i, (a, b) in enumerate(pairs) if a != b}
    return {i: [bit for bit in range(width) if mask >> bit & 1] for i, mask in changed.items()}


# -- bit_flip ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(LAYOUT))
@pytest.mark.parametrize("words", [1, 3, 400, 900, 5000])
@pytest.mark.parametrize(
    ("where", "bits"), [("exponent", 1), ("exponent", 5), ("mantissa", 7), ("sign", 1), ("any", 8)]
)
def test_exactly_the_bits_asked_for_flip(where: str, bits: int, words: int, dtype: torch.dtype) -> None:
    own_D = row(dtype)
    _, width, mantissa = LAYOUT[dtype]
    allowed = {
        "exponent": range(mantissa, width - 1),
        "mantissa": range(mantissa),
        "sign": range(width - 1, width),
        "any": range(width),
    }[where]
    found = flipped(own_D, strike("bit_flip", own_D, bits=bits, words=words, where=where))
    assert len(found) == min(words, 1000)
    for numbers in found.values():
        assert len(numbers) == bits
        assert set(numbers) <= set(allowed)
    if words >= 900 and bits < len(allowed):
        assert {bit for numbers in found.values() for bit in numbers} == set(allowed)  # all of them are drawn from


@pytest.mark.parametrize("dtype", list(LAYOUT))
def test_one_bit_by_its_number(dtype: torch.dtype) -> None:
    own_D = row(dtype)
    for bit in range(LAYOUT[dtype][1]):
        (numbers,) = flipped(own_D, strike("bit_flip", own_D, where=bit)).values()
        assert numbers == [bit]


def test_twice_the_same_flip_is_none() -> None:
    own_D = row()
    once_D = strike("bit_flip", own_D, words=10, bits=3, where="any")
    assert torch.equal(strike("bit_flip", once_D, words=10, bits=3, where="any"), own_D)


@pytest.mark.parametrize(
    ("dtype", "params", "message"),
    [
        (torch.bfloat16, {"where": 16}, r"where: got 16, but the gradients are torch\.bfloat16: bits 0 to 15"),
        (torch.float32, {"where": 32}, "where: got 32"),
        (torch.float16, {"bits": 6}, r"bits: got 6, but a word of torch\.float16 has 5 such bits \(where='exponent'\)"),
        (torch.float32, {"bits": 2, "where": 3}, "bits: got 2, but a word of torch.float32 has one bit of that number"),
        (torch.float8_e5m2, {}, r"name: the gradients are torch\.float8_e5m2, but bits are known of float16, bfloat16"),
    ],
)
def test_bits_that_the_dtype_does_not_have(dtype: torch.dtype, params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strike("bit_flip", torch.zeros(0, dtype=dtype), **params)


# -- the others --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(LAYOUT))
@pytest.mark.parametrize("where", ["exponent", "mantissa", "sign", "any", 3])
def test_lanes_flip_one_bit_in_every_32nd_element(where: str | int, dtype: torch.dtype) -> None:
    own_D = row(dtype)
    found = flipped(own_D, strike("lanes", own_D, where=where))
    assert list(found) == list(range(min(found), 1000, 32))
    assert min(found) < 32
    assert len({tuple(numbers) for numbers in found.values()}) == 1
    if where == 3:
        assert found[min(found)] == [3]


@pytest.mark.parametrize(
    ("lane", "period", "width"), [(0, 32, 1000), (31, 32, 1000), (5, 8, 1000), (4, 5, 3), (0, 1, 9)]
)
def test_lanes_scale(lane: int, period: int, width: int) -> None:
    own_D = row(width=width)
    out_D = strike("lanes", own_D, how="scale", lane=lane, period=period, factor=-2.0)
    hit = torch.arange(width) % period == lane
    assert torch.equal(out_D, torch.where(hit, own_D * -2.0, own_D))


@pytest.mark.parametrize(
    ("params", "width"),
    [
        ({"rows": 4, "cols": 3, "pitch": 50}, 1000),
        ({"rows": 1, "cols": 7, "pitch": 7}, 1000),
        ({"rows": 40, "cols": 10, "pitch": 60}, 1000),  # 60 * 39 + 10 is more than there is
        ({}, 100_000),
        ({}, 10),
    ],
)
def test_a_tile_is_runs_of_elements_one_pitch_apart(params: dict[str, int], width: int) -> None:
    own_D = row(torch.float64, width)
    out_D = strike("gemm_tile", own_D, factor=5.0, **params)
    rows, cols, pitch = ({"rows": 16, "cols": 16, "pitch": 1024} | params).values()
    places = (out_D != own_D).nonzero()[:, 0].tolist()
    tile = [places[0] + r * pitch + c for r in range(rows) for c in range(cols)]
    assert places == [i for i in tile if i < width]
    if (rows - 1) * pitch + cols <= width:
        assert len(places) == rows * cols
    assert torch.equal(out_D[places], own_D[places] * 5.0)


def test_a_tile_may_begin_wherever_it_fits() -> None:
    own_D = torch.ones(8)
    sent = [strike("gemm_tile", own_D, info(step=step), rows=2, cols=2, pitch=4, factor=0.0) for step in range(60)]
    assert {tuple((out_D == 0).nonzero()[:, 0].tolist()) for out_D in sent} == {
        (i, i + 1, i + 4, i + 5) for i in range(3)
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_single_element(dtype: torch.dtype) -> None:
    own_D = row(dtype)
    out_D = strike("single_element", own_D, factor=100.0)
    (place,) = (out_D != own_D).nonzero()[:, 0].tolist()
    assert float(out_D[place]) == pytest.approx(100.0 * float(own_D.double().square().mean().sqrt()), rel=0.01)


@pytest.mark.parametrize("words", [1, 20, 700, 4000])
def test_stuck_words_hold_their_value_in_every_step(words: int) -> None:
    first_D, second_D = row(), row() * 2
    one_D = strike("stuck", first_D, info(step=0), words=words, value=-0.5)
    two_D = strike("stuck", second_D, info(step=8), words=words, value=-0.5)
    places = (one_D != first_D).nonzero()[:, 0]
    assert len(places) == min(words, 1000)
    assert torch.equal(places, (two_D != second_D).nonzero()[:, 0])
    assert (one_D[places] == -0.5).all()
    assert (two_D[places] == -0.5).all()


# -- where and when ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "matters"),
    [
        ("bit_flip", {"seed", "step", "replica", "call"}),
        ("gemm_tile", {"seed", "step", "replica", "call"}),
        ("single_element", {"seed", "step", "replica", "call"}),
        ("stuck", {"seed", "replica", "call"}),
        ("lanes", {"seed", "replica"}),
    ],
)
def test_what_the_place_depends_on(name: str, matters: set[str]) -> None:
    own_D = row(width=100_000)
    many = {"lanes": {"period": 50_000, "how": "scale"}}.get(name, {})
    base_D = strike(name, own_D, **many)
    assert torch.equal(base_D.nan_to_num(7.0), strike(name, own_D, **many).nan_to_num(7.0))
    for one in ("seed", "step", "replica", "call"):
        other_D = strike(name, own_D, info(**{one: 1}), **many)
        assert torch.equal(base_D.nan_to_num(7.0), other_D.nan_to_num(7.0)) == (one not in matters), one


@pytest.mark.parametrize("name", FAULTS)
def test_an_intermittent_fault_strikes_in_some_steps_and_then_in_all_buckets(name: str) -> None:
    own_D = row(width=64)

    def hit(step: int, call: int, probability: float) -> bool:
        out_D = strike(name, own_D, info(step=step, call=call), probability=probability)
        return not torch.equal(out_D, own_D)

    hits = [hit(step, 0, 0.25) for step in range(400)]
    assert 60 < sum(hits) < 140
    assert hits == [hit(step, 3, 0.25) for step in range(400)]
    assert not any(hit(step, 0, 0.0) for step in range(20))
    assert all(hit(step, 0, 1.0) for step in range(20))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_bucket_only(name: str) -> None:
    own_D = row(width=64)
    hits = [not torch.equal(strike(name, own_D, info(call=call), bucket=1), own_D) for call in range(3)]
    assert hits == [False, True, False]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("bit_flip", {"bits": 9}, r"d\.bits: got 9, but it has to be between 1 and 8"),
        ("bit_flip", {"bits": 0}, r"d\.bits: got 0"),
        ("bit_flip", {"where": "exponnt"}, r"d\.where: got 'exponnt'\. Use one of: exponent"),
        ("bit_flip", {"where": -1}, r"d\.where: got -1, but this is a str or a whole number from 0 to 63\."),
        ("bit_flip", {"where": 64}, r"d\.where: got 64"),
        ("bit_flip", {"where": True}, r"d\.where: got True"),
        ("bit_flip", {"where": "sign", "bits": 2}, r"d\.bits: got 2, but where='sign' is one bit"),
        ("bit_flip", {"where": 30, "bits": 2}, r"d\.bits: got 2, but where=30 is one bit"),
        ("lanes", {"lane": 32}, r"d\.lane: got 32, but with period=32 there are lanes 0 to 31"),
        ("lanes", {"how": "or"}, r"d\.how: got 'or'"),
        ("gemm_tile", {"cols": 9, "pitch": 8}, r"d\.cols: got 9, but rows of the tile are pitch=8 apart"),
        ("stuck", {"words": 0}, r"d\.words: got 0"),
        ("stuck", {"value": float("nan")}, r"d\.value: got nan"),
        ("single_element", {"probability": 1.5}, r"d\.probability: got 1\.5, but it has to be between 0\.0 and 1\.0"),
        ("single_element", {"bucket": -1}, r"d\.bucket: got -1"),
    ],
)
def test_parameters_that_cannot_be(name: str, given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ATTACKS[name].check_params(given, "d")


def test_a_bit_may_be_given_by_its_number_or_by_a_name() -> None:
    assert ATTACKS["bit_flip"].check_params({"where": 30}, "d")["where"] == 30
    assert ATTACKS["bit_flip"].check_params({"where": "any"}, "d")["where"] == "any"
