// Memory that a thread keeps from one call to the next: it grows, and is freed when the thread ends.

#pragma once

#include <stdint.h>
#include <stdlib.h>

struct Scratch {
    void* data = nullptr;
    int64_t size = 0;
    ~Scratch() { free(data); }

    // Return at least so many bytes, which lie at a multiple of 64. What they held is lost when they grow.
    void* take(int64_t num_bytes) {
        if (size < num_bytes) {
            free(data);
            data = aligned_alloc(64, (num_bytes + 63) / 64 * 64);
            if (!data) __builtin_trap();  // no memory
            size = num_bytes;
        }
        return data;
    }
};
