"""Units: gated messages to new states, states from above to lower ones, gates to a penalty.

Axes: N points of the batch, D width.
"""

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnknn.afmp.edges import BatchGraph
from attnknn.afmp.messages import gated_sum
from attnknn.afmp.router import PredictiveRouter, Routed
from attnknn.linear import Linear


class CapsuleUnit(nn.Module):
    """h_i' = GELU(W_self h_i + sum over kept edges of gate_ij * W_msg h_j)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own = Linear(width, width)
        self.message = Linear(width, width)

    def forward(
        self, states: Float[Tensor, "N D"], routed: Routed, gate: nn.Linear
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, ""]]:
        """Return the new states and the sum of all gates; only kept edges carry messages.

        Args:
            states: What the layer reads.
            routed: The kept edges and their scores.
            gate: Turns a score into one gate a channel, before the sigmoid.
        """
        # NOTE: W_msg is applied once per point; an edge only gates what its source says.
        said, scores = self.message(states), routed.scores
        heard, total = gated_sum(said, scores, gate.weight[:, 0], gate.bias, routed.edges)
        return F.gelu(self.own(states) + heard), total


class LayerOutput(NamedTuple):
    """States of the next level, what was routed, and the layer's mean gate.

    The mean is over all edges and channels; a pruned edge counts as 0.
    """

    states: Float[Tensor, "N D"]
    routed: Routed
    mean_gate: Float[Tensor, ""]


class Layer(nn.Module):
    """A router and the capsule unit that uses its gates."""

    def __init__(self, width: int, keep_share: float, *, predicts: bool) -> None:
        super().__init__()
        self.router = PredictiveRouter(width, keep_share, predicts=predicts)
        self.unit = CapsuleUnit(width)

    def forward(
        self,
        states: Float[Tensor, "N D"],
        graph: BatchGraph,
        above: Float[Tensor, "N D"] | None = None,
    ) -> LayerOutput:
        """Return the states of the next level and how they came about."""
        routed = self.router(states, graph, above)
        states, total = self.unit(states, routed, self.router.gate)
        n_gates = graph.n_images * graph.n_edges * states.shape[1]
        return LayerOutput(states, routed, total / n_gates)


class TopDown(nn.Module):
    """feedback_l = W_l H t_(l+1), t_l = h_l + feedback_l, from the top level (t_L = h_L) down.

    H gives every patch the mean of its 2 x 2 block: the level above speaks for a region.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(Linear(width, width) for _ in range(layers - 1))

    def forward(
        self, states: list[Float[Tensor, "N D"]], graph: BatchGraph
    ) -> tuple[list[Float[Tensor, "N D"]], list[Float[Tensor, "N D"]]]:
        """Return the refined states of all levels, and the feedback into all but the top one."""
        refined, feedback = [states[-1]], []
        for state, to_lower in zip(states[-2::-1], reversed(self.maps), strict=True):
            feedback.append(to_lower(graph.spread_blocks(refined[-1])))
            refined.append(state + feedback[-1])
        return refined[::-1], feedback[::-1]
