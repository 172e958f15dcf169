"""One file for a fitted classifier: tensors, and the rest as JSON. Reading it runs no code."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from sklearn.utils.validation import check_is_fitted

from attnknn.core.bank import MemoryBank
from attnknn.core.noise import WrongLabels
from attnknn.core.prior import PriorAttention, PriorNetwork
from attnknn.core.refine import Learned
from attnknn.data.tables import TableEncoder
from attnknn.estimator.base import Machinery
from attnknn.estimator.embedding import Chart, Embedding, Features, blank_network
from attnknn.estimator.fitting import Fitted
from attnknn.estimator.inputs import Ledger
from attnknn.files import write_atomic

FORMAT = "attnknn-classifier-3"  # older ones hold attentions that were fitted from nothing
OWN = "<function>"  # stands for an embedder of the user's own


class Store(Machinery):
    """Methods that write and read a fitted classifier."""

    def save(self, path: str | Path) -> Path:
        """Write everything but an embedder of your own to one safetensors file, atomically."""
        check_is_fitted(self)
        tensors, facts = _packed(self)
        tensors = {name: torch.as_tensor(value).contiguous() for name, value in tensors.items()}
        told = json.dumps(facts)
        header = {"format": FORMAT, "facts": told, "sum": _sum_of(tensors, told)}
        content = save(tensors, metadata=header)
        return write_atomic(Path(path), lambda handle: handle.write(content))

    @classmethod
    def load(cls, path: str | Path, *, embedder: Callable[[Any], Any] | None = None) -> "Store":
        """Return a classifier that ``save`` wrote.

        Args:
            path: The file. One with a changed byte, or of an older version, is refused.
            embedder: The function it was fitted with, where it was fitted with one.
        """
        if Path(path).is_dir():
            raise ValueError(f"path must be a saved file, got the folder {path}")
        try:
            with safe_open(path, framework="pt") as handle:
                metadata = handle.metadata() or {}
                tensors = {name: handle.get_tensor(name) for name in handle.keys()}
        except SafetensorError as error:
            raise ValueError(f"path must be a whole saved file, got {path} ({error})") from None
        found = metadata.get("format", "")
        if not found.startswith(FORMAT.rpartition("-")[0]):
            raise ValueError(f"path must be a saved AttnKNNClassifier, got path={str(path)!r}")
        if found != FORMAT:
            raise ValueError(f"path must be of format {FORMAT!r}, got {found!r}: fit and save anew")
        if metadata.get("sum") != _sum_of(tensors, metadata["facts"]):
            raise ValueError(f"path must hold what was saved, got a changed file {str(path)!r}")
        facts = json.loads(metadata["facts"])
        return _unpacked(cls, tensors, facts, embedder)


def _sum_of(tensors: dict[str, torch.Tensor], told: str) -> str:
    """Return the SHA-256 of all that a file says."""
    digest = hashlib.sha256(told.encode())
    for name in sorted(tensors):
        array = tensors[name].contiguous().numpy()
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def _packed(model: Machinery) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tensors by name, and everything else as plain values."""
    fitted, bank = model._fitted, model.memory_
    learned, ledger = fitted.learned, model._ledger
    tensors = {
        "bank.rows": bank.rows,
        "bank.labels": bank.labels,
        "ledger.entries": ledger.entries,
        "ledger.weights": ledger.weights,
        "held_out.probs": learned.probs,
        "held_out.labels": fitted.held_out_labels,
    }
    if bank.weights is not None:
        tensors["bank.weights"] = bank.weights
    tensors |= {f"attention.{name}": v for name, v in learned.attention.state_dict().items()}
    if learned.wrong.transition is not None:
        tensors["transition"] = learned.wrong.transition
    embedding_tensors, embedding = _packed_embedding(fitted.embedding)
    facts = {
        "params": _packed_params(model),
        "classes": {"values": model.classes_.tolist(), "dtype": model.classes_.dtype.str},
        "n_features_in_": getattr(model, "n_features_in_", None),
        "feature_names_in_": getattr(model, "feature_names_in_", np.array([])).tolist(),
        "number_columns": getattr(model, "_number_columns", None),
        "name": fitted.name,
        "index_settings": bank.index_settings,
        "k": learned.k,
        "kinds": ledger.kinds,
        "n_epochs": learned.n_epochs,
        "losses": list(learned.losses.items()),
        "label_noise": [learned.wrong.share, learned.wrong.interval],
        "embedding": embedding,
    }
    return tensors | embedding_tensors, facts


