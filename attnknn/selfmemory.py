"""Self memory: the training rows as each other's neighbours, while the embedder is learning.

Axes: B rows of a batch, N training rows, K neighbours of each, D embedding width.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.config import RunConfig
from attnknn.index import search_by_matmul
from attnknn.losses import hardness
from attnknn.memory import MemoryBank
from attnknn.neighbours import Neighbours

HARDNESS_NEIGHBOURS = 10


class SelfMemory:
    """Embeddings of all training rows as of the last refresh, and who is near whom.

    Args:
        rows: Unit-length training rows, embedded in evaluation mode.
        labels: Their labels.
        config: k, search route, and whether a row may find itself.
        n_classes: Number of classes.

    Attributes:
        hard: Share of each row's nearest neighbours that carry another label.
    """

    def __init__(
        self,
        rows: Float[np.ndarray, "N D"],
        labels: Int[np.ndarray, " N"],
        config: RunConfig,
        *,
        n_classes: int,
    ) -> None:
        self.config = config.training
        self.bank = MemoryBank(
            rows,
            labels,
            n_classes=n_classes,
            index=config.fitting.index,
            trust_neighbours=config.fitting.trust_neighbours,
        )
        k = min(max(self.config.k_train, HARDNESS_NEIGHBOURS), len(rows) - 1)
        # NOTE: leakage guard. exclude_self=False is the published self-retrieval, kept as a switch.
        own = np.arange(len(rows)) if self.config.exclude_self else None
        found = self.bank.search(rows, k, exclude_ids=own)
        self.hard = hardness(found.labels, self.bank.labels, n_neighbours=HARDNESS_NEIGHBOURS)
        # Two spare rows: a mixed row may find neither of the two rows it was made of.
        self.k = min(self.config.k_train, max(1, len(rows) - 2))
        self._ids = found.ids[:, : self.k]  # (N, K)

    def search(self, rows: Float[Tensor, "B D"]) -> Neighbours:
        """Return the neighbours of rows that are not in the training set."""
        return self.bank.search(rows.cpu().numpy(), self.k).to(rows.device)

    def neighbours_of(
        self,
        rows: Float[Tensor, "B D"],
        ids: Int[Tensor, " B"],
        partners: Int[Tensor, " B"] | None = None,
    ) -> Neighbours:
        """Return the neighbours of training rows, with zeros for scores: use the query's own.

        The lists made at the last refresh belong to unmixed rows. A mixed row is another point, so
        its neighbours are searched for with its own embedding.

        Args:
            rows: Current embeddings of the batch.
            ids: Training row of each.
            partners: MixUp: which row of the batch was blended into each.
        """
        own = ids[:, None]  # (B, 1)
        if partners is not None:
            own = torch.stack([ids, ids[partners.cpu()]], dim=1)  # (B, 2)
        lists_fit = self.config.neighbour_search == "faiss" and partners is None
        if lists_fit:
            found = self._ids[ids]
        else:
            found = self._search_live(
                rows.detach(), own if self.config.exclude_self else own[:, :0]
            )
        # Scores are computed anew from the current queries, with their gradient.
        scores = torch.zeros(found.shape)
        queries = rows.detach().cpu()
        own_ids = own if self.config.exclude_self else None
        return Neighbours(queries, scores, found, self.bank.view, own_ids).to(rows.device)

    def _search_live(
        self, rows: Float[Tensor, "B D"], own: Int[Tensor, "B M"]
    ) -> Int[Tensor, "B K"]:
        """Search with the batch's own embeddings, without the rows each one was made of."""
        spare = min(self.k + own.shape[1], len(self.bank))
        if self.config.neighbour_search == "matmul":
            ids = search_by_matmul(rows, self.bank.rows.to(rows.device), spare)[1].cpu()
        else:
            ids = self.bank.nearest_rows(rows.cpu(), spare)[1]
        is_own = (ids[..., None] == own[:, None]).any(dim=-1)
        # Stable: rows of one's own go last, the others keep their order, the surplus is cut off.
        keep = is_own.int().argsort(dim=1, stable=True)[:, : self.k]
        return ids.gather(1, keep)
