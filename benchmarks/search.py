"""Search: exact against its rivals, approximate against exact at a recall of at least 0.99."""

from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.neighbors import NearestNeighbors

from attnknn.core.bank import MemoryBank
from attnknn.core.kernels import AVX512, cpu_flags, running_core_type
from benchmarks.bare_faiss import BareFaiss
from benchmarks.timing import (
    Action,
    Missing,
    Ratio,
    Sizes,
    clustered_rows,
    divided,
    interleaved,
    random_rows,
)

# ---- Exact: against the matrix product alone, bare faiss, torch and scikit-learn.

BLOCK = 1024  # queries a block of the matrix product


def blocked_products(rows: np.ndarray, queries: np.ndarray) -> dict[str, Action]:
    """Return the matrix product of a search and nothing else, by torch and by numpy."""
    buffer = np.empty((BLOCK, len(rows)), dtype=np.float32)
    kept, ours = torch.from_numpy(buffer), torch.from_numpy(rows)

    def by_torch() -> None:
        for block in torch.from_numpy(queries).split(BLOCK):
            torch.mm(block, ours.T, out=kept[: len(block)])

    def by_numpy() -> None:
        for start in range(0, len(queries), BLOCK):
            block = queries[start : start + BLOCK]
            np.matmul(block, rows.T, out=buffer[: len(block)])

    return {"torch_product": by_torch, "numpy_product": by_numpy}


def torch_search(rows: np.ndarray, queries: np.ndarray, k: int) -> Action:
    """Return the usual torch search: product and top-k, block by block."""
    ours, theirs = torch.from_numpy(rows), torch.from_numpy(queries)
    return lambda: [(block @ ours.T).topk(k, dim=1) for block in theirs.split(BLOCK)]


def measure_exact(sizes: Sizes) -> list[Ratio]:
    """Return how our exact search stands, at few and at many neighbours."""
    rows = random_rows(sizes.rows, sizes.dim, 0)
    queries = random_rows(sizes.queries, sizes.dim, 1)
    bank = MemoryBank(rows, np.arange(len(rows)) % 10, n_classes=10, index="auto")
    sklearn = NearestNeighbors(n_neighbors=sizes.k, algorithm="brute").fit(rows)
    bare = BareFaiss(sizes.rows, sizes.dim, sizes.queries)
    times = interleaved(
        {
            "ours": lambda: bank.search(queries, sizes.k),
            "bare": lambda: bare.search(sizes.k),
            **blocked_products(rows, queries),
            "torch": torch_search(rows, queries, sizes.k),
            "sklearn": lambda: sklearn.kneighbors(queries),
            "ours_few": lambda: bank.search(queries, sizes.few),
            "bare_few": lambda: bare.search(sizes.few),
        },
        sizes.rounds,
    )
    bare.close()
    kernels = f"{running_core_type()} kernels here, {bare.kernels} as installed"
    return _ratios(times, sizes, kernels, _product_speed(times, sizes))


def roof(times: dict[str, list[float]]) -> list[float]:
    """Return the shorter time of both products, round by round: libraries differ by the CPU."""
    return [min(pair) for pair in zip(times["torch_product"], times["numpy_product"], strict=True)]


def _product_speed(times: dict[str, list[float]], sizes: Sizes) -> str:
    operations = 2 * sizes.rows * sizes.dim * sizes.queries
    return f"product alone {operations / median(roof(times)) / 1e9:.0f} GFLOPS"


def _ratios(times: dict[str, list[float]], sizes: Sizes, kernels: str, product: str) -> list[Ratio]:
    wide = cpu_flags() >= AVX512
    size = f"{sizes.rows} x {sizes.dim} rows, {sizes.queries} queries"
    against_roof, against_bare = [], []
    for ours, bare, k in (("ours", "bare", sizes.k), ("ours_few", "bare_few", sizes.few)):
        against_roof.append(
            Ratio(
                f"exact_share_of_roof_k{k}",
                f"exact search, k = {k}: share of the bare matrix product's speed",
                divided(roof(times), times[ours]),
                "higher",
                target=0.65,
                note=f"{size}, {product}",
            )
        )
        against_bare.append(
            Ratio(
                f"exact_over_bare_faiss_k{k}",
                f"exact search, k = {k}: times the speed of faiss as installed",
                divided(times[bare], times[ours]),
                "higher",
                target=3.0 if wide else None,
                note=f"{size}, {kernels}",
            )
        )
    others = [
        Ratio(
            f"exact_over_{name}",
            f"exact search, k = {sizes.k}: times the speed of {title}",
            divided(times[name], times["ours"]),
            "higher",
            note=size,
        )
        for name, title in (("torch", "torch product + top-k"), ("sklearn", "scikit-learn brute"))
    ]
    return [*against_roof, *against_bare, *others]


# ---- Approximate: how much faster than exact.

RECALL = 0.99
INDEXES = ("hnsw", "ivfpq")


def measure_approximate(sizes: Sizes, curves: dict[str, Any]) -> list[Ratio | Missing]:
    """Return the speed-ups; the recall/speed curves go to ``curves``."""
    rows, queries, held_out = (
        clustered_rows(n, sizes.dim, seed, n_clusters=max(10, sizes.rows // 100))
        for seed, n in enumerate((sizes.rows, sizes.queries, min(1000, sizes.queries)))
    )
    labels = np.arange(len(rows)) % 10
    banks = {
        name: MemoryBank(rows, labels, n_classes=10, index=name) for name in ("exact", *INDEXES)
    }
    chosen = {}
    for name, bank in banks.items():
        curve = pd.DataFrame(bank.autotune(held_out, recall=RECALL, k=sizes.k))
        curves[name] = curve.round(5).to_dict(orient="records")
        chosen[name] = curve[curve["chosen"]].iloc[0]
    actions = {
        name: (lambda bank=bank: bank.search(queries, sizes.k)) for name, bank in banks.items()
    }
    times = interleaved(actions, sizes.rounds)
    ratios = {name: divided(times["exact"], times[name]) for name in INDEXES}
    settings = {name: banks[name].index_settings for name in INDEXES}
    return [row_of(name, ratios[name], chosen[name], settings[name]) for name in INDEXES]


def row_of(
    name: str, ratios: tuple[float, ...], chosen: Mapping[str, Any], settings: Mapping[str, int]
) -> Ratio | Missing:
    """Return the speed-up of an index, or that it has none: a fast answer must also be right.

    Args:
        name: The index.
        ratios: How much faster than exact it is, in each round.
        chosen: The row of ``autotune`` that was chosen: ``recall`` and ``reached``.
        settings: The settings in force.
    """
    title = f"{name} search: times the speed of our exact one"
    if not chosen["reached"]:
        reason = f"no setting keeps a recall of {RECALL:g}; the best, {chosen['recall']:.4f}, has "
        return Missing(f"{name}_over_exact", title, f"{reason}{dict(settings)}")
    note = f"recall {chosen['recall']:.4f} with {dict(settings)}, clustered rows"
    return Ratio(f"{name}_over_exact", title, ratios, "higher", note=note)
