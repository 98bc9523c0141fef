"""DistributedSampler: torch's indices, and epochs that go on elsewhere."""

from __future__ import annotations

from collections import Counter

import pytest
import torch.utils.data

from mpidl.data import DistributedSampler
from mpidl.errors import ConfigurationError


def samplers(samples: int, ranks: int, **settings) -> list[DistributedSampler]:
    return [DistributedSampler(range(samples), num_replicas=ranks, rank=rank, **settings) for rank in range(ranks)]


def take(sampler: DistributedSampler, count: int) -> list[int]:
    passing = iter(sampler)
    return [next(passing) for _ in range(count)]


def in_order(parts: list[list[int]]) -> list[int]:
    """The ranks' samples in the order in which all ranks together take them."""
    assert len({len(part) for part in parts}) == 1
    return [index for step in zip(*parts, strict=True) for index in step]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("samples", "ranks"), [(12, 3), (13, 4), (15, 4), (2, 5), (1, 4), (7, 1), (4, 4)])
def test_indices_are_those_of_torch(samples: int, ranks: int, drop_last: bool, shuffle: bool) -> None:
    settings = {"shuffle": shuffle, "drop_last": drop_last, "seed": 5}
    for rank, sampler in enumerate(samplers(samples, ranks, **settings)):
        other = torch.utils.data.DistributedSampler(range(samples), num_replicas=ranks, rank=rank, **settings)
        for epoch in (0, 1, 7):
            sampler.set_epoch(epoch)
            other.set_epoch(epoch)
            assert len(sampler) == sampler.remaining == len(other)
            assert list(sampler) == list(other)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (4, 1), (1, 4), (3, 4)])
@pytest.mark.parametrize("taken", [0, 1, 4])
@pytest.mark.parametrize("drop_last", [True, False])
def test_an_interrupted_epoch_goes_on_on_any_number_of_ranks(
    before: int, after: int, taken: int, drop_last: bool
) -> None:
    samples = 23
    (alone,) = samplers(samples, 1, seed=3)
    alone.set_epoch(2)
    order = list(alone)

    first = samplers(samples, before, seed=3, drop_last=drop_last)
    for sampler in first:
        sampler.set_epoch(2)
    parts = [take(sampler, taken) for sampler in first]
    states = [sampler.state_dict() for sampler in first]
    assert all(state == states[0] for state in states)

    second = samplers(samples, after, drop_last=drop_last)
    for sampler in second:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(2)  # as a training loop does for the epoch that it is in
    lengths = [sampler.remaining for sampler in second]
    rest = [list(sampler) for sampler in second]
    assert lengths == [len(part) for part in rest]
    found = in_order(parts) + in_order(rest)
    if drop_last:
        assert found == order[: len(found)]
        assert samples - len(found) < after
    else:
        assert found == order + order[: len(found) - samples]
        assert len(found) - samples < after


def test_a_pass_begins_within_the_epoch_only_once() -> None:
    (sampler,) = samplers(10, 1)
    whole = list(sampler)
    take(sampler, 3)
    state = sampler.state_dict()
    assert list(sampler) == whole  # a pass that was left begins anew
    sampler.load_state_dict(state)
    assert sampler.remaining == 7
    assert len(sampler) == 10
    assert list(sampler) == whole[3:]
    assert sampler.remaining == 10
    assert list(sampler) == whole


def test_another_epoch_begins_at_its_first_sample() -> None:
    (sampler,) = samplers(10, 1)
    take(sampler, 3)
    sampler.load_state_dict(sampler.state_dict())
    sampler.set_epoch(1)
    assert sampler.state_dict()["consumed"] == 0
    assert sorted(sampler) == list(range(10))


def test_the_state_of_a_finished_epoch_leaves_nothing() -> None:
    for sampler in samplers(10, 4):
        list(sampler)
        sampler.load_state_dict(sampler.state_dict())
        assert sampler.remaining == 0
        assert list(sampler) == []
        sampler.set_epoch(1)
        assert sampler.remaining == 3


def test_nor_does_it_on_fewer_ranks_where_the_last_samples_were_dropped() -> None:
    state = None
    for sampler in samplers(127, 64, drop_last=True):
        list(sampler)
        state = sampler.state_dict()
    for sampler in samplers(127, 2, drop_last=True):
        sampler.load_state_dict(state)
        assert sampler.remaining == 0


def test_an_empty_dataset_has_no_samples() -> None:
    for shuffle in (True, False):
        (sampler,) = samplers(0, 1, shuffle=shuffle)
        assert list(sampler) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"process_group": 4}, r"process_group: got 4; needs a Communicator .*num_replicas="),
        ({"num_replicas": 2, "rank": 2}, "rank: got 2 of 2; needs 0 <= rank < num_replicas"),
        ({"num_replicas": 0, "rank": 0}, "got 0 of 0"),
        ({"num_replicas": 1, "rank": 0, "seed": -1}, "seed: got -1; needs an integer of at least 0"),
        ({"num_replicas": 1, "rank": 0, "seed": 0.5}, "seed: got 0.5"),
    ],
)
def test_wrong_arguments_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DistributedSampler(range(4), **settings)


def test_states_that_do_not_fit_are_refused() -> None:
    (sampler,) = samplers(10, 1)
    with pytest.raises(ConfigurationError, match="lacks epoch, samples, seed, shuffle"):
        sampler.load_state_dict({"consumed": 3})
    with pytest.raises(ConfigurationError, match="a dataset of 11 samples; needs 10"):
        sampler.load_state_dict({**sampler.state_dict(), "samples": 11})
    with pytest.raises(ConfigurationError, match="consumed: got -1"):
        sampler.load_state_dict({**sampler.state_dict(), "consumed": -1})
    assert sampler.remaining == 10


@pytest.mark.mpi
def test_the_ranks_share_the_dataset(comm) -> None:
    own = torch.tensor(list(DistributedSampler(range(20), comm, seed=1)))
    everything = torch.empty(comm.size * len(own), dtype=torch.int64)
    comm.all_gather(everything, own)
    counts = Counter(everything.tolist())
    assert counts.keys() == set(range(20))
    assert counts.total() - 20 < comm.size
    with pytest.raises(ConfigurationError, match="got process_group, num_replicas and rank"):
        DistributedSampler(range(20), comm, num_replicas=1, rank=0)
