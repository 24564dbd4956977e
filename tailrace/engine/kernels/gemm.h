// Products of rows with a matrix, both of `element`, summed in fp32.
//
// Each output has one accumulator, to which the products of a word are added in the order of the inner dimension,
// whatever the number of rows: a row's results are the same bit for bit in every batch.
#pragma once

#include <utility>

#include "simd.h"
#include "threads.h"

// Rows, whose neighbouring values make words.
struct Rows {
    const element* data;
    long row;  // elements from a row to the next
};

// Columns in groups of 16: word p of the inner dimension of group g begins at data + p * word + g * group and holds the
// word of column 0, then of column 1, ….  A packed weight matrix [N, K] is [N / 16][K / PER_WORD][16][PER_WORD].
struct Columns {
    const element* data;
    long word, group;
    long ahead = 0;  // elements from what is read to what is fetched into the cache meanwhile; 0: the next groups

    static Columns packed(const element* data, long words) {
        return {data, PER_WORD * LANES, PER_WORD * LANES * words};
    }
};

// Destinations of sums. Their types decide how a tile begins and ends.
struct Store {
    float* data;
    long row;
    const float* bias = nullptr;

    floats start(long, long g) const { return bias ? load(bias + g * LANES) : zeros(); }
    template <int Z>
    void finish(long r, long g, const floats (&sum)[Z]) const {
        for (int z = 0; z < Z; z++) store(data + r * row + (g + z) * LANES, sum[z]);
    }
};

struct Add : Store {
    floats start(long r, long g) const { return load(data + r * row + g * LANES); }
};

// Even groups are gates, odd ones are up: silu(gate) * up.
struct Gated {
    element* data;
    long row;

    floats start(long, long) const { return zeros(); }
    template <int Z>
    void finish(long r, long g, const floats (&sum)[Z]) const {
        static_assert(Z % 2 == 0);
        for (int z = 0; z < Z; z += 2) {
            const floats limited = larger(all(-88.0f), sum[z]);
            const floats below = add(all(1.0f), exp(sub(zeros(), limited)));
            store(data + r * row + (g + z) / 2 * LANES, mul(div(sum[z], below), sum[z + 1]));
        }
    }
};

// R rows by Z groups, in registers; as many groups at once as there are registers for.
template <class Out, int R, int Z>
static void tile(Rows a, long first, Columns b, long group, long words, Out out) {
    floats sum[R][Z];
    for (int r = 0; r < R; r++)
        for (int z = 0; z < Z; z++) sum[r][z] = out.start(first + r, group + z);
    const long ahead = b.ahead ? b.ahead : Z * b.group;
    constexpr int AT_ONCE = groups_at_once(Z);
    for (int begin = 0; begin < Z; begin += AT_ONCE) {
        const element* left = a.data + first * a.row;
        const element* right = b.data + (group + begin) * b.group;
        for (long p = 0; p < words; p++, left += PER_WORD, right += b.word) {
            Words column[AT_ONCE];
            for (int z = 0; z < AT_ONCE; z++) {
                column[z] = load_words(right + z * b.group);
                _mm_prefetch((const char*)(right + z * b.group + ahead), _MM_HINT_T1);
            }
            for (int r = 0; r < R; r++) {
                int32_t word;
                std::memcpy(&word, left + r * a.row, sizeof word);
                const Words own = one_word(word);
                for (int z = 0; z < AT_ONCE; z++) sum[r][begin + z] = plus_dot(sum[r][begin + z], own, column[z]);
            }
        }
    }
    for (int r = 0; r < R; r++) out.finish(first + r, group, sum[r]);
}

template <class Out, int Z, int... R>
static auto tile_of(int rows, std::integer_sequence<int, R...>) {
    static constexpr void (*tiles[])(Rows, long, Columns, long, long, Out) = {tile<Out, R + 1, Z>...};
    return tiles[rows - 1];
}

// All rows by Z groups, in tiles of nearly equal height.
template <class Out, int Z>
static void strip(Rows a, long rows, Columns b, long group, long words, Out out) {
    const long tiles = (rows + most_rows(Z) - 1) / most_rows(Z);
    for (long i = 0; i < tiles; i++) {
        const Share part(rows, i, tiles);
        tile_of<Out, Z>(part.end - part.begin, std::make_integer_sequence<int, most_rows(Z)>{})(
            a, part.begin, b, group, words, out);
    }
}

// out = a · b for groups [begin, end) of columns.
template <class Out>
static void multiply(Rows a, long rows, Columns b, long begin, long end, long words, Out out) {
    long group = begin;
    if (rows <= most_rows(4))
        for (; group + 4 <= end; group += 4) strip<Out, 4>(a, rows, b, group, words, out);
    for (; group + 2 <= end; group += 2) strip<Out, 2>(a, rows, b, group, words, out);
    if constexpr (!std::is_same_v<Out, Gated>)
        if (group < end) strip<Out, 1>(a, rows, b, group, words, out);
}
