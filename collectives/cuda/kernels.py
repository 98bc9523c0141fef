"""The reductions as CUDA kernels: N arrays in the order of ranks into M arrays, in one pass, elementwise.

    acc = in0[i] (op) in1[i] (op) ...        in the accumulating type: fp32 for fp16 and bf16
    out0[i] = out1[i] = ... = acc            rounded once

One source serves every element type, operator and number of arrays; they are filled in as macros, so that NVRTC
compiles a small kernel without loops over arrays, and needs no header. 16 bytes are read and written at a time where
all addresses leave the same rest by 16; the elements before and after are done one by one. The rounding is that of
numpy and torch on the host: no multiply-add is fused, and fp16 and bf16 are rounded to the nearest even.

An element is read from all inputs before it is written anywhere, by one thread, so that an output may be an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..buffers import DType
from ..reduction import Reduction

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

_FP16 = r"""
struct half { unsigned short bits; };
__device__ inline float widen(half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ inline half narrow(float x) { half y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
typedef half T; typedef float A;
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
typedef bfloat T; typedef float A;
"""
_BOOL = r"""
typedef unsigned char T; typedef bool A;
__device__ inline A widen(T x) { return x != 0; }
__device__ inline T narrow(A x) { return x ? 1 : 0; }
"""
_COMPLEX = r"""
struct complex { PART re, im; };
__device__ inline complex operator+(complex a, complex b) { complex c = {a.re + b.re, a.im + b.im}; return c; }
__device__ inline complex operator*(complex a, complex b)
{ complex c = {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; return c; }
__device__ inline complex operator*(complex a, double f) { complex c = {a.re * (PART)f, a.im * (PART)f}; return c; }
__device__ inline complex operator/(complex a, double n) { complex c = {a.re / (PART)n, a.im / (PART)n}; return c; }
typedef complex T; typedef complex A;
__device__ inline A widen(T x) { return x; }
__device__ inline T narrow(A x) { return x; }
"""
_PLAIN = r"""
typedef TYPE T; typedef ACCUMULATE A;
__device__ inline A widen(T x) { return (A)x; }
__device__ inline T narrow(A x) { return (T)x; }
"""

_EXPRESSIONS = {
    "sum": "a + b",
    "avg": "a + b",
    "premul_sum": "a + b",
    "prod": "a * b",
    "min": "a != a ? a : b != b ? b : b < a ? b : a",
    "max": "a != a ? a : b != b ? b : a < b ? b : a",
}
_ON_BOOL = {"sum": "a || b", "max": "a || b", "prod": "a && b", "min": "a && b"}

_KERNEL = r"""
typedef unsigned long long u64;
#define WIDTH (16 / sizeof(T))
struct __align__(16) vector { T element[WIDTH]; };

__device__ inline A op(A a, A b) { return (A)(EXPRESSION); }
__device__ inline A contribution(T x, double factor) { A a = widen(x); return PREMULTIPLIED; }
__device__ inline T result(A a) { return narrow(AVERAGED); }

extern "C" __global__ void combine(PARAMETERS, u64 head, u64 vectors, u64 size)
{
    const u64 inputs[INPUTS] = {INPUT_NAMES};
    const u64 outputs[OUTPUTS] = {OUTPUT_NAMES};
    const double factors[INPUTS] = {FACTOR_NAMES};
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;

    for (u64 i = thread; i < vectors; i += threads) {
        const u64 place = head * sizeof(T) + i * 16;
        vector read[INPUTS];
        #pragma unroll
        for (int n = 0; n < INPUTS; ++n) read[n] = *(const vector *)(inputs[n] + place);
        vector made;
        #pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            A a = contribution(read[0].element[e], factors[0]);
            #pragma unroll
            for (int n = 1; n < INPUTS; ++n) a = op(a, contribution(read[n].element[e], factors[n]));
            made.element[e] = result(a);
        }
        #pragma unroll
        for (int n = 0; n < OUTPUTS; ++n) *(vector *)(outputs[n] + place) = made;
    }
    const u64 done = vectors * WIDTH;
    for (u64 i = thread; i < size - done; i += threads) {
        const u64 place = (i < head ? i : i + done) * sizeof(T);
        A a = contribution(*(const T *)(inputs[0] + place), factors[0]);
        #pragma unroll
        for (int n = 1; n < INPUTS; ++n) a = op(a, contribution(*(const T *)(inputs[n] + place), factors[n]));
        #pragma unroll
        for (int n = 0; n < OUTPUTS; ++n) *(T *)(outputs[n] + place) = result(a);
    }
}
"""


@dataclass(frozen=True)
class Span:
    """How `size` elements are cut: `head` of them one by one, then `vectors` of 16 bytes, then the rest one by one."""

    head: int
    vectors: int
    size: int

    @property
    def blocks(self) -> int:
        """Thread blocks of the launch."""
        return max(1, min(_BLOCKS, -(-max(self.vectors, self.head + 1) // THREADS)))


def span(addresses: Sequence[int], size: int, itemsize: int) -> Span:
    """The cut for arrays at these addresses; without vectors where these are not alike by 16."""
    rest = addresses[0] % _VECTOR
    if any(place % _VECTOR != rest for place in addresses) or rest % itemsize:
        return Span(size, 0, size)
    head = min(size, (-rest % _VECTOR) // itemsize)
    return Span(head, (size - head) * itemsize // _VECTOR, size)


def source(dtype: DType, op: Reduction, inputs: int, outputs: int) -> str:
    """The kernel `combine(in0, ..., out0, ..., factor0, ..., head, vectors, size)`."""
    divisor = f"(a / (A){inputs})" if dtype.kind != "c" else f"(a / {inputs}.0)"
    factor = "a * (A)factor" if dtype.kind != "c" else "a * factor"
    names = {
        "INPUT_NAMES": [f"in{n}" for n in range(inputs)],
        "OUTPUT_NAMES": [f"out{n}" for n in range(outputs)],
        "FACTOR_NAMES": [f"factor{n}" for n in range(inputs)],
    }
    parameters = [f"u64 {name}" for name in names["INPUT_NAMES"] + names["OUTPUT_NAMES"]]
    parameters += [f"double {name}" for name in names["FACTOR_NAMES"]]
    macros = {
        "INPUTS": str(inputs),
        "OUTPUTS": str(outputs),
        "EXPRESSION": (_ON_BOOL if dtype.kind == "b" else _EXPRESSIONS)[op.name],
        "PREMULTIPLIED": factor if op.premultiplied else "a",
        "AVERAGED": divisor if op.name == "avg" and inputs > 1 else "a",
        "PARAMETERS": ", ".join(parameters),
        **{name: ", ".join(listed) for name, listed in names.items()},
    }
    return "".join(f"#define {name} {text}\n" for name, text in macros.items()) + _types(dtype, op) + _KERNEL


def _types(dtype: DType, op: Reduction) -> str:
    """T, what is stored; A, what is computed in; widen and narrow, from one to the other."""
    special = {"float16": _FP16, "bfloat16": _BF16, "bool": _BOOL}.get(dtype.name)
    if special:
        return special
    if dtype.kind == "c":
        return f"#define PART {'float' if dtype.name == 'complex64' else 'double'}\n{_COMPLEX}"
    stored = computed = _C_TYPES[dtype.name]
    if dtype.kind == "i" and op.name in ("sum", "prod"):  # wraps around, which C++ promises of unsigned ones alone
        computed = "unsigned long long" if dtype.itemsize == 8 else "unsigned int"
    elif dtype.kind == "u" and dtype.itemsize < 8:
        computed = "unsigned int"
    return f"#define TYPE {stored}\n#define ACCUMULATE {computed}\n{_PLAIN}"
