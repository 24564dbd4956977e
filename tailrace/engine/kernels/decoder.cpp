// A Llama, Qwen2 or Qwen3 decoder, or one TP rank's share of it, in half layers.
//
// A half layer adds what the ranks summed after the one before to the residual stream, and ends with this rank's share
// of the next sum: attention up to the output projection, or the MLP up to the down projection. Between halves the
// ranks exchange `partial`; a rank that is alone runs all in one call.
//
// The rows of a step go through a half in slabs. Within a slab, threads share the columns of each product, so that each
// weight is read once, and wait for each other at the end of each product.

#include "decoder.h"

#include <omp.h>

#include <chrono>
#include <vector>

#include "placing.h"
#include "threads.h"
#include "tiles.h"

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

// residual += partial; normed = rms_norm(residual) · weight.
void add_and_norm(const Model& m, element* residual, const float* partial, const float* weight, element* normed) {
    floats squares = zeros();
    for (long i = 0; i < m.hidden; i += LANES) {
        store(residual + i, add(load(residual + i), load(partial + i)));
        const floats value = load(residual + i);
        squares = plus_product(value, value, squares);
    }
    const floats scale = all(inverse_rms(m, squares, m.hidden));
    for (long i = 0; i < m.hidden; i += LANES)
        store(normed + i, mul(mul(load(residual + i), scale), load(weight + i)));
}

