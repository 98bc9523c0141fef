"""Says why the tests that need a GPU cannot run here, with status 1; status 0 if they can.

python tests/gpus.py
"""

from __future__ import annotations

import torch


def missing() -> str:
    """Why not; empty if nothing is missing."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    try:
        import cupy
    except ImportError:
        return "cupy is not installed (pip install mpidl[cuda12] or mpidl[cuda13])"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"cupy sees no GPU: {error}"
    return ""


if __name__ == "__main__":
    why = missing()
    print(why)
    raise SystemExit(bool(why))
