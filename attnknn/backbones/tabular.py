"""The table backbone: a two-layer network, with an optional richer view of each number.

Axes: B rows, F features, M number columns.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

HIDDEN = 256


class TableNet(nn.Module):
    """F -> 256 -> LayerNorm -> GELU -> Dropout -> 256 -> LayerNorm -> GELU -> Dropout -> D.

    Args:
        n_features: Width of a row.
        embed_dim: Width of the embedding.
        numbers: Expands the first columns of a row; None takes them as they are.
    """

    def __init__(
        self, n_features: int, embed_dim: int, *, numbers: "PeriodicNumbers | None" = None
    ) -> None:
        super().__init__()
        self.numbers = numbers
        if numbers is not None:
            n_features += numbers.out_dim - numbers.n_numeric
        self.layers = nn.Sequential(
            nn.Linear(n_features, HIDDEN),
            nn.LayerNorm(HIDDEN),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(HIDDEN, HIDDEN),
            nn.LayerNorm(HIDDEN),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(HIDDEN, embed_dim),
        )
        self.out_dim = embed_dim

    def forward(self, rows: Float[Tensor, "B F"]) -> Float[Tensor, "B D"]:
        """Return features of standardised rows."""
        if self.numbers is not None:
            split = self.numbers.n_numeric
            rows = torch.cat([self.numbers(rows[:, :split]), rows[:, split:]], dim=1)
        return self.layers(rows)


class PeriodicNumbers(nn.Module):
    """Each number x becomes ReLU(W [sin(2 pi f x), cos(2 pi f x)] + b), with learned f.

    Sines of several frequencies let the network bend sharply inside the range of one column,
    which a plain layer learns slowly (Gorishniy, Rubachev and Babenko, arXiv:2203.05556).

    Attributes:
        n_numeric: Number columns M.
        out_dim: Width of the flattened output.
    """

    def __init__(
        self, n_numeric: int, *, n_frequencies: int = 24, width: int = 12, spread: float = 0.3
    ) -> None:
        super().__init__()
        self.n_numeric, self.out_dim = n_numeric, n_numeric * width
        self.frequencies = nn.Parameter(spread * torch.randn(n_numeric, n_frequencies))
        bound = 1 / math.sqrt(2 * n_frequencies)
        uniform = torch.empty(n_numeric, 2 * n_frequencies, width).uniform_(-bound, bound)
        self.weight = nn.Parameter(uniform)
        self.bias = nn.Parameter(torch.zeros(n_numeric, width))

    def forward(self, numbers: Float[Tensor, "B M"]) -> Float[Tensor, "B flat"]:
        """Return the expanded columns, side by side."""
        phases = 2 * math.pi * numbers[:, :, None] * self.frequencies  # (B, M, frequencies)
        waves = torch.cat([phases.sin(), phases.cos()], dim=-1)
        expanded = torch.einsum("bmf,mfw->bmw", waves, self.weight) + self.bias
        return expanded.relu().flatten(1)