// The value after the last row of a slab is written with the next slab, so that row is its sequence's newest till then.
std::vector<Place> places_of(const Model& m, const Step& s) {
    std::vector<Place> places;
    places.reserve(s.tokens);
    for (long c = 0; c < s.chunks; c++)
        for (long i = 0; i < s.lengths[c]; i++) {
            const long position = s.starts[c] + i;
            const int64_t block = s.tables[c * s.width + position / m.block_size];
            const bool newest = i + 1 == s.lengths[c] || (places.size() + 1) % SLAB == 0;
            places.push_back({block, position % m.block_size, newest});
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

// The state that the threads of a call share.
struct Run {
    const Model& m;
    const Step& s;
    Workspace w;
    std::vector<Place> places;
    std::vector<std::vector<Queries>> tiles;
    Barrier barrier;
    int missing = -1;  // the rank that did not come to an exchange

    Run(const Model& m, const Step& s)
        : m(m), s(s), w(m, m.workspace), places(places_of(m, s)), tiles(tiles_of(m, s)) {}
};

// One thread's work.
class Worker {
    static_assert(SLAB % (2 * TILE) == 0);  // `multiply_tiles` reads so many rows

  public:
    Worker(Run& run)
        : run(run), m(run.m), s(run.s), w(run.w), clock(m), thread(omp_get_thread_num()),
          threads(omp_get_num_threads()) {}

    // residual = 0; partial = the embeddings of the tokens of this shard, 0 for all others.
    void embed() {
        const Share mine(s.tokens, thread, threads);
        std::fill(s.residual + mine.begin * m.hidden, s.residual + mine.end * m.hidden, 0);
        std::fill(s.partial + mine.begin * m.hidden, s.partial + mine.end * m.hidden, 0.0f);
        for (long t = mine.begin; t < mine.end; t++) {
            const long token = s.token_ids[t] - m.first_token;
            if (token < 0 || token >= m.vocabulary) continue;
            const element* words = m.embedding + token / LANES * LANES * m.hidden + token % LANES * PER_WORD;
            float* partial = s.partial + t * m.hidden;
            for (long h = 0; h < m.hidden; h++)
                partial[h] = to_float(words[h / PER_WORD * PER_WORD * LANES + h % PER_WORD]);
        }
        meet(EMBED);
    }

    void attention(const Layer& layer) {
        for (size_t slab = 0; slab < run.tiles.size(); slab++) {
            const long first = slab * SLAB, rows = std::min(SLAB, s.tokens - first);
            norm(first, rows, layer.input_norm);
            product({w.normed, m.hidden}, rows, layer.qkv, m.qkv(), m.hidden, Store{w.qkv, m.qkv(), layer.qkv_bias});
            meet(QKV);
            place(layer, first, rows);
            meet(ATTENTION);
            attend_tiles(layer, run.tiles[slab]);
            meet(ATTENTION);
            product({w.attended, m.attended()}, rows, layer.out, m.hidden, m.attended(),
                Store{s.partial + first * m.hidden, m.hidden, layer.out_bias});
            meet(OUT);
        }
    }

    void mlp(const Layer& layer) {
        for (long first = 0; first < s.tokens; first += SLAB) {
            const long rows = std::min(SLAB, s.tokens - first);
            norm(first, rows, layer.post_norm);
            product({w.normed, m.hidden}, rows, layer.gate_up, 2 * m.intermediate, m.hidden,
                Gated{w.gated, m.intermediate});
            meet(MLP);
            product({w.gated, m.intermediate}, rows, layer.down, m.hidden, m.intermediate,
                Store{s.partial + first * m.hidden, m.hidden});
            meet(MLP);
        }
    }

    // Final norm and logits of the drawn rows.
    void head() {
        for (long first = 0; first < s.drawn; first += SLAB) {
            const long rows = std::min(SLAB, s.drawn - first);
            const Share mine(rows, thread, threads);
            for (long row = mine.begin; row < mine.end; row++) norm_row(s.drawn_rows[first + row], row, m.norm);
            run.barrier.wait(threads);
            product({w.normed, m.hidden}, rows, m.head, m.vocabulary, m.hidden,
                Store{s.logits + first * m.vocabulary, m.vocabulary});
            meet(HEAD);
        }
    }

    // partial = its sum over the ranks; false if one of them did not come.
    bool exchange() {
        if (thread == 0) run.missing = m.all_reduce(m.exchange, s.partial, s.tokens * m.hidden);
        meet(ALL_REDUCE);
        return run.missing < 0;
    }

  private:
    Run& run;
    const Model& m;
    const Step& s;
    const Workspace& w;
    Clock clock;
    const int thread, threads;

    // Waits until all threads have come here; the time since the last meeting is the section's.
    void meet(Section section) {
        run.barrier.wait(threads);
        clock.charge(section);
    }

    // This thread's columns of rows · packed matrix [columns, inner].
    template <class Out>
    void product(Rows a, long rows, const element* packed, long columns, long inner, Out out) const {
        multiply_share(a, rows, packed, columns / LANES, inner / PER_WORD, out, thread, threads);
    }

    void norm_row(long from, long to, const float* weight) const {
        add_and_norm(m, s.residual + from * m.hidden, s.partial + from * m.hidden, weight, w.normed + to * m.hidden);
    }

    void norm(long first, long rows, const float* weight) {
        const Share mine(rows, thread, threads);
        for (long row = mine.begin; row < mine.end; row++) norm_row(first + row, row, weight);
        run.barrier.wait(threads);
    }

    void place(const Layer& layer, long first, long rows) const {
        const Placing placing{m, layer, w};
        const long heads = placing.heads();
        const Share mine(rows * heads, thread, threads);
        for (long i = mine.begin; i < mine.end; i++) {
            const long row = first + i / heads;
            if (i % heads == 0) placing.fetch(run.places[row]);
            placing.place_head(i / heads, i % heads, s.positions[row], run.places[row]);
        }
    }

    // Threads take tiles as they come free, several at a time where there are many: a tile's keys are fetched while
    // the one before it is computed.
    void attend_tiles(const Layer& layer, const std::vector<Queries>& queries) const {
        const Heads h = m.heads();
        const Scratch scratch(h, w.scratch + thread * w.scratch_bytes);
        const long count = queries.size(), tiles = count * h.kv_heads;
        const long together = std::max(1L, tiles / (16 * threads));
#pragma omp for schedule(dynamic, together) nowait
        for (long i = 0; i < tiles; i++) {
            const long kv_head = i / count, after = std::min(i + 1, tiles - 1);
            const element* q = w.queries + kv_head * SLAB * h.group() * h.head_dim;
            const element* next = region_of(h, layer.keys, queries[after % count], 0, after / count);
            attend(h, queries[i % count], kv_head, q, layer.keys, layer.values, next, scratch, w.attended);
        }
    }
};

}  // namespace

extern "C" {

// A weight of `groups` times 16 rows of `words` words, in the order of `Columns::packed`: group g goes to
// `to + g * stride`, at a multiple of 64 bytes.
void decoder_pack(const uint32_t* weight, uint32_t* to, int64_t groups, int64_t words, int64_t stride, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t g = 0; g < groups; g++) columns_to_lines(weight + g * LANES * words, words, to + g * stride);
        _mm_sfence();
    }
}

int64_t decoder_workspace_bytes(const Model* model) { return Workspace(*model, nullptr).bytes; }

// Stages begin … end - 1. Stage 0 embeds, stages 2 i + 1 and 2 i + 2 are the halves of layer i, and the last, stage
// 2 layers + 1, makes the logits. Between stages, `partial` is to be summed over the ranks. Returns -1, or the rank that
// did not come to an exchange.
int decoder_run(const Model* model, const Step* step, int64_t begin, int64_t end) {
    Run run(*model, *step);
#pragma omp parallel num_threads(model->threads)
    {
        const Tiles tiles;
        Worker worker(run);
        for (long stage = begin; stage < end; stage++) {
            const Layer& layer = model->layer[std::max(0L, stage - 1) / 2];
            if (stage == 0)
                worker.embed();
            else if (stage > 2 * model->layers)
                worker.head();
            else if (stage % 2)
                worker.attention(layer);
            else
                worker.mlp(layer);
            if (model->all_reduce && stage + 1 < end && !worker.exchange()) break;
        }
    }
    return run.missing;
}
}
