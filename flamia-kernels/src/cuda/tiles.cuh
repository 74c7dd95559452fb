// Runs of a document's rows, the tiles that cover them, and the ring of stages that tiles pass through.
//
// Constant: MASK, one of these. All rows are counted from the document's start.
#pragma once

#include "layout.cuh"

enum MaskKind { CAUSAL = 0, FULL = 1, WINDOW = 2 };

struct Range {
    int begin, end;

    __device__ bool contains(int x) const { return x >= begin && x < end; }
};

__device__ inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// The tiles, or blocks, that hold some of these rows.
__device__ inline Range covering(Range rows, int size) { return {rows.begin / size, (rows.end + size - 1) / size}; }

// The keys that any of some queries sees.
__device__ inline Range keys_seen(Range queries, int len, int window) {
    if (queries.begin >= queries.end) return {0, 0};
    if (MASK == FULL) return {0, len};
    return {MASK == WINDOW ? max(0, queries.begin + 1 - window) : 0, queries.end};
}

// The queries that see any of some keys.
__device__ inline Range queries_that_see(Range keys, int len, int window) {
    if (keys.begin >= keys.end) return {0, 0};
    if (MASK == FULL) return {0, len};
    const int last = keys.end - 1;
    return {keys.begin, MASK == WINDOW ? last + min(window, len - last) : len};
}

// Where a walk around a ring of stages stands; in one register.
template <u32 SIZE>
struct Ring {
    u32 steps = 0;  // of two rounds

    __device__ u32 stage() const { return steps < SIZE ? steps : steps - SIZE; }
    __device__ u32 parity() const { return steps >= SIZE; }
    __device__ void advance() { steps = steps + 1 == 2 * SIZE ? 0 : steps + 1; }
};

// On a stage's barrier of loads: one that announces the bulk copies, and one by each lane of the producer
// for its word copies.
constexpr u32 LOAD_ARRIVALS = 1 + 32;
