"""The scikit-learn style classifier over the same memory, attention and calibration."""

from attnknn.estimator.classifier import AttnKNNClassifier

__all__ = ["AttnKNNClassifier"]
