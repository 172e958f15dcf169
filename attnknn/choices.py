"""Choices: the names that settings may take, known without loading what they stand for."""

from typing import Literal

# Backbones by name; attnknn.backbones builds them, and any timm network is "timm:<name>".
BACKBONE_NAMES = (
    "fast",
    "afmp",
    "resnet18",
    "resnet50",
    "timm:<name>",
    "mlp",
    "mlp-periodic",
    "identity",
    "pca",
)

# Training transforms; attnknn.augment applies them.
Augmentation = Literal["crop", "flip", "jitter", "rotate", "cutout"]
# Indexes by name; anything with a capital letter is taken for a FAISS factory string.
INDEX_NAMES = ("auto", "flat_ip", "flat_l2", "hnsw", "ivfpq", "disk", "matmul")
DEVICES = ("auto", "cpu", "cuda", "mps")

# What the attention may look at, for each neighbour of a query; see attnknn.attention.
SITUATION_FEATURES = (
    "gap",  # similarity minus that of the nearest neighbour
    "nearest",  # similarity of the nearest neighbour
    "rank",  # place among the K neighbours, 0 to 1
    "trust",  # share of the neighbour's own neighbours that carry its label
    "label_share",  # share of the neighbour's label among the K labels
    "histogram_share",  # share of the neighbour's label among the K neighbour histograms
    "prototype",  # prototype posterior of the neighbour's label
    "noise",  # mean trust of the whole bank: how wrong the labels are
)

# What tables and figures call a method whose key in saved tables leaves something out.
METHOD_NAMES = {"distance": "distance (squared, τ = 1)"}

# Data sets the quickstart knows by name; attnknn.peers loads them.
QUICKSTART_DATA = (
    "digits",
    "iris",
    "wine",
    "breast cancer",
    "wine quality red",
    "wine quality white",
    "adult",
    "MNIST, 64 axes",
    "CIFAR-10 pixels, 64 axes",
)
