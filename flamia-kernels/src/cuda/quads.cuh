// Quads: four tokens of a block whose codes of one feature are a word of the transposed image.
#pragma once

#include "layout.cuh"

constexpr int QUAD_TOKENS = 4;
constexpr int QUADS = BLOCK_TOKENS / QUAD_TOKENS;
constexpr int CHUNK_QUADS = CHUNK / QUAD_TOKENS;

// Token `i` of a quad: four neighbouring bytes of the transposed image.
__device__ __forceinline__ int quad_token(int quad, int i) {
    return quad / CHUNK_QUADS * CHUNK + quad % CHUNK_QUADS * 2 + pi_token(i);
}

// Turns four words, whose bytes are tokens, into words of four features for each token, or back.
__device__ __forceinline__ void transpose_bytes(u32 (&words)[4]) {
    const u32 a = __byte_perm(words[0], words[1], 0x5140), b = __byte_perm(words[2], words[3], 0x5140);
    const u32 c = __byte_perm(words[0], words[1], 0x7362), d = __byte_perm(words[2], words[3], 0x7362);
    words[0] = __byte_perm(a, b, 0x5410);
    words[1] = __byte_perm(a, b, 0x7632);
    words[2] = __byte_perm(c, d, 0x5410);
    words[3] = __byte_perm(c, d, 0x7632);
}
