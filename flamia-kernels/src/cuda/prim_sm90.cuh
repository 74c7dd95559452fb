// The Hopper instructions that the attention kernels use, one function each. No policy here, and no
// assembly in what is built on it.
#pragma once

#include "layout.cuh"

using u16 = unsigned short;
using i64 = long long;

// Shared memory as the asynchronous units address it.
__device__ inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The dynamic shared memory of the kernel.
__device__ inline u8* shared_memory() {
    extern __shared__ __align__(1024) u8 memory[];
    return memory;
}

// ---- mbarriers: `count` arrivals and all announced bytes complete a phase

__device__ inline void barrier_init(u64& barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count)
                 : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(u64& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// The same by one lane of a whole warp, without a branch.
__device__ inline void barrier_arrive_once(u64& barrier) {
    asm volatile(
        "{ .reg .pred elected; elect.sync _|elected, 0xffffffff;\n"
        "@elected mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(shared_address(&barrier))
        : "memory");
}

// Arrives, and holds the phase until `bytes` more have been copied.
__device__ inline void barrier_arrive_expect(u64& barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
                 "r"(bytes)
                 : "memory");
}

// Waits for the end of the phase of this parity: 0 for the first, third, ...
__device__ inline void barrier_wait(u64& barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
}

// ---- copies from global to shared memory

// Contiguous bytes, a multiple of 16 at multiples of 16.
__device__ inline void bulk_copy(void* to, const void* from, u32 bytes, u64& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&barrier))
        : "memory");
}

// Four bytes of this thread; zero instead of reading where not `present`.
__device__ inline void word_copy(void* to, const void* from, bool present) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(present ? 4 : 0)
                 : "memory");
}

// Arrives once this thread's word copies so far have landed.
__device__ inline void barrier_arrive_after_word_copies(u64& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
                 : "memory");
}

// Orders this thread's accesses of shared memory before those of the asynchronous units that a barrier
// lets in afterwards.
__device__ inline void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- contiguous bytes of shared memory, added to what lies in global memory, element by element

__device__ inline void bulk_add_f16(void* to, const void* from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

__device__ inline void bulk_add_f32(void* to, const void* from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until what this thread has added was read from shared memory, but for its last PENDING groups, or until all lies
// in global memory.
template <u32 PENDING>
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- barriers of some warps of a CTA, `COUNT` threads; 0 is __syncthreads()

template <u32 COUNT>
__device__ inline void named_barrier(u32 id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

// ---- registers of a warpgroup; every one of its warps has to ask

template <u32 COUNT>
__device__ inline void registers_release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <u32 COUNT>
__device__ inline void registers_acquire() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- arithmetic

// 2^x; results under 2^-126 are 0.
__device__ inline float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, of a normal number.
__device__ inline float reciprocal_approximate(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two BF16 values, the first in the lower half.
__device__ inline u32 bf16x2(float a, float b) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
}

// Pairs of BF16 values, multiplied.
__device__ inline u32 multiply_bf16x2(u32 a, u32 b) {
    u32 pair;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

// Two FP16 values, the first in the lower half.
__device__ inline u32 f16x2(float a, float b) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
}

__device__ inline void widen_f16x2(u32 pair, float& a, float& b) {
    asm("{ .reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high; }"
        : "=f"(a), "=f"(b)
        : "r"(pair));
}

// Four 8 x 8 matrices of 16-bit elements from fragments to shared memory; lane i gives the address of row
// i % 8 of matrix i / 8.
__device__ inline void store_matrices(void* row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// The same with columns of matrices as rows.
__device__ inline void store_matrices_transposed(void* row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// ---- wgmma: D (64 x N, FP32) = A (64 x 32) B^T (N x 32) [+ D], both E4M3 with 32 contiguous
// Register i of D is row 16 * warp + lane / 4 + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 * (lane % 4) + i % 2.

// How operand rows lie in shared memory; the value is the descriptor's swizzle code.
enum class Swizzle : u64 { B128 = 1, B64 = 2, B32 = 3 };

// The swizzle whose rows are `bytes` long.
__device__ constexpr Swizzle swizzle_of_rows(u32 bytes) {
    return bytes == 128 ? Swizzle::B128 : bytes == 64 ? Swizzle::B64 : Swizzle::B32;
}

// A K-major operand whose rows are one swizzle span long; groups of 8 rows follow one another.
__device__ inline u64 operand_descriptor(const void* base, Swizzle swizzle) {
    const u64 row_bytes = 256ull >> static_cast<u64>(swizzle);
    return (shared_address(base) >> 4 & 0x3fff) | 1ull << 16 | (8 * row_bytes >> 4) << 32 |
           static_cast<u64>(swizzle) << 62;
}

// An operand of BF16 whose contiguous dimension is not the one that the product sums over: rows of 64 values, of
// which those `stride` bytes further on have the next 64.
__device__ inline u64 values_descriptor(const void* base, u32 stride) {
    constexpr u64 ROW_BYTES = 128;
    return (shared_address(base) >> 4 & 0x3fff) | static_cast<u64>(stride >> 4) << 16 | (8 * ROW_BYTES >> 4) << 32 |
           static_cast<u64>(Swizzle::B128) << 62;
}

// The descriptor of what lies `bytes` further on: the address is in the lower half, alone with a constant.
__device__ inline u64 advance(u64 descriptor, u32 bytes) {
    const u32 low = static_cast<u32>(descriptor) + (bytes >> 4);
    return descriptor >> 32 << 32 | low;
}

// In front of the first wgmma after accumulators or A registers were written.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until no more than PENDING committed groups are under way.
template <u32 PENDING = 0>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving accesses of registers across a wgmma that works on them.
template <u32 COUNT>
__device__ inline void pin(float (&registers)[COUNT]) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) asm volatile("" : "+f"(registers[i])::"memory");
}

template <u32 COUNT>
__device__ inline void pin(u32 (&registers)[COUNT]) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) asm volatile("" : "+r"(registers[i])::"memory");
}

template <u32 ROWS, u32 COUNT>
__device__ inline void pin(u32 (&registers)[ROWS][COUNT]) {
#pragma unroll
    for (u32 i = 0; i < ROWS; i++) pin(registers[i]);
}

// The accumulators of a wgmma, and how its text names them: they are its first operands.
#define ACCUMULATORS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACCUMULATORS_16(i) ACCUMULATORS_4(i), ACCUMULATORS_4(i + 4), ACCUMULATORS_4(i + 8), ACCUMULATORS_4(i + 12)
#define ACCUMULATORS_32 ACCUMULATORS_16(0), ACCUMULATORS_16(16)
#define ACCUMULATORS_64 ACCUMULATORS_32, ACCUMULATORS_16(32), ACCUMULATORS_16(48)
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// A and B from shared memory, B of 128, 64 or 32 rows.
__device__ inline void wgmma_shared(float (&d)[64], u64 a, u64 b, u32 accumulate) {
    asm volatile(
        "{ .reg .pred keep; setp.ne.b32 keep, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NAMES_64 "},\n"
        " %64, %65, keep, 1, 1; }"
        : ACCUMULATORS_64
        : "l"(a), "l"(b), "r"(accumulate));
}

