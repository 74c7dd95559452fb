// Instructions that C++ has no name for, one per function.
#pragma once

// The larger magnitude, without its sign; NaN if either is.
__device__ __forceinline__ float max_magnitude(float a, float b) {
    float largest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(fabsf(a)), "f"(fabsf(b)));
    return largest;
}

// Programmatic dependent launch. Lets the next kernel of the stream start, where it was launched so, once
// every CTA has said this or is over.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Waits until the kernel in front on the stream is over, where it is not yet.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Brings a line of global memory into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
