// Where quantised operands lie in device memory. `layout.rs` beside this file is the same for the host.
//
// Every document starts at a multiple of 32 rows of the scratch, and no block holds rows of two. Kernels
// read and write whole blocks, and none but those that hold rows of the document: there may be no memory
// behind them. Rows of scratch are called slots.
#pragma once

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

// Tokens that share an exponent.
constexpr int BLOCK_TOKENS = 32;
// Codes of the unit that swizzles move.
constexpr int CHUNK = 16;

// The slot of a document's first row. Empty documents count, so that no scan over the lengths before is
// needed: each document gets one block more than those before it can fill.
__device__ __forceinline__ int padded_start(int start, int document) {
    return (start & ~(BLOCK_TOKENS - 1)) + BLOCK_TOKENS * document;
}

// Row image: a row of DIMS codes per slot, in the order that wgmma reads under the swizzle of that
// row length (128 or 64 bytes). Where chunk `chunk` of slot `slot` lies in its row.
template <int DIMS>
__device__ __forceinline__ int row_chunk(int slot, int chunk) {
    static_assert(DIMS == 128 || DIMS == 64, "other rows have no swizzle here");
    return chunk ^ (DIMS == 128 ? slot & 7 : (slot >> 1) & 3);
}

// The byte of element (slot, dim) in the row image of a head.
template <int DIMS>
__device__ __forceinline__ u64 row_byte(int slot, int dim) {
    return (u64)slot * DIMS + row_chunk<DIMS>(slot, dim / CHUNK) * CHUNK + dim % CHUNK;
}

// Transposed image: for each block, DIMS rows of its 32 tokens, under the 32-byte swizzle. Where
// chunk `chunk` (tokens 16 * chunk ..) of row `dim` lies in its row.
__device__ __forceinline__ int transposed_chunk(int dim, int chunk) {
    return chunk ^ ((dim >> 2) & 1);
}

// The order of 16 tokens in a chunk of the transposed image, pi: byte 4c + 2a + b is token 8a + 2c + b.
// The four scores of a thread's accumulator rows are then the four bytes of its next A fragment.
__device__ __forceinline__ int pi_token(int byte) {
    return 8 * ((byte >> 1) & 1) + 2 * (byte >> 2) + (byte & 1);
}

// The inverse of `pi_token`.
__device__ __forceinline__ int pi_byte(int token) {
    return 4 * ((token >> 1) & 3) + 2 * (token >> 3) + (token & 1);
}

// The byte of element (slot, dim) in the transposed image of a head.
template <int DIMS>
__device__ __forceinline__ u64 transposed_byte(int slot, int dim) {
    const int token = slot % BLOCK_TOKENS;
    const int chunk = transposed_chunk(dim, token / CHUNK);
    return (u64)(slot - token) * DIMS + dim * BLOCK_TOKENS + chunk * CHUNK + pi_byte(token % CHUNK);
}

// Values: what codes stand for, in BF16. For each head, one part of 64 features after another, and in each a row
// for every slot, in the order that wgmma reads under the 128-byte swizzle.
constexpr int VALUE_FEATURES = 64;
constexpr int VALUES_BYTES = 2 * VALUE_FEATURES;
