"""The compiled part of the package; everything else stands in pyproject.toml.

It is a plain library with a C ABI that Python opens with ctypes. It is optional: without a C++ compiler the
installation goes on and the engine computes with what torch has.
"""

from glob import glob

from setuptools import Extension, setup

FOLDER = "engine/backends/cpu/csrc"

setup(
    ext_modules=[
        Extension(
            "gptserve.engine.backends.cpu._native",
            sources=sorted(glob(f"{FOLDER}/*.cpp")),
            depends=sorted(glob(f"{FOLDER}/*.h")),
            language="c++",
            # No -march: the code chooses its instructions at run time. No contraction: each FMA is written out, so that
            # a row has the same bits in whichever variant of a loop it is computed. Nobody asks for traps: for them GCC
            # would branch where a loop selects, and would not use vectors of AVX2 for it.
            extra_compile_args=[
                *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
                *("-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-g0"),
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
