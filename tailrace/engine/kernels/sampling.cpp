// The sampler's passes over the logits; `Primitives` in `tailrace/engine/sampler.py` says what they mean.

#include "simd.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr long BLOCK = 256;

__m512 weight(const float* logits, __m512 maximum, __m512 scale) {
    return exp_ps(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(logits), maximum), scale));
}

double block_sum(const float* logits, __m512 maximum, __m512 scale) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (long i = 0; i < BLOCK; i += 2 * LANES) {
        even = _mm512_add_ps(even, weight(logits + i, maximum, scale));
        odd = _mm512_add_ps(odd, weight(logits + i + LANES, maximum, scale));
    }
    const __m512 sum = _mm512_add_ps(even, odd);
    const __m256 high = _mm512_extractf32x8_ps(sum, 1);
    return _mm512_reduce_add_pd(_mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(sum)), _mm512_cvtps_pd(high)));
}

// NaNs are passed over: they make the sums NaN.
int64_t first_maximum(const float* logits, long width) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    __m512i where = _mm512_setzero_si512();
    __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (long i = 0; i < width; i += LANES) {
        const __m512 values = _mm512_loadu_ps(logits + i);
        const __mmask16 larger = _mm512_cmp_ps_mask(values, most, _CMP_GT_OQ);
        most = _mm512_mask_mov_ps(most, larger, values);
        where = _mm512_mask_mov_epi32(where, larger, index);
        index = _mm512_add_epi32(index, _mm512_set1_epi32(LANES));
    }
    const __mmask16 equal = _mm512_cmp_ps_mask(most, _mm512_set1_ps(_mm512_reduce_max_ps(most)), _CMP_EQ_OQ);
    return _mm512_mask_reduce_min_epi32(equal, where);
}

// The first index whose cumulative weight exceeds the target, so one of positive weight, and what lies before it.
// The target is kept just below the total, which rounding might let it reach. Any index where weights are NaN.
template <typename Weight>
long first_above(const Weight* weights, long count, double target, double total, double* before) {
    const double below = std::max(std::min(target, std::nextafter(total, 0.0)), 0.0);
    for (long i = 0; i < count - 1; i++) {
        if (*before + weights[i] > below) return i;
        *before += weights[i];
    }
    return count - 1;
}

}  // namespace

extern "C" {

void sampling_maxima(
    const float* logits, int64_t rows, int64_t width, int64_t threads, float* maxima, int64_t* indexes) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
    for (long row = 0; row < rows; row++) {
        indexes[row] = first_maximum(logits + row * width, width);
        maxima[row] = logits[row * width + indexes[row]];
    }
}

void sampling_block_sums(const float* logits, int64_t rows, int64_t width, int64_t threads, const float* maxima,
    const float* scales, double* sums) {
    const long blocks = width / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
    for (long row = 0; row < rows; row++) {
        const __m512 maximum = _mm512_set1_ps(maxima[row]), scale = _mm512_set1_ps(scales[row]);
        for (long block = 0; block < blocks; block++)
            sums[row * blocks + block] = block_sum(logits + row * width + block * BLOCK, maximum, scale);
    }
}

void sampling_choose(const double* sums, int64_t rows, int64_t blocks, const double* uniforms, int64_t* chosen,
    double* inside, double* totals) {
    for (long row = 0; row < rows; row++) {
        const double* row_sums = sums + row * blocks;
        double total = 0, before = 0;
        for (long block = 0; block < blocks; block++) total += row_sums[block];
        chosen[row] = first_above(row_sums, blocks, uniforms[row] * total, total, &before);
        inside[row] = uniforms[row] * total - before;
        totals[row] = total;
    }
}

void sampling_resolve(const float* logits, int64_t rows, int64_t width, const int64_t* blocks, const double* inside,
    const float* maxima, const float* scales, int64_t* indexes, double* weights) {
    for (long row = 0; row < rows; row++) {
        const __m512 maximum = _mm512_set1_ps(maxima[row]), scale = _mm512_set1_ps(scales[row]);
        const float* block = logits + row * width + blocks[row] * BLOCK;
        float values[BLOCK];
        double total = 0, before = 0;
        for (long i = 0; i < BLOCK; i += LANES) _mm512_storeu_ps(values + i, weight(block + i, maximum, scale));
        for (long i = 0; i < BLOCK; i++) total += values[i];
        const long index = first_above(values, BLOCK, inside[row], total, &before);
        indexes[row] = blocks[row] * BLOCK + index;
        weights[row] = values[index];
    }
}
}
