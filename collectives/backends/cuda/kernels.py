"""The reductions as CUDA kernels: N arrays in the order of ranks into M arrays, in one pass, elementwise.

    acc = in0[i] (op) in1[i] (op) ...        in the accumulating type: fp32 for fp16 and bf16
    out0[i] = out1[i] = ... = acc            rounded once; in fp32 where the reduction goes on elsewhere (`combining`)
    out0[i] = acc[i] / ranks                 what is left then (`finishing`)

One source serves every element type, operator and number of arrays; they are filled in as macros, so that NVRTC
compiles a small kernel without loops over arrays, and needs no header. 16 bytes of the larger type are read or written
at a time where all arrays begin at the same element of a vector; the elements before and after are done one by one.
The rounding is that of numpy and torch on the host: no multiply-add is fused, and fp16 and bf16 are rounded to the
nearest even.

An element is read from all inputs before it is written anywhere, by one thread, so that an output may be an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...base.buffers import DType
from ...base.reduction import Reduction

THREADS = 256
_BLOCKS = 2048  # enough to fill any GPU; a thread takes the next vector from there
_VECTOR = 16  # bytes
OPTIONS = ("--fmad=false",)

_C_TYPES = {
    "float64": "double",
    "float32": "float",
    **{
        f"{sign}int{bits}": f"{name} {word}".strip()
        for sign, name in (("", "signed"), ("u", "unsigned"))
        for bits, word in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
    },
}

FP16 = r"""
struct half { unsigned short bits; };
__device__ inline float widen(half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ inline half narrow(float x) { half y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
typedef half SHORT; typedef float A;
"""
_BF16 = r"""
struct bfloat { unsigned short bits; };
union word { float number; unsigned int bits; };
__device__ inline float widen(bfloat x) { word w; w.bits = (unsigned int)x.bits << 16; return w.number; }
__device__ inline bfloat narrow(float x)
{
    word w; w.number = x; bfloat y;
    if (x != x) y.bits = 0x7fc0;
    else y.bits = (unsigned short)((w.bits + 0x7fff + ((w.bits >> 16) & 1)) >> 16);
    return y;
}
typedef bfloat SHORT; typedef float A;
"""
_BOOL = r"""
typedef unsigned char T; typedef T R; typedef bool A;
__device__ inline A widen(T x) { return x != 0; }
__device__ inline R narrow(A x) { return x ? 1 : 0; }
"""
_COMPLEX = r"""
struct complex { PART re, im; };
__device__ inline complex operator+(complex a, complex b) { complex c = {a.re + b.re, a.im + b.im}; return c; }
__device__ inline complex operator*(complex a, complex b)
{ complex c = {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; return c; }
__device__ inline complex operator*(complex a, double f) { complex c = {a.re * (PART)f, a.im * (PART)f}; return c; }
__device__ inline complex operator/(complex a, double n) { complex c = {a.re / (PART)n, a.im / (PART)n}; return c; }
typedef complex T; typedef T R; typedef complex A;
__device__ inline A widen(T x) { return x; }
__device__ inline R narrow(A x) { return x; }
"""
_PLAIN = r"""
typedef TYPE T; typedef T R; typedef ACCUMULATE A;
__device__ inline A widen(T x) { return (A)x; }
__device__ inline R narrow(A x) { return (R)x; }
"""

_EXPRESSIONS = {
    "sum": "a + b",
    "avg": "a + b",
    "premul_sum": "a + b",
    "prod": "a * b",
    "min": "a != a ? a : b != b ? b : b < a ? b : a",
    "max": "a != a ? a : b != b ? b : a < b ? b : a",
    "band": "a & b",
    "bor": "a | b",
    "bxor": "a ^ b",
}
_LOGICAL = {"sum": "a || b", "max": "a || b", "prod": "a && b", "min": "a && b"}
_ON_BOOL = {**_LOGICAL, "band": "a && b", "bor": "a || b", "bxor": "!a != !b"}

_KERNEL = r"""
typedef unsigned long long u64;
struct __align__(READ_BYTES) reading { T element[WIDTH]; };
struct __align__(WRITTEN_BYTES) writing { R element[WIDTH]; };

__device__ inline A op(A a, A b) { return (A)(EXPRESSION); }
__device__ inline A contribution(T x, double factor) { A a = WIDENED; return PREMULTIPLIED; }
__device__ inline R result(A x) { x = DIVIDED; return NARROWED; }

extern "C" __global__ void combine(PARAMETERS, u64 head, u64 vectors, u64 size)
{
    const u64 inputs[INPUTS] = {INPUT_NAMES};
    const u64 outputs[OUTPUTS] = {OUTPUT_NAMES};
    const double factors[INPUTS] = {FACTOR_NAMES};
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;

    for (u64 i = thread; i < vectors; i += threads) {
        const u64 first = head + i * WIDTH;
        reading read[INPUTS];
        #pragma unroll
        for (int n = 0; n < INPUTS; ++n) read[n] = *(const reading *)(inputs[n] + first * sizeof(T));
        writing made;
        #pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            A a = contribution(read[0].element[e], factors[0]);
            #pragma unroll
            for (int n = 1; n < INPUTS; ++n) a = op(a, contribution(read[n].element[e], factors[n]));
            made.element[e] = result(a);
        }
        #pragma unroll
        for (int n = 0; n < OUTPUTS; ++n) *(writing *)(outputs[n] + first * sizeof(R)) = made;
    }
    const u64 done = vectors * WIDTH;
    for (u64 i = thread; i < size - done; i += threads) {
        const u64 place = i < head ? i : i + done;
        A a = contribution(*(const T *)(inputs[0] + place * sizeof(T)), factors[0]);
        #pragma unroll
        for (int n = 1; n < INPUTS; ++n)
            a = op(a, contribution(*(const T *)(inputs[n] + place * sizeof(T)), factors[n]));
        #pragma unroll
        for (int n = 0; n < OUTPUTS; ++n) *(R *)(outputs[n] + place * sizeof(R)) = result(a);
    }
}
"""


@dataclass(frozen=True)
class Span:
    """The cut of `size` elements: `head` of them one by one, then so many `vectors`, then the rest one by one."""

    head: int
    vectors: int
    size: int

    @property
    def blocks(self) -> int:
        """Thread blocks of the launch."""
        return max(1, min(_BLOCKS, -(-max(self.vectors, self.head + 1) // THREADS)))


@dataclass(frozen=True)
class Kernel:
    """The parameters of a compiled kernel.

    read, written: types of the elements.
    divisor: of what is accumulated.
    """

    op: str
    read: DType
    written: DType
    inputs: int
    outputs: int
    divisor: int = 1

    @property
    def width(self) -> int:
        """Elements that are read or written at a time."""
        return max(1, _VECTOR // max(self.read.itemsize, self.written.itemsize))

    def span(self, inputs: Sequence[int], outputs: Sequence[int], size: int) -> Span:
        """The cut for arrays at these addresses; without vectors where they begin at different elements of one."""
        places = [divmod(place, self.read.itemsize) for place in inputs]
        places += [divmod(place, self.written.itemsize) for place in outputs]
        first = places[0][0] % self.width
        if any(rest or element % self.width != first for element, rest in places):
            return Span(size, 0, size)
        head = min(size, -first % self.width)
        return Span(head, (size - head) // self.width, size)


def combining(op: Reduction, dtype: DType, inputs: int, outputs: int) -> Kernel:
    """The kernel for `Reduction.combine`."""
    divisor = inputs if op.averages else 1
    return Kernel(op.name, dtype, dtype.wide if op.partial else dtype, inputs, outputs, divisor)


def finishing(op: Reduction, dtype: DType, ranks: int) -> Kernel:
    """The kernel for `Reduction.finish`."""
    return Kernel("sum", dtype.wide, dtype, 1, 1, ranks if op.averages else 1)


def source(kernel: Kernel) -> str:
    """The kernel `combine(in0, ..., out0, ..., factor0, ..., head, vectors, size)`."""
    read, written, is_complex = kernel.read, kernel.written, kernel.read.kind == "c"
    quotient = f"(x / {kernel.divisor}.0)" if is_complex else f"(x / (A){kernel.divisor})"
    product = "a * factor" if is_complex else "a * (A)factor"
    names = {
        "INPUT_NAMES": [f"in{n}" for n in range(kernel.inputs)],
        "OUTPUT_NAMES": [f"out{n}" for n in range(kernel.outputs)],
        "FACTOR_NAMES": [f"factor{n}" for n in range(kernel.inputs)],
    }
    parameters = [f"u64 {name}" for name in names["INPUT_NAMES"] + names["OUTPUT_NAMES"]]
    parameters += [f"double {name}" for name in names["FACTOR_NAMES"]]
    has_short = read.widened or written.widened
    macros = {
        "INPUTS": kernel.inputs,
        "OUTPUTS": kernel.outputs,
        "WIDTH": kernel.width,
        "READ_BYTES": kernel.width * read.itemsize,
        "WRITTEN_BYTES": kernel.width * written.itemsize,
        "EXPRESSION": (_ON_BOOL if read.kind == "b" else _EXPRESSIONS)[kernel.op],
        "PREMULTIPLIED": product if kernel.op == "premul_sum" else "a",
        "DIVIDED": quotient if kernel.divisor > 1 else "x",
        "WIDENED": "x" if has_short and not read.widened else "widen(x)",
        "NARROWED": "x" if has_short and not written.widened else "narrow(x)",
        "PARAMETERS": ", ".join(parameters),
        **{name: ", ".join(listed) for name, listed in names.items()},
    }
    return "".join(f"#define {name} {text}\n" for name, text in macros.items()) + _types(kernel) + _KERNEL


def _types(kernel: Kernel) -> str:
    """T, what is read; R, what is written; A, what is computed in; widen and narrow, from T to A and from A to R."""
    read, written = kernel.read, kernel.written
    if read.widened or written.widened:
        short = FP16 if "float16" in (read.name, written.name) else _BF16
        kinds = [f"typedef {'SHORT' if each.widened else 'A'} {name};" for each, name in ((read, "T"), (written, "R"))]
        return f"{short}{' '.join(kinds)}\n"
    if read.kind == "b":
        return _BOOL
    if read.kind == "c":
        return f"#define PART {'float' if read.name == 'complex64' else 'double'}\n{_COMPLEX}"
    stored = computed = _C_TYPES[read.name]
    if read.kind == "i" and kernel.op in ("sum", "prod"):  # wraps around, which C++ promises of unsigned ones alone
        computed = "unsigned long long" if read.itemsize == 8 else "unsigned int"
    elif read.kind == "u" and read.itemsize < 8:
        computed = "unsigned int"
    return f"#define TYPE {stored}\n#define ACCUMULATE {computed}\n{_PLAIN}"
