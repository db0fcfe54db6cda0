"""The compiled part of the package; everything else stands in pyproject.toml.

The CPU attention kernel is a plain library with a C ABI that engine/attention/cpu.py opens with ctypes. It is optional:
without a C++ compiler the installation goes on and the engine says which backend it took instead.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "gptserve.engine.attention._cpu_paged",
            sources=["engine/attention/cpu_paged.cpp"],
            depends=["engine/attention/cpu_paged_kernel.h"],
            language="c++",
            # No -march: the code chooses its instructions at run time. No contraction: each FMA is written out, so
            # that a row has the same bits in whichever variant of a loop it is computed.
            extra_compile_args=[
                *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno"),
                *("-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-g0"),
            ],
            optional=True,
        )
    ]
)
