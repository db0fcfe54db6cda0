"""The compiled parts of the package; everything else stands in pyproject.toml.

Each is a plain library with a C ABI that Python opens with ctypes. They are optional: without a C++ compiler the
installation goes on and the engine computes with what torch has.
"""

from setuptools import Extension, setup


def library(name: str, sources: list[str], headers: list[str]) -> Extension:
    """Return a library of a module's name that the installation builds if it can."""
    return Extension(
        name,
        sources=sources,
        depends=headers,
        language="c++",
        # No -march: the code chooses its instructions at run time. No contraction: each FMA is written out, so that a
        # row has the same bits in whichever variant of a loop it is computed. Nobody asks for traps: for them GCC would
        # branch where a loop selects, and would not use vectors of AVX2 for it.
        extra_compile_args=[
            *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
            *("-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-g0"),
        ],
        extra_link_args=["-pthread"],
        optional=True,
    )


setup(
    ext_modules=[
        library(
            "gptserve.engine.attention._cpu_paged",
            ["engine/attention/cpu_paged.cpp"],
            ["engine/attention/cpu_paged_kernel.h", "engine/native/vectors.h"],
        ),
        library(
            "gptserve.engine.native._native",
            [
                f"engine/native/{name}.cpp"
                for name in (
                    *("draw", "experts", "float_products", "int8", "linear", "logprobs"),
                    *("program", "rows", "team"),
                )
            ],
            [
                f"engine/native/{name}.h"
                for name in (
                    *(
                        "activation",
                        "floats_avx2",
                        "floats_avx512",
                        "floats_generic",
                        "int10_kernel",
                        "int8_kernel",
                        "int8_words",
                        "ints_avx2",
                    ),
                    *("ints_avx512", "ints_generic", "linear", "linear_kernel", "linear_vectors", "linear_words"),
                    *("program", "rows_kernel", "scratch", "softmax", "team", "vectors"),
                )
            ],
        ),
    ]
)
