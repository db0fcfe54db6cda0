// Products with packed weights, for program.cpp. linear.cpp says what they compute.

#pragma once

#include <stdint.h>

#include "vectors.h"

struct Linear;

extern "C" void native_multiply(const Linear* linear, const bf16* x, const bf16* residual, void* out, int64_t rows,
                                int wide);
