"""What every fault of the published code is made on: one run, one search, fits of equal size.

Axes: B queries, K neighbours of each, C classes, N memory rows.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from attnknn.baselines import DISTANCE_TEMPERATURES
from attnknn.classify import Attention, Distance, Method, predict
from attnknn.config import AttentionConfig
from attnknn.fit import fit_on_neighbours
from attnknn.measure import negative_log_likelihood
from attnknn.neighbours import Neighbours
from attnknn.studies.contest import Neighbourhoods, search_run
from attnknn.studies.root_n import some_rows
from attnknn.trained import TrainedRun

# Nothing but similarity: what a published part does is not hidden by other parts.
PLAIN_ATTENTION = AttentionConfig(
    similarity=True,
    situation=(),
    denoise=False,
    prototype_gate=False,
    floor=False,
    query_temperature=False,
    qk="none",
    distance_bias="none",
    label_bias="none",
    prototype_score=False,
    self_attention=False,
    value_path=False,
)


class Pair(NamedTuple):
    """Probabilities with the fault and without it, for the same rows.

    Attributes:
        faulty: As published.
        corrected: As it should be.
        labels: True classes of the rows.
        detail: One more thing that was measured, in words.
    """

    faulty: Float[np.ndarray, "B C"]
    corrected: Float[np.ndarray, "B C"]
    labels: Int[np.ndarray, " B"]
    detail: str = ""


@dataclass(frozen=True)
class Case:
    """A run, one search of it, and the attention that all fits are held against.

    Attributes:
        run: The trained run.
        k_eval: Neighbours that an attention weighs.
        k_baseline: Neighbours of plain votes.
        epochs: Of every fit, faulty or not.
        max_queries: The most queries that any fit gets; faulty and corrected fits get equally many.
    """

    run: TrainedRun
    k_eval: int = 50
    k_baseline: int = 16
    epochs: int = 15
    max_queries: int = 2000

    @cached_property
    def found(self) -> Neighbourhoods:
        """Held-out and test queries in the memory; one row fewer than it has, for leave-one-out."""
        return search_run(self.run, min(max(self.k_eval, self.k_baseline), len(self.run.bank) - 1))

    @property
    def k(self) -> int:
        """Neighbours of plain votes, where the memory has as many."""
        return min(self.k_baseline, self.found.test.k)

    @cached_property
    def labels(self) -> Int[np.ndarray, " B"]:
        """True classes of the test rows."""
        return self.run.labels("test")

    @cached_property
    def n_fit(self) -> int:
        """Queries that every fit gets."""
        return min(self.max_queries, len(self.found.held_out_labels), len(self.run.bank))

    def fit(
        self, config: AttentionConfig, found: Neighbours, labels: Int[np.ndarray, " _"]
    ) -> Attention:
        """Return an attention fitted on queries whose neighbours were found."""
        fitting = replace(self.run.config.fitting, fit_epochs=self.epochs, fit_noise_max=0.0)
        found = found.nearest(min(self.k_eval, found.k))
        fitted = fit_on_neighbours(
            self.run.bank,
            found,
            labels,
            attention=config,
            fitting=fitting,
            seed=self.run.config.seed,
            n_epochs=self.epochs,
            temperature=1.0,
        )
        return fitted.method

    def fit_held_out(self, config: AttentionConfig) -> Attention:
        """Return an attention fitted as it should be: on queries that the embedder never saw."""
        rows = some_rows(len(self.found.held_out_labels), self.n_fit)
        held_out = self.found.held_out.of_queries(torch.from_numpy(rows))
        return self.fit(config, held_out, self.found.held_out_labels[rows])

    @cached_property
    def held_out_probs(self) -> Float[np.ndarray, "B C"]:
        """Test probabilities of the run's kind of attention, fitted on held-out queries."""
        return self.on_test(self.fit_held_out(self.run.config.attention))

    @cached_property
    def plain_attention(self) -> Attention:
        """Weights from similarity alone, fitted on held-out queries."""
        return self.fit_held_out(PLAIN_ATTENTION)

    def on_test(self, method: Method) -> Float[np.ndarray, "_ C"]:
        """Return test probabilities of a method."""
        return predict(method, self.found.test)

    @cached_property
    def distance(self) -> Distance:
        """Distance weights whose temperature the held-out queries chose."""
        held_out, labels = self.found.held_out, self.found.held_out_labels
        tried = [Distance(self.k, temperature) for temperature in DISTANCE_TEMPERATURES]
        return min(tried, key=lambda each: negative_log_likelihood(predict(each, held_out), labels))
