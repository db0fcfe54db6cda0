// What code for vector registers begins with: the CPU's intrinsics, UNROLL and bf16.

#pragma once

#include <stdint.h>

#if defined(__x86_64__)
// GCC 12 takes the operand that its header leaves undefined, because it is not used, for a mistake.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Sums stay in registers only if the loops over them are unrolled before the compiler assigns storage.
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef uint16_t bf16;
