"""Training: stage 1 against a bare loop and against the hardware, stage 2 against a search."""

from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from attnknn.config import AttentionConfig, FittingConfig, RunConfig
from attnknn.core.bank import MemoryBank
from attnknn.core.fit import fit_on_neighbours
from attnknn.embed.loop import Stage1
from attnknn.embed.rows import to_batch
from attnknn.embed.run import stage_of
from benchmarks.exact_search import roof
from benchmarks.images import random_images
from benchmarks.sizes import Sizes, clustered_rows
from benchmarks.timing import Action, Ratio, divided, interleaved

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
