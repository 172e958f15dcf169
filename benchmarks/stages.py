"""Stages: training, prediction and notebooks, each against the plainest way to do the same."""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import nbformat
import numpy as np
import torch
from nbclient import NotebookClient
from sklearn.neighbors import KNeighborsClassifier
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from attnknn.config import AttentionConfig, FittingConfig, RunConfig
from attnknn.core.attention import NeighbourAttention
from attnknn.core.bank import MemoryBank
from attnknn.core.fit import fit_on_neighbours
from attnknn.core.neighbours import Neighbours
from attnknn.core.vote import Attention, Method, Uniform, predict, predict_views
from attnknn.data.change import tta_views
from attnknn.data.splits import Split, Splits
from attnknn.embed.loop import Stage1
from attnknn.embed.networks import Embedder, build_embedder
from attnknn.embed.rows import embed, to_batch
from attnknn.embed.run import stage_of
from benchmarks.search import roof
from benchmarks.timing import (
    Action,
    Missing,
    Ratio,
    Sizes,
    clustered_rows,
    divided,
    interleaved,
    random_rows,
)

# ---- Images and networks that the stages share.


def random_images(n_train: int, n_test: int) -> Splits:
    """Return images of CIFAR-10's shape: a network takes as long for any content."""
    rng = np.random.default_rng(0)

    def split(n_images: int) -> Split:
        images = rng.integers(0, 256, (n_images, 3, 32, 32), dtype=np.uint8)
        return Split(images, np.arange(n_images) % 10)

    return Splits(
        name="random",
        kind="image",
        train=split(n_train),
        val=split(100),
        test=split(n_test),
        class_names=tuple(map(str, range(10))),
        mean=(0.5, 0.5, 0.5),
        std=(0.29, 0.29, 0.29),
        n_numeric=0,
        feature_names=(),
        augmentation=("crop", "flip"),
        source="drawn",
    )


def fast_embedder(splits: Splits) -> Embedder:
    """Return the untrained fast embedder."""
    torch.manual_seed(0)
    return build_embedder(RunConfig().embedder, splits.spec, rows=splits.train.inputs)


# ---- Stage 1 against a bare loop and the hardware, stage 2 against a search.

PRODUCT_SIDE = 2048  # of the square matrix product that shows what the hardware can do


def measure_stage1(sizes: Sizes) -> list[Ratio]:
    """Return the speed of a training step, augmentation and optimiser included."""
    splits = random_images(max(600, 2 * sizes.batch), 10)
    config = RunConfig.from_flat({"batch_size": sizes.batch, "epochs": 1, "device": "cpu"})
    stage = stage_of(config, splits, device=torch.device("cpu"))
    stage.embedder.train()
    ids = torch.arange(sizes.batch)
    bare, operations = _bare_step(stage, splits.train.inputs[: sizes.batch], ids % 10)
    side = torch.randn(PRODUCT_SIDE, PRODUCT_SIDE)
    times = interleaved(
        {
            "ours": lambda: stage._train_step(ids),
            "bare": bare,
            "torch_product": lambda: side @ side,
            "numpy_product": lambda: side.numpy() @ side.numpy(),
        },
        sizes.rounds,
    )
    peak = [2 * PRODUCT_SIDE**3 / taken for taken in roof(times)]  # operations a second
    reached = [operations / taken for taken in times["ours"]]
    note = f"fast embedder, batch {sizes.batch}"
    return [
        Ratio(
            "training_over_bare_loop",
            "training images/s: share of a bare cross-entropy loop",
            divided(times["bare"], times["ours"]),
            "higher",
            note=note,
        ),
        Ratio(
            "training_share_of_flop_roof",
            "training: share of the operations/s of a square matrix product",
            divided(reached, peak),
            "higher",
            note=f"{note}, {operations / sizes.batch / 1e9:.2f} GFLOP an image and step",
        ),
    ]


def _bare_step(stage: Stage1, images: np.ndarray, labels: torch.Tensor) -> tuple[Action, int]:
    """Return a step of the plainest loop over the same network, and its operations."""
    inputs, head = to_batch(images), stage.objective.network
    parameters = [*stage.embedder.parameters(), *head.parameters()]
    optimiser = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=1e-6)

    def step() -> None:
        optimiser.zero_grad()
        functional.cross_entropy(head(stage.features(inputs)), labels).backward()
        optimiser.step()

    with FlopCounterMode(display=False) as counter:
        step()
    return step, counter.get_total_flops()


