// The online softmax of the `hopper` profile on accumulator fragments; cpu/hopper/forward.rs defines
// the numbers.
//
// Rows are queries, groups of columns are 32 keys.
#pragma once

#include "key_tile.cuh"

// The reference of a row that has seen no key. Finite, so that -inf scores stay -inf relative to it.
constexpr float NO_REFERENCE = -3.402823466e38f;

// What the key groups of a tile make of a product of codes: z = s * multiplier + fold.
struct TileScales {
    float multiplier[GROUPS];
    float fold[GROUPS];  // the exponents of V's blocks

    __device__ TileScales(float q_scale, const float (&k_scales)[GROUPS], const float (&v_folds)[GROUPS]) {
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            // The codes of a zero block are zero whatever they are multiplied with, but a masked -inf
            // times zero would be NaN.
            multiplier[g] = fmaxf(q_scale * k_scales[g], SMALLEST_NORMAL);
            fold[g] = v_folds[g];
        }
    }
};

// What a tile's probabilities, with the fold, add up to in a thread's two rows and columns.
struct TileSums {
    float sum[2] = {0, 0};
};

// What P V of a row and tile is multiplied with, so that its weights are as heavy rounded as they were before. None of
// them that is not 0 is under the smallest code.
__device__ inline float make_up(float weights, float rounded) { return weights * reciprocal_approximate(fmaxf(rounded, 0x1p-9f)); }

// The running state of a thread's two rows.
struct SoftmaxRows {
    float reference[2];  // integers
    float sum[2];        // of this thread's columns, without the fold

    __device__ SoftmaxRows() : reference{NO_REFERENCE, NO_REFERENCE}, sum{0, 0} {}

    // Whether some score might pass its row's reference by more than tau. Never misses one, and
    // costs half of an exact maximum: as integers, floats above zero compare like floats, and all
    // others count as zero.
    __device__ bool may_pass(const float (&s)[64], const TileScales& scales, float tau) const {
        bool passes = false;
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                int bound = 0;
#pragma unroll
                for (u32 j = 0; j < GROUP_COLUMNS; j += 2)
                    bound = __vimax3_s32(bound, __float_as_int(entry(s, g, half, j)),
                                         __float_as_int(entry(s, g, half, j + 1)));
                passes |= fmaf(__int_as_float(bound), scales.multiplier[g], scales.fold[g]) > reference[half] + tau;
            }
        return passes;
    }

    // Replaces the references that the tile passes by more than tau, and takes along what was
    // accumulated. Row by row: what one row needs must not show in another. NaN scores are left to
    // the exponential. Groups whose bit is not set do not count.
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
                for (u32 j = 0; j < GROUP_COLUMNS; j++) in_group = fmaxf(in_group, entry(s, g, half, j));
                largest = fmaxf(largest, fmaf(in_group, scales.multiplier[g], scales.fold[g]));
            }
            largest = quad_max(largest);
            float rescale = 1;
            if (largest > reference[half] + tau) {
                const float raised = ceilf(largest);
                rescale = exp2_approximate(reference[half] - raised);
                reference[half] = raised;
            }
            sum[half] *= rescale;
#pragma unroll
            for (u32 i = 0; i < COUNT; i++)
                if (i / 2 % 2 == half) o[i] *= rescale;
        }
    }

    // The probabilities of a group, 2^(z - reference + c), as E4M3 codes: ready as the A operand over keys
    // in pi order of the MMA's step `g`. Adds them to `in_tile` before they are rounded.
    __device__ void probabilities(float (&s)[64], const TileScales& scales, float c, u32 g, TileSums& in_tile,
                                  u32 (&codes)[4]) {
        const float unfold = exp2_approximate(-scales.fold[g]);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const float addend = scales.fold[g] + c - reference[half];
            float in_group;
#pragma unroll
            for (u32 j = 0; j < GROUP_COLUMNS; j++) {
                float& p = entry(s, g, half, j);
                p = exp2_approximate(fmaf(p, scales.multiplier[g], addend));
                in_group = j == 0 ? p : in_group + p;
            }
            sum[half] = fmaf(in_group, unfold, sum[half]);
            in_tile.sum[half] += in_group;
        }
        group_codes(s, g, codes);
    }
};
