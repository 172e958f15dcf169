"""Training objectives: features of a batch -> one loss a row.

``HeadObjective`` puts cross-entropy on a classifier head. ``JointObjective`` lets each training row
be classified by its neighbours in the training set:

    loss = knn_weight * NLL of the vote + contrastive_weight * contrast - entropy_weight * entropy
           + penalty of the attention

Axes: B rows of a batch, N training rows, K neighbours of each, D embedding width, C classes.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from attnknn.checks import check_count, check_one_of, check_range
from attnknn.config import RunConfig
from attnknn.core.attention import NeighbourAttention
from attnknn.core.bank import MemoryBank
from attnknn.core.index import search_by_matmul
from attnknn.core.neighbours import Neighbours
from attnknn.embed.networks import Embedder, build_head
from attnknn.embed.rows import Inputs, embed, embed_with_logits

# ---- Training losses of the joint stage: the vote, the contrast, the entropy, the hard rows.
#
# Axes: B queries, K neighbours of each, D embedding width, C classes.


def soft_targets(
    labels: Int[Tensor, " B"],
    *,
    n_classes: int,
    smoothing: float = 0.0,
    partners: Int[Tensor, " B"] | None = None,
    share: float = 1.0,
) -> Float[Tensor, "B C"]:
    """Return target distributions after MixUp and label smoothing.

    Args:
        labels: Label of each row.
        n_classes: Number of classes.
        smoothing: Mass spread evenly over all classes.
        partners: Labels of the rows mixed in.
        share: Share of the row itself in the mix.
    """
    targets = functional.one_hot(labels, n_classes).float()
    if partners is not None:
        targets = share * targets + (1 - share) * functional.one_hot(partners, n_classes)
    return (1 - smoothing) * targets + smoothing / n_classes


def vote_loss(
    log_probs: Float[Tensor, "B C"], targets: Float[Tensor, "B C"]
) -> Float[Tensor, " B"]:
    """Return the cross-entropy of each row between the neighbours' vote and its target."""
    return -(targets * log_probs).sum(dim=1)


def contrastive_loss(
    rows: Float[Tensor, "B D"],
    labels: Int[Tensor, " B"],
    *,
    temperature: float = 0.07,
    margin: float = 0.0,
) -> Float[Tensor, " B"]:
    """Return the supervised contrastive loss of each row; 0 for rows without a partner.

    The margin is subtracted from the similarity of positive pairs, in the numerator and in the
    denominator: a pair must be closer by that much. (Adding it to the loss as a constant, as
    published, leaves every gradient as it was.)

    Args:
        rows: Unit-length embeddings of a batch.
        labels: Their labels.
        temperature: Divides the similarities.
        margin: Cosine by which positives are held back.
    """
    own = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    positive = (labels[:, None] == labels[None, :]) & ~own  # (B, B)
    similarity = rows @ rows.T - margin * positive  # (B, B)
    logits = (similarity / temperature).masked_fill(own, float("-inf"))
    log_shares = (logits - logits.logsumexp(dim=1, keepdim=True)).masked_fill(own, 0.0)
    n_positive = positive.sum(dim=1)
    return -(log_shares * positive).sum(dim=1) / n_positive.clamp(min=1)


def hardness(
    neighbour_labels: Int[Tensor, "B K"], labels: Int[Tensor, " B"], *, n_neighbours: int = 10
) -> Float[Tensor, " B"]:
    """Return the share of each row's nearest neighbours that carry another label."""
    near = neighbour_labels[:, : check_count("n_neighbours", n_neighbours)]
    return (near != labels[:, None]).float().mean(dim=1)


def hard_row_weights(
    hard: Float[Tensor, " B"], *, mode: str, share: float, weight: float
) -> Float[Tensor, " B"]:
    """Return a weight of each row with mean 1 that favours the hardest ones.

    Args:
        hard: Hardness of each row.
        mode: ``none`` (all 1), ``keep`` (only the hardest ``share``) or ``weight`` (the hardest
            ``share`` count ``weight`` times as much).
        share: Share of rows that are called hard.
        weight: What a hard row counts in ``weight`` mode.
    """
    check_one_of("mode", mode, ("none", "keep", "weight"))
    check_range("share", share, low=0, high=1, low_open=True)
    if mode == "none":
        return torch.ones_like(hard)
    n_hard = max(1, round(share * len(hard)))
    chosen = torch.zeros_like(hard)
    chosen[hard.topk(n_hard).indices] = 1.0
    raw = chosen if mode == "keep" else 1 + (weight - 1) * chosen
    return raw / raw.mean()


# ---- Self memory: the training rows as each other's neighbours, while the embedder is learning.
#
# Axes: B rows of a batch, N training rows, K neighbours of each, D embedding width.

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


VOTE_BLOCK = 1024  # validation rows a block: bounds the (block, K, D) neighbour embeddings


@dataclass
class Batch:
    """Which training rows a batch is made of.

    Attributes:
        ids: Training row of each batch row.
        labels: Their labels.
        partners: MixUp: which row of the batch was blended into each.
        share: MixUp: share of the row itself.
    """

    ids: Int[Tensor, " B"]
    labels: Int[Tensor, " B"]
    partners: Int[Tensor, " B"] | None = None
    share: float = 1.0

    def targets(self, n_classes: int, smoothing: float) -> Float[Tensor, "B C"]:
        """Return the label distributions a prediction is held against."""
        partners = None if self.partners is None else self.labels[self.partners]
        return soft_targets(
            self.labels,
            n_classes=n_classes,
            smoothing=smoothing,
            partners=partners,
            share=self.share,
        )


