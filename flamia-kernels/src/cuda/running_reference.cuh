// The running power-of-two reference of one accumulator row of dS: cpu/hopper/reference.rs defines the
// numbers.
#pragma once

#include "block_scale.cuh"

// How far under its highest value a reference may fall.
constexpr int MAX_DESCENT = 64;

struct RunningReference {
    // Under every exponent: no tile so far had an entry other than zero.
    static constexpr int NONE = -512;

    int exponent = NONE;
    int highest = NONE;

    // Takes the largest magnitude of the next tile into account. The factor for what has been accumulated,
    // exact; 1 if the reference stays. NaN and infinity change nothing: they poison the entries themselves.
    __device__ float update(float amax, int hysteresis) {
        const BlockScale tile(amax);
        if (tile.zero || tile.poisoned) return 1;
        const int needed = tile.exponent, current = exponent;
        if (current == NONE || needed > current) {
            exponent = needed;
        } else if (needed <= current - hysteresis) {
            exponent = max(needed, highest - MAX_DESCENT);
        }
        highest = max(highest, exponent);
        if (current == NONE || exponent == current) return 1;
        return current - exponent < -126 ? 0 : pow2(current - exponent);
    }

    // What entries are multiplied with before they are rounded, and the accumulated row in the end.
    __device__ float down() const { return exponent == NONE ? 0 : pow2(-exponent); }
    __device__ float up() const { return exponent == NONE ? 0 : pow2(exponent); }
};
