// A team of threads: one for the whole process, as a step is computed by one caller after the other.
//
// All other files compute in it. It knows nothing of what it computes.

#pragma once

#include <stdint.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int MAX_CHUNKS = 65535;

// Call chunk(job, i) once for each i in [0, num_chunks), on at most num_threads threads, this one among them; return
// when all calls have returned. A caller that finds the team busy, as one within a chunk does, makes all calls itself.
// num_chunks is at most MAX_CHUNKS. A chunk should take less than 100 us: the caller may have to wait for one.
void run_chunks(void (*chunk)(void* job, int64_t i), void* job, int64_t num_chunks, int64_t num_threads);

// The num_threads that the calling thread has set by native_set_num_threads; at first 1.
int num_threads();

// Call fn(data) on num_threads threads of the team, this one among them; return when all calls have returned.
EXPORT void native_parallel(void (*fn)(void*), void* data, unsigned num_threads);
