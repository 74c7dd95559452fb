// From accumulators to BF16 rows in global memory.
//
// A warp holds 16 rows of HEAD_DIM features: value 4 * j + 2 * half + b of a thread is of row
// lane / 4 + 8 * half, feature 8 * j + 2 * (lane % 4) + b.
#pragma once

#include "fragment.cuh"

// The Hadamard rotation, which is its own inverse, but for the factor 1 / sqrt(HEAD_DIM).
template <u32 COUNT>
__device__ inline void rotate_rows(float (&x)[COUNT]) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i += 2) {
        const float a = x[i], b = x[i + 1];
        x[i] = a + b;
        x[i + 1] = a - b;
    }
    // Features 2 and 4 apart are in other lanes of the quad.
#pragma unroll
    for (u32 lanes = 1; lanes <= 2; lanes *= 2) {
        const float sign = threadIdx.x & lanes ? -1 : 1;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) x[i] = fmaf(sign, x[i], __shfl_xor_sync(FULL_WARP, x[i], lanes));
    }
#pragma unroll
    for (u32 stride = 4; stride < COUNT; stride *= 2) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            if (i & stride) continue;
            const float a = x[i], b = x[i + stride];
            x[i] = a + b;
            x[i + stride] = a - b;
        }
    }
}

// Where a warp's rows wait to go out whole: `low` has room for the first eight and `high` for the others.
struct RowStaging {
    u8* low;
    u8* high;

    // 16 bytes of a row, so that neither rows nor columns of them meet in a bank.
    template <u32 ROW_BYTES>
    __device__ u8* chunk(u32 row, u32 chunk) const {
        return (row < 8 ? low : high) + row % 8 * ROW_BYTES + (chunk ^ row % 8) * 16;
    }
};

// Writes the first `rows` of a warp's rows, each multiplied with its factor, to `to` and every `stride`
// elements after it.
template <u32 COUNT>
__device__ inline void store_rows(const float (&x)[COUNT], const float (&factor)[2], RowStaging staging, u16* to,
                                  i64 stride, int rows) {
    constexpr u32 ROW_BYTES = 4 * COUNT, CHUNKS = ROW_BYTES / 16;
    const u32 lane = threadIdx.x % 32, matrix = lane / 8, matrix_row = lane % 8 + 8 * (matrix % 2);
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < COUNT / 8; i++) {
        const float* v = &x[8 * i];
        store_matrices(staging.chunk<ROW_BYTES>(matrix_row, 2 * i + matrix / 2),
                       bf16x2(v[0] * factor[0], v[1] * factor[0]), bf16x2(v[2] * factor[1], v[3] * factor[1]),
                       bf16x2(v[4] * factor[0], v[5] * factor[0]), bf16x2(v[6] * factor[1], v[7] * factor[1]));
    }
    __syncwarp();
#pragma unroll
    for (u32 i = lane; i < 16 * CHUNKS; i += 32) {
        const u32 row = i / CHUNKS, chunk = i % CHUNKS;
        if (int(row) < rows)
            *reinterpret_cast<uint4*>(to + row * stride + 8 * chunk) =
                *reinterpret_cast<const uint4*>(staging.chunk<ROW_BYTES>(row, chunk));
    }
}
