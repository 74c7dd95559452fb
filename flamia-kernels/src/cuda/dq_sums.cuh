// The sums of dQ in global memory, between the kernel that adds them up and the one that makes rows of them.
//
// For each head and each block of 32 queries there are two parts, of the lower and the upper half of the
// features, and in each of them 16 bytes of thread 0 to 63, then the next 16 bytes of each: a
// thread has the accumulator fragment of 16 queries to a warp (output_rows.cuh).
//
// Constants: HEAD_DIM, and DQ_BYTES, 2 for FP16 and 4 for FP32.
#pragma once

#include "layout.cuh"

constexpr u32 DQ_PARTS = 2;
constexpr u32 PART_FEATURES = HEAD_DIM / DQ_PARTS;
constexpr u32 DQ_WORDS = PART_FEATURES / 2;  // of a thread
constexpr u32 DQ_CHUNK = 16 / DQ_BYTES;      // of its values lie together
constexpr u32 CHUNK_STRIDE = 64 * 16;        // bytes from one of its chunks to the next
constexpr u32 DQ_PART_BYTES = BLOCK_TOKENS * PART_FEATURES * DQ_BYTES;

static_assert(DQ_BYTES == 2 || DQ_BYTES == 4, "FP16 or FP32");

// Where a tile's dQ is added up: to each of `blocks` blocks of queries.
struct DqTarget {
    u8* to;
    u32 blocks;
    bool is_last;  // of the item
};

// What dQ is added up times, so that no order of additions overflows FP16: a power of two for the document and
// key/value head, which K is multiplied with, and 2^-e for each block of queries, e being dO's exponent, which dS is
// multiplied with (and Q with 2^e, so that dK stays what it is).
//
// |dQ| <= sum over keys of |dS| |K| with dS = P (dP - D): |dP| is at most the largest |dO| times the largest
// |V|, |D| twice that, since P inside O is rounded, and rounding dS at most doubles it; the P of a row sum
// to 1. So 8 |dO| |V| max|K| is a bound with room to spare, and the norms are at most sqrt(HEAD_DIM) times the
// largest magnitude, that is 448 = 2^8.81 times a power of two: of dO 2^e, of V and K for the document and head
// (`key_exponent`, the sum of both).
__device__ inline int key_scale_exponent(float key_exponent) {
    if (DQ_BYTES == 4) return 0;
    constexpr int LOG2_HEAD_DIM = HEAD_DIM == 128 ? 7 : 6;
    constexpr int LARGEST = 15, FACTORS = 3 + LOG2_HEAD_DIM + 27;
    // The power and its inverse are normal numbers.
    return max(-126, min(126, LARGEST - FACTORS - int(key_exponent)));
}
