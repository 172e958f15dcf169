"""Peers: the classifier against what people use instead of it, on the same rows."""

from attnknn.peers import quickstart
from attnknn.peers.methods import (
    ATTENTION,
    CLEANLAB,
    KNN_FAMILY,
    METHODS,
    measure_cleanlab,
    measure_method,
)
from attnknn.peers.problems import CIFAR_EMBEDDINGS, PROBLEMS, Problem, load_problem
from attnknn.peers.ranks import critical_difference, rank_table

__all__ = [
    "ATTENTION",
    "CIFAR_EMBEDDINGS",
    "CLEANLAB",
    "KNN_FAMILY",
    "METHODS",
    "PROBLEMS",
    "Problem",
    "critical_difference",
    "load_problem",
    "measure_cleanlab",
    "measure_method",
    "quickstart",
    "rank_table",
]
