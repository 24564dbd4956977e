// The structs that Python passes; `tailrace/engine/decoder/cpu.py` mirrors them.
#pragma once

#include "attention.h"

// Packed matrices, the cache and the residual stream are of `element`, all else is fp32. Absent parts are null.
struct Layer {
    const float *input_norm, *post_norm, *q_norm, *k_norm, *qkv_bias, *out_bias;
    const element *qkv, *out, *gate_up, *down;
    element *keys, *values;  // this layer's part of the cache
};

struct Model {
    int64_t layers, hidden, intermediate, query_heads, kv_heads, head_dim, block_size, vocabulary;
    int64_t first_token;  // of this shard of the vocabulary
    double norm_eps;
    const Layer* layer;
    const element *embedding, *head;
    const float *norm, *cosines, *sines;  // tables: [positions, head_dim / 2]
    int64_t* nanoseconds;                 // by Section
    char* workspace;
    int64_t threads;
    // Sums `data` over the ranks; -1, or the rank that did not come. Null where the caller does that between stages.
    int (*all_reduce)(void* exchange, float* data, int64_t count);
    void* exchange;

    Heads heads() const { return {query_heads, kv_heads, head_dim, block_size}; }
    long attended() const { return query_heads * head_dim; }
    long qkv() const { return (query_heads + 2 * kv_heads) * head_dim; }
};

// T packed tokens in C chunks, as in Batch.
struct Step {
    int64_t tokens, chunks, width, drawn;
    const int64_t *token_ids, *positions, *starts, *lengths, *tables, *drawn_rows;
    element* residual;  // [T, hidden]
    float* partial;  // [T, hidden], this rank's share of the sum to be added to `residual`
    float* logits;   // [drawn, vocabulary]
};

enum Section { EMBED, QKV, ATTENTION, OUT, MLP, HEAD, ALL_REDUCE };

// Rows that pass through a half layer together: few enough for their activations in bf16 to stay in the level 2 cache.
constexpr long SLAB = 192;

// The buffers of a slab, and each thread's scratch.
struct Workspace {
    element *normed, *queries, *attended, *gated;
    float* qkv;
    char* scratch;
    long scratch_bytes, bytes;

    Workspace(const Model& m, char* memory) {
        char* next = memory;
        const auto take = [&](long size) {
            char* taken = next;
            next += (size + 63) / 64 * 64;
            return taken;
        };
        normed = (element*)take(SLAB * m.hidden * sizeof(element));
        queries = (element*)take(SLAB * m.attended() * sizeof(element));
        attended = (element*)take(SLAB * m.attended() * sizeof(element));
        gated = (element*)take(SLAB * m.intermediate * sizeof(element));
        qkv = (float*)take(SLAB * m.qkv() * sizeof(float));
        scratch_bytes = (Scratch::bytes(m.heads()) + 63) / 64 * 64;
        scratch = take(scratch_bytes * m.threads);
        bytes = next - memory;
    }
};
