"""Small seeded sets that several tests share."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from attnknn.core.bank import MemoryBank

N, B, D, C, K = 101, 29, 6, 5, 11


@dataclass(frozen=True)
class Blobs:
    """Unit rows around a few directions of each class, and queries drawn in the same way."""

    rows: np.ndarray
    labels: np.ndarray
    queries: np.ndarray
    query_labels: np.ndarray
    n_classes: int

    def bank(self, **options) -> MemoryBank:
        """Return a memory bank over the rows."""
        return MemoryBank(self.rows, self.labels, n_classes=self.n_classes, **options)

    def with_noise(self, share: float, seed: int) -> "Blobs":
        """Return the set with a share of all labels replaced by another class."""
        rng = np.random.default_rng(seed)

        def flipped(labels):
            other = (labels + rng.integers(1, self.n_classes, len(labels))) % self.n_classes
            return np.where(rng.random(len(labels)) < share, other, labels)

        return replace(self, labels=flipped(self.labels), query_labels=flipped(self.query_labels))


def unit(rows: np.ndarray) -> np.ndarray:
    """Return float32 rows of length 1."""
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def make_blobs(
    seed: int = 0,
    *,
    n_rows: int = N,
    n_queries: int = B,
    spread: float = 0.6,
    n_blobs: int = C,
) -> Blobs:
    """Draw a set of ``n_blobs`` blobs that take turns in carrying the 5 classes."""
    rng = np.random.default_rng(seed)
    centres = unit(rng.normal(size=(n_blobs, D)))
    blob = np.concatenate([np.arange(C), rng.integers(n_blobs, size=n_rows - C)])
    query_blob = rng.integers(n_blobs, size=n_queries)
    rows = unit(centres[blob] + spread * rng.normal(size=(n_rows, D)))
    queries = unit(centres[query_blob] + spread * rng.normal(size=(n_queries, D)))
    return Blobs(rows, blob % C, queries, query_blob % C, C)


@pytest.fixture(name="make_blobs")
def make_blobs_fixture():
    """The function that draws a set, for tests that need another size."""
    return make_blobs


@pytest.fixture
def blobs() -> Blobs:
    """A set of 101 rows, 29 queries, width 6, 5 classes."""
    return make_blobs()


@pytest.fixture
def bank(blobs) -> MemoryBank:
    """A memory bank over the blobs."""
    return blobs.bank()


@pytest.fixture
def neighbours(bank, blobs):
    """The 11 nearest rows of each of the 29 queries."""
    return bank.search(blobs.queries, K)


@pytest.fixture
def circle():
    """A bank of four points on the unit circle, to be worked out on paper.

    With the query (1, 0) the cosines are 1, 0.5, 0, -1 and the distances 0, 1, root 2, 2.
    """
    angles = np.deg2rad([0.0, 60.0, 90.0, 180.0])
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return MemoryBank(rows, np.array([0, 1, 1, 2]), n_classes=4, trust_neighbours=2)


@pytest.fixture
def east() -> np.ndarray:
    """The query (1, 0)."""
    return np.array([[1.0, 0.0]], dtype=np.float32)
