// Before and after backward_fused_sm90.cu: values of Q, zeros for the sums of dQ, and BF16 rows of them.
// `backward_fused.rs` launches both.
//
// Constants: those of dq_sums.cuh, and as 0 or 1 ROTATED, whether dQ has to be rotated back.
#include "block_rows.cuh"
#include "block_scale.cuh"
#include "dq_sums.cuh"
#include "output_rows.cuh"
#include "parameters.cuh"
#include "ptx.cuh"

// `SumParameters` of backward_fused.rs. Strides are in elements.
struct SumParameters {
    const u8 *q;            // [heads][slots] rows
    const float *q_scales;  // [heads][blocks]
    u8 *q_values;           // [heads][VALUE_PARTS][slots] (layout.cuh), times the scale of dO
    u8 *sums;              // [heads][blocks][DQ_PARTS], DQ_PART_BYTES each
    float *key_exponents;  // [kv_heads][documents]
    const float *d_o_folds;  // [heads][blocks]
    const float *k_folds;    // [kv_heads][blocks]
    const float *v_folds;
    const int *cu_seqlens;
    u16 *dq;  // [tokens][heads][HEAD_DIM], BF16
    i64 token_stride;
    i64 head_stride;
    int tokens;
    int documents;
    int heads;
    int kv_heads;
    int slots;
    float scale;  // softmax scale, times 1 / sqrt(HEAD_DIM) where dQ is rotated
};
SAME_OFFSET(SumParameters, q);
SAME_OFFSET(SumParameters, q_scales);
SAME_OFFSET(SumParameters, q_values);
SAME_OFFSET(SumParameters, sums);
SAME_OFFSET(SumParameters, key_exponents);
SAME_OFFSET(SumParameters, d_o_folds);
SAME_OFFSET(SumParameters, k_folds);
SAME_OFFSET(SumParameters, v_folds);
SAME_OFFSET(SumParameters, cu_seqlens);
SAME_OFFSET(SumParameters, dq);
SAME_OFFSET(SumParameters, token_stride);
SAME_OFFSET(SumParameters, head_stride);
SAME_OFFSET(SumParameters, tokens);
SAME_OFFSET(SumParameters, documents);
SAME_OFFSET(SumParameters, heads);
SAME_OFFSET(SumParameters, kv_heads);
SAME_OFFSET(SumParameters, slots);
SAME_OFFSET(SumParameters, scale);

constexpr int VALUE_CHUNK = 8;  // BF16 values of a chunk

// The largest of an operand's exponents in some blocks. For a warp.
__device__ inline float largest_exponent(const float *folds, int count) {
    float largest = MIN_EXPONENT;
    for (int i = threadIdx.x % 32; i < count; i += 32) largest = fmaxf(largest, folds[i]);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, lanes));
    return largest;
}

// A chunk of values, times the scale of dO, from half a chunk of codes: half `index` of all heads' rows. Threads next
// to one another write chunks next to one another.
__device__ inline void widen(const SumParameters &p, i64 index) {
    constexpr int ROW_HALVES = HEAD_DIM / VALUE_CHUNK, PART_CHUNKS = VALUE_FEATURES / VALUE_CHUNK;
    const i64 row = index / ROW_HALVES, head = row / p.slots;
    const int slot = int(row % p.slots), half = int(index % ROW_HALVES);
    const int chunk = 2 * row_chunk<HEAD_DIM>(slot, half / 2) + half % 2;
    const uint2 codes = reinterpret_cast<const uint2 *>(p.q)[index];
    const float scale = p.q_scales[row / BLOCK_TOKENS] * exp2_approximate(p.d_o_folds[row / BLOCK_TOKENS]);
    float low[4], high[4];
    unpack_e4m3(codes.x, low);
    unpack_e4m3(codes.y, high);
    constexpr int PARTS = HEAD_DIM / VALUE_FEATURES;
    u8 *to = p.q_values + ((head * PARTS + chunk / PART_CHUNKS) * p.slots + slot) * VALUES_BYTES;
    reinterpret_cast<uint4 *>(to)[row_chunk<VALUES_BYTES>(slot, chunk % PART_CHUNKS)] =
        make_uint4(bf16x2(low[0] * scale, low[1] * scale), bf16x2(low[2] * scale, low[3] * scale),
                   bf16x2(high[0] * scale, high[1] * scale), bf16x2(high[2] * scale, high[3] * scale));
}

