// Shared by the kernels: bf16, conversions, exp. Needs AVX512-BF16.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

constexpr int LANES = 16;  // floats in a register

static inline __m512 load_bf16(const bf16* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline void store_bf16(bf16* to, __m512 values) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(values));
}

static inline float to_float(bf16 value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// e^x to about one unit in the last place; 0 for very negative x and -inf, NaN for NaN. Meant for x <= 88.
static inline __m512 exp_ps(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);  // the second operand is what NaN passes through
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);  // the series of e^r, |r| <= ln(2) / 2
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// A mask of the first `count` lanes; none for count <= 0, all for count >= 16.
static inline __mmask16 first_lanes(long count) {
    return (__mmask16)((1u << std::clamp(count, 0L, 16L)) - 1);
}

// 16 rows of 16 32-bit values become its columns.
static inline void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
            y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88);
        x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xdd);
    }
}
