// A Llama, Qwen2 or Qwen3 decoder, or one TP rank's share of it, in half layers.
//
// A half layer adds what the ranks summed after the one before to the residual stream, and ends with this rank's share
// of the next sum: attention up to the output projection, or the MLP up to the down projection. Between halves the
// ranks exchange `partial`; a rank that is alone runs all halves in one call.
//
// The rows of a step go through a half in slabs. Within a slab, threads share the columns of each product, so that each
// weight is read once, and wait for each other at every `omp barrier`.

#include "decoder.h"

#include <omp.h>

#include <chrono>
#include <vector>

namespace {

// Charges the time since the last call to a section. Only the first thread keeps time.
class Clock {
  public:
    Clock(const Model& m) : nanoseconds(omp_get_thread_num() == 0 ? m.nanoseconds : nullptr), last(now()) {}
    void charge(Section section) {
        if (!nanoseconds) return;
        const int64_t time = now();
        nanoseconds[section] += time - last;
        last = time;
    }

  private:
    static int64_t now() {
        return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
    int64_t* nanoseconds;
    int64_t last;
};

float inverse_rms(const Model& m, __m512 squares, long size) {
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / (float)size + (float)m.norm_eps);
}

// residual += partial; normed = rms_norm(residual) · weight.
void add_and_norm(const Model& m, bf16* residual, const float* partial, const float* weight, bf16* normed) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < m.hidden; i += LANES) {
        store_bf16(residual + i, _mm512_add_ps(load_bf16(residual + i), _mm512_loadu_ps(partial + i)));
        const __m512 value = load_bf16(residual + i);
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    const __m512 scale = _mm512_set1_ps(inverse_rms(m, squares, m.hidden));
    for (long i = 0; i < m.hidden; i += LANES) {
        const __m512 scaled = _mm512_mul_ps(load_bf16(residual + i), scale);
        store_bf16(normed + i, _mm512_mul_ps(scaled, _mm512_loadu_ps(weight + i)));
    }
}

void norm_slab(const Model& m, const Step& s, long first, long rows, const float* weight, bf16* normed) {
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++) {
        const long at = (first + row) * m.hidden;
        add_and_norm(m, s.residual + at, s.partial + at, weight, normed + row * m.hidden);
    }
}

