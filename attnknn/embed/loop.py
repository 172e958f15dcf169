"""Stage 1: train the embedder together with its objective's network.

One loop for every recipe: the objective says what a batch costs, the optimiser how weights move,
and this file keeps the order of rows, the augmentation, the record, the best epoch and the state
from which a killed training goes on. Several processes may share the work, see `parallel`.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from attnknn.config import ConfigError, RunConfig, check_heads
from attnknn.data.change import alternating_flips, augment_batch, mixup, shrink
from attnknn.data.splits import InputSpec, Split
from attnknn.embed.networks import build_embedder
from attnknn.embed.objectives import OBJECTIVES, Batch, SelfMemory
from attnknn.embed.optim import build_optimiser
from attnknn.embed.parallel import ALONE, Group, running_statistics
from attnknn.embed.rows import embed, to_batch
from attnknn.files import load_checkpoint, save_checkpoint

State = dict[str, dict[str, Tensor]]
# Of what an objective records, the running means that the progress bar has room for.
SHOWN = {"loss": "loss", "train_accuracy": "accuracy", "entropy": "entropy"}


class Stage1:
    """One training: networks, optimiser, memory and every source of chance.

    Args:
        config: Everything that shapes the training.
        train: Rows to learn from.
        val: Rows to choose the epoch by.
        spec: Kind, shape and statistics of the inputs.
        n_classes: Number of classes.
        augmentation: Transforms that suit the inputs.
        device: Where the networks run.
        group: The processes that train together; every one of them makes the same calls.
    """

    def __init__(
        self,
        config: RunConfig,
        train: Split,
        val: Split,
        *,
        spec: InputSpec,
        n_classes: int,
        augmentation: Sequence[str] = (),
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        if group.size > 1 and config.training.batch_size < 2 * group.size:
            raise ConfigError(
                "batch_size must be at least twice the number of processes, "
                f"got batch_size={config.training.batch_size}, processes={group.size}"
            )
        torch.manual_seed(config.seed)
        self.group = group
        self.config, self.train, self.val, self.device = config, train, val, device
        self.spec, self.n_classes, self.augmentation = spec, n_classes, augmentation
        self.generator = torch.Generator().manual_seed(config.seed)
        self.embedder = build_embedder(config.embedder, spec, rows=train.inputs).to(device)
        # Now, though it may be stage 2 that builds the attention: a training would be lost.
        check_heads("embedding width", self.embedder.embed_dim, config.attention)
        self.objective = OBJECTIVES[config.training.objective](config, self.embedder, n_classes)
        self.objective.network.to(device)
        self.steps_per_epoch = max(1, len(train) // config.training.batch_size)
        self.optimiser = build_optimiser(
            config.training,
            embedder=self.embedder,
            steps_per_epoch=self.steps_per_epoch,
            **{self.objective.role: self.objective.network},
        )
        self.features = self.embedder.features
        if config.training.compile:
            self.features = torch.compile(self.embedder.features)
        self.halved = uses_bfloat16(config.training.precision, device)
        self.epoch = 0
        self.history: list[dict[str, float]] = []
        self.best: dict[str, Any] = {"val_accuracy": -1.0, "networks": None}
        self._labels = torch.from_numpy(train.labels)

    def run(self, checkpoint: Path, *, progress: bool = True) -> pd.DataFrame:
        """Train to the end, from the checkpoint if there is one, and leave the best weights.

        Args:
            checkpoint: Written after every epoch; a killed run resumes from it and ends with the
                same numbers as an unbroken one.
            progress: Show a bar with the running loss, accuracy and, where there is one, entropy.

        Returns:
            One row an epoch: mean losses, entropies, accuracies, learning rate, seconds.
        """
        is_writer = self.group.is_first
        found = load_checkpoint(checkpoint) if is_writer and checkpoint.exists() else None
        if state := self.group.from_first(found):
            self._restore(state)
        while self.epoch < self.config.training.epochs:
            self._run_epoch(progress=progress and is_writer)
            if is_writer:
                save_checkpoint(checkpoint, self._state())
        if self.best["networks"] is not None:
            self._load_networks(self.best["networks"])
        return pd.DataFrame(self.history)

    def _run_epoch(self, *, progress: bool) -> None:
        start, training = time.perf_counter(), self.config.training
        is_joint = training.objective == "joint"
        if is_joint and self.objective.memory is None:
            self._remember(self._embed_all(progress=progress))
        means = self._train_epoch(progress=progress)
        self.epoch += 1
        if self.epoch == training.epochs:
            self.optimiser.end_of_training()
        # Before validation: new queries among rows of older weights would be judged by a memory
        # that no one uses. The next epoch trains with the same rows.
        if is_joint and self.epoch % training.refresh_epochs == 0:
            self._remember(self._embed_all(progress=progress))
        rate = training.lr * self.optimiser.factor(self.optimiser.current_step)
        row = {"epoch": self.epoch, "lr": rate} | means | self._validate()
        self.history.append(row | {"seconds": time.perf_counter() - start})
        # NOTE: leakage guard. The epoch is chosen on validation rows; test rows are not read here.
        if row["val_accuracy"] >= self.best["val_accuracy"]:
            networks = _copied(self._network_state())
            self.best = {"val_accuracy": row["val_accuracy"], "networks": networks}

    def _train_epoch(self, *, progress: bool) -> dict[str, float]:
        """Go once through the training rows; return the mean of each recorded value."""
        for network in self._networks().values():
            network.train()
        order = torch.randperm(len(self._labels), generator=self.generator)
        # The last, smaller batch is left out: the optimiser's step count stays exact.
        batches = order.split(self.config.training.batch_size)[: self.steps_per_epoch]
        title = f"epoch {self.epoch + 1}/{self.config.training.epochs}"
        bar = tqdm(batches, desc=title, disable=not progress, leave=False)
        sums: dict[str, float] = defaultdict(float)
        for number, ids in enumerate(bar):
            self.optimiser.set_step(self.epoch * self.steps_per_epoch + number)
            for name, value in self._train_step(ids).items():
                sums[name] += float(value)
            seen = {name: sums[key] / (number + 1) for key, name in SHOWN.items() if key in sums}
            bar.set_postfix({name: f"{mean:.3f}" for name, mean in seen.items()}, refresh=False)
        return {name: total / len(batches) for name, total in sums.items()}

    def _train_step(self, ids: Int[Tensor, " B"]) -> dict[str, Tensor]:
        inputs, batch = self._load(ids)
        self.optimiser.zero_grad()
        self._seed_dropout(self.group.rank)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.halved):
            own = self.features(inputs[self.group.share(len(ids))])
        self._seed_dropout(self.group.size)
        per_row, recorded = self.objective.loss(self.group.whole(own.float(), len(ids)), batch)
        loss = per_row.mean()
        if not torch.isfinite(loss):
            raise RuntimeError(
                f"the training loss became {loss.item()} in epoch {self.epoch + 1}: "
                f"lower lr, now {self.config.training.lr}, or set clip_norm"
            )
        loss.backward()
        self._combine()
        self.optimiser.step()
        return {name: value.detach() for name, value in ({"loss": loss} | recorded).items()}

    def _combine(self) -> None:
        """Bring the processes together again: after this, all of them make the same step."""
        networks = self._networks()
        shared, alike = (
            [p.grad for p in networks[name].parameters() if p.grad is not None]
            for name in ("embedder", "objective")
        )
        # Every process has the whole gradient of the objective's network: the average changes
        # nothing, but rounding on a GPU cannot drive the processes apart.
        self.group.combine(shared, [*alike, *running_statistics(networks.values())])

    def _seed_dropout(self, place: int) -> None:
        """Draw other units for each share of a batch, and the same in a resumed training."""
        if self.group.size > 1:
            step = self.optimiser.current_step
            torch.manual_seed((self.config.seed << 40) + step * (self.group.size + 1) + place)

    def _load(self, ids: Int[Tensor, " B"]) -> tuple[Tensor, Batch]:
        """Return augmented, perhaps mixed inputs on the device, and what they are made of."""
        training, generator = self.config.training, self.generator
        inputs = to_batch(self.train.inputs[ids.numpy()])
        batch = Batch(ids, self._labels[ids])
        names = self.augmentation if training.augment == "auto" else training.augment
        if self.spec.kind == "image" and names:
            flips = None
            if training.alternating_flip:
                flips = alternating_flips(ids, epoch=self.epoch, seed=self.config.seed)
            inputs = augment_batch(
                inputs,
                names,
                generator,
                pad=training.crop_pad,
                pad_mode=training.crop_mode,
                flips=flips,
            )
        if self.spec.kind == "image":
            inputs = shrink(inputs, self._image_size(inputs.shape[-1]))
        if training.mixup_alpha > 0 and torch.rand((), generator=generator) < training.mixup_share:
            inputs, batch.partners, batch.share = mixup(inputs, training.mixup_alpha, generator)
        return inputs.to(self.device), batch

    def _image_size(self, full: int) -> int:
        """Return the side of training images at this step: early epochs may see small ones."""
        training = self.config.training
        done = self.optimiser.current_step / max(1, training.epochs * self.steps_per_epoch)
        stages = zip(training.small_until, training.small_sizes, strict=True)
        return min(full, next((size for until, size in stages if done < until), full))

    def _validate(self) -> dict[str, float]:
        """Return accuracy and NLL of the validation rows under the current networks."""
        labels = torch.from_numpy(self.val.labels)
        inputs = self.val.inputs
        log_probs = self.group.compute(
            len(inputs), lambda part: self.objective.log_probs(self.embedder, inputs[part])
        )
        hits = (log_probs.argmax(dim=1) == labels).float()
        nll = functional.nll_loss(log_probs, labels)
        return {"val_accuracy": float(hits.mean()), "val_nll": float(nll)}

    def _embed_all(self, *, progress: bool) -> Float[np.ndarray, "N D"]:
        """Return the training rows as the embedder sees them now."""
        inputs, options = self.train.inputs, {"device": self.device, "progress": progress}
        rows = self.group.compute(
            len(inputs),
            lambda part: torch.from_numpy(embed(self.embedder, inputs[part], **options)),
        )
        return rows.numpy()

    def _remember(self, rows: Any) -> None:
        labels, n_classes = self.train.labels, self.n_classes
        self.objective.memory = SelfMemory(rows, labels, self.config, n_classes=n_classes)

    def _networks(self) -> dict[str, nn.Module]:
        return {"embedder": self.embedder, "objective": self.objective.network}

    def _network_state(self) -> State:
        return {name: network.state_dict() for name, network in self._networks().items()}

    def _load_networks(self, state: State) -> None:
        for name, network in self._networks().items():
            network.load_state_dict(state[name])

    def _state(self) -> dict[str, Any]:
        memory = self.objective.memory
        return {
            "epoch": self.epoch,
            "history": self.history,
            "best": self.best,
            "networks": self._network_state(),
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "mps_rng": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
            # A memory older than the networks cannot be made again from them.
            "memory_rows": None if memory is None else memory.bank.rows,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.history, self.best = state["epoch"], state["history"], state["best"]
        self._load_networks(state["networks"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch_rng"])
        if state.get("cuda_rng") and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        if state.get("mps_rng") is not None and torch.backends.mps.is_available():
            torch.mps.set_rng_state(state["mps_rng"])
        if state["memory_rows"] is not None:
            self._remember(state["memory_rows"].numpy())


def uses_bfloat16(precision: str, device: torch.device) -> bool:
    """Return whether the features are trained in bfloat16; weights and losses never are.

    ``auto`` does so where the hardware multiplies bfloat16 (on a CPU: AVX-512 BF16 or AMX). There
    it is about 1.6 times faster; elsewhere it is emulated and three times slower.
    """
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    tells = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)  # absent in old torch
    return device.type == "cpu" and tells()


def _copied(state: State) -> State:
    return {
        network: {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        for network, tensors in state.items()
    }
