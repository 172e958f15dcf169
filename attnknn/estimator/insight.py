"""What lies behind the predictions: explanations, label issues, prediction sets, abstention."""

from typing import Any

import numpy as np
import pandas as pd
from sklearn.utils.validation import check_is_fitted

from attnknn.abstain import (
    CONFORMAL_SCORES,
    fit_conformal,
    predict_sets,
    rejection_threshold,
)
from attnknn.checks import check_one_of
from attnknn.classify import at_k
from attnknn.estimator.base import Machinery
from attnknn.estimator.inputs import check_classes
from attnknn.estimator.learning import TOO_FEW_QUERIES
from attnknn.estimator.params import check_number
from attnknn.explain import explain
from attnknn.measure import risk_coverage


class Insight(Machinery):
    """Methods that say why, how surely and with what mistakes."""

    def explain(self, X: Any) -> pd.DataFrame:
        """Return the training rows that a prediction rests on, and how much each of them counts.

        Args:
            X: A few rows.

        Returns:
            One row per query and neighbour, nearest first: ``query``, ``rank``, ``id`` (place in
            the training rows), ``label``, ``similarity`` (cosine of the unit rows), ``trust``
            (share of its own neighbours that agree with its label), ``weight`` (they sum to 1),
            ``vote`` (what the row adds to the probability of the predicted class, by its own label
            and by the labels around it), and for the whole query ``prototypes`` (what the class
            prototypes add to it) and ``predicted``, the class predicted for the query. The votes
            of a query and its ``prototypes`` sum to the probability of the predicted class as it
            is before floor and temperature, which flatten or sharpen it last.
        """
        neighbours = self._neighbours(X)
        method = at_k(self._fitted.learned.method, neighbours.k)
        table = explain(method, neighbours)
        return table.assign(
            id=self._ledger.first_ids()[table["id"]],
            similarity=1 - (1 - table["similarity"]) / self._fitted.stretch,
            label=self.classes_[table["label"]],
            predicted=self.classes_[table["predicted"]],
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
        rows = self.memory_.rows.numpy()
        if len(rows) < 2:  # nobody else to ask: the only row is taken at its word
            return self._probs(self._search(rows, 1))
        k = min(self.n_neighbors_, len(rows) - 1)
        return self._probs_in_blocks(
            rows.__getitem__, len(rows), k, title="label issues", leave_out=True
        )

    def predict_set(
        self,
        X: Any,
        coverage: Any = 0.9,
        *,
        score: Any = "aps",
        held_out: Any = None,
    ) -> np.ndarray:
        """Return which classes are in each row's conformal prediction set, (N, C).

        With ``held_out`` the sets are split-conformal: they hold the label of an exchangeable row
        with probability ``coverage`` or more. Without it the threshold comes from training rows
        that were left out of their own neighbourhood and of the attention that predicts them. That
        is cross-conformal: the same rows chose the metric and the last calibration, and one
        member of the committee predicts them, so ``coverage`` is met closely but not guaranteed.
        Of fewer than nine training rows nothing can be left out, and every class is in every set.

        Where some labels are wrong the sets are larger than need be: they cover labels as given.

        Args:
            X: Rows.
            coverage: Share of sets that shall hold the label.
            score: "aps" (adapts to hard rows) or "lac" (smallest sets).
            held_out: Rows and labels that ``fit`` has not seen.
        """
        check_one_of("score", score, CONFORMAL_SCORES)
        coverage = check_number("coverage", coverage)
        if held_out is not None and not (isinstance(held_out, tuple | list) and len(held_out) == 2):
            raise ValueError(f"held_out must be rows and their labels, got {held_out=}")
        probs = self.predict_proba(X)
        judged = self._held_out() if held_out is None else self._judged(*held_out)
        threshold = fit_conformal(*judged, coverage, score=score)
        if held_out is None and len(judged[1]) < TOO_FEW_QUERIES:
            threshold = np.inf
        return predict_sets(probs, threshold, score=score)

    def reject_threshold(self, *, coverage: Any = None, target_risk: Any = None) -> float:
        """Return a value for ``reject_below``, judged on held-out training rows.

        Args:
            coverage: Answer at least this share of rows.
            target_risk: Answer as many rows as possible with at most this share of errors. What
                ``label_noise_`` of wrong labels among the held-out rows adds is taken off; an
                estimate is cautious, and then it abstains too often rather than too seldom.
                Infinite (never answer) where even the most confident rows err more.
        """
        check_is_fitted(self)
        wanted = {"coverage": coverage, "target_risk": target_risk}
        wanted = {k: None if v is None else check_number(k, v) for k, v in wanted.items()}
        return rejection_threshold(
            *self._held_out(),
            **wanted,
            label_error=self.label_noise_,
        )

    def coverage_curve(self, X: Any = None, y: Any = None) -> pd.DataFrame:
        """Return the error among the answered rows, for every share of rows that is answered.

        Args:
            X: Rows; None takes the held-out part of the training rows.
            y: Their labels.

        Returns:
            ``coverage``, ``risk`` (labels taken as given, wrong ones too) and ``confidence`` (of
            the last row answered: a candidate for ``reject_below``).
        """
        check_is_fitted(self)
        if X is None and y is not None:
            raise ValueError("X must be given where y is, got X=None")
        if X is None:
            return risk_coverage(*self._held_out())
        return risk_coverage(*self._judged(X, y))

    def _judged(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities and labels of new rows."""
        probs = self.predict_proba(X)
        labels = check_classes(y, len(probs))
        unknown = [label for label in np.unique(labels).tolist() if label not in self.classes_]
        if unknown:
            raise ValueError(f"y must hold known classes, got {unknown}")
        return probs, np.searchsorted(self.classes_, labels)

    def _held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities and labels of rows that the attention was not fitted on."""
        return self._fitted.learned.probs, self._fitted.held_out_labels
