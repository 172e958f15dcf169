"""Training objectives: features of a batch -> one loss a row.

``HeadObjective`` puts cross-entropy on a classifier head. ``JointObjective`` lets each training row
be classified by its neighbours in the training set:

    loss = knn_weight * NLL of the vote + contrastive_weight * contrast - entropy_weight * entropy
           + penalty of the attention

Axes: B rows of a batch, N training rows, K neighbours of each, D embedding width, C classes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from attnknn.attention import NeighbourAttention
from attnknn.backbones import Embedder, build_head
from attnknn.config import RunConfig
from attnknn.embed import Inputs, embed, embed_with_logits
from attnknn.losses import (
    contrastive_loss,
    hard_row_weights,
    soft_targets,
    vote_loss,
)
from attnknn.selfmemory import SelfMemory

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
