"""The CUDA kernels without a GPU: what they compute, run on the host; where NVRTC is there, that GPUs can have them."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from collectives import PremulSum
from collectives.backends.cuda import kernels
from collectives.base.buffers import DTYPES, Buffer, DType
from collectives.base.reduction import Reduction, check, partial_of
from collectives.errors import CollectivesError
from tests.collectives.backends.cuda import host_kernels

LIKE_OTHERS = ("float64", "int8", "int16", "int64", "uint16", "uint32", "uint64", "complex128")
FACTORS = [1.5, -2.0, 0.25]
OPS = {
    **{name: name for name in ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")},
    "premul": PremulSum(1.5),
}


def served(name: str, dtype: DType) -> Reduction | None:
    try:
        return check(OPS[name], dtype)
    except CollectivesError:
        return None


def data(dtype: DType, size: int, seed: int, offset: int) -> np.ndarray:
    """Numbers of every kind, NaN among those that can be; `offset` elements off an address that 16 divides."""
    random = np.random.default_rng(seed)
    memory = np.zeros(16 * (size + offset + 32), np.uint8)
    start = -memory.ctypes.data % 64 + offset * dtype.itemsize
    flat = memory[start : start + size * dtype.itemsize].view(dtype.storage)
    if dtype.kind == "b":
        flat[:] = random.integers(0, 2, size)
    elif dtype.kind == "c":
        flat[:] = random.standard_normal(size) + 1j * random.standard_normal(size)
    elif dtype.kind == "f":
        wide = random.standard_normal(size).astype(np.float32) * 100
        wide[random.random(size) < 0.05] = np.nan
        if dtype.name == "bfloat16":
            Buffer(flat, dtype).as_torch().copy_(Buffer(wide, DTYPES["float32"]).as_torch())
        else:
            flat[:] = wide
    else:
        flat[:] = random.integers(*((np.iinfo(dtype.storage).min, np.iinfo(dtype.storage).max)), size, dtype.storage)
    return flat


@pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.thorough(*(f"{dtype}-{name}" for dtype in LIKE_OTHERS for name in OPS if name != "sum"))
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_a_kernel_gives_the_host_s_bits(dtype: DType, name: str, tmp_path: Path) -> None:
    """Whatever the arrays' addresses are, and with an output that is an input."""
    op = served(name, dtype)
    if op is None:
        return
    kernel = kernels.combining(op, dtype, 3, 2)
    library = host_kernels.build(tmp_path, kernel)
    for size in (1, 7, 64, 131):
        for offsets in ((0, 0, 0), (1, 1, 1), (0, 1, 2)):
            inputs = [data(dtype, size, seed, offset) for seed, offset in enumerate(offsets)]
            other = data(dtype, size, 9, offsets[0])
            expected = np.empty_like(other)
            with np.errstate(all="ignore"):
                op.combine(inputs, [expected], dtype, FACTORS)
            span = host_kernels.run(library, kernel, inputs, [inputs[0], other], FACTORS)
            if dtype.itemsize < 16 and size != 7:
                assert (span.vectors > 0) == (len(set(offsets)) == 1 and size > 16)
            for found in (inputs[0], other):
                assert_same_bits(found, expected, dtype, f"{dtype.name} {name} {size} {offsets}")


@pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.thorough("float32-max", "float16-max", "float32-premul", "float16-premul")
@pytest.mark.parametrize("name", ["avg", "max", "premul"])
@pytest.mark.parametrize("dtype", [DTYPES[n] for n in ("float32", "float16", "bfloat16")], ids=lambda dtype: dtype.name)
def test_a_reduction_in_two_parts_gives_the_host_s_bits(dtype: DType, name: str, tmp_path: Path) -> None:
    """A part stays in the accumulating type, and is divided and rounded once it is complete."""
    op = served(name, dtype)
    assert op is not None
    partly, rest = kernels.combining(partial_of(op), dtype, 3, 1), kernels.finishing(op, dtype, 6)
    libraries = host_kernels.build(tmp_path, partly), host_kernels.build(tmp_path, rest)
    for size in (1, 7, 64, 131):
        for offsets in ((0, 0, 0), (1, 1, 1), (0, 1, 2)):
            inputs = [data(dtype, size, seed, offset) for seed, offset in enumerate(offsets)]
            wide, expected_wide = (data(dtype.wide, size, seed, offsets[0]) for seed in (7, 8))
            out, expected = (data(dtype, size, seed, offsets[-1]) for seed in (9, 10))
            what = f"{dtype.name} {name} {size} {offsets}"
            with np.errstate(all="ignore"):
                partial_of(op).combine(inputs, [expected_wide], dtype, FACTORS)
                span = host_kernels.run(libraries[0], partly, inputs, [wide], FACTORS)
                assert_same_bits(wide, expected_wide, dtype.wide, what)
                op.finish(expected_wide, 6, Buffer(expected, dtype))
                host_kernels.run(libraries[1], rest, [wide], [out], [1.0])
            assert_same_bits(out, expected, dtype, what)
            if size != 7:
                assert (span.vectors > 0) == (len(set(offsets)) == 1 and size > 16)


def assert_same_bits(found: np.ndarray, expected: np.ndarray, dtype: DType, what: str) -> None:
    if dtype.kind == "c":  # numpy may fuse a product and a sum
        np.testing.assert_allclose(found, expected, 1e-4)
        return
    same = found.view(np.uint8) == expected.view(np.uint8)
    if dtype.kind == "f":  # the other bits of a NaN do not matter
        same = same.reshape(found.size, -1).all(1) | (is_nan(found, dtype) & is_nan(expected, dtype))
    assert same.all(), what


def is_nan(flat: np.ndarray, dtype: DType) -> np.ndarray:
    return Buffer(flat, dtype).as_torch().isnan().numpy()


@pytest.mark.parametrize("rest", [0, 4, 8, 12])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8, 1003])
def test_a_span_covers_every_element_once(size: int, rest: int) -> None:
    kernel = kernels.combining(Reduction("sum"), DTYPES["float32"], 1, 1)
    span = kernel.span([0x1000 + rest], [0x9000 + rest], size)
    tail = size - span.head - 4 * span.vectors
    assert span.head == min(size, (16 - rest) % 16 // 4)
    assert 0 <= tail < 4
    assert (0x1000 + rest + 4 * span.head) % 16 == 0 or not span.vectors
    assert kernel.span([0x1000], [0x1004], size).vectors == 0
    assert kernel.span([0x1002], [0x1002], size).vectors == 0
    assert span.blocks >= 1
    mixed = kernels.combining(partial_of(Reduction("sum")), DTYPES["bfloat16"], 1, 1)  # four elements at a time
    span = mixed.span([0x1000 + rest // 2], [0x9000 + rest], size)
    assert (span.head, span.vectors) == (min(size, (16 - rest) % 16 // 4), (size - span.head) // 4)
    assert mixed.span([0x1002], [0x1000], size).vectors == 0


def _nvrtc() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (found.submodule_search_locations or [])] if found else []
    for folder in folders:
        for path in sorted(folder.glob("*/lib/libnvrtc.so.*")):
            return ctypes.CDLL(str(path))
    name = ctypes.util.find_library("nvrtc")
    return ctypes.CDLL(name) if name else None


@pytest.mark.skipif(_nvrtc() is None, reason="needs NVRTC (pip install nvidia-cuda-nvrtc-cu12)")
@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_the_kernels_compile_for_gpus(dtype: DType, architecture: str) -> None:
    nvrtc = _nvrtc()
    assert nvrtc is not None
    for name in OPS:
        op = served(name, dtype)
        if op is None:
            continue
        made = [kernels.combining(op, dtype, *arrays) for arrays in ((1, 1), (2, 2), (4, 1))]
        for kernel in (*made, kernels.combining(partial_of(op), dtype, 3, 1), kernels.finishing(op, dtype, 6)):
            program = ctypes.c_void_p()
            text = kernels.source(kernel).encode()
            assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"combine.cu", 0, None, None) == 0
            options = [option.encode() for option in (*kernels.OPTIONS, f"--gpu-architecture={architecture}")]
            status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            length = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(length))
            log = ctypes.create_string_buffer(length.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
            assert status == 0, log.value.decode()
            assert not log.value, log.value.decode()
