"""The training loop of AFMP ablations.

Validation rows choose the epoch and lower the rate. Test rows are read for the published form
alone, to show what choosing by them adds; nothing is chosen by them here. A killed training goes on
from its last whole epoch and ends with the same numbers as an unbroken one.
"""

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from attnknn.afmptrain.networks import build_classifier
from attnknn.afmptrain.predict import gate_facts, judge, middle_gates
from attnknn.afmptrain.settings import Recipe, Setting
from attnknn.augment import augment_batch
from attnknn.checkpoint import load_checkpoint, save_checkpoint
from attnknn.data import Splits
from attnknn.embed import to_batch

LOOK_EVERY = 10  # epochs between two looks at the gates


class Training:
    """One training: model, optimiser, rate, and every source of chance.

    Args:
        setting: What is trained.
        splits: Rows to learn from, to choose by, and to report on.
        recipe: How.
        seed: Decides weights, order and augmentation.
        device: Where.
    """

    def __init__(
        self,
        setting: Setting,
        splits: Splits,
        recipe: Recipe,
        *,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.setting, self.splits, self.recipe, self.device = setting, splits, recipe, device
        self.model = build_classifier(setting, splits, seed=seed).to(device)
        # Fused: one call for all parameters; one by one they cost a third of a small step.
        fused = torch.device(device).type in ("cpu", "cuda")
        rates = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
        self.optimiser = torch.optim.AdamW(self.model.parameters(), **rates, fused=fused)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optimiser, mode="max", patience=recipe.patience, factor=recipe.factor
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.augment = [name for name in recipe.augment if name in splits.augmentation]
        self.epoch, self.history, self.gates = 0, [], []
        self.gate_maps: dict[str, Tensor] = {}  # epoch to the gates of a few images
        self.best: dict[str, Any] = {"val_accuracy": -1.0, "model": None}

    def run(self, checkpoint: Path, *, progress: bool = True) -> None:
        """Train to the end, from the checkpoint if there is one, and leave the best weights."""
        if checkpoint.exists():
            self._restore(load_checkpoint(checkpoint))
        epochs = range(self.epoch, self.recipe.epochs)
        for _ in tqdm(epochs, desc=self.setting.name, disable=not progress, leave=False):
            self._run_epoch()
            save_checkpoint(checkpoint, self._state())
        self.model.load_state_dict(self.best["model"])

    def _run_epoch(self) -> None:
        start, cpu_start = time.perf_counter(), time.process_time()
        row = {"epoch": self.epoch + 1, "lr": self.optimiser.param_groups[0]["lr"]}
        row |= self._train_epoch()
        # NOTE: seconds of the training alone; judging and looking at gates are not training.
        row["seconds"] = time.perf_counter() - start
        # Of all threads; unlike the clock on the wall, untouched by what else the machine does.
        row["cpu_seconds"] = time.process_time() - cpu_start
        row |= judge(self.model, self.splits.val, "val")
        # What the source notebook called the time of an epoch: nothing but that is told by it.
        row["cpu_seconds_with_validation"] = time.process_time() - cpu_start
        if self.setting.kind == "published":
            # Only to show what choosing the epoch on test rows, as published, makes of it.
            row["test_accuracy"] = judge(self.model, self.splits.test, "test")["test_accuracy"]
        self.epoch += 1
        self.history.append(row)
        self._look_at_gates()
        self.plateau.step(row["val_accuracy"])
        # NOTE: leakage guard. The epoch is chosen on validation rows, never on test rows.
        if row["val_accuracy"] > self.best["val_accuracy"]:
            weights = {name: value.cpu().clone() for name, value in self.model.state_dict().items()}
            self.best = {"val_accuracy": row["val_accuracy"], "model": weights}

    def _train_epoch(self) -> dict[str, float]:
        self.model.train()
        train, sums, n_rows = self.splits.train, torch.zeros(3), 0
        for ids in torch.randperm(len(train), generator=self.generator).split(
            self.recipe.batch_size
        ):
            pixels = to_batch(train.inputs[ids.numpy()])
            pixels = augment_batch(pixels, self.augment, self.generator).to(self.device)
            labels = torch.from_numpy(train.labels[ids.numpy()]).to(self.device)
            sums += len(ids) * self._step(pixels, labels)
            n_rows += len(ids)
        loss, penalty, accuracy = (sums / n_rows).tolist()
        return {"loss": loss, "sparsity_loss": penalty, "train_accuracy": accuracy}

    def _step(self, pixels: Tensor, labels: Tensor) -> Float[Tensor, "3"]:
        logits, penalty = self.model.logits_and_penalty(pixels)
        loss = F.cross_entropy(logits, labels)
        if not torch.isfinite(loss):
            raise RuntimeError(
                f"the training loss became {loss.item()} in epoch {self.epoch + 1}: lower lr, "
                f"now {self.recipe.lr}"
            )
        self.optimiser.zero_grad()
        (loss + penalty).backward()
        self.optimiser.step()
        hits = (logits.argmax(dim=1) == labels).float().mean()
        return torch.stack([loss, penalty, hits]).detach().cpu()

    def _look_at_gates(self) -> None:
        """Record the gates of some validation images, now and then and after the last epoch."""
        due = self.epoch % LOOK_EVERY == 0 or self.epoch == self.recipe.epochs
        if not due or self.setting.kind == "deit":
            return
        self.gates += [
            {"epoch": self.epoch, "layer": place + 1, **facts}
            for place, facts in enumerate(gate_facts(self.model, self.splits.val))
        ]
        if self.setting.kind == "afmp":
            self.gate_maps[str(self.epoch)] = middle_gates(self.model, self.splits.val)

    def _state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "history": self.history,
            "gates": self.gates,
            "gate_maps": self.gate_maps,
            "best": self.best,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "plateau": self.plateau.state_dict(),
            "generator": self.generator.get_state(),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.history = state["epoch"], state["history"]
        self.gates, self.best = state["gates"], state["best"]
        self.gate_maps = state["gate_maps"]
        for name in ("model", "optimiser", "plateau"):
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"])
