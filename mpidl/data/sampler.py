"""The samples of a dataset that a rank trains on, and the sample at which an interrupted epoch goes on.

    order of an epoch    7 2 9 0 5 3 8 1 6 4     from seed + epoch, the same on every rank
    over 2 ranks         0 1 0 1 0 1 0 1 0 1     whose sample each is
    after 2 samples a rank, on 3 ranks from here on:
                                 0 1 2 0 1 2

The position is counted in samples of that order, taken by all ranks together. So it does not depend on the number of
ranks, and an epoch that was interrupted on some ranks can be finished on any other number of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch.utils.data import Sampler

from collectives import Communicator

from ..errors import ConfigurationError
from ..mesh import Mesh
from ..mesh.groups import data_group
from ..setting_checks import integer


class DistributedSampler(Sampler[int]):
    """This rank's indices into a dataset, equally many on every rank: those of torch.utils.data.DistributedSampler.

    dataset: whatever has a length.
    process_group: the Communicator; by default the world.
    shuffle: another random order each epoch, of seed + epoch; else the dataset's own order.
    drop_last: where the ranks do not divide the samples, the last few are left out; else the first few come twice.
    mesh: a `Mesh`, in place of process_group: ranks along dp get different samples, others the same.
    num_replicas, rank: instead of those of the process group, as for torch's.

    Call `set_epoch` before each epoch, or every epoch has the order of the first one.

    A pass over the sampler begins at the epoch's first sample, except the first one after `load_state_dict`, which
    begins where the state was taken. An index counts as consumed once it is handed out. A DataLoader takes indices
    ahead of time; mpidl.data.DataLoader therefore sets `is_counted_by_loader` and counts with `consumed` what it has
    handed out itself.

    epoch, seed: what the order depends on.
    begin: at which sample of the order the next pass begins.
    position: up to which sample the latest pass has come.
    is_counted_by_loader: a loader counts in place of this object.
    """

    def __init__(
        self,
        dataset: Sized,
        process_group: Communicator | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        if process_group is not None and not hasattr(process_group, "rank"):
            raise ConfigurationError(
                f"process_group: got {process_group!r}; needs a Communicator (the number of ranks is num_replicas=)"
            )
        if num_replicas is None or rank is None:
            comm = data_group("DistributedSampler", process_group, mesh, ("dp",))
            num_replicas = comm.size if num_replicas is None else num_replicas
            rank = comm.rank if rank is None else rank
        elif process_group is not None or mesh is not None:
            given = "mesh" if process_group is None else "process_group"
            raise ConfigurationError(f"DistributedSampler: got {given}, num_replicas and rank; needs one or the others")
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise ConfigurationError(f"rank: got {rank} of {num_replicas}; needs 0 <= rank < num_replicas")
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(value, bool):
                raise ConfigurationError(f"{name}: got {value!r}; needs True or False")
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.drop_last = shuffle, drop_last
        self.seed, self.epoch = integer("seed", seed), 0
        self.begin = self.position = 0
        self.is_counted_by_loader = False
        self._pass = (0, 0)  # where the latest pass began, and how many samples of a rank it has

    def __len__(self) -> int:
        """Samples of a rank in a whole epoch, also while a part of one is left (that is `remaining`).

        Schedules that count an epoch's steps by it are the same before and after an interruption.
        """
        return self._share(0)

    @property
    def remaining(self) -> int:
        """Samples of a rank in the next pass: fewer than `len` if it begins within an epoch."""
        return self._share(self.begin)

    def _share(self, begin: int) -> int:
        left = max(len(self.dataset) - begin, 0)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        self._pass = (self.begin, self.remaining)
        indices = self._indices(*self._pass)
        self.position, self.begin = self.begin, 0
        return self._hand_out(indices)

    def _indices(self, begin: int, count: int) -> list[int]:
        samples = len(self.dataset)
        # Past the end, the order begins anew: these are the samples that come twice.
        places = (begin + self.rank + torch.arange(count) * self.num_replicas) % max(samples, 1)
        if self.shuffle:
            random = torch.Generator().manual_seed(self.seed + self.epoch)
            places = torch.randperm(samples, generator=random)[places]
        return cast("list[int]", places.tolist())

    def _hand_out(self, indices: list[int]) -> Iterator[int]:
        for number, index in enumerate(indices, start=1):
            if not self.is_counted_by_loader:
                self.consumed(number)
            yield index

    def consumed(self, samples: int | None = None) -> None:
        """Notes that this rank has had so many samples of the latest pass (None, or more than there are: all)."""
        begin, count = self._pass
        if samples is None or samples >= count:  # of a finished epoch nothing is left, also on fewer ranks
            self.position = max(len(self.dataset), begin + self.num_replicas * count)
        else:
            self.position = begin + self.num_replicas * samples

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the passes from here on. A position that was loaded for the same epoch is kept."""
        if epoch != self.epoch:
            self.epoch = integer("epoch", epoch)
            self.begin = self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """Epoch, seed, shuffle, samples (of the dataset), consumed (of them, by all ranks); the same on all ranks."""
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": len(self.dataset),
            "consumed": self.position,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over epoch, seed and shuffle, and begins the next pass where the state's had come to, on any ranks.

        The state of a finished epoch leaves nothing for the next pass, unless `set_epoch` begins another. Raises
        ConfigurationError for what is no such state, or that of a dataset of another length.
        """
        missing = sorted({"epoch", "seed", "shuffle", "samples", "consumed"} - state_dict.keys())
        if missing:
            raise ConfigurationError(f"load_state_dict: got {sorted(state_dict)}; lacks {', '.join(missing)}")
        if state_dict["samples"] != len(self.dataset):
            raise ConfigurationError(
                f"load_state_dict: got the state of a dataset of {state_dict['samples']} samples; needs "
                f"{len(self.dataset)}, as a position is one in the order of all of them"
            )
        consumed = integer("consumed", state_dict["consumed"])
        self.epoch, self.seed = integer("epoch", state_dict["epoch"]), integer("seed", state_dict["seed"])
        self.shuffle = bool(state_dict["shuffle"])
        self.begin = self.position = consumed
