"""Says why the tests that need a GPU cannot run here, with status 1; status 0 if they can.

python tests/gpus.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collectives.cuda.driver import missing

if __name__ == "__main__":
    why = missing() if torch.cuda.is_available() else "torch sees no CUDA GPU"
    print(why)
    raise SystemExit(bool(why))
