// The products of gemm.h with packed bf16 matrices on a CPU with AMX, which multiplies tiles of 16 rows and 16 columns.
//
// A product of two tiles adds 16 words to each sum, in their order, and no row of a tile changes another. So here, too,
// a row's results are the same bit for bit in every batch. Other CPUs round differently.
#pragma once

#include "gemm.h"

constexpr int TILE = 16;  // rows, columns, and words of the inner dimension

#if defined(__AMX_BF16__) && !defined(IN_FP32)
#define HAS_TILES

#include <sys/syscall.h>
#include <unistd.h>

// Whether the system lets this process use tiles. It has to be asked once.
static inline bool may_use_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool may = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return may;
}

// Tiles of this thread, all of full size, while this object lives.
class Tiles {
  public:
    Tiles() {
        if (!may_use_tiles()) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        std::fill_n(config.bytes, 8, 4 * TILE);
        std::fill_n(config.rows, 8, TILE);
        _tile_loadconfig(&config);
    }
    ~Tiles() {
        if (may_use_tiles()) _tile_release();
    }
    Tiles(const Tiles&) = delete;
};

// 32 rows, or 16, by two groups.
template <class Out, bool WIDE>
static void two_groups(Rows a, long first, long rows, const element* b, long group, long words, Out out) {
    const element* left = a.data + first * a.row;
    const element* right = b + group * 2 * LANES * words;
    const long stride = a.row * sizeof(element), next = 2 * LANES * words;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (WIDE) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long p = 0; p < words; p += TILE, left += 2 * TILE, right += 2 * LANES * TILE) {
        _tile_loadd(4, left, stride);
        _tile_loadd(6, right, 4 * LANES);
        _tile_loadd(7, right + next, 4 * LANES);
        if (first == 0)  // what comes next is fetched once
            for (long line = 0; line < TILE; line++) {
                _mm_prefetch((const char*)(right + 2 * next + line * 2 * LANES), _MM_HINT_T1);
                _mm_prefetch((const char*)(right + 3 * next + line * 2 * LANES), _MM_HINT_T1);
            }
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (WIDE) {
            _tile_loadd(5, left + TILE * a.row, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    alignas(64) float sums[2 * TILE][2 * LANES];
    _tile_stored(0, &sums[0][0], sizeof sums[0]);
    _tile_stored(1, &sums[0][LANES], sizeof sums[0]);
    if constexpr (WIDE) {
        _tile_stored(2, &sums[TILE][0], sizeof sums[0]);
        _tile_stored(3, &sums[TILE][LANES], sizeof sums[0]);
    }
    for (long r = 0; r < rows; r++) {
        const floats sum[2] = {add(out.start(first + r, group), load(&sums[r][0])),
            add(out.start(first + r, group + 1), load(&sums[r][LANES]))};
        out.finish(first + r, group, sum);
    }
}

// out = a · b for groups [begin, end) of a packed matrix, an even number of them. `words` is a multiple of 16. Rows
// are read up to the next multiple of 32, whatever is there.
template <class Out>
static void multiply_tiles(Rows a, long rows, const element* b, long begin, long end, long words, Out out) {
    for (long group = begin; group < end; group += 2)
        for (long first = 0; first < rows; first += 2 * TILE) {
            const long count = std::min(rows - first, 2L * TILE);
            if (count > TILE)
                two_groups<Out, true>(a, first, count, b, group, words, out);
            else
                two_groups<Out, false>(a, first, count, b, group, words, out);
        }
}

#else

// Without AMX, and in fp32, there are no tiles.
struct Tiles {};

#endif

// One thread's part of rows · packed matrix [16 * groups, PER_WORD * words]. See `multiply_tiles` about the memory of
// `a`.
template <class Out>
static void multiply_share(
    Rows a, long rows, const element* packed, long groups, long words, Out out, int thread, int threads) {
    const Share twos(groups / 2, thread, threads);  // in twos, so that a gate and its up stay together
    const long end = thread + 1 == threads ? groups : 2 * twos.end;
    long begin = 2 * twos.begin;
#ifdef HAS_TILES
    if (may_use_tiles() && words % TILE == 0) {
        multiply_tiles<Out>(a, rows, packed, begin, 2 * twos.end, words, out);
        begin = 2 * twos.end;
    }
#endif
    multiply<Out>(a, rows, Columns::packed(packed, words), begin, end, words, out);
}
