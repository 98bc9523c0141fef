"""Loads batches of this rank's part of a dataset while the rank trains.

    num_workers=0     a thread, `mpidl-loader`, loads the next batches during the training step; none is started with
                      prefetch_factor=0, as torch's loader starts none
    num_workers=n     n processes do, which are no ranks (`workers`)

How far the training has come is counted in batches that were handed out, not in those that are prepared.

Who runs what: the thread `mpidl-loader` and the workers read the dataset, and call no collective. The rank's own thread
waits for its next batch alone, so no rank waits for another rank's loader.

torch's loader draws the seed of its workers from torch's global generator at the beginning of each pass, so that a run
that is resumed within an epoch, which begins one pass more, would draw one seed more and have other dropout from there
on. Here a generator of the loader's own gives that seed, from where the pass begins.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch.utils.data

from collectives import Communicator

from ..errors import ConfigurationError, TrainingError
from ..mesh import Mesh
from ..mesh.groups import data_group
from ..setting_checks import integer
from .sampler import DistributedSampler
from .workers import WorkerStart, environment_without_rank, start_detached_tracker, worker_context

_END: Any = object()
_DEFAULT_PREFETCH = 2


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's DataLoader for one rank of many: the same arguments, and these that differ.

    batch_size: samples a rank a batch.
    shuffle, seed, process_group, mesh: of the DistributedSampler that is made where neither sampler nor batch_sampler
        is given. An IterableDataset has no sampler and must give each rank its part itself.
    generator: gives the workers' seeds, as torch's does; by default they come from the sampler's seed, epoch and
        position, the pass, the rank and the worker.
    drop_last: leaves out samples rather than have a smaller last batch or samples that come twice.
    multiprocessing_context: "forkserver" (default) or "spawn". Both import the program's main file in the workers, so
        that what it does must stand under `if __name__ == "__main__":`. The fork server, one a rank, ends with it.
    prefetch_factor: batches that are prepared ahead, by each worker or, without workers, by a thread (default 2). 0,
        without workers only: every batch is loaded when it is asked for. That is the default for a mesh with tp, pp or
        cp, whose ranks need the same samples.

    The loader draws nothing from the global generators of torch, numpy and python. In a thread the dataset runs during
    the training: what it draws from them itself mixes with what the model draws. With workers, or prefetch_factor=0,
    runs repeat exactly. Workers seed theirs when they start, with persistent_workers at the first pass alone.

    A worker that raises, or dies, raises on the rank that asks for its batch. Every loop over the loader is a pass of
    its own; one that was left behind, by break, stops loading. `close` ends workers and thread; so does deleting the
    loader. Raises ConfigurationError for arguments that do not fit.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        num_workers: int = 0,
        *,
        process_group: Communicator | None = None,
        seed: int = 0,
        drop_last: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        mesh: Mesh | None = None,
        **settings: Any,
    ) -> None:
        workers = integer("num_workers", num_workers, 0)
        in_step = isinstance(mesh, Mesh) and any(mesh.size(axis) > 1 for axis in ("pp", "tp", "cp"))
        # What a thread draws falls between what the program draws.
        default = 0 if in_step and not workers else _DEFAULT_PREFETCH
        ahead = integer("prefetch_factor", default if prefetch_factor is None else prefetch_factor, min(workers, 1))
        self._prefetch = 0 if workers else ahead
        self._thread: ThreadPoolExecutor | None = None
        self._passes: weakref.WeakSet[_EpochPass] = weakref.WeakSet()
        if workers:
            settings["prefetch_factor"] = ahead
            settings["multiprocessing_context"] = worker_context(multiprocessing_context)
            settings["worker_init_fn"] = WorkerStart(worker_init_fn)
        elif multiprocessing_context is not None:
            raise ConfigurationError("multiprocessing_context: there are no workers; needs num_workers of at least 1")
        self._has_own_generator = settings.get("generator") is None
        if self._has_own_generator:
            settings["generator"] = torch.Generator()
        iterable = isinstance(dataset, torch.utils.data.IterableDataset)
        if sampler is None and batch_sampler is None and not iterable:
            sampler = DistributedSampler(dataset, process_group, bool(shuffle), seed, drop_last, mesh=mesh)
            shuffle = None
        try:
            super().__init__(
                dataset, batch_size, shuffle, sampler, batch_sampler, workers, drop_last=drop_last, **settings
            )
        except ValueError as error:
            raise ConfigurationError(f"DataLoader: {error}") from error
        self._position_sampler = sampler if isinstance(sampler, DistributedSampler) else None
        self._seed, self._epoch, self._rank = seed, 0, 0
        if self._position_sampler is not None:
            self._position_sampler.is_counted_by_loader, self._rank = True, self._position_sampler.rank
        elif workers and not isinstance(dataset, torch.utils.data.IterDataPipe):
            # The ranks share out one order of a pipe, which torch shuffles by the same generator: rank 0's for all.
            self._rank = data_group("DataLoader", process_group, mesh, ("dp",)).rank
        self._start_of_pass: tuple[int, ...] = ()  # where the latest pass began
        self._repeated = 0  # how many passes in a row have begun there before it

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._has_own_generator:
            self.generator.manual_seed(self._seed_of_pass())
        if self._prefetch and self._thread is None:
            # One for all passes, so that the dataset is never used by two at a time.
            self._thread = ThreadPoolExecutor(1, "mpidl-loader")
        batches = self._start_workers() if self.num_workers else super().__iter__()
        load = partial(_from_workers if self.num_workers else next, batches, _END)
        one_pass = _EpochPass(load, self._thread, self._prefetch, self._position_sampler, self.batch_size or 1)
        self._passes.add(one_pass)
        return one_pass

    def _start_workers(self) -> Iterator[Any]:
        try:
            with environment_without_rank():
                start_detached_tracker()
                return super().__iter__()
        except (EOFError, ConnectionError) as error:
            raise TrainingError(
                "DataLoader: the workers cannot be started; their messages stand above (does the program's main file "
                "do anything outside `if __name__ == '__main__':`?)"
            ) from error

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the DistributedSampler; without one, of the workers' seeds alone."""
        self._epoch = epoch
        if self._position_sampler is not None:
            self._position_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The ranks' position, to be loaded on any number of ranks: DistributedSampler.state_dict.

        Equal on every rank if all have been handed equally many batches. Raises ConfigurationError if another sampler
        chooses the samples.
        """
        return self._needs_position_sampler("state_dict").state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the position: the next pass begins behind the last batch handed out before `state_dict`."""
        self._needs_position_sampler("load_state_dict").load_state_dict(state_dict)

    def close(self) -> None:
        """Ends the workers, the thread, and the passes under way. A later loop starts them anew."""
        for passing in list(self._passes):
            passing.close()
        self._iterator = None  # torch's, which shuts its workers down as it goes
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def _seed_of_pass(self) -> int:
        """The seed of the pass that begins now; depends on nothing that was drawn before."""
        sampler = self._position_sampler
        begins = (self._seed, self._epoch, 0) if sampler is None else (sampler.seed, sampler.epoch, sampler.begin)
        self._repeated = self._repeated + 1 if begins == self._start_of_pass else 0
        self._start_of_pass = begins
        return int(np.random.SeedSequence((*begins, self._repeated, self._rank)).generate_state(1, np.uint64)[0])

    def _needs_position_sampler(self, what: str) -> DistributedSampler:
        if self._position_sampler is None:
            raise ConfigurationError(
                f"{what}: another sampler chooses the samples; needs a mpidl.data.DistributedSampler"
            )
        return self._position_sampler


