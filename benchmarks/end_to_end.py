"""From rows or pixels to probabilities: ours against scikit-learn, attention against uniform."""

from functools import partial

import numpy as np
import torch
from sklearn.neighbors import KNeighborsClassifier

from attnknn.config import AttentionConfig
from attnknn.core.attention import NeighbourAttention
from attnknn.core.bank import MemoryBank
from attnknn.core.neighbours import Neighbours
from attnknn.core.vote import Attention, Method, Uniform, predict, predict_views
from attnknn.data.change import tta_views
from attnknn.embed.rows import embed
from benchmarks.images import fast_embedder, random_images
from benchmarks.sizes import Sizes, clustered_rows, random_rows
from benchmarks.timing import Missing, Ratio, divided, interleaved

N_VIEWS = 5


def untrained_attention(bank: MemoryBank, k: int) -> Attention:
    """Return an attention as it is before its fit; what it has learned costs no time."""
    torch.manual_seed(0)
    module = NeighbourAttention(AttentionConfig(), dim=bank.dim, n_classes=bank.n_classes)
    method = Attention(k, module.eval())
    predict(method, bank.search(bank.rows[:10].numpy(), k))  # trust is made once a bank
    return method


def measure_rows(sizes: Sizes) -> list[Ratio]:
    """Return what is measured on embeddings that are there."""
    rows, queries = (
        random_rows(n, sizes.dim, seed) for seed, n in enumerate((sizes.rows, sizes.queries))
    )
    labels = np.arange(len(rows)) % 10
    bank = MemoryBank(rows, labels, n_classes=10)
    sklearn = KNeighborsClassifier(sizes.k, algorithm="brute").fit(rows, labels)
    attention = untrained_attention(bank, sizes.k)

    def classify(method: Method) -> np.ndarray:
        return predict(method, bank.search(queries, sizes.k))

    times = interleaved(
        {
            "uniform": lambda: classify(Uniform(sizes.k)),
            "attention": lambda: classify(attention),
            "sklearn": lambda: sklearn.predict_proba(queries),
        },
        sizes.rounds,
    )
    note = f"{sizes.rows} x {sizes.dim} rows, {sizes.queries} queries, k={sizes.k}"
    return [
        Ratio(
            "attention_over_uniform",
            "search + weigh + vote: time of attention over uniform",
            divided(times["attention"], times["uniform"]),
            "lower",
            target=1.5,
            note=note,
        ),
        Ratio(
            "uniform_over_sklearn",
            "predict_proba, uniform votes: times the speed of scikit-learn brute",
            divided(times["sklearn"], times["uniform"]),
            "higher",
            note=note,
        ),
        Ratio(
            "attention_over_sklearn",
            "predict_proba, attention: times the speed of scikit-learn brute",
            divided(times["sklearn"], times["attention"]),
            "higher",
            note=note,
        ),
    ]


def measure_estimator(sizes: Sizes) -> list[Ratio | Missing]:
    """Return our scikit-learn style classifier against scikit-learn's."""
    name, title = "estimator_over_sklearn", "AttnKNNClassifier.predict_proba over scikit-learn's"
    try:
        from attnknn.estimator.classifier import AttnKNNClassifier
    except ImportError as error:
        return [Missing(name, title, f"attnknn.estimator cannot be imported: {error}")]
    rows = clustered_rows(sizes.estimator_rows, sizes.dim, 0, n_clusters=50)
    queries = clustered_rows(sizes.queries, sizes.dim, 1, n_clusters=50)
    labels = np.random.default_rng(0).integers(10, size=len(rows))
    ours = AttnKNNClassifier(
        sizes.k, embedder="identity", metric="cosine", label_noise=0.0, random_state=0
    ).fit(rows, labels)
    theirs = KNeighborsClassifier(sizes.k, algorithm="brute").fit(rows, labels)
    times = interleaved(
        {
            "ours": lambda: ours.predict_proba(queries),
            "theirs": lambda: theirs.predict_proba(queries),
        },
        sizes.rounds,
    )
    note = f"{len(rows)} x {sizes.dim} rows, {len(queries)} queries, k={sizes.k}"
    return [Ratio(name, title, divided(times["theirs"], times["ours"]), "higher", note=note)]


def measure_images(sizes: Sizes) -> list[Ratio]:
    """Return what is measured from pixels on, through the fast embedder."""
    splits = random_images(600, sizes.images)
    embedder, images = fast_embedder(splits), splits.test.inputs
    rows = random_rows(sizes.rows, embedder.embed_dim, 0)
    bank = MemoryBank(rows, np.arange(len(rows)) % 10, n_classes=10)
    attention = untrained_attention(bank, sizes.k)

    def found(place: int) -> Neighbours:
        view = partial(_view, place) if place else None
        return bank.search(embed(embedder, images, progress=False, view=view), sizes.k)

    times = interleaved(
        {
            "uniform": lambda: predict(Uniform(sizes.k), found(0)),
            "attention": lambda: predict(attention, found(0)),
            "views": lambda: predict_views(attention, [found(i) for i in range(N_VIEWS)]),
        },
        sizes.rounds,
    )
    note = f"{sizes.images} images of 3 x 32 x 32 through the fast embedder, {sizes.rows} rows"
    return [
        Ratio(
            "attention_over_uniform_with_embedding",
            "embed + search + weigh + vote: time of attention over uniform",
            divided(times["attention"], times["uniform"]),
            "lower",
            target=1.15,
            note=note,
        ),
        Ratio(
            "views_over_single",
            f"{N_VIEWS} test-time views: time over a single view",
            divided(times["views"], times["attention"]),
            "lower",
            note=f"{note}; {N_VIEWS} is the least that {N_VIEWS} embeddings can take",
        ),
    ]


def _view(place: int, images: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return tta_views(images, generator, kind="v5", n_views=N_VIEWS, flip=True, pad=4)[place]
