"""AFMP: an image model whose patches exchange gated messages along a fixed scaffold.

``scaffold`` says who may talk to whom, ``router`` who is heard, ``units`` what is said, ``model``
puts them together. ``published`` holds the faulty version of the source notebook, for comparison.
"""

from attnknn.afmp.model import AFMP, AFMPTrunk, LayerGates, Passage
from attnknn.afmp.scaffold import Scaffold, build_scaffold, grid_scaffold, patch_centres
from attnknn.afmp.settings import AFMP_SMALL, AFMP_TINY, AFMPConfig

__all__ = [
    "AFMP",
    "AFMP_SMALL",
    "AFMP_TINY",
    "AFMPConfig",
    "AFMPTrunk",
    "LayerGates",
    "Passage",
    "Scaffold",
    "build_scaffold",
    "grid_scaffold",
    "patch_centres",
]
