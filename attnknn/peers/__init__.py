"""Peers: the classifier against what people use instead of it, on the same rows."""

from attnknn.peers import quickstart
from attnknn.peers.code import digest_of
from attnknn.peers.methods import (
    ATTENTION,
    CLEANLAB,
    KNN_FAMILY,
    METHODS,
    measure_cleanlab,
    measure_method,
)
from attnknn.peers.problems import (
    CIFAR_EMBEDDINGS,
    PROBLEMS,
    Parts,
    Problem,
    load_parts,
    load_problem,
    make_problem,
)
from attnknn.peers.ranks import Standing, critical_difference, rank_table, standing

__all__ = [
    "ATTENTION",
    "CIFAR_EMBEDDINGS",
    "CLEANLAB",
    "KNN_FAMILY",
    "METHODS",
    "PROBLEMS",
    "Parts",
    "Problem",
    "Standing",
    "critical_difference",
    "digest_of",
    "load_parts",
    "load_problem",
    "make_problem",
    "measure_cleanlab",
    "measure_method",
    "quickstart",
    "rank_table",
    "standing",
]
