"""Index: the few calls a memory bank needs.

Whatever an index measures inside, what comes out is cosine similarity, larger = closer. (An inner
product index returns similarities, an L2 index squared distances; mixing them up inverts a vote.)
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

from attnknn.checks import check_count, check_one_of

Found = tuple[Float[np.ndarray, "B K"], Int[np.ndarray, "B K"]]
K_FACTORS = (1, 2, 4, 8, 16)


class Index:
    """Something that finds the most similar rows.

    Attributes:
        name: What was built, also where ``auto`` was asked for.
        exact_scores: Whether the scores are the cosines of the rows as they were added. An index
            may compress or rotate its rows; its scores have to be computed anew, from the rows.
        knobs: Settings that trade recall for speed, each with its values, cheapest first.
        settings: The values in force.
    """

    name: str
    exact_scores: bool = True

    def __init__(self) -> None:
        self.knobs: dict[str, tuple[int, ...]] = {}
        self.settings: dict[str, int] = {}

    @property
    def k_factor(self) -> int:
        """Candidates fetched per neighbour asked for; the bank ranks them by their true cosine."""
        return self.settings.get("k_factor", 1)

    def extend(self, rows: Float[np.ndarray, "N D"]) -> None:
        """Take in the rows behind those that are there already; ``rows`` are all of the bank's."""
        raise NotImplementedError

    def search(self, queries: Float[np.ndarray, "B D"], k: int) -> Found:
        """Return cosines, largest first, and row ids; id -1 where fewer than k were found."""
        raise NotImplementedError

    def tune(self, settings: Mapping[str, int]) -> None:
        """Change settings; names that this index does not have are refused."""
        for name, value in settings.items():
            check_one_of("index_settings", name, tuple(self.knobs))
            self._apply(name, check_count(name, value))
            self.settings[name] = int(value)

    def _apply(self, name: str, value: int) -> None:
        """Pass a setting on; ``k_factor`` is only read by the bank."""

    def close(self) -> None:
        """Give back what does not go away by itself."""

    def discard(self) -> None:
        """Make room for an index that is built in the place of this one."""
        self.close()
