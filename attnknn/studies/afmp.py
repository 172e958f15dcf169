"""AFMP ablations: settings and seeds become histories, measures and paired tests.

Axes: B rows, C classes.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy import stats
from scipy.special import softmax
from tqdm import tqdm

from attnknn.afmp.graph import AFMPConfig, grid_scaffold
from attnknn.afmp.model import AFMPTrunk, kept_edges
from attnknn.afmp.published import one_way_edges
from attnknn.afmp.train import (
    AblationRun,
    Recipe,
    Setting,
    build_classifier,
    run_path,
    train_setting,
)
from attnknn.data.splits import Splits, load_splits
from attnknn.embed.rows import to_batch
from attnknn.embed.run import choose_device
from attnknn.embed.runs import project_root, results_root
from attnknn.evaluate.compare import compare_methods, verdict_sentence, with_verdicts
from attnknn.figures.tables import DisplayTable, pivot_mean_interval
from attnknn.files import REPORT_NAME, read_json
from attnknn.studies.common import tidy_measures

# ---- What the AFMP ablation compares: a model becomes the settings that are trained.

DENSE, TOP_DOWN, PUBLISHED = "dense", "top-down", "published"
WIDER, DEIT, DEIT_LARGER = "one pass, wider", "DeiT", "DeiT, larger"


def keep_name(share: float) -> str:
    """Return what a setting is called by the share of edges it keeps."""
    return DENSE if share == 1 else f"keep {share:g}"


def ablation_settings(
    model: AFMPConfig, *, keep_shares: Sequence[float], sparse_weights: Sequence[float]
) -> list[Setting]:
    """Return the settings of the study.

    Shares kept and penalty weights are tried without the top-down pass; then the pass is added to
    the reference (the model's own share and weight). Beside them stand one pass that is as large
    as both, the published model, with and without its top-down pass, and two transformers: one of
    about the reference's size, and one of about the size of the model with the top-down pass.

    Args:
        model: The full model: its sizes, share and weight are the reference's.
        keep_shares: Shares of edges to keep; 1 is the dense model, 0 one without messages.
        sparse_weights: Weights of the mean gate in the loss, at the reference's share.
    """
    plain = replace(model, top_down=False)
    shares = sorted({*keep_shares, model.keep_share}, reverse=True)
    settings = [Setting(keep_name(share), replace(plain, keep_share=share)) for share in shares]
    settings += [
        Setting(f"λ {weight:g}", replace(plain, sparse_weight=weight))
        for weight in sorted(sparse_weights, reverse=True)
        if weight != model.sparse_weight
    ]
    return [
        *settings,
        Setting(TOP_DOWN, replace(model, top_down=True)),
        Setting(WIDER, widened(plain)),
        Setting(PUBLISHED, plain, "published"),
        Setting(f"{PUBLISHED}, {TOP_DOWN}", replace(model, top_down=True), "published"),
        # NOTE: as large as what it is compared with; the top-down pass has half as much again.
        Setting(DEIT, plain, "deit"),
        Setting(DEIT_LARGER, replace(model, top_down=True), "deit"),
    ]


def widened(plain: AFMPConfig) -> AFMPConfig:
    """Return one pass that is wide enough to have about the parameters of the top-down model.

    What the second pass gains could have come from its parameters alone.
    """
    wanted = _n_parameters(replace(plain, top_down=True))
    wider = (replace(plain, width=width) for width in range(plain.width, 2 * plain.width, 2))
    return min(wider, key=lambda config: abs(_n_parameters(config) - wanted))


def _n_parameters(config: AFMPConfig) -> int:
    with torch.device("meta"):  # counted, not made
        return sum(p.numel() for p in AFMPTrunk(config).parameters())


# ---- What the programs in ``benchmarks`` saved about AFMP: where it lies, and two of them in
# words.

PLACE = Path("afmp")
EPOCH_COMMAND = "python benchmarks/afmp_epoch.py --out results/afmp/epoch"
CONTROLS_COMMAND = "python benchmarks/afmp_controls.py --out results/afmp/controls"


def saved_place(name: str, file: str) -> Path | None:
    """Return the folder in which a benchmark left a file: among the results, or in the project."""
    roots = (results_root(), (project_root() or Path()) / "results")
    places = [root / PLACE / name for root in roots]
    return next((place for place in places if (place / file).is_file()), None)


def _summary(name: str) -> dict[str, Any] | None:
    place = saved_place(name, f"{name}.json")
    return None if place is None else read_json(place / f"{name}.json")


def epoch_words() -> str:
    """Return, in Markdown, how long training epochs take, or how to measure it."""
    saved = _summary("epoch")
    if saved is None:
        return f"Time of an epoch: not measured here; `{EPOCH_COMMAND}` does."
    times = "; ".join(f"{name} {value:.1f}" for name, value in saved["seconds"].items())
    return (
        f"Seconds of a training epoch of AFMP-Tiny on {saved['images']:,} images, median of "
        f"{saved['rounds']}, {saved['threads']} threads of {saved['hardware']['cpu']}: {times}. "
        f"Measured by `{saved['command']}`."
    )


def controls_words() -> str:
    """Return, in Markdown, what AFMP owes to messages and to size, or how to find out."""
    saved = _summary("controls")
    if saved is None:
        return f"Controls: not trained here; `{CONTROLS_COMMAND}` does."
    sizes = "; ".join(f"{name} {value:,}" for name, value in saved["parameters"].items())
    told = [verdict for verdict in saved["verdicts"] if " in accuracy (" in verdict]
    return "\n".join(
        [
            f"Trained on {saved['images']:,} images by `{saved['command']}`; parameters: {sizes}.",
            "",
            *(f"- {sentence}" for sentence in [*told, saved["training"]]),
        ]
    )


# Besides the reference, each with its counterpart: the published model prunes nothing, and the
# wider model and the larger transformer have the size of the model with the top-down pass.
PAIRS = ((PUBLISHED, DENSE), (TOP_DOWN, WIDER), (TOP_DOWN, DEIT_LARGER))


@dataclass(frozen=True)
class Ablation:
    """All runs of an ablation.

    Attributes:
        runs: Name of each setting to its runs, one a seed.
        reference: Name of the setting that the others are compared with.
        splits: The data.
    """

    runs: dict[str, list[AblationRun]]
    reference: str
    splits: Splits

    @property
    def labels(self) -> Int[np.ndarray, " B"]:
        """True classes of the test rows."""
        return self.splits.test.labels

    @cached_property
    def probs(self) -> dict[str, list[Float[np.ndarray, "B C"]]]:
        """Test probabilities of each setting, one table a seed."""
        return {
            name: [softmax(run.logits["test"].astype(np.float64), axis=1) for run in runs]
            for name, runs in self.runs.items()
        }

    @property
    def sparsest(self) -> str:
        """Name of the setting that keeps the fewest edges."""
        models = {name: runs[0].setting.model for name, runs in self.runs.items()}
        shares = {name: models[name].keep_share for name in models if name.startswith("keep ")}
        return min(shares, key=shares.get, default=DENSE)

    @property
    def rivals(self) -> list[str]:
        """Names of the reference and of what differs from it in more than shares and penalties."""
        names = list(self.runs)
        return [self.reference, *names[names.index(TOP_DOWN) :]]

    def history(self) -> pd.DataFrame:
        """Return one row per setting, seed and epoch."""
        return self._joined("history")

    def gates(self) -> pd.DataFrame:
        """Return one row per setting, seed, recorded epoch and layer."""
        return self._joined("gates")

    def table(self) -> pd.DataFrame:
        """Return one row per setting, seed and measure, on the test rows."""
        rows = []
        for name, tables in self.probs.items():
            for run, probs in zip(self.runs[name], tables, strict=True):
                rows += tidy_measures({name: probs}, self.labels, seed=run.seed)
        return pd.DataFrame(rows)

    def comparison(self, *, metrics: Sequence[str] = ("accuracy", "nll", "ece")) -> pd.DataFrame:
        """Return every setting's paired difference to the reference."""
        return compare_methods(self.probs, self.labels, self.reference, metrics=metrics)

    def pairs(self, *, metrics: Sequence[str] = ("accuracy", "nll", "ece")) -> pd.DataFrame:
        """Return the paired differences of ``PAIRS`` and of all edges against the fewest.

        As far as both were trained; one family.
        """
        tables = [
            compare_methods(
                {name: self.probs[name] for name in pair}, self.labels, pair[1], metrics=metrics
            )
            for pair in (*PAIRS, (DENSE, self.sparsest))
            if set(pair) <= set(self.runs) and self.reference not in pair
        ]
        if not tables:
            return self.comparison(metrics=metrics).iloc[:0]
        return with_verdicts(pd.concat(tables, ignore_index=True), family=["metric"])

    def _joined(self, part: str) -> pd.DataFrame:
        tables = [
            getattr(run, part).assign(setting=name, seed=run.seed)
            for name, runs in self.runs.items()
            for run in runs
        ]
        return pd.concat([table for table in tables if len(table)], ignore_index=True)


def run_ablation(
    folder: Path,
    settings: Sequence[Setting],
    *,
    dataset: str,
    recipe: Recipe,
    seeds: Sequence[int],
    max_rows: int | None = None,
    workers: int = 1,
    device: str = "auto",
) -> Ablation:
    """Train every setting with every seed, or read what is finished, and return them all.

    Each run is kept as soon as it ends; started again, the study goes on where it was.

    Args:
        folder: Where the runs are kept.
        settings: What to train; the first one without a top-down pass that keeps the share of the
            setting "top-down" is the reference.
        dataset: A data set of images.
        recipe: How to train.
        seeds: Seeds of every setting.
        max_rows: Training images to draw; None takes all.
        workers: Processes that train at the same time, each on its share of the cores.
        device: Where to train; "auto" takes CUDA where it is present, or else the CPU.
    """
    if device == "auto":  # not MPS: it has no sparse products
        device = "cuda" if torch.cuda.is_available() else "cpu"
    data = {"dataset": dataset, "max_train_rows": max_rows}
    splits = load_splits(**data)
    jobs = [(setting, seed) for setting in settings for seed in seeds]
    fixed = {"recipe": recipe, "data": data, "device": choose_device(device)}
    todo = [
        (setting, seed)
        for setting, seed in jobs
        if not (run_path(folder, setting, splits, recipe, seed=seed) / REPORT_NAME).exists()
    ]
    if workers > 1 and len(todo) > 1:
        _train_apart(folder, todo, fixed, workers)
    runs: dict[str, list[AblationRun]] = {}
    bar = tqdm(jobs, desc="AFMP ablation", disable=not todo)
    for setting, seed in bar:
        bar.set_postfix_str(f"{setting.name}, seed {seed}")
        run = train_setting(folder, setting, splits=splits, seed=seed, progress=False, **fixed)
        runs.setdefault(setting.name, []).append(run)
    return Ablation(runs, _reference(settings), splits)


def _reference(settings: Iterable[Setting]) -> str:
    share = next(s.model.keep_share for s in settings if s.name == TOP_DOWN)
    return keep_name(share)


def _train_apart(
    folder: Path, jobs: list[tuple[Setting, int]], fixed: dict[str, Any], workers: int
) -> None:
    """Train in processes of their own; each keeps its run, so nothing comes back."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    # Spawned, not forked: a fork of a process with running threads can hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(_train_one, folder, *job, fixed, threads) for job in jobs]
        bar = tqdm(as_completed(waiting), total=len(jobs), desc=f"{workers} trainings at once")
        try:
            for done in bar:
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # what has not begun would train for nothing
            raise


def _train_one(
    folder: Path, setting: Setting, seed: int, fixed: dict[str, Any], threads: int
) -> None:
    torch.set_num_threads(threads)
    splits = load_splits(**fixed["data"])
    train_setting(folder, setting, splits=splits, seed=seed, progress=False, **fixed)


def ablation_table(ablation: Ablation, step_mb: dict[str, float]) -> DisplayTable:
    """Return settings against measures; bold where the best beats the reference.

    Args:
        ablation: The runs.
        step_mb: Peak memory of a training step of each setting, in MB.
    """
    shown = pivot_mean_interval(
        ablation.table(), comparison=ablation.comparison(metrics=("accuracy", "nll", "ece"))
    )
    first = {name: runs[0] for name, runs in ablation.runs.items()}
    extra = {
        "parameters": [f"{first[name].report['parameters']:,}" for name in shown.text.index],
        "CPU s / 1 000 images": [
            f"{_epoch_seconds(ablation.runs[name]):.2f}" for name in shown.text.index
        ],
        "MB of a step": [f"{step_mb[name]:.0f}" for name in shown.text.index],
    }
    none = dict.fromkeys(extra, False)
    return DisplayTable(shown.text.assign(**extra), shown.bold.assign(**none))


def _epoch_seconds(runs: list[AblationRun]) -> float:
    """Return the median CPU seconds of training on 1 000 images; validation is not in them."""
    rows = runs[0].report["rows"]["train"]
    return float(np.median([run.history["cpu_seconds"].median() for run in runs]) * 1000 / rows)


def comparison_table(ablation: Ablation) -> pd.DataFrame:
    """Return the paired tests against the reference, then those of ``PAIRS``, for printing.

    Holm corrects each of the two families on its own, measure by measure. ``p_seeds`` is that of a
    paired t test over the seeds alone: three of them can carry little, and the bootstrap, which
    draws from the same three, says more than they do.
    """
    table = pd.concat([ablation.comparison(), ablation.pairs()], ignore_index=True)
    table = table.assign(p_seeds=_seed_p_values(table, ablation.table()))
    columns = ["method", "baseline", "metric", "difference", "low", "high", "p_holm", "p_seeds"]
    shown = table[[*columns, "verdict"]]
    return shown.rename(columns={"method": "setting", "baseline": "against"})


def _seed_p_values(tests: pd.DataFrame, measures: pd.DataFrame) -> list[float]:
    """Return, for each test, the p-value of a paired t test over seeds; NaN where none is."""
    by_seed = measures.pivot(index=["metric", "seed"], columns="method", values="value")
    p_values = []
    for row in tests.itertuples():
        gaps = by_seed.loc[row.metric, row.method] - by_seed.loc[row.metric, row.baseline]
        testable = len(gaps) > 1 and gaps.std() > 0
        p_values.append(float(stats.ttest_1samp(gaps, 0).pvalue) if testable else float("nan"))
    return p_values


def penalty_names(ablation: Ablation) -> dict[str, str]:
    """Return the settings that differ in the penalty alone, each with its weight as its label."""
    names = [name for name in ablation.runs if name == ablation.reference or name.startswith("λ")]
    weights = {name: ablation.runs[name][0].setting.model.sparse_weight for name in names}
    return {name: f"λ {weights[name]:g}" for name in sorted(names, key=weights.get, reverse=True)}


def mean_accuracy(runs: list[AblationRun], part: str) -> float:
    """Return the mean accuracy of runs on the "val" or the "test" rows."""
    return float(np.mean([run.report["metrics"][f"{part}_accuracy"] for run in runs]))


# ---- What the published AFMP measures: its sweep of the keep share, its epochs, its top-down pass.

SHARES = (0.2, 0.3, 0.4, 0.5, 0.6)  # of the published sweep


@torch.no_grad()
def published_sweep(ablation: Ablation) -> pd.DataFrame:
    """Return how many edges the published model keeps at each share, and whether that matters.

    Untrained models of one seed: where their logits are equal to the last bit, so is every step of
    their trainings, but for the penalty's weight.

    Returns:
        One row a share: ``keep share``, ``edges to keep`` (its count), ``edges`` (that there are),
        ``pruned`` and ``same logits`` (as at the first share).
    """
    splits, config = ablation.splits, ablation.runs[PUBLISHED][0].setting.model
    rows, logits = [], []
    for share in SHARES:
        setting = Setting(PUBLISHED, replace(config, keep_share=share), "published")
        model = build_classifier(setting, splits, seed=0).eval()
        pixels = to_batch(splits.test.inputs[: model.network.batch_size])
        scaffold = model.network.trunk.scaffold(pixels)
        n_edges = one_way_edges(scaffold)[0].shape[1]
        n_kept = int(share * scaffold.n_points * model.network.batch_size)
        logits.append(model(pixels))
        rows.append(
            {
                "keep share": share,
                "edges to keep": n_kept,
                "edges": n_edges,
                "pruned": max(0, n_edges - n_kept),
                "same logits": torch.equal(logits[0], logits[-1]),
            }
        )
    return pd.DataFrame(rows)


def sweep_words(sweep: pd.DataFrame) -> str:
    """Say whether the published sweep of the keep share compares models that differ."""
    n_edges, least = sweep["edges"].iloc[0], sweep["edges to keep"].min()
    asked = f"it keeps {least:,} edges or more out of {n_edges}"
    same = sweep["same logits"].all() and not sweep["pruned"].any()
    if same:
        return f"One and the same model at all shares: {asked}; equal logits."
    n_pruned = int((sweep["pruned"] > 0).sum())
    return f"It prunes at {n_pruned} of {len(sweep)} shares: {asked}."


def published_words(ablation: Ablation) -> str:
    """Say what the published top-down ablation, its choice of the epoch and its times measure."""
    pair = [PUBLISHED, f"{PUBLISHED}, {TOP_DOWN}"]
    probs = {name: ablation.probs[name] for name in pair}
    row = compare_methods(probs, ablation.labels, PUBLISHED, metrics=("accuracy",)).iloc[0]
    runs = [run for name in pair for run in ablation.runs[name]]
    chosen = [
        run.history["test_accuracy"].max() - run.report["metrics"]["test_accuracy"] for run in runs
    ]
    times = pd.concat([run.history for run in runs])
    longer = times["cpu_seconds_with_validation"].sum() / times["cpu_seconds"].sum() - 1
    return (
        f"Its top-down pass cannot reach the output; the two differ by what seeds do: "
        f"{row['difference']:+.4f}, p = {row['p_value']:.3f} (a check of the paired test: there "
        f"is nothing to find). Choosing the epoch on test rows, as it did, adds "
        f"{100 * np.mean(chosen):.2f} points; counting the judging of rows into the time of an "
        f"epoch, as it did, adds {100 * longer:.0f} % of CPU time with our validation rows."
    )


# ---- Gates of a trained AFMP setting, as tables and pictures.

LOW, HIGH = 0.02, 0.98  # a gate beyond these is saturated: hardly any gradient passes it


def gate_values(ablation: Ablation, name: str, *, n_images: int = 64) -> pd.DataFrame:
    """Return every channel's gate of the kept edges of some validation images, one row a gate.

    Of all seeds; the weights are those of the chosen epoch, which make the predictions.

    Args:
        ablation: The runs.
        name: A setting of the corrected model.
        n_images: Validation images to look at.
    """
    pixels = to_batch(ablation.splits.val.inputs[:n_images])
    tables = []
    for run in ablation.runs[name]:
        model = run.load_model(ablation.splits)
        for place, layer in enumerate(model.network.gates(model.normalised(pixels)), start=1):
            gates = layer.channels.flatten().numpy()
            tables.append(pd.DataFrame({"seed": run.seed, "layer": place, "gate": gates}))
    return pd.concat(tables, ignore_index=True)


def saturation_table(ablation: Ablation, names: Sequence[str]) -> pd.DataFrame:
    """Return, by setting and layer, which shares of the kept edges' gates are saturated.

    Args:
        ablation: The runs.
        names: Settings of the corrected model.

    Returns:
        One row per setting and layer: ``setting``, ``layer``, ``nearly closed``, ``nearly open``
        and their sum ``saturated``, as shares of all channels of all kept edges.
    """
    rows = []
    for name in names:
        for layer, gates in gate_values(ablation, name).groupby("layer")["gate"]:
            shut, wide = float((gates < LOW).mean()), float((gates > HIGH).mean())
            shares = {"nearly closed": shut, "nearly open": wide, "saturated": shut + wide}
            rows.append({"setting": name, "layer": layer} | shares)
    return pd.DataFrame(rows)


def saturation_words(table: pd.DataFrame) -> str:
    """Say how many gates of a table's first setting are saturated, layer by layer."""
    name = table["setting"].iloc[0]
    rows = table[table["setting"] == name]
    shown = ", ".join(f"{100 * share:.0f} %" for share in rows["saturated"])
    n_layers = int((rows["saturated"] > 0.5).sum())
    return (
        f"**Gates.** More than half of the gates of “{name}” are saturated (below {LOW:g} or above "
        f"{HIGH:g}) in {n_layers} of {len(rows)} layers; from the first to the last: {shown}."
    )


def gate_pictures(ablation: Ablation, name: str) -> dict[str, Any]:
    """Return what ``plot.gate_maps`` draws: validation images with the middle layer's gates.

    The gates are those of the first seed's weights at every recorded epoch, as in ``gates()``.
    """
    run = ablation.runs[name][0]
    model, maps = run.setting.model, run.gate_maps
    images = ablation.splits.val.inputs[: len(next(iter(maps.values())))]
    scaffold = grid_scaffold(
        *images.shape[2:], model.patch, kind=model.scaffold, window=model.window
    )
    return {
        "images": images,
        "points": scaffold.points,
        "pairs": np.stack([scaffold.sources, scaffold.targets]),
        "gates": maps,
        "patch": model.patch,
    }


# ---- The verdict of an AFMP ablation, in words that follow from its runs.

# By the verdict on the published model against the dense one, which prunes nothing either.
_AGAINST_DENSE = {
    "worse": "is {loss:.2f} points worse than dense",
    "better": "is {gain:.2f} points better than dense",
    "no difference at this size": "cannot be told from dense",
    "undefined": "cannot be compared with dense",
}
# By the verdict on the dense model against one that keeps no edge.
_AGAINST_NONE = {
    "worse": "Messages cost accuracy on these data.",
    "better": "Messages help on these data.",
    "no difference at this size": "That messages help on these data is not shown.",
    "undefined": "Whether messages help on these data is not told.",
}


def verdict(ablation: Ablation, *more: str) -> str:
    """Return, in Markdown, what each part of the ablation showed.

    Args:
        ablation: The runs.
        more: What was found beside it (gates, kNN head), a sentence each.
    """
    table = ablation.comparison(metrics=("accuracy",)).set_index("method")
    spoken = {name: verdict_sentence({**row, "method": name}) for name, row in table.iterrows()}
    pairs = ablation.pairs(metrics=("accuracy",))
    lines = _share_lines(ablation, spoken)
    lines += _edge_lines(ablation, pairs)
    lines += [f"**Penalty {name}.** {spoken[name]}" for name in spoken if name.startswith("λ")]
    second = [spoken[TOP_DOWN], _second_pass_words(ablation), *_spoken_pair(pairs, TOP_DOWN, WIDER)]
    lines.append(f"**Top-down pass.** {' '.join(second)}")
    published = [spoken[PUBLISHED], *_message_words(ablation, pairs), published_words(ablation)]
    lines.append(f"**As published.** {' '.join(published)}")
    lines.append(f"**Published sweep.** {sweep_words(published_sweep(ablation))}")
    larger = _spoken_pair(pairs, TOP_DOWN, DEIT_LARGER)
    lines.append(
        f"**Transformer.** {' '.join([spoken[DEIT], *larger, _transformer_words(ablation)])}"
    )
    lines.append(f"**Training.** {training_words(ablation.history())}")
    lines.append(f"**Seeds.** {seed_words(comparison_table(ablation))}")
    return "\n".join(f"- {line}" for line in [*lines, *(each for each in more if each)])


def _share_lines(ablation: Ablation, spoken: dict[str, str]) -> list[str]:
    shares = [name for name in ablation.runs if name == DENSE or name.startswith("keep ")]
    # NOTE: leakage guard. Test rows judge the chosen share, so validation rows choose it.
    best = max(shares, key=lambda name: mean_accuracy(ablation.runs[name], "val"))
    accuracies = ", ".join(
        f"{name} {100 * mean_accuracy(ablation.runs[name], 'test'):.2f} %" for name in shares
    )
    lines = [f"**Keep share.** {accuracies}; best on validation rows: {best}."]
    # What pruning costs is asked whatever share is best.
    return lines + [spoken[name] for name in shares if name in spoken and name in (best, DENSE)]


def _spoken_pair(pairs: pd.DataFrame, method: str, baseline: str) -> list[str]:
    rows = pairs[(pairs["method"] == method) & (pairs["baseline"] == baseline)]
    return [verdict_sentence(row) for row in rows.to_dict("records")]


def _edge_lines(ablation: Ablation, pairs: pd.DataFrame) -> list[str]:
    """Say what all edges do over the fewest; of models alike but for that."""
    rows = pairs[pairs["method"] == DENSE].to_dict("records")
    if not rows:
        return []
    model = ablation.runs[ablation.sparsest][0].setting.model
    shape = ablation.splits.train.inputs.shape[2:]
    scaffold = grid_scaffold(*shape, model.patch, kind=model.scaffold, window=model.window)
    n_kept = kept_edges(scaffold.n_edges, model.keep_share)
    fewest = f"“{ablation.sparsest}” keeps {n_kept} of the {scaffold.n_edges} edges of an image."
    lines = []
    for row in rows:
        # An edge or two may also disturb.
        said = "A few edges are not none." if n_kept else _AGAINST_NONE[row["verdict"]]
        lines.append(f"**Messages.** {fewest} {verdict_sentence(row)} {said}")
    return lines


def _second_pass_words(ablation: Ablation) -> str:
    """Say what else the top-down pass brings along: time and parameters."""
    own, other = (_parameters(ablation, name) for name in (TOP_DOWN, ablation.reference))
    return (
        "It needs a second bottom-up pass, which without feedback would repeat the first, and has "
        f"{own:,} instead of {other:,} parameters; “{WIDER}” has "
        f"{_parameters(ablation, WIDER):,}."
    )


def _message_words(ablation: Ablation, pairs: pd.DataFrame) -> list[str]:
    """Say how the published model stands beside the dense one; neither prunes."""
    words = []
    for row in pairs[pairs["method"] == PUBLISHED].to_dict("records"):
        points = 100 * row["difference"]
        said = _AGAINST_DENSE[row["verdict"]].format(gain=points, loss=-points)
        own, other = (_parameters(ablation, name) for name in (PUBLISHED, DENSE))
        words.append(
            f"{PUBLISHED}, in which one image of a batch exchanges messages, {said}. They also "
            f"differ in one-way edges, in the error term, in a small penalty and in parameters "
            f"({own:,} against {other:,})."
        )
        words.append(verdict_sentence(row))
    return words


def _parameters(ablation: Ablation, name: str) -> int:
    return ablation.runs[name][0].report["parameters"]


def seed_words(tests: pd.DataFrame) -> str:
    """Say how many verdicts the seeds alone would carry: few of them understate their spread.

    Args:
        tests: What ``comparison_table`` returned.
    """
    told = tests[tests["verdict"].isin(["better", "worse"])]
    n_kept = int((told["p_seeds"] <= 0.05).sum())
    return (
        f"Of {len(told)} differences in the table of paired tests, {n_kept} also hold in a paired "
        "t test over the seeds alone (5 %, not corrected); the others rest on few trainings."
    )


def _transformer_words(ablation: Ablation) -> str:
    """Say how large and how accurate the transformers and both forms of AFMP are."""
    names = [DEIT, ablation.reference, DEIT_LARGER, TOP_DOWN]
    runs = {name: ablation.runs[name] for name in names if name in ablation.runs}
    shown = (
        f"{name} {100 * mean_accuracy(own, 'test'):.2f} % ({own[0].report['parameters']:,})"
        for name, own in runs.items()
    )
    return f"Accuracy (parameters): {', '.join(shown)}."


def training_words(history: pd.DataFrame) -> str:
    """Say in which epochs runs were best on validation rows, and whether the rate ever fell.

    Args:
        history: Columns ``setting``, ``seed``, ``epoch``, ``lr`` and ``val_accuracy``.
    """
    runs = [run.sort_values("epoch") for _, run in history.groupby(["setting", "seed"])]
    peaks = np.array([run["epoch"].iloc[run["val_accuracy"].argmax()] for run in runs])
    lowered = sum(run["lr"].min() < run["lr"].max() for run in runs)
    last = int(history["epoch"].max())
    n_last = int((peaks == last).sum())
    words = (
        f"{len(runs)} runs of {last} epochs were best on validation rows in epochs {peaks.min()} "
        f"to {peaks.max()} (median {np.median(peaks):g}), {n_last} of them in the last; the "
        f"learning rate was lowered in {lowered}."
    )
    if not n_last and lowered == len(runs):
        return words
    return f"{words} They have not all converged: the differences are those of this budget."
