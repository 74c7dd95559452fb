// E4M3 conversions, four values at a time.
#pragma once

#include "layout.cuh"

// Codes of four values, the first in the lowest byte: nearest, ties to even, saturating at 448. NaN
// gives 0x7f.
__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
    u32 codes;
    asm("{\n"
        "  .reg .b16 low, high;\n"
        "  cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "  cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "  mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return codes;
}

// The values of four codes, exactly.
__device__ __forceinline__ void unpack_e4m3(u32 codes, float (&values)[4]) {
    asm("{\n"
        "  .reg .b16 low, high, h0, h1, h2, h3;\n"
        "  .reg .b32 first, second;\n"
        "  mov.b32 {low, high}, %4;\n"
        "  cvt.rn.f16x2.e4m3x2 first, low;\n"
        "  cvt.rn.f16x2.e4m3x2 second, high;\n"
        "  mov.b32 {h0, h1}, first;\n"
        "  mov.b32 {h2, h3}, second;\n"
        "  cvt.f32.f16 %0, h0;\n"
        "  cvt.f32.f16 %1, h1;\n"
        "  cvt.f32.f16 %2, h2;\n"
        "  cvt.f32.f16 %3, h3;\n"
        "}"
        : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
        : "r"(codes));
}
