"""Times one other library, in its own environment: a line of JSON in, a line of JSON out. Started by `rules_speed.py`.

In: {"rule", "n", "f", "d", "dtype", "seed"}; out: {"seconds"} of one call, or {"missing"}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

torch.set_num_threads(1)


@lru_cache(maxsize=1)
def rows(n: int, d: int, dtype: str, seed: int) -> torch.Tensor:
    """[n, d], the same as in `rules_speed.py`."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def byzfl(rule: str, f: int) -> Callable[[torch.Tensor], Any] | None:
    """An aggregator of ByzFL."""
    import byzfl as lib

    known: dict[str, Callable[[], Any]] = {
        "median": lib.Median,
        "trimmed_mean": lambda: lib.TrMean(f),
        "meamed": lambda: lib.Meamed(f),
        "krum": lambda: lib.Krum(f),
        "multi_krum": lambda: lib.MultiKrum(f),
        "geometric_median": lib.GeometricMedian,
        "centered_clip": lambda: lib.CenteredClipping(L=5, tau=100.0),
        "smea": lambda: lib.SMEA(f),
        "caf_gated": lambda: lib.CAF(f),
        "nnm+trimmed_mean": lambda: _chain(lib.NNM(f), lib.TrMean(f)),
    }
    return known[rule]() if rule in known else None


def byzpy(rule: str, f: int) -> Callable[[torch.Tensor], Any] | None:
    """An aggregator of byzpy, which takes a list of vectors."""
    from byzpy.aggregators.coordinate_wise.mean_of_medians import MeanOfMedians
    from byzpy.aggregators.coordinate_wise.median import CoordinateWiseMedian
    from byzpy.aggregators.coordinate_wise.trimmed_mean import CoordinateWiseTrimmedMean
    from byzpy.aggregators.geometric_wise.geometric_median import GeometricMedian
    from byzpy.aggregators.geometric_wise.krum import Krum, MultiKrum
    from byzpy.aggregators.geometric_wise.smea import SMEA
    from byzpy.aggregators.norm_wise.caf import CAF
    from byzpy.aggregators.norm_wise.center_clipping import CenteredClipping
    from byzpy.pre_aggregators.nnm import NearestNeighborMixing

    known: dict[str, Callable[[int], Any]] = {
        "median": lambda n: CoordinateWiseMedian(),
        "trimmed_mean": lambda n: CoordinateWiseTrimmedMean(f=f),
        "meamed": lambda n: MeanOfMedians(f=f),
        "krum": lambda n: Krum(f=f),
        "multi_krum": lambda n: MultiKrum(f=f, q=n - f),
        "geometric_median": lambda n: GeometricMedian(),
        "centered_clip": lambda n: CenteredClipping(c_tau=100.0, M=5),
        "smea": lambda n: SMEA(f=f),
        "caf_gated": lambda n: CAF(f=f),
    }
    if rule == "nnm+trimmed_mean":
        mix, trim = NearestNeighborMixing(f=f), CoordinateWiseTrimmedMean(f=f)
        return lambda x: trim.aggregate(mix.pre_aggregate(list(x)))
    return (lambda x: known[rule](len(x)).aggregate(list(x))) if rule in known else None


def krum(rule: str, f: int) -> Callable[[torch.Tensor], Any] | None:
    """An aggregator of krum, which asks for Python 3.12 but runs on 3.11."""
    from krum.primitives import aggregators as lib
    from krum.primitives.aggregators import bulyan, geometric_median, median, multikrum, trimmed_mean
    from krum.primitives.aggregators import krum as single

    known: dict[str, type[lib.Aggregator]] = {
        "median": median.Median,
        "trimmed_mean": trimmed_mean.TrimmedMean,
        "krum": single.Krum,
        "multi_krum": multikrum.MultiKrum,
        "bulyan": bulyan.Bulyan,
        "geometric_median": geometric_median.GeometricMedian,
    }
    return (lambda x: known[rule].aggregate(x, n=len(x), f=f)) if rule in known else None


def _chain(first: Callable[[Any], Any], then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: then(first(x))


def main(library: str) -> None:
    """Answer until the input ends."""
    make = {"byzfl": byzfl, "byzpy": byzpy, "krum": krum}[library]
    for line in sys.stdin:
        asked = json.loads(line)
        x = rows(asked["n"], asked["d"], asked["dtype"], asked["seed"])
        call = make(asked["rule"], asked["f"])
        if call is None:
            print(json.dumps({"missing": asked["rule"]}), flush=True)
            continue
        began = time.perf_counter()
        try:
            call(x)
        except Exception as error:
            print(json.dumps({"missing": f"{type(error).__name__}: {error}"}), flush=True)
            continue
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
