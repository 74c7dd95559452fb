// The scale of a block of E4M3 codes, from its largest magnitude: `flamia_format::block_exponent` with the
// rule `Up`, and the floor of the CPU's `hopper` profile.
#pragma once

#include "layout.cuh"

// 2^e for e from -127, a subnormal, to 127.
__device__ __forceinline__ float pow2(int e) {
    return __uint_as_float(e == -127 ? 0x00400000 : (e + 127) << 23);
}

// The smallest exponent of a block: folding V's exponents into P takes them out of the row sum again,
// as 2^-e, and that has to stay finite.
constexpr int MIN_EXPONENT = -96;
// The smallest exponent before that, which stands for a block of zeros as well.
constexpr int SMALLEST_EXPONENT = -127;

// How the values of a block become codes.
struct BlockScale {
    // The smallest that takes the largest magnitude to 448 or less, from SMALLEST_EXPONENT.
    int exponent;
    bool zero;
    // There is a NaN or an infinity.
    bool poisoned;

    __device__ explicit BlockScale(float amax) {
        constexpr u32 LARGEST = 0x43e00000;  // 448
        constexpr u32 MANTISSA = 0x7fffff;
        const u32 bits = __float_as_uint(amax);
        const int biased = bits >> 23;
        exponent = biased - (int)(LARGEST >> 23) + ((bits & MANTISSA) > (LARGEST & MANTISSA));
        exponent = max(exponent, SMALLEST_EXPONENT);
        zero = bits == 0;
        poisoned = biased == 255;
    }

    __device__ __forceinline__ bool ordinary() const { return exponent >= MIN_EXPONENT && !poisoned; }
    __device__ __forceinline__ int floored() const { return max(exponent, MIN_EXPONENT); }
    // Whether codes have a scale: the block is neither zero, as good as zero, nor poisoned.
    __device__ __forceinline__ bool has_scale() const { return exponent != SMALLEST_EXPONENT && !poisoned; }
    // What codes are multiplied with; 0 for a block of zeros. NaN codes need no scale to poison, and the
    // rows past a document's end none that does.
    __device__ __forceinline__ float factor() const { return has_scale() ? pow2(floored()) : 0.0f; }
    // The same for others to read, who can tell a poisoned block by it.
    __device__ __forceinline__ float scale() const { return poisoned ? __uint_as_float(0x7fffffff) : factor(); }
    // The exponent to fold into another operand. A zero block never sets a reference there.
    __device__ __forceinline__ float fold() const { return has_scale() ? floored() : MIN_EXPONENT; }
};
