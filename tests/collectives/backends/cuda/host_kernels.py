"""The CUDA kernels, compiled by the host's C++ compiler and run thread by thread: their arithmetic, on a CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np

from collectives.backends.cuda import kernels
from collectives.base.buffers import address

Array = np.ndarray

COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
_BLOCKS, _THREADS = 3, 5  # few, so that every thread goes round its loops several times

# CUDA's words, and fp16 conversions in place of its instructions.
_PROLOGUE = r"""
#include <cstdint>
#define __device__
#define __global__
#define __align__(n) alignas(n)
struct Index { unsigned x; };
static thread_local Index blockIdx, threadIdx, blockDim, gridDim;
"""
_EPILOGUE = r"""
extern "C" void run(const u64 *in, const u64 *out, const double *factor, u64 head, u64 vectors, u64 size)
{
    gridDim.x = BLOCKS; blockDim.x = THREADS;
    for (unsigned b = 0; b < BLOCKS; ++b)
        for (unsigned t = 0; t < THREADS; ++t) {
            blockIdx.x = b; threadIdx.x = t;
            combine(ARGUMENTS, head, vectors, size);
        }
}
"""
_FP16 = r"""
struct half { unsigned short bits; };
inline float widen(half x) { _Float16 h; __builtin_memcpy(&h, &x, 2); return (float)h; }
inline half narrow(float x) { _Float16 h = (_Float16)x; half y; __builtin_memcpy(&y, &h, 2); return y; }
typedef half SHORT; typedef float A;
"""


def build(folder: Path, kernel: kernels.Kernel) -> ctypes.CDLL:
    """Compiles the kernel to a library with `run`."""
    assert COMPILER
    text, inputs, outputs = kernels.source(kernel).replace(kernels.FP16, _FP16), kernel.inputs, kernel.outputs
    arguments = [f"in[{n}]" for n in range(inputs)] + [f"out[{n}]" for n in range(outputs)]
    arguments += [f"factor[{n}]" for n in range(inputs)]
    macros = f"#define BLOCKS {_BLOCKS}\n#define THREADS {_THREADS}\n#define ARGUMENTS {', '.join(arguments)}\n"
    name = f"{kernel.op}-{kernel.read.name}-{kernel.written.name}-{inputs}-{outputs}-{kernel.divisor}"
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(_PROLOGUE + text + macros + _EPILOGUE)
    command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]
    subprocess.run([*command, "-shared", "-fPIC", "-w", source, "-o", library], check=True, capture_output=True)
    return ctypes.CDLL(str(library))


def run(
    library: ctypes.CDLL, kernel: kernels.Kernel, inputs: list[Array], outputs: list[Array], factors: list[float]
) -> kernels.Span:
    """Runs it as the driver would; gives how it was cut."""
    places = [address(array) for array in inputs], [address(array) for array in outputs]
    span = kernel.span(*places, inputs[0].size)
    library.run(
        (ctypes.c_uint64 * len(inputs))(*places[0]),
        (ctypes.c_uint64 * len(outputs))(*places[1]),
        (ctypes.c_double * len(inputs))(*factors),
        *map(ctypes.c_uint64, (span.head, span.vectors, span.size)),
    )
    return span
