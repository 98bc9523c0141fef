"""Arrays are seen, not copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from collectives import ArgumentError, ArgumentTypeError, even_counts
from collectives.base.buffers import DTYPES, empty, inspect, signature


@pytest.mark.parametrize("name", DTYPES)
def test_a_buffer_is_the_array_s_own_memory(name: str) -> None:
    tensor = torch.zeros(2, 3, dtype=getattr(torch, name))
    data = inspect(tensor, "x", writable=True)
    assert (data.size, data.dtype.name) == (6, name)
    data.flat.view(np.uint8)[:] = 1
    assert tensor.view(torch.uint8).sum() == tensor.numel() * tensor.element_size()
    assert data.as_torch().data_ptr() == tensor.data_ptr()


def test_sixteen_bit_floats_reduce_in_fp32() -> None:
    assert {d.name for d in DTYPES.values() if d.widened} == {"float16", "bfloat16"}
    assert DTYPES["bfloat16"].accumulate == np.float32


def test_parameters_scalars_and_slices_are_arrays_too() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    inspect(parameter, "x", writable=True).flat[:] = 5
    assert (parameter == 5).all()
    assert inspect(np.array(3.0), "x", writable=True).size == 1
    whole = np.zeros((4, 4))
    inspect(whole[1:3], "x", writable=True).flat[:] = 1
    assert whole.sum() == 8


def test_an_array_of_nothing_has_an_address_that_is_no_mark_of_an_mpi_library() -> None:
    """MPI_IN_PLACE, MPI_BOTTOM and their like are small integers, and so would torch's address of nothing be."""
    for nothing in (torch.empty(0), torch.empty(3, 0), np.empty(0), np.empty((0, 2), np.int8)):
        data = inspect(nothing, "x", writable=True)
        assert data.size == 0
        assert data.span()[0] > 4096


def test_empty_gives_the_kind_of_array_that_its_dtype_belongs_to() -> None:
    assert empty((2, 3), torch.bfloat16).shape == (2, 3)
    assert empty(5, np.int8).dtype == np.int8


@pytest.mark.parametrize(("size", "ranks"), [(0, 3), (2, 3), (10, 4), (12, 4), (7, 1)])
def test_even_counts_differ_by_one_at_most(size: int, ranks: int) -> None:
    counts = even_counts(size, ranks)
    assert sum(counts) == size
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


def test_a_tensor_whose_storage_was_freed_is_refused() -> None:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"x: .*storage was freed"):
        inspect(tensor, "x", writable=True)
    assert signature(tensor) is None


def test_a_matrix_is_a_flat_array_too() -> None:
    matrix = np.matrix([[1.0, 2.0], [3.0, 4.0]])
    data = inspect(matrix, "x", writable=True)
    assert (type(data.flat), data.flat.shape) == (np.ndarray, (4,))
    data.flat[:] = 5
    assert (matrix == 5).all()


def test_a_masked_array_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^x: .*mask"):
        inspect(np.ma.masked_array([1.0, 2.0], [False, True]), "x", writable=False)


class Wrapper(torch.Tensor):
    """A subclass with nothing in its own storage, as of tensors that hold others."""

    @staticmethod
    def __new__(cls) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} was asked for")


def test_tensors_without_memory_of_their_own_are_refused() -> None:
    with FakeTensorMode():
        fake = torch.ones(4)
    for tensor in (Wrapper(), fake):
        signature(tensor)
        with pytest.raises(ArgumentTypeError, match=rf"^x: got .*{type(tensor).__qualname__}"):
            inspect(tensor, "x", writable=False)
