"""The PCA backbone: an embedding that nobody trained, from the principal axes of raw inputs.

Axes: N rows, B inputs, F values of an input, D principal axes.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class PrincipalAxes(nn.Module):
    """features = axes (flat input - centre), with the axes of largest variance first.

    Args:
        n_values: Values of an input, pixels or features.
        n_axes: Axes kept.
    """

    n_initial_rows = 20_000  # enough for the leading axes, and bounds the time of the fit

    def __init__(self, n_values: int, n_axes: int) -> None:
        super().__init__()
        if n_axes > n_values:
            raise ValueError(
                f"embed_dim must be at most the {n_values} values of an input, got {n_axes}"
            )
        self.register_buffer("centre", torch.zeros(n_values))
        self.register_buffer("axes", torch.zeros(n_axes, n_values))
        self.out_dim = n_axes

    @torch.no_grad()
    def initialise(self, rows: Float[Tensor, "N *shape"]) -> None:
        """Set the axes from training rows."""
        flat = rows.flatten(1)
        self.centre.copy_(flat.mean(dim=0))
        centred = flat - self.centre
        _, vectors = torch.linalg.eigh(centred.T @ centred)  # ascending variance
        axes = vectors.flip(1).T[: len(self.axes)]
        # Eigenvectors come with either sign; fixing it makes runs comparable.
        largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
        self.axes.copy_(axes * largest.sign())

    def forward(self, inputs: Float[Tensor, "B *shape"]) -> Float[Tensor, "B D"]:
        """Return the coordinates along the axes."""
        return (inputs.flatten(1) - self.centre) @ self.axes.T
