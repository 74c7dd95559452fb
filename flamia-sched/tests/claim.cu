// As walk.cu's walk, with positions claimed from CTAs that have not started.
#include "claim.cuh"

extern "C" __global__ void walk_claimed(const ScheduleHeader* header, u32 pass, HeadSections order, u32* visits) {
    __shared__ Claim claim;
    const u32 items = header->items[pass];
    const u32 positions = position_count(items, order);
    if (threadIdx.x == 0) claim_init(&claim);
    __syncthreads();
    u32 position = blockIdx.x;
    for (u32 round = 0;; ++round) {
        if (threadIdx.x == 0) claim_ask(&claim);
        if (position < positions && threadIdx.x == 0) {
            const Assignment work = assignment_at(position, items, order);
            atomicAdd(&visits[work.item * order.heads + work.head], 1);
        }
        const bool more = claim_answer(&claim, round, &position);
        __syncthreads();
        if (!more) return;
    }
}
