// See simd.h.
#pragma once

struct floats {
    __m256 low, high;
};

static inline floats all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
static inline floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
static inline void store(float* to, floats values) {
    _mm256_storeu_ps(to, values.low);
    _mm256_storeu_ps(to + 8, values.high);
}

static inline __m256 widened(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
static inline floats load(const bf16* from) {
    return {widened(_mm_loadu_si128((const __m128i*)from)), widened(_mm_loadu_si128((const __m128i*)(from + 8)))};
}
// To the nearest bf16, ties to even, in the lower halves of the lanes.
static inline __m256i narrowed(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(nearest, quiet, none), 16);
}
static inline void store(bf16* to, floats values) {
    const __m256i packed = _mm256_packus_epi32(narrowed(values.low), narrowed(values.high));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(packed, 0xd8));
}

static inline floats add(floats a, floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
static inline floats sub(floats a, floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
static inline floats mul(floats a, floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
static inline floats div(floats a, floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
static inline floats larger(floats a, floats b) {  // b where one is NaN
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
static inline floats plus_product(floats a, floats b, floats c) {  // c + a b
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static inline floats minus_product(floats a, floats b, floats c) {  // c - a b
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
static inline floats rounded(floats x) { return {_mm256_round_ps(x.low, 8), _mm256_round_ps(x.high, 8)}; }

// x 2^n; 0 where that has no normal number. n <= 127.
static inline __m256 times_power_of_2(__m256 x, __m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    const __m256 none = _mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
    return _mm256_andnot_ps(none, _mm256_mul_ps(x, power));
}
static inline floats times_power_of_2(floats x, floats n) {
    return {times_power_of_2(x.low, n.low), times_power_of_2(x.high, n.high)};
}

static inline float first(floats x) { return _mm256_cvtss_f32(x.low); }
static inline float total(floats x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
static inline float largest(floats x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
static inline double exact_total(floats x) {
    const auto widened = [](__m256 of) {
        return _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(of)), _mm256_cvtps_pd(_mm256_extractf128_ps(of, 1)));
    };
    const __m256d four = _mm256_add_pd(widened(x.low), widened(x.high));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

// The first `count` lanes of x, and `rest` in the others; none for count <= 0, all for count >= 16.
static inline floats first_lanes(floats x, long count, floats rest) {
    const __m256i most = _mm256_set1_epi32(std::clamp(count, 0L, 16L));
    const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
    return {_mm256_blendv_ps(rest.low, x.low, _mm256_castsi256_ps(_mm256_cmpgt_epi32(most, low))),
        _mm256_blendv_ps(rest.high, x.high, _mm256_castsi256_ps(_mm256_cmpgt_epi32(most, high)))};
}
// A bit for each lane in which a equals b.
static inline unsigned equal(floats a, floats b) {
    const auto bits = [](__m256 one, __m256 other) { return _mm256_movemask_ps(_mm256_cmp_ps(one, other, _CMP_EQ_OQ)); };
    return (unsigned)bits(a.low, b.low) | (unsigned)bits(a.high, b.high) << 8;
}

constexpr int groups_at_once(int) { return 1; }

#ifdef IN_FP32

// A word for each lane, or one for all.
using Words = floats;
constexpr int most_rows(int) { return 6; }  // what 16 registers hold beside one group of columns

static inline Words load_words(const float* from) { return load(from); }
static inline Words one_word(int32_t word) {
    const __m256 eight = _mm256_castsi256_ps(_mm256_set1_epi32(word));
    return {eight, eight};
}
static inline floats plus_dot(floats sum, const Words& a, const Words& b) { return plus_product(a, b, sum); }

#else

// The same for pairs of bf16, whose members are apart, in fp32.
struct Words {
    floats first, second;
};
constexpr int most_rows(int) { return 5; }

static inline Words words_of(__m256i low, __m256i high) {
    const __m256i upper = _mm256_set1_epi32(0xffff0000);
    const auto first = [](__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); };
    const auto second = [&](__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, upper)); };
    return {{first(low), first(high)}, {second(low), second(high)}};
}
static inline Words load_words(const bf16* from) {
    return words_of(_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)(from + LANES)));
}
static inline Words one_word(int32_t word) { return words_of(_mm256_set1_epi32(word), _mm256_set1_epi32(word)); }
static inline floats plus_dot(floats sum, const Words& a, const Words& b) {
    return plus_product(a.second, b.second, plus_product(a.first, b.first, sum));
}

#endif

// Column p of 16 rows of so many words becomes line p of `lines`.
static inline void columns_to_lines(const uint32_t* rows, long words, uint32_t* lines) {
    for (long p = 0; p < words; p++)
        for (long r = 0; r < LANES; r++) lines[p * LANES + r] = rows[r * words + p];
}
