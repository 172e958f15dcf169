"""What lies behind the predictions: explanations, label issues, prediction sets, abstention."""

from typing import Any

import numpy as np
import pandas as pd
from sklearn.utils.validation import check_is_fitted
from tqdm import tqdm

from attnknn.calibrate import fit_conformal, predict_sets, rejection_threshold
from attnknn.classify import at_k
from attnknn.estimator.base import QUERY_BLOCK, Machinery
from attnknn.estimator.inputs import check_classes, n_rows_of
from attnknn.explain import explain
from attnknn.measure import risk_coverage

COPIES_PER_SET = 1_000_000  # class shares computed at a time in label_issues


class Insight(Machinery):
    """Methods that say why, how surely and with what mistakes."""

    def explain(self, X: Any) -> pd.DataFrame:
        """Return the training rows that a prediction rests on, and how much each of them counts.

        Args:
            X: A few rows.

        Returns:
            One row per query and neighbour, nearest first: ``query``, ``rank``, ``id`` (place in
            the training rows), ``label``, ``similarity`` (cosine of the unit rows), ``trust``
            (share of its own neighbours that agree with its label), ``weight`` (they sum to 1)
            and ``predicted``, the class predicted for the query.
        """
        neighbours = self._neighbours(X)
        method = at_k(self._fitted.learned.method, neighbours.k)
        table = explain(method, neighbours)
        predicted = self.classes_[self._probs(neighbours).argmax(axis=1)]
        return table.assign(
            id=self._ledger.first_ids()[table["id"]],
            similarity=1 - (1 - table["similarity"]) / self._fitted.stretch,
            label=self.classes_[table["label"]],
            predicted=predicted[table["query"]],
        )

    def explain_figure(
        self, X: Any, *, image: np.ndarray | None = None, images: Any = None, n_shown: int = 8
    ) -> Any:
        """Draw the neighbours that count most for one row.

        Args:
            X: The row, as a table of one row.
            image: What the row looks like; with ``images`` the neighbours are drawn as pictures.
            images: What the training rows look like, by id.
            n_shown: Neighbours drawn.

        Returns:
            A matplotlib figure.
        """
        from attnknn.plot import explanation  # matplotlib is slow to load

        table = self.explain(X)
        if table["query"].max() > 0:
            raise ValueError(f"X must be one row, got {table['query'].max() + 1} rows")
        predicted = table["predicted"].iloc[0]
        return explanation(
            table,
            image=image,
            images=images,
            predicted=predicted,
            query_note=f"predicted {predicted}",
            n_shown=n_shown,
        )

    def label_issues(self, *, all_rows: bool = False) -> pd.DataFrame:
        """Return training rows whose label their neighbours contradict, the worst first.

        Each row is predicted from the others; neither the row nor its copies vote.

        Args:
            all_rows: Return the rows nobody contradicts, too.

        Returns:
            ``id`` (place in the training rows), ``label``, ``suggested`` (the most probable
            class), ``quality`` (probability that the label is right) and ``is_issue``.
        """
        check_is_fitted(self)
        probs = self._left_out_probs()
        codes = self.memory_.labels.numpy()
        quality = probs[np.arange(len(probs)), codes]
        ids = self._ledger.ids()
        entry = self._ledger.entries[ids]
        suggested = probs.argmax(axis=1)
        table = pd.DataFrame(
            {
                "id": ids,
                "label": self.classes_[codes[entry]],
                "suggested": self.classes_[suggested[entry]],
                "quality": quality[entry],
                "is_issue": (suggested != codes)[entry],
            }
        )
        table = table.sort_values(["quality", "id"], ignore_index=True)
        return table if all_rows else table[table["is_issue"]].reset_index(drop=True)

    def _left_out_probs(self) -> np.ndarray:
        """Return the probabilities of every memory row, predicted by the others."""
        rows, blocks = self.memory_.rows.numpy(), []
        k = min(self.n_neighbors_, len(rows) - 1)
        block = max(1, min(QUERY_BLOCK, COPIES_PER_SET // len(self.classes_)))
        starts = range(0, len(rows), block)
        for start in tqdm(starts, desc="label issues", disable=self.verbose <= 0, leave=False):
            own = np.arange(start, min(start + block, len(rows)))
            with self._threads():
                found = self._search(rows[own], k, own)
            blocks.append(self._probs(found))
        return np.concatenate(blocks)

    def predict_set(self, X: Any, coverage: float = 0.9, *, score: str = "aps") -> np.ndarray:
        """Return which classes are in each row's split-conformal prediction set, (N, C).

        The threshold comes from rows that the attention was not fitted on. Where some of their
        labels are wrong the sets are larger than need be: they cover the labels as given.

        Args:
            X: Rows.
            coverage: Share of sets that shall hold the label.
            score: "aps" (adapts to hard rows) or "lac" (smallest sets).
        """
        probs = self.predict_proba(X)
        threshold = fit_conformal(*self._held_out(), coverage, score=score)
        return predict_sets(probs, threshold, score=score)

    def reject_threshold(
        self, *, coverage: float | None = None, target_risk: float | None = None
    ) -> float:
        """Return a value for ``reject_below``, judged on held-out training rows.

        Args:
            coverage: Answer at least this share of rows.
            target_risk: Answer as many rows as possible with at most this share of errors.
        """
        check_is_fitted(self)
        return rejection_threshold(*self._held_out(), coverage=coverage, target_risk=target_risk)

    def coverage_curve(self, X: Any = None, y: Any = None) -> pd.DataFrame:
        """Return the error among the answered rows, for every share of rows that is answered.

        Args:
            X: Rows; None takes the held-out part of the training rows.
            y: Their labels.

        Returns:
            ``coverage``, ``risk`` and ``confidence`` (of the last row answered: a candidate for
            ``reject_below``).
        """
        check_is_fitted(self)
        if X is None:
            return risk_coverage(*self._held_out())
        labels = check_classes(y, n_rows_of(X))
        if unknown := np.setdiff1d(labels, self.classes_).tolist():
            raise ValueError(f"y must hold known classes, got {unknown}")
        return risk_coverage(self.predict_proba(X), np.searchsorted(self.classes_, labels))

    def _held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities and labels of rows that the attention was not fitted on."""
        return self._fitted.learned.probs, self._fitted.held_out_labels
