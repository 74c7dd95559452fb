// The online softmax of the `hopper` profile on accumulator fragments; cpu/hopper/forward.rs defines
// the numbers.
//
// A thread holds two rows of a 64 x 128 fragment of scores, 8 columns of each 32-key group: row
// `half`, column j of group g is score(s, g, half, j). The four threads of a quad share their rows.
#pragma once

#include "e4m3.cuh"
#include "prim_sm90.cuh"

constexpr u32 GROUPS = 4;         // of 32 keys in a tile
constexpr u32 GROUP_COLUMNS = 8;  // that a thread holds of a row
constexpr u32 FULL_WARP = 0xffffffff;

// The reference of a row that has seen no key. Finite, so that -inf scores stay -inf relative to it.
constexpr float NO_REFERENCE = -3.402823466e38f;
constexpr float SMALLEST_NORMAL = 1.175494351e-38f;
#define INF __int_as_float(0x7f800000)

template <typename T>
__device__ inline T& score(T (&s)[64], u32 group, u32 half, u32 column) {
    return s[16 * group + 4 * (column / 2) + 2 * half + column % 2];
}

// What the key groups of a tile make of a product of codes: z = s * multiplier + fold. Read from shared
// memory where they are needed, which saves registers.
struct TileScales {
    float q_scale;
    const float (&k_scales)[GROUPS];
    const float (&v_folds)[GROUPS];  // the exponents of V's blocks

    // The codes of a zero block are zero whatever they are multiplied with, but a masked -inf times zero
    // would be NaN.
    __device__ float multiplier(u32 g) const { return fmaxf(q_scale * k_scales[g], SMALLEST_NORMAL); }
    __device__ float fold(u32 g) const { return v_folds[g]; }
};

// The probabilities of a tile, in the place of its scores: p = 2^(z - reference + c).
struct Probabilities {
    float sum[2] = {0, 0};    // of this thread's columns, without the fold
    float largest_group = 0;  // the largest sum of a group, with the fold; NaN left out

    // Of the groups whose bit is set; what is in the others' places stays.
    __device__ Probabilities(float (&s)[64], const TileScales& scales, const float (&reference)[2], float c,
                             u32 groups) {
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            if (!(groups >> g & 1)) continue;
            const float multiplier = scales.multiplier(g), fold = scales.fold(g);
            const float unfold = exp2_approximate(-fold);
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const float addend = fold + c - reference[half];
                float in_group = 0;
#pragma unroll
                for (u32 j = 0; j < GROUP_COLUMNS; j++) {
                    float& p = score(s, g, half, j);
                    p = exp2_approximate(fmaf(p, multiplier, addend));
                    in_group += p;
                }
                sum[half] = fmaf(in_group, unfold, sum[half]);
                largest_group = fmaxf(largest_group, in_group);
            }
        }
    }
};

// Probabilities as E4M3 codes, ready as the A operand over keys in pi order: the codes of group g are
// the fragment of the MMA's step g.
__device__ inline void to_codes(float (&p)[64], u32 (&codes)[GROUPS][4]) {
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++)
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            const u32 half = r % 2, column = 4 * (r / 2);
            codes[g][r] = pack_e4m3(score(p, g, half, column), score(p, g, half, column + 1),
                                    score(p, g, half, column + 2), score(p, g, half, column + 3));
        }
}

// What the four threads of a quad, who share rows, make of a value of each.
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

// Multiplies one of the thread's two rows of a fragment.
template <u32 COUNT>
__device__ inline void scale_row(float (&fragment)[COUNT], u32 half, float factor) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++)
        if (i / 2 % 2 == half) fragment[i] *= factor;
}

// The running state of a thread's two rows.
struct SoftmaxRows {
    float reference[2];  // integers
    float sum[2];        // of this thread's columns, without the fold

    __device__ SoftmaxRows() : reference{NO_REFERENCE, NO_REFERENCE}, sum{0, 0} {}

    // Makes good for exponentials that were taken before any maximum was known. Where a probability passes
    // `bound` = 2^(c + tau), the row's reference was to be raised before: everything is a power of two too
    // large, and the largest probability tells which. Nearly always nothing is to be done. False if some
    // row's largest is infinite, which tells nothing.
    template <u32 COUNT>
    __device__ bool settle(float (&p)[64], Probabilities& probabilities, float c, float bound, float (&o)[COUNT]) {
        // None is larger than the sum that it is in.
        if (!__any_sync(FULL_WARP, probabilities.largest_group > bound)) return true;
        bool is_finite = true;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float largest = 0;
#pragma unroll
            for (u32 g = 0; g < GROUPS; g++)
#pragma unroll
                for (u32 j = 0; j < GROUP_COLUMNS; j++) largest = fmaxf(largest, score(p, g, half, j));
            largest = quad_max(largest);
            // Sums may be infinite before any of their terms is.
            is_finite &= largest < INF && probabilities.sum[half] != INF;
            if (largest > bound && largest < INF) {
                const int exponent = (__float_as_int(largest) + 0x7fffff) >> 23;  // rounded up
                const float steps = float(exponent - 127) - c;
                const float rescale = exp2_approximate(-steps);
                reference[half] += steps;
                sum[half] *= rescale;
                probabilities.sum[half] *= rescale;
                scale_row(p, half, rescale);
                scale_row(o, half, rescale);
            }
        }
        return is_finite;
    }

    __device__ void add(const Probabilities& probabilities) {
        sum[0] += probabilities.sum[0];
        sum[1] += probabilities.sum[1];
    }

    // Replaces the references that the tile passes by more than tau, and takes what was accumulated
    // along. Row by row: what one row needs must not show in another. NaN scores are left to the
    // exponential.
    template <u32 COUNT>
    __device__ void raise_references(const float (&s)[64], const TileScales& scales, float tau, u32 groups,
                                     float (&o)[COUNT]) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float largest = -INF;
#pragma unroll
            for (u32 g = 0; g < GROUPS; g++) {
                if (!(groups >> g & 1)) continue;
                float in_group = -INF;
#pragma unroll
                for (u32 j = 0; j < GROUP_COLUMNS; j++) in_group = fmaxf(in_group, score(s, g, half, j));
                largest = fmaxf(largest, fmaf(in_group, scales.multiplier(g), scales.fold(g)));
            }
            largest = quad_max(largest);
            if (largest > reference[half] + tau) {
                const float raised = ceilf(largest);
                const float rescale = exp2_approximate(reference[half] - raised);
                reference[half] = raised;
                sum[half] *= rescale;
                scale_row(o, half, rescale);
            }
        }
    }
};

// Transposes a 4 x 4 matrix over the threads of a quad: word i of thread t becomes word t of thread i.
__device__ inline void quad_transpose(u32 (&words)[4]) {
#pragma unroll
    for (u32 bit = 1; bit < 4; bit *= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (i & bit) continue;
            const u32 other = __shfl_xor_sync(FULL_WARP, upper ? words[i] : words[i + bit], bit);
            (upper ? words[i] : words[i + bit]) = other;
        }
    }
}
