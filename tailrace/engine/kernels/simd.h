// Shared by the kernels: bf16, and sixteen floats as one value.
//
// `floats` and its functions are those of the CPU: AVX512-BF16, or AVX2 with FMA, which multiplies bf16 as fp32.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

constexpr int LANES = 16;  // numbers of `floats`

static inline float to_float(bf16 value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

#ifdef __AVX512BF16__
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
