// The backward pass where the rows of accumulators are keys: P and dS of a tile of 64 queries, as E4M3
// codes, and the references that dV and dK are accumulated relative to. cpu/hopper/keys.rs defines the
// numbers.
//
// A warp's 16 keys lie in one block of 32. Groups of a fragment's columns are the two query blocks.
#pragma once

#include "fragment.cuh"
#include "running_reference.cuh"
#include "tiles.cuh"

constexpr int QUERIES = 64;  // of a tile
constexpr u32 BLOCKS = QUERIES / BLOCK_TOKENS;
constexpr u32 ALL_BLOCKS = (1 << BLOCKS) - 1;

// Scores, probabilities, or their gradients: 64 keys of a warpgroup by the queries of a tile.
using Tile = float[QUERIES / 2];
using TileCodes = u32[BLOCKS][4];

// What a tile of queries brings along, in shared memory. Aligned for bulk copies.
struct alignas(16) QueryTable {
    float lse2[QUERIES];
    float row_sums[QUERIES];  // D
    float q_scale[BLOCKS];
    float do_scale[BLOCKS];
    float do_fold[BLOCKS];  // exponents of dO
    int query;              // the first
    u32 flags;
};

// The values of a table of rows for this thread's columns j and j + 1 of a query block.
__device__ inline float2 column_pair(const float (&table)[QUERIES], u32 g, u32 j) {
    return *reinterpret_cast<const float2*>(&table[32 * g + 4 * j + 2 * (threadIdx.x % 4)]);
}

// What is added to scores of a thread's columns of a query block.
using BlockAddends = float2[GROUP_COLUMNS / 2];

// S of a query block becomes P, times the power of two that is in the addends. With the scales of a tile in
// `multiplier`, the scores are the forward's to the bit.
__device__ inline void probabilities(Tile& s, u32 g, float multiplier, const BlockAddends& addends) {
#pragma unroll
    for (u32 j = 0; j < GROUP_COLUMNS; j += 2) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float &a = entry(s, g, half, j), &b = entry(s, g, half, j + 1);
            a = exp2_approximate(fmaf(a, multiplier, addends[j / 2].x));
            b = exp2_approximate(fmaf(b, multiplier, addends[j / 2].y));
        }
    }
}

// 2^exponent P = 2^(score + addend).
__device__ inline void probability_addends(const QueryTable& table, u32 g, float exponent, BlockAddends& addends) {
#pragma unroll
    for (u32 j = 0; j < GROUP_COLUMNS; j += 2) {
        const float2 lse2 = column_pair(table.lse2, g, j);
        addends[j / 2] = {exponent - lse2.x, exponent - lse2.y};
    }
}

// What scores of a tile are multiplied with. `scale` is the softmax scale times log2(e).
__device__ inline void score_scales(const QueryTable& table, float scale, float k_scale, float (&multiplier)[BLOCKS]) {
#pragma unroll
    for (u32 g = 0; g < BLOCKS; g++) multiplier[g] = fmaxf(scale * table.q_scale[g] * k_scale, SMALLEST_NORMAL);
}

// What turns dP of a tile into dS, for reading while the tensor core is not yet given more to do: shared memory
// is slow to answer beside it.
struct GradientStart {
    float scale[BLOCKS];                          // of dP
    float2 row_sums[BLOCKS][GROUP_COLUMNS / 2];  // D of this thread's columns

    __device__ GradientStart(const QueryTable& table, float v_scale) {
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++) {
            scale[g] = table.do_scale[g] * v_scale;
#pragma unroll
            for (u32 j = 0; j < GROUP_COLUMNS; j += 2) row_sums[g][j / 2] = column_pair(table.row_sums, g, j);
        }
    }
};

// dP becomes dS = P (dP - D), or as many times that as `p` is of P.
__device__ inline void score_gradients(Tile& dp, const Tile& p, const GradientStart& start) {
#pragma unroll
    for (u32 g = 0; g < BLOCKS; g++) {
#pragma unroll
        for (u32 j = 0; j < GROUP_COLUMNS; j += 2) {
            const float2 d = start.row_sums[g][j / 2];
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float &a = entry(dp, g, half, j), &b = entry(dp, g, half, j + 1);
                a = entry(p, g, half, j) * fmaf(a, start.scale[g], -d.x);
                b = entry(p, g, half, j + 1) * fmaf(b, start.scale[g], -d.y);
            }
        }
    }
}

