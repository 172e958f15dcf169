"""What attention costs over a uniform vote: search + weigh + vote, and with embedding.

Every figure is a ratio of times measured in turns in the same run, because absolute times on a
shared machine say little. Usage: ``python benchmarks/attention_cost.py [--rounds 5]``.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from attnknn.attention import NeighbourAttention
from attnknn.backbones import build_embedder
from attnknn.classify import Attention, Uniform, predict
from attnknn.config import AttentionConfig, RunConfig
from attnknn.data import load_splits
from attnknn.embed import embed
from attnknn.memory import MemoryBank


def unit_rows(n_rows: int, dim: int, seed: int) -> np.ndarray:
    """Return random unit rows; speed does not depend on where they lie."""
    rows = np.random.default_rng(seed).standard_normal((n_rows, dim), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def seconds(action: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def interleaved(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each action, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            times[name].append(seconds(action))
    return {name: median(values) for name, values in times.items()}


def ready_made(rounds: int) -> dict[str, float]:
    """Compare on embeddings that are there: 10 000 queries, 50 000 x 256 memory, k = 50."""
    bank = MemoryBank(unit_rows(50_000, 256, 0), np.arange(50_000) % 10, n_classes=10)
    queries = unit_rows(10_000, 256, 1)
    torch.manual_seed(0)
    module = NeighbourAttention(AttentionConfig(), dim=256, n_classes=10).eval()
    predict(Attention(50, module), bank.search(queries[:100], 50))  # trust is made once per bank
    times = interleaved(
        {
            "uniform": lambda: predict(Uniform(50), bank.search(queries, 50)),
            "attention": lambda: predict(Attention(50, module), bank.search(queries, 50)),
        },
        rounds,
    )
    return times | {"ratio": times["attention"] / times["uniform"]}


def with_embedding(rounds: int) -> dict[str, float]:
    """Compare from pixels: 10 000 CIFAR-10 test images through the fast embedder."""
    splits = load_splits("cifar10")
    embedder = build_embedder(RunConfig().embedder, splits)
    memory = unit_rows(45_000, embedder.embed_dim, 0)
    bank = MemoryBank(memory, splits.train.labels, n_classes=10)
    module = NeighbourAttention(AttentionConfig(), dim=bank.dim, n_classes=10).eval()
    predict(Attention(50, module), bank.search(memory[:100], 50))

    def classify(method: Uniform | Attention) -> np.ndarray:
        rows = embed(embedder, splits.test.inputs, progress=False)
        return predict(method, bank.search(rows, 50))

    times = interleaved(
        {
            "uniform": lambda: classify(Uniform(50)),
            "attention": lambda: classify(Attention(50, module)),
        },
        rounds,
    )
    return times | {"ratio": times["attention"] / times["uniform"]}


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    pixels = with_embedding(max(1, rounds // 2))
    result = {"ready_made": ready_made(rounds), "with_embedding": pixels}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
