"""The classifier: scikit-learn's API over memory, attention and calibration.

Axes of what comes back: N rows, K neighbours of each, C classes.
"""

from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from attnknn.checks import check_count, check_labels, check_one_of
from attnknn.core.parts import euclidean_distances
from attnknn.core.prior import PriorAttention, shipped_prior
from attnknn.core.vote import Attention, at_k, explain
from attnknn.estimator.base import Machinery, lowered
from attnknn.estimator.fitting import FEWEST_QUERIES, check_number, check_reject
from attnknn.estimator.inputs import GONE, check_classes, n_rows_of, naming
from attnknn.estimator.store import Store
from attnknn.evaluate.abstain import (
    CONFORMAL_SCORES,
    fit_conformal,
    predict_sets,
    rejection_threshold,
)
from attnknn.evaluate.measure import risk_coverage

# ---- What lies behind the predictions: explanations, label issues, prediction sets, abstention.


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
            ``prior_weight`` (the weight before refinement: what the shipped attention says by
            itself; the rest of ``weight`` is what these rows taught), ``vote`` (what the row adds
            to the probability of the predicted class, by its own label and by the labels around
            it), and for the whole query ``prototypes`` (what the class prototypes add to it) and
            ``predicted``, the class predicted for the query. The votes of a query and its
            ``prototypes`` sum to the probability of the predicted class as it is before floor,
            global expert and temperature, which bend it last.
        """
        neighbours = self._neighbours(X)
        method = at_k(self._fitted.learned.method, neighbours.k)
        table = explain(method, neighbours)
        unrefined = Attention(method.k, PriorAttention(shipped_prior()))
        return table.assign(
            prior_weight=unrefined.weights(neighbours).flatten().numpy(),
            id=self._ledger.first_ids()[table["id"]],
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
        from attnknn.figures.neighbours import explanation  # matplotlib is slow to load

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

        Each row is predicted from the others; neither the row nor its copies vote. (In a table of a
        few kinds of rows, equal rows are cases of their own, and the other cases vote.)

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
        labels: Any = "right",
        score: Any = "aps",
        held_out: Any = None,
    ) -> np.ndarray:
        """Return which classes are in each row's conformal prediction set, (N, C).

        With ``held_out`` the sets are split-conformal: they hold the label of an exchangeable row
        with probability ``coverage`` or more. Without it the threshold comes from training rows
        that were left out of their own neighbourhood and of the attention that predicts them. That
        is cross-conformal: the same rows chose the metric and the last temperature, and one
        member of the committee predicts them, so ``coverage`` is met closely but not guaranteed.
        Of fewer than nine training rows nothing can be left out, and every class is in every set.

        Args:
            X: Rows.
            coverage: Share of sets that shall hold the label.
            labels: What sets shall hold. "right": right labels, where ``transition_`` says which
                of the labels it was judged by are wrong; the coverage is as good as that estimate.
                "given": labels as they are given, wrong ones too, so the sets are larger.
            score: "aps" (adapts to hard rows) or "lac" (smallest sets).
            held_out: Rows and labels that ``fit`` has not seen.
        """
        check_one_of("score", score, CONFORMAL_SCORES)
        check_one_of("labels", labels, ("right", "given"))
        coverage = check_number("coverage", coverage)
        if held_out is not None and not (isinstance(held_out, tuple | list) and len(held_out) == 2):
            raise ValueError(f"held_out must be rows and their labels, got {held_out=}")
        probs = self.predict_proba(X)
        judged, given = self._held_out() if held_out is None else self._judged(*held_out)
        transition = self._fitted.learned.wrong.transition
        if labels == "given" and transition is not None:
            probs, judged, transition = probs @ transition, judged @ transition, None
        options = {"score": score}
        # A share of the class's own mass is drawn, so that sets are not larger than asked.
        threshold = fit_conformal(
            judged, given, coverage, transition=transition, rng=np.random.default_rng(0), **options
        )
        if held_out is None and len(given) < FEWEST_QUERIES:
            threshold = np.inf
        return predict_sets(probs, threshold, rng=np.random.default_rng(1), **options)

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


class AttnKNNClassifier(ClassifierMixin, Insight, Store):
    """A nearest-neighbour classifier that learns how much each neighbour counts.

    Training rows become a memory of unit rows. The attention over a query's neighbours comes with
    the package: it was learned over thousands of drawn tables. Inside ``fit`` rows that are left
    out of their own neighbourhood, or held out from the training of the embedder, tell the share
    of wrong labels, refine the attention where that helps and set a last temperature. No other
    rows are seen.

    ``embedder="auto"`` keeps the features and chooses the metric (cosine, Euclidean, Euclidean of
    standardised or of rank-transformed columns, of either with columns weighted by what they say
    of the labels) that predicts left-out rows best. Where the rows
    are a table (with categories, or of at most 100 columns) of at least 1 000 distinct rows, with
    numbers in it, a network ("mlp-periodic") is trained too, and taken where it predicts held-out
    rows better.

    Args:
        n_neighbors: Neighbours that vote. "auto" takes half of an average class, 5 to 50.
        embedder: "auto"; "identity" (features as they are); a backbone of
            ``attnknn.embed.networks``, trained in ``fit``; or a function of your own from rows to
            numbers.
        metric: "auto", "cosine", "euclidean", "standardised", "quantile", "weighted" or "weighted
            quantile", where nothing is trained. What a function of your own returns is not
            scaled: "cosine" or "euclidean".
        label_noise: Share of training labels that are wrong, below 1 - 1/C, where labels would say
            nothing. "auto" estimates it: ``predict_proba`` then speaks of right labels where wrong
            ones were found, and with 0 of labels as they are given.
        refine: Whether the shipped attention learns from the rows: "auto", as many steps as help
            on rows left out; "none", a fit is embedding and search; "full", from more rows and up
            to four times as long.
        time_limit: Seconds after which nothing more is tried; what is found by then is kept.
        class_weight: Class to weight, or "balanced"; multiplies the sample weights.
        missing: "error" refuses missing numbers, "impute" puts the column's median in their place.
            A missing category is a category of its own.
        new_classes: Whether ``partial_fit`` may "add" classes or calls them an "error".
        reject_below: ``predict`` abstains where the largest probability is smaller; infinity lets
            it never answer.
        reject_label: What it answers then.
        training: Settings of the embedder's training by name, such as ``{"epochs": 20}``.
        trust_neighbours: How many neighbours judge a training row's label.
        index: How neighbours are searched: "auto", "flat_ip", "flat_l2", "hnsw", "matmul" or a
            FAISS factory string.
        n_jobs: Threads; None leaves that to torch and FAISS, -1 takes all processors.
        random_state: Seed, generator or None.
        verbose: Above 0, show progress bars.

    Attributes:
        classes_: The classes, sorted.
        n_features_in_: Columns seen in ``fit``.
        feature_names_in_: Their names, where they have names.
        embedder_: Metric or backbone that is in use.
        n_neighbors_: Neighbours that vote.
        label_noise_: Share of wrong labels that was corrected for; 0 where nothing was.
        label_noise_interval_: Shares that explain the labels nearly as well, at 95 %.
        transition_: Chance that class i (row) is labelled j (column).
        memory_: The ``MemoryBank``. Rows that are copies of each other are one row of it.
    """

    # Any value is taken here and checked in ``fit``, as scikit-learn's searches and clones expect.
    def __init__(
        self,
        n_neighbors: Any = "auto",
        *,
        embedder: Any = "auto",
        metric: Any = "auto",
        label_noise: Any = "auto",
        refine: Any = "auto",
        time_limit: Any = None,
        class_weight: Any = None,
        missing: Any = "error",
        new_classes: Any = "error",
        reject_below: Any = None,
        reject_label: Any = None,
        training: Any = None,
        trust_neighbours: Any = 20,
        index: Any = "auto",
        n_jobs: Any = None,
        random_state: Any = None,
        verbose: Any = 0,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.embedder = embedder
        self.metric = metric
        self.label_noise = label_noise
        self.refine = refine
        self.time_limit = time_limit
        self.class_weight = class_weight
        self.missing = missing
        self.new_classes = new_classes
        self.reject_below = reject_below
        self.reject_label = reject_label
        self.training = training
        self.trust_neighbours = trust_neighbours
        self.index = index
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Tags:
        """Return what scikit-learn may expect."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "impute"
        tags.input_tags.sparse = False
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "AttnKNNClassifier":
        """Learn from labelled rows.

        Args:
            X: Numbers, a pandas or Polars data frame (other columns than numbers are categories),
                images for an image backbone, or whatever an embedder of your own takes.
            y: Labels, strings or integers.
            sample_weight: How much each row counts; 2 is the same as coming twice.
        """
        return self._fit(X, y, sample_weight, classes=None)

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> "AttnKNNClassifier":
        """Add rows to the memory; attention, calibration and embedder stay as they are.

        Args:
            X: More rows, with the columns of ``fit``. On a new classifier this is ``fit``.
            y: Their labels.
            classes: All classes that will ever come; read by the first call alone.
            sample_weight: How much each row counts.
        """
        if isinstance(self.class_weight, str):
            raise ValueError(
                "class_weight must be weights by class for partial_fit, which does not see all "
                f"rows, got class_weight={self.class_weight!r}"
            )
        if not self.__sklearn_is_fitted__():
            return self._fit(X, y, sample_weight, classes=classes)
        rows = self._checked(X)
        labels = check_classes(y, n_rows_of(rows))
        all_classes = self._classes_with(labels)
        weights = self._weights(sample_weight, labels, all_classes)
        codes = np.searchsorted(all_classes, labels)
        with self._threads():
            embedding = self._fitted.embedding
            inputs, codes, entries = self._distinct(rows, codes, weights, known_by=embedding)
            added = embedding.place(inputs) if callable(self.embedder) else embedding.rows(inputs)
            # Whatever may be refused has been refused: nothing has changed so far.
            self._open_classes(all_classes)
            known = self._known_entries(added, codes)
            if (new := known == GONE).any():
                self.memory_.add(added[new], codes[new])
        self._ledger = self._ledger.grown(entries, weights, known)
        self.memory_.reweigh(self._ledger.row_weights())
        return self

    def forget(self, ids: Any) -> "AttnKNNClassifier":
        """Take rows out of the memory, by their place in what ``fit`` and ``partial_fit`` got.

        Other rows keep their ids. What was learned stays: fit anew to take its traces out too.
        """
        check_is_fitted(self)
        with naming("ids", "be row numbers"):
            ids = np.unique(np.atleast_1d(np.asarray(ids)))
        if not len(ids):
            return self
        n_given = len(self._ledger.entries)
        ids = check_labels("ids", ids, n_rows=len(ids), n_classes=n_given)  # one of so many, too
        self._ledger, removed = self._ledger.without(ids)
        if len(removed):
            self.memory_.remove(removed)
        self.memory_.reweigh(self._ledger.row_weights())
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return calibrated class probabilities, (N, C), in the order of ``classes_``."""
        check_is_fitted(self)
        embedding = self._fitted.embedding
        with self._threads():
            inputs = embedding.encode(self._checked(X))
        return self._probs_in_blocks(
            lambda part: embedding.place(inputs[part]), len(inputs), self._voters, title="predict"
        )

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the logarithm of ``predict_proba``; every class has some probability."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row, or ``reject_label`` where it abstains."""
        probs = self.predict_proba(X)
        labels = self.classes_[probs.argmax(axis=1)]
        if self.reject_below is None:
            return labels
        check_reject(self.reject_below)
        answered = probs.max(axis=1) >= self.reject_below
        return np.where(answered, labels.astype(object), self.reject_label)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the share of rows whose most probable class is right.

        Rows on which ``predict`` would abstain count like all others; ``coverage_curve`` shows what
        abstaining gains.
        """
        answers = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return float(accuracy_score(y, answers, sample_weight=sample_weight))

    def kneighbors(
        self, X: Any = None, n_neighbors: int | None = None, return_distance: bool = True
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Return the ids of each row's nearest training rows; copies are found once.

        Args:
            X: Rows; None asks for the neighbours of every memory row, itself left out.
            n_neighbors: How many; as many as vote by default. More than there are is lowered.
            return_distance: Return Euclidean distances between unit rows too, before the ids.
        """
        check_is_fitted(self)
        available = len(self.memory_) - (X is None)
        if not available:
            raise ValueError("X must be given where the memory holds one row alone, got X=None")
        k = min(self.n_neighbors_, available)
        if n_neighbors is not None:
            asked = check_count("n_neighbors", n_neighbors)
            k = lowered(asked, available, stacklevel=3)
        if X is None:
            with self._threads():
                own = np.arange(len(self.memory_))
                found = self._search(self.memory_.rows.numpy(), k, own)
        else:
            found = self._neighbours(X, k=k)
        ids = self._ledger.first_ids()[found.ids.numpy()]
        return (euclidean_distances(found.scores).numpy(), ids) if return_distance else ids

    def __sklearn_is_fitted__(self) -> bool:
        """Return whether ``fit`` has been called."""
        return hasattr(self, "memory_")
