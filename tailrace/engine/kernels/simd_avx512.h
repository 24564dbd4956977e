// See simd.h.
#pragma once

using floats = __m512;

static inline floats all(float value) { return _mm512_set1_ps(value); }
static inline floats zeros() { return _mm512_setzero_ps(); }
static inline floats load(const float* from) { return _mm512_loadu_ps(from); }
static inline void store(float* to, floats values) { _mm512_storeu_ps(to, values); }

static inline floats load(const bf16* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
#ifdef __AVX512BF16__
static inline __m256i narrowed(floats values) { return (__m256i)_mm512_cvtneps_pbh(values); }
#else
// To the nearest bf16, ties to even.
static inline __m256i narrowed(floats values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 none = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(nearest, none, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}
#endif
static inline void store(bf16* to, floats values) { _mm256_storeu_si256((__m256i*)to, narrowed(values)); }

static inline floats add(floats a, floats b) { return _mm512_add_ps(a, b); }
static inline floats sub(floats a, floats b) { return _mm512_sub_ps(a, b); }
static inline floats mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
static inline floats div(floats a, floats b) { return _mm512_div_ps(a, b); }
static inline floats larger(floats a, floats b) { return _mm512_max_ps(a, b); }  // b where one is NaN
static inline floats plus_product(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }    // c + a b
static inline floats minus_product(floats a, floats b, floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
static inline floats rounded(floats x) { return _mm512_roundscale_ps(x, 8); }
static inline floats times_power_of_2(floats x, floats n) { return _mm512_scalef_ps(x, n); }

static inline float first(floats x) { return _mm512_cvtss_f32(x); }
static inline float total(floats x) { return _mm512_reduce_add_ps(x); }
static inline float largest(floats x) { return _mm512_reduce_max_ps(x); }
static inline double exact_total(floats x) {
    const __m256 high = _mm512_extractf32x8_ps(x, 1);
    return _mm512_reduce_add_pd(_mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(high)));
}

// The first `count` lanes of x, and `rest` in the others; none for count <= 0, all for count >= 16.
static inline floats first_lanes(floats x, long count, floats rest) {
    return _mm512_mask_mov_ps(rest, (__mmask16)((1u << std::clamp(count, 0L, 16L)) - 1), x);
}
// A bit for each lane in which a equals b.
static inline unsigned equal(floats a, floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }

constexpr int groups_at_once(int groups) { return groups; }

#if defined(IN_FP32) || defined(__AVX512BF16__)

constexpr int most_rows(int groups) { return groups == 4 ? 6 : 12; }  // what 32 registers hold

// A word for each lane, or one for all.
#ifdef IN_FP32
using Words = __m512;
static inline Words load_words(const float* from) { return load(from); }
static inline Words one_word(int32_t word) { return _mm512_castsi512_ps(_mm512_set1_epi32(word)); }
static inline floats plus_dot(floats sum, Words a, Words b) { return plus_product(a, b, sum); }
#else
using Words = __m512bh;
static inline Words load_words(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
static inline Words one_word(int32_t word) { return (__m512bh)_mm512_set1_epi32(word); }
static inline floats plus_dot(floats sum, Words a, Words b) { return _mm512_dpbf16_ps(sum, a, b); }
#endif

#else

// The same for pairs of bf16, whose members are apart, in fp32.
struct Words {
    floats first, second;
};
constexpr int most_rows(int groups) { return groups == 4 ? 5 : 12; }

static inline Words words_of(__m512i words) {
    const __m512i upper = _mm512_and_si512(words, _mm512_set1_epi32(0xffff0000));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), _mm512_castsi512_ps(upper)};
}
static inline Words load_words(const bf16* from) { return words_of(_mm512_loadu_si512(from)); }
static inline Words one_word(int32_t word) { return words_of(_mm512_set1_epi32(word)); }
static inline floats plus_dot(floats sum, const Words& a, const Words& b) {
    return plus_product(a.second, b.second, plus_product(a.first, b.first, sum));
}

#endif

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

// Column p of 16 rows of so many words becomes line p of `lines`. The stores bypass the cache: nothing computes with
// them yet, and a line that is written whole need not be read first.
static inline void columns_to_lines(const uint32_t* rows, long words, uint32_t* lines) {
    for (long p = 0; p < words; p += LANES) {
        const long count = std::min((long)LANES, words - p);
        __m512i x[LANES];
        for (long r = 0; r < LANES; r++)
            x[r] = _mm512_maskz_loadu_epi32((__mmask16)((1u << count) - 1), rows + r * words + p);
        transpose(x);
        for (long i = 0; i < count; i++) _mm512_stream_si512((__m512i*)(lines + (p + i) * LANES), x[i]);
    }
}