def measure_stage2(sizes: Sizes) -> list[Ratio]:
    """Return the time of a stage-2 fit over that of the search for the bank's trust."""
    rows = clustered_rows(sizes.rows, sizes.dim, 0)
    queries = clustered_rows(sizes.fit_queries, sizes.dim, 1)
    bank = MemoryBank(rows, np.arange(len(rows)) % 10, n_classes=10)
    found, labels = bank.search(queries, sizes.k), np.arange(len(queries)) % 10
    fitting = FittingConfig(fit_epochs=sizes.fit_epochs, fit_k=sizes.k)
    attention = AttentionConfig()

    def trust() -> None:
        _ = replace(bank.content.bank).own_neighbours  # one that has not been asked yet

    times = interleaved(
        {
            "fit": lambda: fit_on_neighbours(
                bank, found, labels, attention=attention, fitting=fitting
            ),
            "trust": trust,
        },
        max(1, sizes.rounds // 2),
    )
    return [
        Ratio(
            "fit_over_trust_search",
            "stage-2 fit: time over the leave-one-out search that trust needs",
            divided(times["fit"], times["trust"]),
            "lower",
            note=f"{sizes.fit_queries} queries, {sizes.fit_epochs} epochs, {sizes.rows} rows",
        )
    ]


# ---- From rows or pixels to probabilities.

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


# ---- What papermill and the PDF add to a notebook.

CELLS = ("n = 3", "import numpy as np\nvalues = np.arange(n)", "print(values.sum())")


def small_notebook(path: Path) -> Path:
    """Write a notebook that does nearly nothing."""
    notebook = nbformat.v4.new_notebook()
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["kernelspec"] = kernel
    notebook.cells = [
        nbformat.v4.new_markdown_cell("# A small notebook"),
        *(nbformat.v4.new_code_cell(source) for source in CELLS),
    ]
    notebook.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, path)
    return path


def measure_notebooks(sizes: Sizes) -> list[Ratio]:
    """Return the time of papermill + PDF over that of the bare kernel."""
    import papermill

    from attnknn.paper.pdf import notebook_to_pdf

    with tempfile.TemporaryDirectory(prefix="attnknn-bench-") as folder:
        source, done = small_notebook(Path(folder) / "source.ipynb"), Path(folder) / "done.ipynb"

        def piped() -> None:
            papermill.execute_notebook(source, done, {"n": 5}, progress_bar=False)
            notebook_to_pdf(done)

        def bare() -> None:
            NotebookClient(nbformat.read(source, as_version=4), kernel_name="python3").execute()

        times = interleaved({"piped": piped, "bare": bare}, max(2, sizes.rounds // 2))
    extra = sum(times["piped"]) / len(times["piped"]) - sum(times["bare"]) / len(times["bare"])
    return [
        Ratio(
            "notebook_over_bare_kernel",
            "papermill + PDF of a small notebook: time over a bare kernel",
            divided(times["piped"], times["bare"]),
            "lower",
            note=f"{extra:.1f} s more a notebook",
        )
    ]


# ---- AFMP against DeiT-Tiny; `afmp_scaling` has all sizes.

DEIT, AFMP = "DeiT-Tiny", "AFMP-Small keep 0.3"
AFMP_NAME, AFMP_TITLE = "afmp_over_deit", "AFMP-Small: time of forward + backward over DeiT-Tiny"
BATCH = 8


def measure_afmp(sizes: Sizes) -> list[Ratio | Missing]:
    """Return the ratio, or say why there is none."""
    try:
        import timm  # noqa: F401

        import attnknn.afmp.model  # noqa: F401
        from benchmarks.afmp_scaling import MODELS, build, training_pass
    except ImportError as error:
        return [Missing(AFMP_NAME, AFMP_TITLE, f"cannot be imported: {error}")]
    if not {DEIT, AFMP} <= set(MODELS):
        reason = f"afmp_scaling has other models: {', '.join(MODELS)}"
        return [Missing(AFMP_NAME, AFMP_TITLE, reason)]
    torch.manual_seed(0)
    images, labels = torch.randn(BATCH, 3, sizes.side, sizes.side), torch.arange(BATCH)
    actions = {
        name: partial(training_pass, build(name, sizes.side).train(), images, labels)
        for name in (AFMP, DEIT)
    }
    times = interleaved(actions, sizes.rounds)
    note = f"batch {BATCH} of {sizes.side} px, three tenths of the edges kept"
    return [Ratio(AFMP_NAME, AFMP_TITLE, divided(times[AFMP], times[DEIT]), "lower", note=note)]
