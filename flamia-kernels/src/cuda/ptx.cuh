// Instructions that C++ has no name for, one per function.
#pragma once

// The larger magnitude, without its sign; NaN if either is.
__device__ __forceinline__ float max_magnitude(float a, float b) {
    float largest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(fabsf(a)), "f"(fabsf(b)));
    return largest;
}

// Brings a line of global memory into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
