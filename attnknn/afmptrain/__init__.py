"""Training of AFMP and its rivals: settings and seeds become finished runs in folders."""

from attnknn.afmptrain.folder import AblationRun, run_path, train_setting
from attnknn.afmptrain.loop import Training
from attnknn.afmptrain.networks import Classifier, build_classifier, build_transformer
from attnknn.afmptrain.predict import embed_features, gate_facts, judge, predict_logits
from attnknn.afmptrain.settings import Recipe, Setting

__all__ = [
    "AblationRun",
    "Classifier",
    "Recipe",
    "Setting",
    "Training",
    "build_classifier",
    "build_transformer",
    "embed_features",
    "gate_facts",
    "judge",
    "predict_logits",
    "run_path",
    "train_setting",
]
