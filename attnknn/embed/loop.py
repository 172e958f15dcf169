"""The training loop: networks, an optimiser and rows become trained networks and a history.

``Training`` is the one loop of this package: it keeps the order of rows, the record, the best epoch
and the state from which a killed training goes on; several processes may share the work, see
`parallel`. What a batch costs is said by a kind of training: `Stage1` trains an embedder together
with the network of its objective, `attnknn.afmp.train` trains AFMP.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from attnknn.embed.optim import Optimiser, build_optimiser
from attnknn.embed.parallel import ALONE, Group, running_statistics
from attnknn.embed.rows import embed, to_batch
from attnknn.files import load_checkpoint, save_checkpoint
from attnknn.progress import progress_bar

State = dict[str, dict[str, Tensor]]
# Of what a batch records, the running means that the progress bar has room for.
SHOWN = {"loss": "loss", "train_accuracy": "accuracy", "entropy": "entropy"}


class Training:
    """One training: networks, optimiser and every source of chance.

    A kind of training says in ``load``, ``forward``, ``loss`` and ``validate`` what it does with a
    batch, and may do more around an epoch.

    Args:
        networks: What is trained, by name.
        optimiser: Moves their weights.
        train: Rows to learn from.
        val: Rows to choose the epoch by.
        epochs: Rounds over the training rows.
        batch_size: Rows a step.
        whole_batches: Leave out a last, smaller batch.
        seed: Decides the order of rows and whatever ``load`` draws.
        device: Where the networks run.
        group: The processes that train together; every one of them makes the same calls.
        bfloat16: Whether ``forward`` computes in half precision.
    """

    title = "training"
    prefers_later = True  # of epochs that validate alike

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        optimiser: Optimiser,
        train: Split,
        val: Split,
        *,
        epochs: int,
        batch_size: int,
        whole_batches: bool,
        seed: int,
        device: torch.device | str,
        group: Group = ALONE,
        bfloat16: bool = False,
    ) -> None:
        self.networks, self.optimiser, self.train, self.val = networks, optimiser, train, val
        self.epochs, self.batch_size, self.seed = epochs, batch_size, seed
        self.steps_per_epoch = steps_of(len(train), batch_size, whole=whole_batches)
        self.device, self.group, self.bfloat16 = torch.device(device), group, bfloat16
        self.generator = torch.Generator().manual_seed(seed)
        self.epoch = 0
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {"val_accuracy": -1.0, "networks": None}
        self._labels = torch.from_numpy(train.labels)

    # ---- What a kind of training says.

    def load(self, ids: Int[Tensor, " B"]) -> tuple[Tensor, Batch]:
        """Return augmented inputs on the device, and what they are made of."""
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> tuple[Float[Tensor, "M D"], dict[str, Tensor]]:
        """Return features of a share of a batch, and by name what is added to the loss."""
        raise NotImplementedError

    def loss(
        self, features: Float[Tensor, "B D"], batch: Batch
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Return the loss of a whole batch, and means to record."""
        raise NotImplementedError

    def validate(self) -> dict[str, float]:
        """Return at least the ``val_accuracy`` of the validation rows."""
        raise NotImplementedError

    def before_epoch(self) -> None:
        """Prepare an epoch; its time counts as training."""

    def after_training(self) -> None:
        """Do what follows the last step of an epoch; its time counts as training."""

    def after_epoch(self, row: dict[str, Any]) -> None:
        """Look at an epoch that is validated; its time is not counted."""

    def own_state(self) -> dict[str, Any]:
        """Return what this kind of training needs to go on, besides the common state."""
        return {}

    def restore_own(self, state: dict[str, Any]) -> None:
        """Go on from what ``own_state`` returned."""

    # ---- The loop.

    def run(self, checkpoint: Path, *, progress: bool = True) -> pd.DataFrame:
        """Train to the end, from the checkpoint if there is one, and leave the best weights.

        Args:
            checkpoint: Written after every epoch; a killed run resumes from it and ends with the
                same numbers as an unbroken one.
            progress: Show one bar with the running loss, accuracy and, where there is one, entropy.

        Returns:
            One row an epoch: mean losses, entropies, accuracies, learning rate, seconds.
        """
        is_writer = self.group.is_first
        found = load_checkpoint(checkpoint) if is_writer and checkpoint.exists() else None
        if state := self.group.from_first(found):
            self._restore(state)
        steps = {"initial": self.epoch * self.steps_per_epoch}
        steps["total"] = self.epochs * self.steps_per_epoch
        hidden = not (progress and is_writer)
        with progress_bar(title=self.title, disable=hidden, **steps) as bar:
            while self.epoch < self.epochs:
                self._run_epoch(bar)
                if is_writer:
                    save_checkpoint(checkpoint, self._state())
        if self.best["networks"] is not None:
            self._load_networks(self.best["networks"])
        return pd.DataFrame(self.history)

    def _run_epoch(self, bar: tqdm) -> None:
        start = np.array([time.perf_counter(), time.process_time()])
        self.before_epoch()
        means = self._train_epoch(bar)
        self.epoch += 1
        if self.epoch == self.epochs:
            self.optimiser.end_of_training()
        self.after_training()
        # NOTE: seconds of the training alone; judging is not training. CPU seconds are those of all
        # threads: unlike the clock on the wall, untouched by what else the machine does.
        trained = np.array([time.perf_counter(), time.process_time()]) - start
        row = {"epoch": self.epoch, "lr": self.optimiser.rate} | means | self.validate()
        judged = np.array([time.perf_counter(), time.process_time()]) - start
        names = ("seconds", "cpu_seconds")
        row |= dict(zip(names, trained.tolist(), strict=True))
        row |= {f"{n}_with_validation": t for n, t in zip(names, judged.tolist(), strict=True)}
        self.after_epoch(row)
        self.history.append(row)
        self.optimiser.end_of_epoch(row["val_accuracy"])
        # NOTE: leakage guard. The epoch is chosen on validation rows, never on test rows.
        accuracy, best = row["val_accuracy"], self.best["val_accuracy"]
        if accuracy > best or (self.prefers_later and accuracy == best):
            self.best = {"val_accuracy": accuracy, "networks": _copied(self._network_state())}

    def _train_epoch(self, bar: tqdm) -> dict[str, float]:
        """Go once through the training rows; return the mean of each recorded value."""
        for network in self.networks.values():
            network.train()
        order = torch.randperm(len(self._labels), generator=self.generator)
        batches = order.split(self.batch_size)[: self.steps_per_epoch]
        sums: dict[str, float] = defaultdict(float)
        n_rows = 0
        bar.set_description(f"{self.title}, epoch {self.epoch + 1}/{self.epochs}", refresh=False)
        for number, ids in enumerate(batches):
            self.optimiser.set_step(self.epoch * self.steps_per_epoch + number)
            n_rows += len(ids)
            for name, value in self._train_step(ids).items():
                sums[name] += len(ids) * float(value)
            seen = {name: sums[key] / n_rows for key, name in SHOWN.items() if key in sums}
            bar.set_postfix({name: f"{mean:.3f}" for name, mean in seen.items()}, refresh=False)
            bar.update()
        return {name: total / n_rows for name, total in sums.items()}

    def _train_step(self, ids: Int[Tensor, " B"]) -> dict[str, Tensor]:
        inputs, batch = self.load(ids)
        self.optimiser.zero_grad()
        self._seed_dropout(self.group.rank)
        own = inputs[self.group.share(len(ids))]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            features, added = self.forward(own)
        self._seed_dropout(self.group.size)
        loss, recorded = self.loss(self.group.whole(features.float(), len(ids)), batch)
        if not torch.isfinite(loss):
            raise RuntimeError(
                f"the training loss became {loss.item()} in epoch {self.epoch + 1}: "
                f"lower lr, now {self.optimiser.lr}, or set clip_norm"
            )
        # What a share adds counts by its size: the gradients of all shares are summed up.
        (loss + sum(added.values()) * (len(own) / len(ids))).backward()
        self._combine()
        self.optimiser.step()
        found = {"loss": loss} | added | recorded
        return {name: value.detach() for name, value in found.items()}

    def _combine(self) -> None:
        """Bring the processes together again: after this, all of them make the same step."""
        shared, *alike = (
            [p.grad for p in network.parameters() if p.grad is not None]
            for network in self.networks.values()
        )
        # Every process has the whole gradient of what reads the features: the average changes
        # nothing, but rounding on a GPU cannot drive the processes apart.
        statistics = running_statistics(self.networks.values())
        self.group.combine(shared, [*(grad for grads in alike for grad in grads), *statistics])

    def _seed_dropout(self, place: int) -> None:
        """Draw other units for each share of a batch, and the same in a resumed training."""
        if self.group.size > 1:
            step = self.optimiser.current_step
            torch.manual_seed((self.seed << 40) + step * (self.group.size + 1) + place)

    def _network_state(self) -> State:
        return {name: network.state_dict() for name, network in self.networks.items()}

    def _load_networks(self, state: State) -> None:
        for name, network in self.networks.items():
            network.load_state_dict(state[name])

    def _state(self) -> dict[str, Any]:
        return self.own_state() | {
            "epoch": self.epoch,
            "history": self.history,
            "best": self.best,
            "networks": self._network_state(),
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "mps_rng": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.history, self.best = state["epoch"], state["history"], state["best"]
        self._load_networks(state["networks"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch_rng"])
        if state["cuda_rng"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        if state["mps_rng"] is not None and torch.backends.mps.is_available():
            torch.mps.set_rng_state(state["mps_rng"])
        self.restore_own(state)


def steps_of(n_rows: int, batch_size: int, *, whole: bool) -> int:
    """Return the steps of an epoch; of whole batches alone, the optimiser's count stays exact."""
    return max(1, n_rows // batch_size) if whole else -(-n_rows // batch_size)


class Stage1(Training):
    """The training of an embedder together with the network of its objective.

    Args:
        config: Everything that shapes the training.
        train: Rows to learn from.
        val: Rows to choose the epoch by.
        spec: Kind, shape and statistics of the inputs.
        n_classes: Number of classes.
        augmentation: Transforms that suit the inputs.
        device: Where the networks run.
        group: The processes that train together.
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
        training = config.training
        if group.size > 1 and training.batch_size < 2 * group.size:
            raise ConfigError(
                "batch_size must be at least twice the number of processes, "
                f"got batch_size={training.batch_size}, processes={group.size}"
            )
        torch.manual_seed(config.seed)
        self.config, self.spec, self.n_classes = config, spec, n_classes
        self.augmentation = augmentation if training.augment == "auto" else training.augment
        self.embedder = build_embedder(config.embedder, spec, rows=train.inputs).to(device)
        # Now, though it may be stage 2 that builds the attention: a training would be lost.
        check_heads("embedding width", self.embedder.embed_dim, config.attention)
        self.objective = OBJECTIVES[training.objective](config, self.embedder, n_classes)
        self.objective.network.to(device)
        compiled = torch.compile(self.embedder.features) if training.compile else None
        self.features = compiled or self.embedder.features
        super().__init__(
            {"embedder": self.embedder, "objective": self.objective.network},
            build_optimiser(
                training,
                embedder=self.embedder,
                steps_per_epoch=steps_of(len(train), training.batch_size, whole=True),
                **{self.objective.role: self.objective.network},
            ),
            train,
            val,
            epochs=training.epochs,
            batch_size=training.batch_size,
            whole_batches=True,
            seed=config.seed,
            device=device,
            group=group,
            bfloat16=uses_bfloat16(training.precision, device),
        )

    def load(self, ids: Int[Tensor, " B"]) -> tuple[Tensor, Batch]:
        """Return augmented, perhaps mixed inputs on the device, and what they are made of."""
        training, generator = self.config.training, self.generator
        inputs, batch = to_batch(self.train.inputs[ids.numpy()]), Batch(ids, self._labels[ids])
        if self.spec.kind == "image":
            inputs = self._augmented(inputs, ids) if self.augmentation else inputs
            inputs = shrink(inputs, self._image_size(inputs.shape[-1]))
        if training.mixup_alpha > 0 and torch.rand((), generator=generator) < training.mixup_share:
            inputs, batch.partners, batch.share = mixup(inputs, training.mixup_alpha, generator)
        return inputs.to(self.device), batch

    def _augmented(self, inputs: Tensor, ids: Int[Tensor, " B"]) -> Tensor:
        training, flips = self.config.training, None
        if training.alternating_flip:
            flips = alternating_flips(ids, epoch=self.epoch, seed=self.seed)
        crop = {"pad": training.crop_pad, "pad_mode": training.crop_mode}
        return augment_batch(inputs, self.augmentation, self.generator, flips=flips, **crop)

    def _image_size(self, full: int) -> int:
        """Return the side of training images at this step: early epochs may see small ones."""
        training = self.config.training
        done = self.optimiser.current_step / max(1, self.epochs * self.steps_per_epoch)
        stages = zip(training.small_until, training.small_sizes, strict=True)
        return min(full, next((size for until, size in stages if done < until), full))

    def forward(self, inputs: Tensor) -> tuple[Float[Tensor, "M D"], dict[str, Tensor]]:
        """Return features; an embedder adds nothing to the loss."""
        return self.features(inputs), {}

    def loss(
        self, features: Float[Tensor, "B D"], batch: Batch
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Return the mean loss of the objective, and means to record."""
        per_row, recorded = self.objective.loss(features, batch)
        return per_row.mean(), recorded

    def before_epoch(self) -> None:
        """Embed the memory of a joint training that has none yet."""
        if self.config.training.objective == "joint" and self.objective.memory is None:
            self._remember(self._embed_all())

    def after_training(self) -> None:
        """Refresh the memory of a joint training when it is time."""
        # Before validation: new queries among rows of older weights would be judged by a memory
        # that no one uses. The next epoch trains with the same rows.
        training = self.config.training
        if training.objective == "joint" and self.epoch % training.refresh_epochs == 0:
            self._remember(self._embed_all())

    def validate(self) -> dict[str, float]:
        """Return accuracy and NLL of the validation rows under the current networks."""
        labels, inputs = torch.from_numpy(self.val.labels), self.val.inputs
        log_probs = self.group.compute(
            len(inputs), lambda part: self.objective.log_probs(self.embedder, inputs[part])
        )
        hits = (log_probs.argmax(dim=1) == labels).float()
        nll = functional.nll_loss(log_probs, labels)
        return {"val_accuracy": float(hits.mean()), "val_nll": float(nll)}

    def _embed_all(self) -> Float[np.ndarray, "N D"]:
        """Return the training rows as the embedder sees them now."""
        inputs, options = self.train.inputs, {"device": self.device, "progress": False}
        rows = self.group.compute(
            len(inputs),
            lambda part: torch.from_numpy(embed(self.embedder, inputs[part], **options)),
        )
        return rows.numpy()

    def _remember(self, rows: Any) -> None:
        labels, n_classes = self.train.labels, self.n_classes
        self.objective.memory = SelfMemory(rows, labels, self.config, n_classes=n_classes)

    def own_state(self) -> dict[str, Any]:
        """Return the memory: one older than the networks cannot be made again from them."""
        memory = self.objective.memory
        return {"memory_rows": None if memory is None else memory.bank.rows}

    def restore_own(self, state: dict[str, Any]) -> None:
        """Take over the memory."""
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
