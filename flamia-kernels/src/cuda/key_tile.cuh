// A tile of keys as a warpgroup of 64 queries sees it: whole, in part, and entry by entry.
//
// Rows and keys are counted from the document's start; MASK is of tiles.cuh.
#pragma once

#include "fragment.cuh"
#include "tiles.cuh"

constexpr int TILE = 128;  // keys
constexpr int BLOCK = BLOCK_TOKENS;
constexpr u32 GROUPS = TILE / BLOCK;  // of 32 keys in a tile
constexpr int GROUP_ROWS = 64;        // query rows of a warpgroup
constexpr int WARP_ROWS = 16;

// The tiles of which every one of a warpgroup's rows sees every key.
__device__ inline Range tiles_without_mask(Range rows, int len, int window) {
    if (MASK == FULL) return {0, len / TILE};
    const int begin = MASK == WINDOW ? (max(0, rows.end - window) + TILE - 1) / TILE : 0;
    return {begin, (rows.begin + 1) / TILE};
}

// Those of a warpgroup.
__device__ inline Range group_rows(Range rows, u32 group) {
    const int begin = rows.begin + int(group) * GROUP_ROWS;
    return {begin, min(begin + GROUP_ROWS, rows.end)};
}

// Which key groups of a tile the rows of a warp see, in part or whole, as bits.
struct VisibleGroups {
    u32 partly = 0, wholly = 0;

    __device__ VisibleGroups(int first_row, int len, int tile, int window) {
        const int last_row = first_row + WARP_ROWS - 1;
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            const int begin = tile * TILE + 32 * int(g), end = begin + 32;
            const bool starts = MASK == FULL ? begin < len : begin <= last_row;
            const bool is_before = MASK == FULL ? end <= len : end <= first_row + 1;
            partly |= u32(starts && (MASK != WINDOW || end > first_row + 1 - window)) << g;
            wholly |= u32(is_before && (MASK != WINDOW || begin >= last_row + 1 - window)) << g;
        }
    }
};

// Replaces what a thread's rows, of which `row` is the first, must not see of some groups of a tile; by
// selection, so that NaN goes as well.
__device__ inline void replace_unseen(float (&s)[64], u32 groups, int row, int len, int tile, int window,
                                      float replacement) {
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++) {
        if (!(groups >> g & 1)) continue;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            // Counted from this thread's first column.
            const int origin = tile * TILE + 32 * int(g) + 2 * int(threadIdx.x % 4);
            const int end = (MASK == FULL ? len : row + int(8 * half) + 1) - origin;
            const int begin = end - window;
#pragma unroll
            for (u32 j = 0; j < GROUP_COLUMNS; j++) {
                const int column = 8 * (j / 2) + j % 2;
                const bool seen = column < end && (MASK != WINDOW || column >= begin);
                float& x = entry(s, g, half, j);
                x = seen ? x : replacement;
            }
        }
    }
}
