// From the fused projection to attention: norms and rotates heads, and writes keys and values into the cache.
#pragma once

#include "decoder.h"

// The place of a row's key and value in the cache.
struct Place {
    long block, offset;
    bool newest;  // whether the row is the newest of its sequence so far
};

static inline float inverse_rms(const Model& m, floats squares, long size) {
    return 1.0f / std::sqrt(total(squares) / (float)size + (float)m.norm_eps);
}

// Norm and rotary position embedding of one head, in place.
static inline void rotate(const Model& m, float* x, const float* norm, long position) {
    const long half = m.head_dim / 2;
    if (norm) {
        floats squares = zeros();
        for (long d = 0; d < m.head_dim; d += LANES) {
            const floats values = load(x + d);
            squares = plus_product(values, values, squares);
        }
        const float scale = inverse_rms(m, squares, m.head_dim);
        for (long d = 0; d < m.head_dim; d++) x[d] = x[d] * scale * norm[d];
    }
    const float *cosine = m.cosines + position * half, *sine = m.sines + position * half;
    for (long d = 0; d < half; d++) {
        const float low = x[d], high = x[d + half];
        x[d] = low * cosine[d] - high * sine[d];
        x[d + half] = high * cosine[d] + low * sine[d];
    }
}

static inline void round_head(const Model& m, const float* x, element* to) {
    for (long d = 0; d < m.head_dim; d += LANES) store(to + d, load(x + d));
}

// region: of a (block, KV head), words [head_dim / PER_WORD][block_size].
static inline void write_key(const Model& m, element* region, const Place& place, const element* key) {
    for (long d = 0; d < m.head_dim; d += PER_WORD)
        std::memcpy(region + d * m.block_size + PER_WORD * place.offset, key + d, sizeof(uint32_t));
}

// Each word of a key goes to another line: fetch them before they are written.
static inline void fetch_key(const Model& m, const element* region, const Place& place) {
    for (long d = 0; d < m.head_dim; d += PER_WORD)
        __builtin_prefetch(region + d * m.block_size + PER_WORD * place.offset, 1);
}

// region: of a (block, KV head), words [block_size / PER_WORD][head_dim]. The neighbour of a sequence's newest value is
// read with it where they share a word, at weight zero: it must be finite, whatever was left there.
static inline void write_value(const Model& m, element* region, const Place& place, const element* value) {
    const long member = place.offset % PER_WORD;
    element* words = region + (place.offset - member) * m.head_dim;
    const bool alone = place.newest && member + 1 < PER_WORD;
    for (long d = 0; d < m.head_dim; d++) words[PER_WORD * d + member] = value[d];
    for (long d = 0; alone && d < m.head_dim; d++) words[PER_WORD * d + 1] = 0;
}

// The heads of a slab's rows on their way from the fused projection to attention.
struct Placing {
    const Model& m;
    const Layer& layer;
    const Workspace& w;

    long heads() const { return m.query_heads + 2 * m.kv_heads; }
    long region(const Place& place, long kv_head) const {
        return (place.block * m.kv_heads + kv_head) * m.heads().region();
    }

    void fetch(const Place& place) const {
        for (long i = 0; i < m.kv_heads; i++) fetch_key(m, layer.keys + region(place, i), place);
    }

    // A query goes to its buffer, a key or a value to the cache.
    void place_head(long row, long head, long position, const Place& place) const {
        const long first_key = m.query_heads, first_value = m.query_heads + m.kv_heads, group = m.heads().group();
        float* x = w.qkv + row * m.qkv() + head * m.head_dim;
        element rounded[MOST_HEAD_DIM];
        if (head < first_key) {
            rotate(m, x, layer.q_norm, position);
            round_head(m, x, w.queries + ((head / group * SLAB + row) * group + head % group) * m.head_dim);
        } else if (head < first_value) {
            rotate(m, x, layer.k_norm, position);
            round_head(m, x, rounded);
            write_key(m, layer.keys + region(place, head - first_key), place, rounded);
        } else {
            round_head(m, x, rounded);
            write_value(m, layer.values + region(place, head - first_value), place, rounded);
        }
    }
};
