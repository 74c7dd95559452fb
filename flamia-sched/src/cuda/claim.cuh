// Dynamic acquisition on Blackwell: Cluster Launch Control. The grid has one CTA per position; a
// running CTA claims the place of one that has not started, which then never does. Needs sm_100.
#pragma once
#include "schedule.cuh"

// In shared memory, one per CTA.
struct Claim {
    alignas(16) u64 answer[2];
    u64 barrier;
};

__device__ inline u32 shared_address(const void* pointer) {
    return u32(__cvta_generic_to_shared(pointer));
}

// By one thread, before the others are let past a barrier of the CTA.
__device__ inline void claim_init(Claim* claim) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&claim->barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// By one thread: asks for the next place. To be called only once the last loads of the current item
// are under way: a CTA that claims earlier keeps work from one that is free (the paper's section
// 3.6.2; 6 to 14.5 % in its section 4.3).
__device__ inline void claim_ask(Claim* claim) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&claim->barrier)),
                 "n"(sizeof(claim->answer))
                 : "memory");
    asm volatile(
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(
            shared_address(claim->answer)),
        "r"(shared_address(&claim->barrier))
        : "memory");
}

// By every thread: waits for the answer to the `round`th question, counted from 0. False if there
// is no place left, and then nothing may be asked again.
__device__ inline bool claim_answer(const Claim* claim, u32 round, u32* position) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "waiting:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra waiting;\n"
        "}" ::"r"(shared_address(&claim->barrier)),
        "r"(round % 2)
        : "memory");
    u32 claimed, first;
    asm volatile(
        "{\n"
        ".reg .pred claimed;\n"
        ".reg .b128 answer;\n"
        "ld.shared.b128 answer, [%2];\n"
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 claimed, answer;\n"
        "selp.u32 %0, 1, 0, claimed;\n"
        "mov.u32 %1, 0;\n"
        "@claimed clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, answer;\n"
        "}"
        : "=r"(claimed), "=r"(first)
        : "r"(shared_address(claim->answer))
        : "memory");
    // The next answer is written by the asynchronous proxy.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    *position = first;
    return claimed != 0;
}
