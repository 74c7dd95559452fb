// Accumulator fragments of a warpgroup's products, 64 rows by groups of 32 columns.
//
// A thread holds two rows, 8 apart, and 8 columns of each group: row `half`, column j of group g is
// entry(x, g, half, j), the fragment's column 32 * g + 8 * (j / 2) + 2 * (lane % 4) + j % 2. The four
// threads of a quad share their rows.
#pragma once

#include "e4m3.cuh"
#include "prim_sm90.cuh"

constexpr u32 GROUP_COLUMNS = 8;  // that a thread holds of a row
constexpr u32 FULL_WARP = 0xffffffff;

// What the largest power of two under any product of scales is floored to.
constexpr float SMALLEST_NORMAL = 1.175494351e-38f;
#define INF __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

template <typename T, u32 COUNT>
__device__ inline T& entry(T (&x)[COUNT], u32 group, u32 half, u32 column) {
    return x[16 * group + 4 * (column / 2) + 2 * half + column % 2];
}

// The E4M3 codes of a group, ready as the A operand of one step of a product over its columns in pi order.
template <u32 COUNT>
__device__ inline void group_codes(const float (&x)[COUNT], u32 group, u32 (&codes)[4]) {
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
        const u32 half = r % 2, column = 4 * (r / 2);
        codes[r] = pack_e4m3(entry(x, group, half, column), entry(x, group, half, column + 1),
                             entry(x, group, half, column + 2), entry(x, group, half, column + 3));
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
