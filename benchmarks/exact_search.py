"""Exact search: ours against the matrix product alone, bare faiss, torch and scikit-learn."""

import numpy as np
import torch
from sklearn.neighbors import NearestNeighbors

from attnknn.blas import AVX512, cpu_flags
from attnknn.memory import MemoryBank
from benchmarks.bare_faiss import BareFaiss
from benchmarks.sizes import Sizes, random_rows
from benchmarks.timing import Action, Ratio, divided, interleaved

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


def measure(sizes: Sizes) -> list[Ratio]:
    """Return how our exact search stands."""
    rows = random_rows(sizes.rows, sizes.dim, 0)
    queries = random_rows(sizes.queries, sizes.dim, 1)
    bank = MemoryBank(rows, np.arange(len(rows)) % 10, n_classes=10, index="auto")
    sklearn = NearestNeighbors(n_neighbors=sizes.k, algorithm="brute").fit(rows)
    bare = BareFaiss(sizes.rows, sizes.dim, sizes.queries, sizes.k)
    times = interleaved(
        {
            "ours": lambda: bank.search(queries, sizes.k),
            "bare": bare,
            "torch": torch_search(rows, queries, sizes.k),
            "sklearn": lambda: sklearn.kneighbors(queries),
            **blocked_products(rows, queries),
        },
        sizes.rounds,
    )
    bare.close()
    return _ratios(times, f"{sizes.rows} x {sizes.dim} rows, {sizes.queries} queries, k={sizes.k}")


def _ratios(times: dict[str, list[float]], note: str) -> list[Ratio]:
    roof = [min(pair) for pair in zip(times["torch_product"], times["numpy_product"], strict=True)]
    wide = cpu_flags() >= AVX512
    ours = times["ours"]
    return [
        Ratio(
            "exact_share_of_roof",
            "exact search: share of the speed of the bare matrix product",
            divided(roof, ours),
            "higher",
            target=0.65,
            note=note,
        ),
        Ratio(
            "exact_over_bare_faiss",
            "exact search: times the speed of faiss as installed",
            divided(times["bare"], ours),
            "higher",
            target=3.0 if wide else None,
            note="kernels for AVX-512" if wide else "no AVX-512 here: faiss chooses well by itself",
        ),
        Ratio(
            "exact_over_torch",
            "exact search: times the speed of torch product + top-k",
            divided(times["torch"], ours),
            "higher",
        ),
        Ratio(
            "exact_over_sklearn",
            "exact search: times the speed of scikit-learn brute",
            divided(times["sklearn"], ours),
            "higher",
        ),
    ]
