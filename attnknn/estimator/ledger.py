"""The ledger: which memory row each given row became, and how much it counts there.

Ids are places in what was handed to ``fit``, and go on counting with ``partial_fit``; they never
change. Copies share a memory row.

Axes: N given rows, M memory rows.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

GONE = -1


@dataclass(frozen=True)
class Ledger:
    """Given rows to memory rows.

    Attributes:
        entries: Memory row of each given row; ``GONE`` for one that was forgotten or weighs 0.
        weights: How much each given row counts.
    """

    entries: Int[np.ndarray, " N"]
    weights: Float[np.ndarray, " N"]

    def row_weights(self) -> Float[np.ndarray, " M"] | None:
        """Return how much each memory row counts; None where all count alike."""
        kept = self.entries != GONE
        sums = np.bincount(self.entries[kept], weights=self.weights[kept])
        # Only ratios matter, and the plain vote is faster.
        return None if np.ptp(sums) == 0 else sums / sums.mean()

    def first_ids(self) -> Int[np.ndarray, " M"]:
        """Return the first given row of each memory row."""
        ids = np.flatnonzero(self.entries != GONE)
        return ids[np.unique(self.entries[ids], return_index=True)[1]]

    def ids(self) -> Int[np.ndarray, " K"]:
        """Return the given rows that are still in the memory."""
        return np.flatnonzero(self.entries != GONE)

    def grown(
        self,
        entries: Int[np.ndarray, " A"],
        weights: Float[np.ndarray, " A"],
        known: Int[np.ndarray, " R"],
    ) -> "Ledger":
        """Return the ledger with more given rows.

        Args:
            entries: Which of R distinct rows each of them is.
            weights: How much each of them counts.
            known: Memory row that a distinct row is a copy of; ``GONE`` for a new one, which
                continues the count.
        """
        new = known == GONE
        rows = np.where(new, self.entries.max() + new.cumsum(), known)
        shifted = np.where(entries == GONE, GONE, rows[entries])
        return Ledger(
            np.concatenate([self.entries, shifted]), np.concatenate([self.weights, weights])
        )

    def without(self, ids: Int[np.ndarray, " G"]) -> tuple["Ledger", Int[np.ndarray, " R"]]:
        """Return the ledger without some given rows, and the memory rows nobody needs any more."""
        if (self.entries[ids] == GONE).any():
            unknown = ids[self.entries[ids] == GONE]
            raise ValueError(f"ids must be in the memory, got {unknown.tolist()}, which are not")
        entries = self.entries.copy()
        entries[ids] = GONE
        if (entries == GONE).all():
            raise ValueError("ids must leave at least one row in the memory, got all of them")
        kept = np.unique(entries[entries != GONE])
        removed = np.setdiff1d(np.arange(self.entries.max() + 1), kept)
        renumbered = np.where(entries == GONE, GONE, np.searchsorted(kept, entries))
        return Ledger(renumbered, self.weights), removed
