// Drawing tokens from logits that are spread over ranks.

#include "simd.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr long BLOCK = 256;

floats weight(const float* logits, floats maximum, floats scale) {
    return exp(mul(sub(load(logits), maximum), scale));
}

double block_sum(const float* logits, floats maximum, floats scale) {
    floats even = zeros(), odd = even;
    for (long i = 0; i < BLOCK; i += 2 * LANES) {
        even = add(even, weight(logits + i, maximum, scale));
        odd = add(odd, weight(logits + i + LANES, maximum, scale));
    }
    return exact_total(add(even, odd));
}

// NaNs are passed over: they make the sums NaN. 0 where there is nothing else.
int64_t first_maximum(const float* logits, long width) {
    floats most = all(-INFINITY);
    for (long i = 0; i < width; i += LANES) most = larger(load(logits + i), most);
    const floats maximum = all(largest(most));
    for (long i = 0; i < width; i += LANES)
        if (const unsigned found = equal(load(logits + i), maximum)) return i + __builtin_ctz(found);
    return 0;
}

// The first index whose cumulative weight exceeds the target, so one of positive weight, and the sum of those before.
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

// A row's likeliest logit, or its token that was drawn, as the ranks exchange it.
struct Found {
    double value, token;
};

// This rank's share of the drawing of N rows, and the exchange between the ranks.
struct Drawing {
    float* logits;
    long rows, width, threads, tokens, blocks;  // tokens: of this rank's width; blocks: of the whole vocabulary
    const float* scales;
    long rank, ranks;
    int (*gather)(void* exchange, const char* own, char* all, int64_t bytes);
    void* exchange;
    int missing = -1;

    // [ranks][own], or `own` itself where there is one rank. The contents are of no use once a rank is missing.
    template <typename Item>
    std::vector<Item> of_all_ranks(const std::vector<Item>& own) {
        if (ranks == 1) return own;
        std::vector<Item> gathered(ranks * own.size());
        if (missing < 0)
            missing = gather(exchange, (const char*)own.data(), (char*)gathered.data(), own.size() * sizeof(Item));
        return gathered;
    }

    // The largest logit of each row over all ranks, and the first token that has it.
    std::vector<Found> likeliest() {
        std::vector<Found> own(rows);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
        for (long row = 0; row < rows; row++) {
            float* own_logits = logits + row * width;
            std::fill(own_logits + tokens, own_logits + width, -INFINITY);
            const int64_t index = first_maximum(own_logits, width);
            own[row] = {own_logits[index], double(rank * width + index)};
        }
        const std::vector<Found> found = of_all_ranks(own);
        for (long row = 0; row < rows; row++)
            for (long other = 0; other < ranks; other++) {
                const Found& candidate = found[other * rows + row];
                if (other == 0 || candidate.value > own[row].value) own[row] = candidate;
            }
        return own;
    }

    // [ranks][rows][own blocks]
    std::vector<double> block_sums(const std::vector<Found>& maxima) {
        const long own_blocks = width / BLOCK;
        std::vector<double> sums(rows * own_blocks);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
        for (long row = 0; row < rows; row++) {
            const floats maximum = all(maxima[row].value), scale = all(scales[row]);
            for (long block = 0; block < own_blocks; block++)
                sums[row * own_blocks + block] = block_sum(logits + row * width + block * BLOCK, maximum, scale);
        }
        return of_all_ranks(sums);
    }

    // The weight and the token at `inside` of one of this rank's blocks.
    Found resolve(long row, long block, double inside, double maximum) const {
        const floats most = all(maximum), scale = all(scales[row]);
        const float* block_logits = logits + row * width + block * BLOCK;
        float values[BLOCK];
        double total = 0, before = 0;
        for (long i = 0; i < BLOCK; i += LANES) store(values + i, weight(block_logits + i, most, scale));
        for (long i = 0; i < BLOCK; i++) total += values[i];
        const long index = first_above(values, BLOCK, inside, total, &before);
        return {values[index], double(rank * width + block * BLOCK + index)};
    }

    void draw(const uint8_t* greedy, const double* uniforms, int64_t* drawn, double* weights, double* totals) {
        const long own_blocks = width / BLOCK;
        const std::vector<Found> maxima = likeliest();
        const std::vector<double> sums = block_sums(maxima);
        std::vector<double> row_sums(blocks);
        std::vector<long> owners(rows);
        std::vector<Found> own(rows);
        for (long row = 0; row < rows; row++) {
            double total = 0, before = 0;
            for (long block = 0; block < blocks; block++) {
                row_sums[block] = sums[(block / own_blocks * rows + row) * own_blocks + block % own_blocks];
                total += row_sums[block];
            }
            const double target = uniforms[row] * total;
            const long block = first_above(row_sums.data(), blocks, target, total, &before);
            owners[row] = block / own_blocks;
            totals[row] = total;
            if (owners[row] == rank) own[row] = resolve(row, block % own_blocks, target - before, maxima[row].value);
        }
        const std::vector<Found> found = of_all_ranks(own);
        for (long row = 0; row < rows; row++) {
            const Found& token = ranks == 1 ? found[row] : found[owners[row] * rows + row];
            drawn[row] = greedy[row] ? maxima[row].token : token.token;
            weights[row] = greedy[row] ? 1.0 : token.value;
        }
    }
};

}  // namespace

extern "C" {

// See `Drawing.draw` in `tailrace/engine/sampling/drawing.py`. Returns -1, or the rank that did not take part.
int sampling_draw(float* logits, int64_t rows, int64_t width, int64_t threads, int64_t tokens, int64_t blocks,
    const float* scales, const uint8_t* greedy, const double* uniforms, int64_t rank, int64_t ranks,
    int (*gather)(void*, const char*, char*, int64_t), void* exchange, int64_t* drawn, double* weights,
    double* totals) {
    Drawing drawing{logits, rows, width, threads, tokens, blocks, scales, rank, ranks, gather, exchange};
    drawing.draw(greedy, uniforms, drawn, weights, totals);
    return drawing.missing;
}
}
