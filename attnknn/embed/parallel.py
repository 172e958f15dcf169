"""Several processes, one training: who takes which rows, and how their parts come together.

Every process holds the same networks and draws the same random numbers. Each computes the features
of its share of a batch; the features are gathered, so that every loss (a contrast between all rows
of a batch, a choice of its hardest rows) means the same as in one process. What flows back to the
features of a share is then exact, and the gradients of the shares add up to that of the batch.

BatchNorm takes its statistics from a process's own share, as with batches of that size; the running
ones are averaged after every step. (torch's synchronised BatchNorm knows GPUs only.)

Axes: B rows of a batch, M rows of a share, D width.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.nn.functional
from jaxtyping import Float
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

# torch loads this at the first step of an optimiser at the latest, and its functions then keep the
# group of that moment as a default: no end of the group ended its threads, and one that gave back
# its last message while Python was closing aborted the process. Loaded here, it keeps none.


@dataclass(frozen=True)
class Group:
    """The processes that train together, seen from one of them.

    Attributes:
        rank: Number of this process; process 0 alone writes files.
        size: How many there are.
        local_rank: Number of this process on its machine, and of its GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this process reads and writes the files of all."""
        return self.rank == 0

    def device(self, chosen: torch.device) -> torch.device:
        """Return the device of this process: of several GPUs, its own."""
        several = self.size > 1 and chosen.type == "cuda"
        return torch.device("cuda", self.local_rank) if several else chosen

    def share(self, n_rows: int) -> slice:
        """Return the rows that this process takes; shares differ by one row at most."""
        return self._share_of(self.rank, n_rows)

    def compute(self, n_rows: int, part: Callable[[slice], Tensor]) -> Tensor:
        """Return the result of ``part`` for all rows, each computed by one process.

        Args:
            n_rows: Rows in all.
            part: Computes some of them; fewer rows than processes are computed by everyone.
        """
        if self.size == 1 or n_rows < self.size:
            return part(slice(0, n_rows))
        return self._gathered(part(self.share(n_rows)), n_rows)

    def whole(self, features: Float[Tensor, "M D"], n_rows: int) -> Float[Tensor, "B D"]:
        """Return the features of a whole batch; a gradient reaches those of this process alone."""
        if self.size == 1:
            return features
        own, everyone = self.share(n_rows), self._gathered(features.detach(), n_rows)
        return torch.cat([everyone[: own.start], features, everyone[own.stop :]])

    @torch.no_grad()
    def combine(self, added: Iterable[Tensor], averaged: Iterable[Tensor]) -> None:
        """Add up some tensors over all processes and average others, in place, in one message."""
        added, averaged = list(added), list(averaged)
        if self.size == 1:
            return
        parts = [*added, *(tensor / self.size for tensor in averaged)]
        flat = torch.cat([part.flatten() for part in parts])
        distributed.all_reduce(flat)
        values = flat.split([part.numel() for part in parts])
        for tensor, value in zip([*added, *averaged], values, strict=True):
            tensor.copy_(value.view(tensor.shape))

    def from_first(self, value: Any = None) -> Any:
        """Return what process 0 passes here; the others wait for it."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def _share_of(self, rank: int, n_rows: int) -> slice:
        return slice(n_rows * rank // self.size, n_rows * (rank + 1) // self.size)

    def _gathered(self, own: Tensor, n_rows: int) -> Tensor:
        # Messages must be of one size: shorter shares are filled up, and cut again.
        padded = own.new_zeros(-(-n_rows // self.size), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        distributed.all_gather(parts, padded)
        shares = [self._share_of(rank, n_rows) for rank in range(self.size)]
        sizes = [share.stop - share.start for share in shares]
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


ALONE = Group()


@contextmanager
def joined() -> Iterator[Group]:
    """Join the processes that ``torchrun`` has started; without it, this one is alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend)
    try:
        yield Group(distributed.get_rank(), size, local_rank)
    finally:
        distributed.destroy_process_group()


def running_statistics(networks: Iterable[nn.Module]) -> list[Tensor]:
    """Return the running means and variances of every BatchNorm."""
    norms = [m for net in networks for m in net.modules() if isinstance(m, _BatchNorm)]
    pairs = [(norm.running_mean, norm.running_var) for norm in norms]
    return [statistic for pair in pairs for statistic in pair if statistic is not None]
