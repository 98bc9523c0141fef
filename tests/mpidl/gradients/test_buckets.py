"""Cuts of parameters into buckets and of buckets into shards."""

from __future__ import annotations

import pytest
import torch

from mpidl.gradients.buckets import BucketLayout, assign, layout_of


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def sizes_of(buckets: list[list[torch.nn.Parameter]]) -> list[list[int]]:
    return [[p.numel() for p in bucket] for bucket in buckets]


def test_buckets_close_at_their_cap() -> None:
    given = parameters(5, 4, 3, 2, 1)
    assert sizes_of(assign(given, 4 * 6)) == [[5, 4], [3, 2, 1]]
    assert sizes_of(assign(given, 4 * 6, 4)) == [[5], [4, 3], [2, 1]]
    assert sizes_of(assign(given, 1)) == [[5], [4], [3], [2], [1]]
    assert sizes_of(assign(given, 2**40)) == [[5, 4, 3, 2, 1]]


def test_a_bucket_has_one_dtype() -> None:
    given = [*parameters(5), *parameters(4, 3, dtype=torch.bfloat16), *parameters(2, 1)]
    buckets = assign(given, 2**40)
    assert sorted(sizes_of(buckets)) == [[4, 3], [5, 2, 1]]
    assert all(len({p.dtype for p in bucket}) == 1 for bucket in buckets)


@pytest.mark.parametrize("line", [1, 4, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("sizes", [(1,), (5, 3), (0, 4, 0), (10, 1, 1, 7), (2, 2, 2, 2), (16, 0, 33)])
def test_shards_are_equal_and_their_pieces_cover_every_parameter_once(
    sizes: tuple[int, ...], ranks: int, line: int
) -> None:
    layout = BucketLayout(sizes, ranks, line)
    assert layout.padded == layout.shard_size * ranks
    assert 0 <= layout.padded - sum(-(-size // line) * line for size in sizes) < ranks * line
    flat = torch.arange(layout.padded)
    for index, (offset, size) in enumerate(zip(layout.offsets, sizes, strict=True)):
        found = []
        for rank in range(ranks):
            piece = layout.pieces(rank)[index]
            length = piece.stop - piece.start
            found.append(layout.shard(flat, rank)[piece.offset : piece.offset + length])
            assert piece.start == sum(map(len, found[:-1])) or length == 0
        assert torch.equal(torch.cat(found), flat[offset : offset + size])


def test_parameters_and_shards_begin_with_a_line_and_the_rest_is_padding() -> None:
    layout = BucketLayout((5, 16, 0, 1), 3, 8)
    assert layout.offsets == (0, 8, 24, 24)
    assert (layout.shard_size, layout.padded) == (16, 48)
    own = {number for at, size in zip(layout.offsets, layout.sizes, strict=True) for number in range(at, at + size)}
    assert layout.padding.tolist() == [number for number in range(48) if number not in own]


def test_a_line_has_more_elements_of_smaller_dtypes() -> None:
    found = {dtype: layout_of(parameters(3, 3, dtype=dtype), 1).offsets[1] for dtype in (torch.float64, torch.float16)}
    assert found == {torch.float64: 8, torch.float16: 32}
