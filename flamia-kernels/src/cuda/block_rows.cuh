// Which rows of the packed tensor a block of padded slots holds.
#pragma once

#include "layout.cuh"

constexpr u32 ALL_LANES = 0xffffffff;

// Rows of the packed tensor.
struct Rows {
    int first;
    int count;
    int document;
};

// The rows of the block at slot `slot`: none if it lies past its document's end. For a whole warp.
//
// The document is the last one whose padded start is not past the slot. A warp looks at 32 candidates
// at a time, so that the search takes one load up to 32 documents and two up to 1024.
__device__ __forceinline__ Rows rows_of_block(const int *cu_seqlens, int documents, int tokens, int slot) {
    const int lane = threadIdx.x % 32;
    int document = 0;
#pragma unroll 1
    for (int candidates = documents; candidates > 1;) {
        const int step = (candidates + 31) / 32;
        const int probe = document + lane * step;
        const bool is_document = lane * step < candidates;
        const bool starts = is_document && padded_start(__ldg(cu_seqlens + probe), probe) <= slot;
        // Lane 0 always says yes.
        const int last = 31 - __clz(__ballot_sync(ALL_LANES, starts));
        document += last * step;
        candidates = min(step, candidates - last * step);
    }
    const int start = __ldg(cu_seqlens + document);
    const int end = min(__ldg(cu_seqlens + document + 1), tokens);
    const int first = start + slot - padded_start(start, document);
    // Boundaries that no packed row has may put the block in front of the tensor: it has no rows then.
    return {first, first < 0 ? 0 : min(end - first, BLOCK_TOKENS), document};
}