class _EpochPass(Iterator[Any]):
    """One loop over the batches.

    load: gives the next batch, or _END.
    thread: where to load `ahead` of them before they are asked for; None: nowhere.
    sampler: is told after each batch how many samples were handed out.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        thread: ThreadPoolExecutor | None,
        ahead: int,
        sampler: DistributedSampler | None,
        batch_size: int,
    ) -> None:
        self._load: Callable[[], Any] | None = load
        self._thread, self._prefetch, self._sampler, self._batch_size = thread, ahead, sampler, batch_size
        self._loading: deque[Future[Any]] = deque()
        self._batches_handed_out = 0

    def __next__(self) -> Any:
        if self._load is None:
            raise StopIteration
        batch = self._take(self._load)
        self._batches_handed_out += 1
        if self._sampler is not None:
            self._sampler.consumed(None if batch is _END else self._batches_handed_out * self._batch_size)
        if batch is _END:
            self.close()
            raise StopIteration
        return batch

    def _take(self, load: Callable[[], Any]) -> Any:
        if self._thread is None:
            return load()
        # The first batch is loaded while the caller waits: the sampler draws its order before the program draws.
        if not self._loading:
            self._loading.append(self._thread.submit(load))
        batch = self._loading.popleft().result()
        while batch is not _END and len(self._loading) < self._prefetch:
            self._loading.append(self._thread.submit(load))
        return batch

    def close(self) -> None:
        """Stops loading; torch's iterator ends its workers when it goes."""
        self._load = None
        while self._loading:
            self._loading.pop().cancel()

    def __del__(self) -> None:
        self.close()


def _from_workers(batches: Iterator[Any], end: Any) -> Any:
    """Does what `next` does, and names the cause where torch cannot read from a worker."""
    try:
        return next(batches, end)
    except Exception as error:
        text = str(error)
        if "in DataLoader worker process" in text:  # the dataset's, with its traceback in the text
            # torch's frames refer to each other, and would keep the workers until garbage is collected.
            raise error.with_traceback(None) from None
        if not isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) and "DataLoader worker (" not in text:
            raise
        raise TrainingError(
            f"DataLoader: a worker died; it may have been killed for the memory that it took ({text})"
        ) from error
