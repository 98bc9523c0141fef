"""The part in C, which is left out where it cannot be compiled; all else is in setup.cfg."""

from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("collectives/native")

setup(
    ext_modules=[
        Extension(
            "collectives.native.compiled",
            [str(path) for path in sorted(FOLDER.glob("*.c"))],
            depends=[str(FOLDER / "native.h")],
            extra_compile_args=["-O3", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