def _packed_params(model: Machinery) -> dict[str, Any]:
    """Return the parameters; what JSON cannot hold and nobody needs to predict is left out."""
    params = model.get_params(deep=False)
    if callable(params["embedder"]):
        params["embedder"] = OWN
    if isinstance(params["class_weight"], dict):
        pairs = params["class_weight"].items()
        params["class_weight"] = {"pairs": [[_plain(name), weight] for name, weight in pairs]}
    if not isinstance(params["random_state"], int):
        params["random_state"] = None
    return {name: _plain(value) for name, value in params.items()}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _packed_embedding(embedding: Embedding) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors, facts = {}, {"recipe": embedding.recipe}
    if embedding.chart is not None:
        chart = embedding.chart
        tensors["chart.centre"], facts["chart"] = chart.centre, [chart.name, chart.scale]
        if chart.weights is not None:
            tensors["chart.weights"] = chart.weights
    if embedding.network is not None:
        state = embedding.network.state_dict()
        tensors |= {f"network.{name}": value for name, value in state.items()}
    if embedding.features is not None:
        encoder = embedding.features.encoder
        facts["medians"] = embedding.features.medians
        if encoder is not None:
            names = ("numeric", "mean", "std", "categories")
            facts["encoder"] = {name: getattr(encoder, name) for name in names}
            ranks = enumerate(encoder.ranks.values())
            tensors |= {f"ranks.{place}": values for place, values in ranks}
    return tensors, facts


def _unpacked(
    cls: type, tensors: dict[str, torch.Tensor], facts: dict[str, Any], function: Callable | None
) -> Any:
    """Return the classifier that ``_packed`` took apart."""
    params = facts["params"]
    if (params["embedder"] == OWN) != (function is not None):
        rule = "given" if function is None else "left out"
        raise ValueError(f"embedder must be {rule}: see what the file was fitted with")
    if function is not None:
        params["embedder"] = function
    if isinstance(params["class_weight"], dict):
        params["class_weight"] = {name: value for name, value in params["class_weight"]["pairs"]}
    model = cls(**params)
    classes = facts["classes"]
    model.classes_ = np.array(classes["values"], dtype=classes["dtype"])
    if facts["n_features_in_"] is not None:
        model.n_features_in_ = facts["n_features_in_"]
    if facts["feature_names_in_"]:
        model.feature_names_in_ = np.array(facts["feature_names_in_"], dtype=object)
    model._number_columns = facts["number_columns"]
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    bank = MemoryBank(
        arrays["bank.rows"],
        arrays["bank.labels"],
        n_classes=len(model.classes_),
        index=model.index,
        trust_neighbours=model.trust_neighbours,
        weights=arrays.get("bank.weights"),
        index_settings=facts["index_settings"],
    )
    learned = _unpacked_learned(tensors, arrays, facts)
    model._ledger = Ledger(arrays["ledger.entries"], arrays["ledger.weights"], facts["kinds"])
    embedding = _unpacked_embedding(tensors, arrays, facts["embedding"], function)
    order = np.arange(len(bank))
    labels = arrays["held_out.labels"]
    model._set_fitted(Fitted(facts["name"], embedding, bank, order, learned, labels))
    return model


def _unpacked_learned(tensors: dict[str, torch.Tensor], arrays: dict, facts: dict) -> Learned:
    state = _under("attention.", tensors)
    start = state["network.bias_in"]
    attention = PriorAttention(PriorNetwork(len(start), start.shape[-1]))
    attention.load_state_dict(state)
    share, interval = facts["label_noise"]
    return Learned(
        attention=attention.requires_grad_(False).eval(),
        k=facts["k"],
        wrong=WrongLabels(share, tuple(interval), arrays.get("transition")),
        n_epochs=facts["n_epochs"],
        losses=dict(facts["losses"]),
        probs=arrays["held_out.probs"],
    )


def _unpacked_embedding(
    tensors: dict[str, torch.Tensor], arrays: dict, facts: dict, function: Callable | None
) -> Embedding:
    features = encoder = chart = network = None
    if "encoder" in facts:
        known = facts["encoder"]
        ranks = {
            column: arrays[f"ranks.{place}"]
            for place, column in enumerate(known["mean"])
            if f"ranks.{place}" in arrays
        }
        encoder = TableEncoder(ranks=ranks, **known)
    if "medians" in facts:
        features = Features(facts["medians"], encoder)
    if "chart" in facts:
        name, scale = facts["chart"]
        chart = Chart(name, arrays["chart.centre"], scale, arrays.get("chart.weights"))
    if facts["recipe"] is not None:
        network = blank_network(facts["recipe"])
        network.load_state_dict(_under("network.", tensors))
    return Embedding(features, function, chart, network, facts["recipe"])


def _under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