__device__ inline void wgmma_shared(float (&d)[32], u64 a, u64 b, u32 accumulate) {
    asm volatile(
        "{ .reg .pred keep; setp.ne.b32 keep, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" NAMES_32 "},\n"
        " %32, %33, keep, 1, 1; }"
        : ACCUMULATORS_32
        : "l"(a), "l"(b), "r"(accumulate));
}

__device__ inline void wgmma_shared(float (&d)[16], u64 a, u64 b, u32 accumulate) {
    asm volatile(
        "{ .reg .pred keep; setp.ne.b32 keep, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {" NAMES_16 "},\n"
        " %16, %17, keep, 1, 1; }"
        : ACCUMULATORS_16(0)
        : "l"(a), "l"(b), "r"(accumulate));
}

// A from registers, B of 128, 64, 136 or 72 rows.
__device__ inline void wgmma_registers(float (&d)[64], const u32 (&a)[4], u64 b, u32 accumulate) {
    asm volatile(
        "{ .reg .pred keep; setp.ne.b32 keep, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NAMES_64 "},\n"
        " {%64, %65, %66, %67}, %68, keep, 1, 1; }"
        : ACCUMULATORS_64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

__device__ inline void wgmma_registers(float (&d)[32], const u32 (&a)[4], u64 b, u32 accumulate) {
    asm volatile(
        "{ .reg .pred keep; setp.ne.b32 keep, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" NAMES_32 "},\n"
        " {%32, %33, %34, %35}, %36, keep, 1, 1; }"
        : ACCUMULATORS_32
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

__device__ inline void wgmma_registers(float (&d)[68], const u32 (&a)[4], u64 b, u32 accumulate) {
    asm volatile(
        "{ .reg .pred keep; setp.ne.b32 keep, %73, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {" NAMES_64 ", %64, %65, %66, %67" "},\n"
        " {%68, %69, %70, %71}, %72, keep, 1, 1; }"
        : ACCUMULATORS_64, ACCUMULATORS_4(64)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

__device__ inline void wgmma_registers(float (&d)[36], const u32 (&a)[4], u64 b, u32 accumulate) {
    asm volatile(
        "{ .reg .pred keep; setp.ne.b32 keep, %41, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n72k32.f32.e4m3.e4m3 {" NAMES_32 ", %32, %33, %34, %35" "},\n"
        " {%36, %37, %38, %39}, %40, keep, 1, 1; }"
        : ACCUMULATORS_32, ACCUMULATORS_4(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// D (64 x N) = A (64 x 16) B (16 x N) [+ D] of BF16, both from shared memory, of B N contiguous.
__device__ inline void wgmma_shared_bf16(float (&d)[32], u64 a, u64 b, u32 accumulate) {
    asm volatile(
        "{ .reg .pred keep; setp.ne.b32 keep, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "},\n"
        " %32, %33, keep, 1, 1, 0, 1; }"
        : ACCUMULATORS_32
        : "l"(a), "l"(b), "r"(accumulate));
}

// The same with A from registers.
__device__ inline void wgmma_registers_bf16(float (&d)[64], const u32 (&a)[4], u64 b, u32 accumulate) {
    asm volatile(
        "{ .reg .pred keep; setp.ne.b32 keep, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "},\n"
        " {%64, %65, %66, %67}, %68, keep, 1, 1, 1; }"
        : ACCUMULATORS_64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

__device__ inline void wgmma_registers_bf16(float (&d)[32], const u32 (&a)[4], u64 b, u32 accumulate) {
    asm volatile(
        "{ .reg .pred keep; setp.ne.b32 keep, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "},\n"
        " {%32, %33, %34, %35}, %36, keep, 1, 1, 1; }"
        : ACCUMULATORS_32
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

#undef ACCUMULATORS_4
#undef ACCUMULATORS_16
#undef ACCUMULATORS_32
#undef ACCUMULATORS_64
#undef NAMES_16
#undef NAMES_32
#undef NAMES_64
