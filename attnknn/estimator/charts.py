"""Charts: rows of features become points on the unit sphere, where the memory searches by cosine.

``cosine`` keeps the direction of a row. The others keep distances: the plane is wrapped around the
sphere by the inverse stereographic projection

    z = (x - centre) / scale,   row = (2 z, |z|^2 - 1) / (|z|^2 + 1),

which changes lengths by the same factor in every direction, so that near neighbours stay in their
Euclidean order. The scale lets nearly all rows lie around one pole, where the factor hardly
changes: farther out it falls quickly, and rows in the tails would come near to everything. (Of the
ten nearest rows of three tables, 98 % are the ten nearest on the sphere.)

Axes: N rows, F features, D embedding width.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32

CHARTS = ("cosine", "euclidean")
INNER_SHARE, ROOM = 0.99, 2.0


@dataclass(frozen=True)
class Chart:
    """One map from features to the sphere.

    Attributes:
        name: One of ``CHARTS``.
        centre: Mean of the training rows; not used by ``cosine``.
        scale: Twice the distance that few training rows exceed; not used by ``cosine``.
    """

    name: str
    centre: Float32[np.ndarray, "F"]
    scale: float

    def rows(self, features: Float[np.ndarray, "N F"]) -> Float32[np.ndarray, "N D"]:
        """Return unit rows; a row of zeros, which has no direction, gets one of its own."""
        if self.name == "cosine":
            lengths = np.linalg.norm(features, axis=1, keepdims=True)
            no_direction = lengths == 0
            lengths[no_direction] = math.sqrt(features.shape[1])
            return (np.where(no_direction, 1.0, features) / lengths).astype(np.float32, copy=False)
        z = (features - self.centre) / self.scale
        squares = np.square(z).sum(axis=1, keepdims=True)
        rows = np.concatenate([2 * z, squares - 1], axis=1) / (squares + 1)
        return rows.astype(np.float32)


def fit_chart(name: str, features: Float[np.ndarray, "N F"]) -> Chart:
    """Return the chart that suits the training rows."""
    centre = features.mean(axis=0, dtype=np.float64)
    lengths = np.linalg.norm(features - centre, axis=1)
    scale = ROOM * float(np.quantile(lengths, INNER_SHARE))
    return Chart(name, centre.astype(np.float32), scale or 1.0)