class Objective(Protocol):
    """What the training loop needs to know of an objective.

    Attributes:
        role: Which learning rate its network trains at, "head" or "attention".
        network: What it trains besides the embedder.
        memory: The training rows as neighbours, where it needs them; set anew at each refresh.
    """

    role: str
    network: nn.Module
    memory: SelfMemory | None

    def loss(
        self, features: Float[Tensor, "B D"], batch: Batch
    ) -> tuple[Float[Tensor, " B"], dict[str, Tensor]]:
        """Return the loss of each row, and means to record."""

    def log_probs(self, embedder: Embedder, inputs: Inputs) -> Float[Tensor, "N C"]:
        """Return log probabilities of inputs that are not in the training set."""


class HeadObjective:
    """Cross-entropy on a classifier head."""

    role = "head"
    memory = None

    def __init__(self, config: RunConfig, embedder: Embedder, n_classes: int) -> None:
        self.config, self.n_classes = config.training, n_classes
        self.network = build_head(
            self.config.head, embedder.embed_dim, n_classes, scale=embedder.logit_scale
        )

    def loss(
        self, features: Float[Tensor, "B D"], batch: Batch
    ) -> tuple[Float[Tensor, " B"], dict[str, Tensor]]:
        """Return the loss of each row, and means to record."""
        log_probs = self.network(features).log_softmax(dim=1)
        targets = batch.targets(self.n_classes, self.config.label_smoothing).to(features.device)
        return vote_loss(log_probs, targets), {"train_accuracy": _hits(log_probs, batch)}

    def log_probs(self, embedder: Embedder, inputs: Inputs) -> Float[Tensor, "N C"]:
        """Return log probabilities of the head."""
        device = next(self.network.parameters()).device
        _, logits = embed_with_logits(embedder, self.network, inputs, device=device, progress=False)
        return torch.from_numpy(logits).log_softmax(dim=1)


class JointObjective:
    """The vote of the neighbours, with the attention learned along."""

    role = "attention"
    memory: SelfMemory | None = None

    def __init__(self, config: RunConfig, embedder: Embedder, n_classes: int) -> None:
        self.config, self.n_classes = config.training, n_classes
        self.network = NeighbourAttention(
            config.attention, dim=embedder.embed_dim, n_classes=n_classes
        )

    def loss(
        self, features: Float[Tensor, "B D"], batch: Batch
    ) -> tuple[Float[Tensor, " B"], dict[str, Tensor]]:
        """Return the loss of each row, and means to record."""
        config, rows = self.config, functional.normalize(features, dim=1)
        neighbours = self.memory.neighbours_of(rows, batch.ids, batch.partners)
        attended = self.network(neighbours, query=rows)
        targets = batch.targets(self.n_classes, config.label_smoothing).to(rows.device)
        knn = vote_loss(attended.log_probs, targets)
        contrast = self._contrast(rows, batch)
        entropy = attended.entropy()
        per_row = (
            config.knn_weight * knn
            + config.contrastive_weight * contrast
            - config.entropy_weight * entropy
        )
        recorded = {"knn": knn.mean(), "contrastive": contrast.mean(), "entropy": entropy.mean()}
        recorded["train_accuracy"] = _hits(attended.log_probs, batch)
        weighted = self._hard_weights(batch).to(rows.device) * per_row
        # The same for every row, whatever a row counts: the mean over a batch has it once.
        return weighted + self.network.penalty(), recorded

    @torch.no_grad()
    def log_probs(self, embedder: Embedder, inputs: Inputs) -> Float[Tensor, "N C"]:
        """Return log probabilities of the memory's vote."""
        device = next(self.network.parameters()).device
        rows = torch.from_numpy(embed(embedder, inputs, device=device, progress=False))
        self.network.eval()
        blocks = [self.memory.search(block).to(device) for block in rows.split(VOTE_BLOCK)]
        return torch.cat([self.network(block).log_probs.cpu() for block in blocks])

    def _hard_weights(self, batch: Batch) -> Float[Tensor, " B"]:
        return hard_row_weights(
            self.memory.hard[batch.ids],
            mode=self.config.hard_negatives,
            share=self.config.hard_share,
            weight=self.config.hard_weight,
        )

    def _contrast(self, rows: Float[Tensor, "B D"], batch: Batch) -> Float[Tensor, " B"]:
        """Return the contrastive loss; a mixed row is contrasted under both of its labels."""
        margin = self.config.contrastive_margin
        settings = {
            "temperature": self.config.contrastive_temperature,
            "margin": margin if self.config.contrastive_form == "margin" else 0.0,
        }
        labels = batch.labels.to(rows.device)
        loss = contrastive_loss(rows, labels, **settings)
        if batch.partners is None:
            return loss
        partner_labels = batch.labels[batch.partners].to(rows.device)
        other = contrastive_loss(rows, partner_labels, **settings)
        return batch.share * loss + (1 - batch.share) * other


OBJECTIVES: dict[str, type[Objective]] = {"cross_entropy": HeadObjective, "joint": JointObjective}


def _hits(log_probs: Float[Tensor, "B C"], batch: Batch) -> Float[Tensor, ""]:
    return (log_probs.argmax(dim=1).cpu() == batch.labels).float().mean()
