// Shared by the kernels: bf16, and sixteen floats as one value.
//
// `floats` and its functions are those of the CPU: AVX512, or AVX2 with FMA. Without AVX512-BF16 they multiply bf16 as
// fp32. Where IN_FP32 is defined, the numbers of a model are fp32 in place of bf16.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

#ifdef IN_FP32
using element = float;
#else
using element = bf16;
#endif

constexpr int LANES = 16;  // numbers of `floats`

// Neighbours along the inner dimension of a product that make one word of 32 bits, and are multiplied together.
constexpr long PER_WORD = sizeof(uint32_t) / sizeof(element);

static inline float to_float(float value) { return value; }
static inline float to_float(bf16 value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif

// e^x to about one unit in the last place; 0 for very negative x and -inf, NaN for NaN. Meant for x <= 88.
static inline floats exp(floats x) {
    x = larger(all(-200.0f), x);  // the second operand is what NaN passes through
    const floats n = rounded(mul(x, all(1.44269504f)));
    floats r = minus_product(n, all(0.693359375f), x);
    r = minus_product(n, all(-2.12194440e-4f), r);
    floats p = all(1.0f / 720);  // the series of e^r, |r| <= ln(2) / 2
    p = plus_product(p, r, all(1.0f / 120));
    p = plus_product(p, r, all(1.0f / 24));
    p = plus_product(p, r, all(1.0f / 6));
    p = plus_product(p, r, all(0.5f));
    p = plus_product(p, r, all(1.0f));
    p = plus_product(p, r, all(1.0f));
    return times_power_of_2(p, n);
}
