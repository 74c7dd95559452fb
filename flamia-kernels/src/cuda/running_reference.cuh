// The running power-of-two reference of one accumulator row of dS: cpu/hopper/reference.rs defines the
// numbers.
#pragma once

#include "block_scale.cuh"

// How far under its highest value a reference may fall.
constexpr int MAX_DESCENT = 64;

// Without a branch, since in most tiles some row of a warp needs another reference. Exponents are kept where
// FP32 has its own, in multiples of UNIT.
struct RunningReference {
    static constexpr int UNIT = 1 << 23;
    static constexpr int BIAS = 127 * UNIT;
    // Under every exponent: no tile so far had an entry other than zero.
    static constexpr int NONE = -136 * UNIT;

    int exponent = NONE;
    int highest = NONE;

    // Takes the largest magnitude of the next tile into account. The factor for what has been accumulated,
    // exact; 1 if the reference stays. NaN and infinity change nothing: they poison the entries themselves.
    __device__ float update(float amax, int hysteresis) {
        // The smallest exponent e with amax <= 448 * 2^e, which is as many as amax is past 224 * 2^e.
        constexpr int PAST_224 = 0x43600001;
        const int current = exponent;
        const bool counts = amax > 0 && amax < __int_as_float(0x7f800000);
        const int smallest = max((__float_as_int(amax) - PAST_224) & -UNIT, SMALLEST_EXPONENT * UNIT);
        const int needed = counts ? smallest : current;
        const int lowered = needed <= current - hysteresis * UNIT ? max(needed, highest - MAX_DESCENT * UNIT) : current;
        exponent = needed > current ? needed : lowered;
        highest = max(highest, exponent);
        return __int_as_float(max(BIAS + current - exponent, 0));
    }

    // What entries are multiplied with before they are rounded, and the accumulated row in the end.
    __device__ float down() const { return exponent == NONE ? 0 : __int_as_float(BIAS - exponent); }
    __device__ float up() const { return exponent == NONE ? 0 : pow2(exponent / UNIT); }
};