// A warp for each document and key/value head; the other CTAs widen Q, and fill the sums with zeros.
extern "C" __global__ void __launch_bounds__(256) prepare_dq_sums(const __grid_constant__ SumParameters p) {
    wait_for_predecessor();
    launch_dependents();
    const int blocks = p.slots / BLOCK_TOKENS;
    const i64 pairs = i64(p.kv_heads) * p.documents;
    const i64 exponent_ctas = (pairs + 7) / 8;
    if (blockIdx.x < exponent_ctas) {
        const i64 pair = i64(blockIdx.x) * 8 + threadIdx.x / 32;
        if (pair >= pairs) return;
        const int document = int(pair % p.documents);
        const int start = p.cu_seqlens[document], end = min(p.cu_seqlens[document + 1], p.tokens);
        const int count = (max(end - start, 0) + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        const i64 first = pair / p.documents * blocks + padded_start(start, document) / BLOCK_TOKENS;
        const float sum = largest_exponent(p.k_folds + first, count) + largest_exponent(p.v_folds + first, count);
        if (threadIdx.x % 32 == 0) p.key_exponents[pair] = sum;
        return;
    }
    // A chunk of values is as many elements as one of sums in FP16.
    const i64 chunks = i64(p.heads) * p.slots * HEAD_DIM / VALUE_CHUNK;
    const i64 stride = i64(gridDim.x - exponent_ctas) * blockDim.x;
    for (i64 i = (blockIdx.x - exponent_ctas) * blockDim.x + threadIdx.x; i < chunks; i += stride) {
        widen(p, i);
#pragma unroll
        for (u32 part = 0; part < DQ_BYTES / 2; part++)
            reinterpret_cast<uint4 *>(p.sums)[part * chunks + i] = make_uint4(0, 0, 0, 0);
    }
}

// A CTA of two warps for a block of queries of a head.
extern "C" __global__ void __launch_bounds__(64) finish_dq_sums(const __grid_constant__ SumParameters p) {
    constexpr u32 WARP_BYTES = 16 * HEAD_DIM * 2;
    __shared__ __align__(16) u8 staging[2 * WARP_BYTES];
    const int head = blockIdx.x % p.heads, block = blockIdx.x / p.heads;
    const Rows rows = rows_of_block(p.cu_seqlens, p.documents, p.tokens, block * BLOCK_TOKENS);
    if (rows.count <= 0) return;

    wait_for_predecessor();
    const i64 in_table = i64(head) * (p.slots / BLOCK_TOKENS) + block;
    const u8 *from = p.sums + in_table * DQ_PARTS * DQ_PART_BYTES + threadIdx.x * 16;
    float x[HEAD_DIM / 2];
#pragma unroll
    for (u32 part = 0; part < DQ_PARTS; part++)
#pragma unroll
        for (u32 i = 0; i < DQ_WORDS; i += DQ_CHUNK) {
            const uint4 chunk = __ldcs(reinterpret_cast<const uint4 *>(from + part * DQ_PART_BYTES + i / DQ_CHUNK * CHUNK_STRIDE));
            const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
            float *to = &x[part * DQ_WORDS + i];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                if constexpr (DQ_BYTES == 2)
                    widen_f16x2(words[j], to[2 * j], to[2 * j + 1]);
                else
                    to[j] = __uint_as_float(words[j]);
            }
        }
    if constexpr (ROTATED) rotate_rows(x);

    const int kv_head = head / (p.heads / p.kv_heads);
    const float key_exponent = p.key_exponents[i64(kv_head) * p.documents + rows.document];
    const float factor = p.scale * exp2_approximate(p.d_o_folds[in_table]) * pow2(-key_scale_exponent(key_exponent));
    const u32 warp = threadIdx.x / 32;
    u8 *own = staging + warp * WARP_BYTES;
    const float both[2] = {factor, factor};
    store_rows(x, both, {own, own + WARP_BYTES / 2}, p.dq + i64(rows.first + 16 * warp) * p.token_stride + head * p.head_stride,
               p.token_stride, rows.count - 16 * int(warp));
}
