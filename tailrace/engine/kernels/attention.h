// Attention over the block cache, by online softmax (Dao et al. 2022, FlashAttention).
//
// The keys of a (block, KV head) are stored as words [head_dim / PER_WORD][block_size] and its values as words
// [block_size / PER_WORD][head_dim], so that scores and weighted sums are products of gemm.h without any rearranging.
// A query meets its blocks in the order of the sequence, one at a time, whatever is computed beside it.
#pragma once

#include "gemm.h"

struct Heads {
    long query_heads, kv_heads, head_dim, block_size;

    long group() const { return query_heads / kv_heads; }
    long region() const { return head_dim * block_size; }  // elements of a (block, KV head)
};

// Consecutive tokens of one sequence whose queries are computed together, for one KV head at a time.
struct Queries {
    long first;     // row in the slab
    long tokens;
    long position;  // of the first token
    const int64_t* table;
};

// The keys or values of a (block, KV head).
static inline const element* region_of(
    const Heads& h, const element* pool, const Queries& queries, long n, long kv_head) {
    return pool + (queries.table[n] * h.kv_heads + kv_head) * h.region();
}

constexpr long QUERY_ROWS = 36;  // rows that share a level 1 cache with a block's keys and values in bf16
constexpr long MOST_HEAD_DIM = 256;

static inline long tokens_per_tile(const Heads& h) { return std::max(1L, QUERY_ROWS / h.group()); }

// One thread's memory for a tile.
struct Scratch {
    float *scores, *sums, *largest, *total;
    element* weights;

    static long bytes(const Heads& h) {
        const long rows = tokens_per_tile(h) * h.group();
        return rows * ((4 + sizeof(element)) * h.block_size + 4 * h.head_dim + 8) + 64;
    }
    Scratch(const Heads& h, char* memory) {
        const long rows = tokens_per_tile(h) * h.group();
        scores = (float*)memory;
        sums = scores + rows * h.block_size;
        largest = sums + rows * h.head_dim;
        total = largest + rows;
        weights = (element*)(total + rows);
    }
};

// Turns a row's scores of one block into weights. Rescales the earlier sums if there is a new largest score.
static void soften(const Heads& h, const Scratch& s, long row, long visible, long keys) {
    float* scores = s.scores + row * h.block_size;
    element* weights = s.weights + row * h.block_size;
    const floats scale = all(1.0f / std::sqrt((float)h.head_dim));
    const floats hidden = all(-INFINITY);
    floats most = hidden;
    for (long k = 0; k < keys; k += LANES) {
        const floats seen = first_lanes(mul(scale, load(scores + k)), visible - k, hidden);
        store(scores + k, seen);
        most = larger(most, seen);
    }
    const float before = s.largest[row], largest = std::max(before, ::largest(most));
    floats sum = zeros();
    for (long k = 0; k < keys; k += LANES) {
        const floats weight = exp(sub(load(scores + k), all(largest)));
        sum = add(sum, weight);
        store(weights + k, weight);
    }
    s.largest[row] = largest;
    if (largest == before) {
        s.total[row] += total(sum);
        return;
    }
    const floats shrink = exp(all(before - largest));
    s.total[row] = s.total[row] * first(shrink) + total(sum);
    for (long d = 0; d < h.head_dim; d += LANES) {
        float* sums = s.sums + row * h.head_dim + d;
        store(sums, mul(shrink, load(sums)));
    }
}

// q: the slab's queries of this KV head, [token, query head of the group, head_dim]. next: the memory that this thread
// probably reads afterwards. out: [token, query_heads, head_dim]; this fills the group's heads.
static void attend(const Heads& h, const Queries& queries, long kv_head, const element* q, const element* keys,
    const element* values, const element* next, const Scratch& s, element* out) {
    const long group = h.group(), rows = queries.tokens * group, last = queries.position + queries.tokens - 1;
    std::fill_n(s.sums, rows * h.head_dim, 0.0f);
    std::fill_n(s.total, rows, 0.0f);
    std::fill_n(s.largest, rows, -INFINITY);
    const Rows query_rows = {q + queries.first * group * h.head_dim, h.head_dim};
    const Rows weight_rows = {s.weights, h.block_size};
    for (long n = 0; n * h.block_size <= last; n++) {
        const long start = n * h.block_size, seen = std::min(h.block_size, last + 1 - start);
        const element* key = region_of(h, keys, queries, n, kv_head);
        const element* value = region_of(h, values, queries, n, kv_head);
        const element* after = start + seen <= last ? region_of(h, keys, queries, n + 1, kv_head) : next;
        multiply(query_rows, rows, {key, PER_WORD * h.block_size, PER_WORD * LANES, value - key}, 0,
            (seen + LANES - 1) / LANES, h.head_dim / PER_WORD, Store{s.scores, h.block_size});
        for (long row = 0; row < rows; row++)
            soften(h, s, row, queries.position + row / group + 1 - start, seen);
        multiply(weight_rows, rows, {value, PER_WORD * h.head_dim, PER_WORD * LANES, after - value}, 0,
            h.head_dim / LANES, (seen + PER_WORD - 1) / PER_WORD, Add{{s.sums, h.head_dim}});
    }
    for (long row = 0; row < rows; row++) {
        const long token = queries.first + row / group, head = kv_head * group + row % group;
        const floats total = all(s.total[row]);
        for (long d = 0; d < h.head_dim; d += LANES)
            store(out + (token * h.query_heads + head) * h.head_dim + d,
                div(load(s.sums + row * h.head_dim + d), total));
    }
}
