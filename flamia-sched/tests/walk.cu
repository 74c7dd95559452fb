// The CTAs of a persistent grid, or of the backward's two launches, note which position they got.
#include "schedule.cuh"

// Adds one to visits[item * heads + head] of every position of this CTA.
extern "C" __global__ void walk(const ScheduleHeader* header, u32 pass, u32 dynamic, HeadSections order,
                                u32* counter, u32* visits) {
    __shared__ u32 taken;
    const u32 items = header->items[pass];
    const u32 positions = position_count(items, order);
    for (u32 round = 0;; ++round) {
        u32 position = alternating_position(round);
        if (dynamic) {
            if (threadIdx.x == 0) taken = acquire_position(counter, positions);
            __syncthreads();
            position = taken;
            __syncthreads();
            if (position >= positions) return;
        } else if (round * gridDim.x >= positions) {
            return;
        } else if (position >= positions) {
            continue;
        }
        const Assignment work = assignment_at(position, items, order);
        if (threadIdx.x == 0) atomicAdd(&visits[work.item * order.heads + work.head], 1);
    }
}

// Whether a kernel with heads in this order acquires dynamically.
extern "C" __global__ void acquisition(const ScheduleHeader* header, HeadSections order, u32* dynamic) {
    *dynamic = acquires_dynamically(header, order);
}

// Where each position is.
extern "C" __global__ void locate(u32 items, HeadSections order, uint2* found) {
    const u32 position = blockIdx.x * blockDim.x + threadIdx.x;
    if (position >= position_count(items, order)) return;
    const Assignment work = assignment_at(position, items, order);
    found[position] = make_uint2(work.item, work.head);
}
