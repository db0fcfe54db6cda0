// What code for vector registers begins with: the CPU's intrinsics, the choice of instructions, UNROLL and bf16.

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

// Functions between BEGIN_INSTRUCTIONS and END_INSTRUCTIONS may use these; callers have asked has_... before. There,
// call nothing from std: the linker might keep the copy of an inline function that was compiled there for all callers.
#define PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define BEGIN_INSTRUCTIONS(names) PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define END_INSTRUCTIONS PRAGMA(clang attribute pop)
#define WITH_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,fma"
#else
#define BEGIN_INSTRUCTIONS(names) PRAGMA(GCC push_options) PRAGMA(GCC target(names))
#define END_INSTRUCTIONS PRAGMA(GCC pop_options)
#define WITH_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"
#endif
#define WITH_AVX2 "avx2,fma"

#if defined(__x86_64__)
static inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
static inline bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Sums stay in registers only if the loops over them are unrolled before the compiler assigns storage.
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// Code that is compiled into what calls it: into a function of each set of instructions, or so that sums which it adds to
// stay in registers.
// A sanitizer's checks make functions so large that inlining them all takes GCC minutes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define INLINE static inline
#else
#define INLINE static inline __attribute__((always_inline))
#endif

// Have the compiler keep a vector in a register here.
#if defined(__x86_64__)
#define KEEP_IN_REGISTER(vector) __asm__("" : "+x"(vector))
#elif defined(__aarch64__)
#define KEEP_IN_REGISTER(vector) __asm__("" : "+w"(vector))
#else
#define KEEP_IN_REGISTER(vector)
#endif

typedef uint16_t bf16;