// Norm and rotary position embedding of one head, in place.
void rotate(const Model& m, float* x, const float* norm, long position) {
    const long half = m.head_dim / 2;
    if (norm) {
        __m512 squares = _mm512_setzero_ps();
        for (long d = 0; d < m.head_dim; d += LANES) {
            const __m512 values = _mm512_loadu_ps(x + d);
            squares = _mm512_fmadd_ps(values, values, squares);
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

void round_head(const Model& m, const float* x, bf16* to) {
    for (long d = 0; d < m.head_dim; d += LANES) store_bf16(to + d, _mm512_loadu_ps(x + d));
}

// Where the key and value of a row of the step belong.
struct Place {
    long block, offset;
    bool newest;  // of its sequence
};

std::vector<Place> places_of(const Model& m, const Step& s) {
    std::vector<Place> places;
    places.reserve(s.tokens);
    for (long c = 0; c < s.chunks; c++)
        for (long i = 0; i < s.lengths[c]; i++) {
            const long position = s.starts[c] + i;
            const int64_t block = s.tables[c * s.width + position / m.block_size];
            places.push_back({block, position % m.block_size, i + 1 == s.lengths[c]});
        }
    return places;
}

// Each slab's tiles of queries.
std::vector<std::vector<Queries>> tiles_of(const Model& m, const Step& s) {
    std::vector<std::vector<Queries>> slabs((s.tokens + SLAB - 1) / SLAB);
    const long most = tokens_per_tile(m.heads());
    long row = 0;
    for (long c = 0; c < s.chunks; c++)
        for (long done = 0; done < s.lengths[c];) {
            const long tokens = std::min({most, s.lengths[c] - done, SLAB - row % SLAB});
            slabs[row / SLAB].push_back({row % SLAB, tokens, s.starts[c] + done, s.tables + c * s.width});
            done += tokens;
            row += tokens;
        }
    return slabs;
}

// region: of a (block, KV head), [head_dim / 2][block_size][2].
void write_key(const Model& m, bf16* region, const Place& place, const bf16* key) {
    for (long d = 0; d < m.head_dim; d += 2) std::memcpy(region + d * m.block_size + 2 * place.offset, key + d, 4);
}

// Each pair of a key goes to another line: fetch them before they are written.
void fetch_key(const Model& m, const bf16* region, const Place& place) {
    for (long d = 0; d < m.head_dim; d += 2) __builtin_prefetch(region + d * m.block_size + 2 * place.offset, 1);
}

// region: of a (block, KV head), [block_size / 2][head_dim][2]. The neighbour of a sequence's newest value is read with
// it, at weight zero: it must be finite, whatever was left there.
void write_value(const Model& m, bf16* region, const Place& place, const bf16* value) {
    bf16* pairs = region + place.offset / 2 * m.head_dim * 2;
    const bool alone = place.newest && place.offset % 2 == 0;
    for (long d = 0; d < m.head_dim; d++) pairs[2 * d + place.offset % 2] = value[d];
    for (long d = 0; alone && d < m.head_dim; d++) pairs[2 * d + 1] = 0;
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
        bf16 rounded[MOST_HEAD_DIM];
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

// What all halves of a call share.
struct Run {
    const Model& m;
    const Step& s;
    Workspace w;
    std::vector<Place> places;
    std::vector<std::vector<Queries>> tiles;

    Run(const Model& m, const Step& s)
        : m(m), s(s), w(m, m.workspace), places(places_of(m, s)), tiles(tiles_of(m, s)) {}

    void attend_slab(const Layer& layer, const std::vector<Queries>& queries) const {
        const Heads h = m.heads();
        const Scratch scratch(h, w.scratch + omp_get_thread_num() * w.scratch_bytes);
        const long count = queries.size(), units = count * h.kv_heads;
        const long together = std::max(1L, units / (16 * omp_get_num_threads()));
#pragma omp for schedule(dynamic, together)
        for (long i = 0; i < units; i++) {
            const long kv_head = i / count, after = std::min(i + 1, units - 1);
            const bf16* q = w.queries + kv_head * SLAB * h.group() * h.head_dim;
            const bf16* next = region_of(h, layer.keys, queries[after % count], 0, after / count);
            attend(h, queries[i % count], kv_head, q, layer.keys, layer.values, next, scratch, w.attended);
        }
    }

    void attention(const Layer& layer, long slab, Clock& clock) const {
        const long first = slab * SLAB, rows = std::min(SLAB, s.tokens - first), attended = m.attended();
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        norm_slab(m, s, first, rows, layer.input_norm, w.normed);
        multiply_share({w.normed, m.hidden}, rows, layer.qkv, m.qkv() / LANES, m.hidden / 2,
            Store{w.qkv, m.qkv(), layer.qkv_bias}, thread, threads);
#pragma omp barrier
        clock.charge(QKV);
        const Placing placing{m, layer, w};
        const long heads = placing.heads();
#pragma omp for schedule(static)
        for (long i = 0; i < rows * heads; i++) {
            const long row = first + i / heads;
            if (i % heads == 0) placing.fetch(places[row]);
            placing.place_head(i / heads, i % heads, s.positions[row], places[row]);
        }
        attend_slab(layer, tiles[slab]);
        clock.charge(ATTENTION);
        multiply_share({w.attended, attended}, rows, layer.out, m.hidden / LANES, attended / 2,
            Store{s.partial + first * m.hidden, m.hidden, layer.out_bias}, thread, threads);
#pragma omp barrier
        clock.charge(OUT);
    }

    void mlp(const Layer& layer, long slab, Clock& clock) const {
        const long first = slab * SLAB, rows = std::min(SLAB, s.tokens - first);
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        norm_slab(m, s, first, rows, layer.post_norm, w.normed);
        multiply_share({w.normed, m.hidden}, rows, layer.gate_up, 2 * m.intermediate / LANES, m.hidden / 2,
            Gated{w.gated, m.intermediate}, thread, threads);
#pragma omp barrier
        multiply_share({w.gated, m.intermediate}, rows, layer.down, m.hidden / LANES, m.intermediate / 2,
            Store{s.partial + first * m.hidden, m.hidden}, thread, threads);
#pragma omp barrier
        clock.charge(MLP);
    }
};

}  // namespace

extern "C" {

int64_t decoder_workspace_bytes(const Model* m) { return Workspace(*m, nullptr).bytes; }

// residual = 0; partial = the embeddings of the tokens of this shard, 0 for all others.
void decoder_embed(const Model* model, const Step* step) {
    const Model& m = *model;
    const Step& s = *step;
#pragma omp parallel num_threads(m.threads)
    {
        Clock clock(m);
#pragma omp for schedule(static)
        for (long t = 0; t < s.tokens; t++) {
            const long token = s.token_ids[t] - m.first_token;
            float* partial = s.partial + t * m.hidden;
            std::fill_n(s.residual + t * m.hidden, m.hidden, 0);
            if (token < 0 || token >= m.vocabulary) {
                std::fill_n(partial, m.hidden, 0.0f);
                continue;
            }
            const bf16* pairs = m.embedding + (token / LANES * m.hidden / 2 * LANES + token % LANES) * 2;
            for (long h = 0; h < m.hidden; h++) partial[h] = to_float(pairs[h / 2 * 2 * LANES + h % 2]);
        }
        clock.charge(EMBED);
    }
}

// Half layers begin … begin + count - 1: half 2 i is layer i's attention, half 2 i + 1 its MLP.
void decoder_halves(const Model* model, const Step* step, int64_t begin, int64_t count) {
    const Run run(*model, *step);
#pragma omp parallel num_threads(model->threads)
    {
        Clock clock(*model);
        for (long half = begin; half < begin + count; half++)
            for (size_t slab = 0; slab < run.tiles.size(); slab++) {
                const Layer& layer = model->layer[half / 2];
                if (half % 2)
                    run.mlp(layer, slab, clock);
                else
                    run.attention(layer, slab, clock);
            }
    }
}

// Final norm and logits of the drawn rows.
void decoder_head(const Model* model, const Step* step) {
    const Model& m = *model;
    const Step& s = *step;
    const Workspace w(m, m.workspace);
#pragma omp parallel num_threads(m.threads)
    {
        Clock clock(m);
        for (long first = 0; first < s.drawn; first += SLAB) {
            const long rows = std::min(SLAB, s.drawn - first);
#pragma omp for schedule(static)
            for (long row = 0; row < rows; row++) {
                const long at = s.drawn_rows[first + row] * m.hidden;
                add_and_norm(m, s.residual + at, s.partial + at, m.norm, w.normed + row * m.hidden);
            }
            multiply_share({w.normed, m.hidden}, rows, m.head, m.vocabulary / LANES, m.hidden / 2,
                Store{s.logits + first * m.vocabulary, m.vocabulary}, omp_get_thread_num(), omp_get_num_threads());
#pragma omp barrier
        }
        clock.charge(HEAD);
    }
}
}