// Keys of a document against a tile of its queries, of which some must not see some.
struct KeyMask {
    int key;    // this thread's first; the other one is 8 further on
    int query;  // the tile's first
    int len;
    int window;

    // Zero, of the sign that no probability has, for what is not seen; a selection, so that NaN goes as well.
    __device__ void apply(Tile& x) const {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            // Counted from this thread's first column.
            const int origin = query + 2 * int(threadIdx.x % 4);
            const int own = key + 8 * int(half), left = len - own;
            const int begin = MASK == FULL ? (left > 0 ? 0 : QUERIES) : own - origin;
            const int end = own + (MASK == WINDOW ? min(left, window) : left) - origin;
#pragma unroll
            for (u32 g = 0; g < BLOCKS; g++)
#pragma unroll
                for (u32 j = 0; j < GROUP_COLUMNS; j++) {
                    const int column = 32 * int(g) + 8 * int(j / 2) + int(j % 2);
                    float& value = entry(x, g, half, j);
                    value = column >= begin && column < end ? value : -0.0f;
                }
        }
    }
    static __device__ bool was_seen(float x) { return __float_as_uint(x) != 0x80000000; }
};

// What dV of a warp's keys is accumulated relative to, and with it P: the largest exponent of dO that they
// met. P is at most 1, so that P 2^(8 + exponent of dO - reference) stays in range.
struct ValueReference {
    static constexpr int SHIFT = 8;

    float reference = MIN_EXPONENT;

    // Takes query blocks into account, given as bits. The factor for what has been accumulated, exact; 1 if
    // the reference stays. Blocks of zeros or with a NaN have the smallest exponent, and change nothing.
    __device__ float update(const QueryTable& table, u32 blocks) {
        float largest = reference;
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++)
            if (blocks >> g & 1) largest = fmaxf(largest, table.do_fold[g]);
        const float rescale = exp2_approximate(reference - largest);
        reference = largest;
        return rescale;
    }

    // The powers of two on P of each query block. Under the smallest code they say nothing of dV any more,
    // and have to leave dS in FP32's range.
    __device__ void exponents(const QueryTable& table, float (&exponents)[BLOCKS]) const {
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++) exponents[g] = fmaxf(SHIFT + table.do_fold[g] - reference, -60);
    }

    // What the accumulated rows are multiplied with in the end.
    __device__ float up() const { return exp2_approximate(reference - SHIFT); }
};

// The largest magnitudes of a thread's two rows in each query block.
using BlockMaxima = float[BLOCKS][2];

__device__ inline void block_maxima(const Tile& x, BlockMaxima& amax) {
#pragma unroll
    for (u32 g = 0; g < BLOCKS; g++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            amax[g][half] = 0;
#pragma unroll
            for (u32 j = 0; j < GROUP_COLUMNS; j++) amax[g][half] = fmaxf(amax[g][half], fabsf(entry(x, g, half, j)));
        }
}

// What dK of a thread's two keys is accumulated relative to.
struct KeyReferences {
    RunningReference references[2];

    // dS of a tile, times 2^exponents, becomes codes of dS times the scale of Q, relative to the references,
    // which move first and take dK along.
    template <u32 COUNT>
    __device__ void codes(const Tile& ds, const BlockMaxima& maxima, const QueryTable& table,
                          const float (&exponents)[BLOCKS], int hysteresis, float (&dk)[COUNT], TileCodes& codes) {
        float scale[BLOCKS], amax[2] = {0, 0};
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++) {
            scale[g] = table.q_scale[g] * exp2_approximate(-exponents[g]);
#pragma unroll
            for (u32 half = 0; half < 2; half++) amax[half] = fmaxf(amax[half], maxima[g][half] * scale[g]);
        }
        float down[2], rescale[2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            rescale[half] = references[half].update(quad_max(amax[half]), hysteresis);
            down[half] = references[half].down();
        }
        // A vote over rows gates code, never numbers.
        if (__any_sync(FULL_WARP, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) dk[i] *= rescale[i / 2 % 2];
        }
        Tile scaled;
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++) {
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                // One multiplication for both. Finite, since 0 times infinity would be NaN.
                const float factor = fminf(scale[g] * down[half], 0x1p127f);
#pragma unroll
                for (u32 j = 0; j < GROUP_COLUMNS; j++) entry(scaled, g, half, j) = entry(ds, g, half, j) * factor;
            }
            group_codes(scaled, g, codes[g]);
        }
    }

    __device__ float up(u32 half) const { return references[half].up(); }
};
