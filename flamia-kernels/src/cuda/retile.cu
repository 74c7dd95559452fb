// Makes one image of a quantised tensor from the other: the same codes in another order. `retile.rs`
// launches it.
//
// In both images a block of 32 slots takes the same bytes, so a CTA moves one block, whatever document it
// belongs to, if any.
//
// Constants: HEAD_DIM (64 or 128), TO_TRANSPOSED (0 or 1: the row image).

#include "layout.cuh"
#include "parameters.cuh"
#include "quads.cuh"

// `Parameters` of retile.rs.
struct Parameters {
    const u8 *from;
    u8 *to;
};
SAME_OFFSET(Parameters, from);
SAME_OFFSET(Parameters, to);

constexpr int THREADS = LAUNCH_THREADS;
constexpr int BLOCK_BYTES = BLOCK_TOKENS * HEAD_DIM;
// Codes of a word.
constexpr int WORD = 4;
constexpr int ROW_WORDS = HEAD_DIM / WORD;

// A block in both orders.
struct Shared {
    uint4 rows[BLOCK_BYTES / CHUNK];
    // Four features of all quads in a run, padded so that neighbouring runs meet different banks.
    static constexpr int RUN_CHUNKS = WORD * BLOCK_TOKENS / CHUNK, PADDED_CHUNKS = RUN_CHUNKS + 2;
    uint4 transposed[ROW_WORDS * PADDED_CHUNKS];

    // A chunk of the transposed image.
    __device__ uint4 &transposed_chunk_at(int chunk) {
        return transposed[chunk / RUN_CHUNKS * PADDED_CHUNKS + chunk % RUN_CHUNKS];
    }
    // Four features of a token: those from WORD * word on.
    __device__ u32 &row_word(int token, int word) {
        const int chunk = row_chunk<HEAD_DIM>(token, word * WORD / CHUNK);
        return reinterpret_cast<u32 *>(rows)[token * ROW_WORDS + chunk * (CHUNK / WORD) + word % (CHUNK / WORD)];
    }
    // A feature of a quad.
    __device__ u32 &quad_word(int quad, int dim) {
        const int chunk = dim * (BLOCK_TOKENS / CHUNK) + transposed_chunk(dim, quad / CHUNK_QUADS);
        return reinterpret_cast<u32 *>(&transposed_chunk_at(chunk))[quad % CHUNK_QUADS];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) retile(const __grid_constant__ Parameters p) {
    __shared__ Shared shared;
    const u64 block = (u64)blockIdx.x * BLOCK_BYTES;
    const uint4 *from = reinterpret_cast<const uint4 *>(p.from + block);
    uint4 *to = reinterpret_cast<uint4 *>(p.to + block);
#pragma unroll
    for (int chunk = threadIdx.x; chunk < BLOCK_BYTES / CHUNK; chunk += THREADS)
        (TO_TRANSPOSED ? shared.rows[chunk] : shared.transposed_chunk_at(chunk)) = from[chunk];
    __syncthreads();

    // Four tokens by four features at a time.
#pragma unroll
    for (int i = threadIdx.x; i < QUADS * ROW_WORDS; i += THREADS) {
        const int quad = i % QUADS, word = i / QUADS;
        u32 words[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            words[k] = TO_TRANSPOSED ? shared.row_word(quad_token(quad, k), word) : shared.quad_word(quad, WORD * word + k);
        transpose_bytes(words);
#pragma unroll
        for (int k = 0; k < 4; k++)
            (TO_TRANSPOSED ? shared.quad_word(quad, WORD * word + k) : shared.row_word(quad_token(quad, k), word)) = words[k];
    }
    __syncthreads();

#pragma unroll
    for (int chunk = threadIdx.x; chunk < BLOCK_BYTES / CHUNK; chunk += THREADS)
        to[chunk] = TO_TRANSPOSED ? shared.transposed_chunk_at(chunk) : shared.rows[chunk];
}
