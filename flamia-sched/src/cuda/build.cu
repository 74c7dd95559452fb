// Work lists and row tables from cu_seqlens on the device, without the host.
//
// Launches whose number the row length fixes: clear the header; expand (check the boundaries, place
// every row, collect one key per item); sort_runs (RUN keys per CTA); and as many merges of FAN_IN
// runs as it takes, the last of which writes the items.
//
// A key is (section of the document, most work first, first row of the item). Rows are unique, so keys are: the
// order is total, and it does not matter in which order the atomics of expand collected them. A row
// also names its item, by way of the row table.
#include "schedule.cuh"

// CU_SEQLEN is the type of a boundary; RUN, FAN_IN and MAX_SECTIONS are the host's.
constexpr u32 TILE = 128;
constexpr u32 EXPAND_THREADS = 1024;
constexpr u32 MERGE_THREADS = 256;
constexpr u32 WARPS = EXPAND_THREADS / 32;
constexpr u64 NO_KEY = ~0ull;
constexpr u32 COST_BITS = 24;  // a row has no more tiles
static_assert(MAX_SECTIONS <= 1 << (32 - COST_BITS), "a section fits beside a cost");
static_assert((RUN & (RUN - 1)) == 0 && RUN <= 1024, "a search halves a run, a CTA sorts one");
static_assert(WARPS == 32, "one warp scans the counts of all");

enum MaskKind { CAUSAL = 0, FULL = 1, WINDOW = 2 };

// What is wrong with a boundary, in the order in which the host looks.
enum Fault { START = 0, NEGATIVE = 1, DECREASING = 2, PAST_END = 3, END = 4 };

struct BuildParams {
    const CU_SEQLEN* cu_seqlens;
    ScheduleHeader* header;
    RowPlace* rows;
    TileBounds* tiles;
    WorkItem* items[PASSES];
    u64* keys[PASSES];
    u64* spare[PASSES];
    u32 entries;
    u32 total;
    u32 item_rows[PASSES];
    u32 section_rows[PASSES];
    u32 mask;
    u32 window;
};
SAME_OFFSET(BuildParams, cu_seqlens);
SAME_OFFSET(BuildParams, header);
SAME_OFFSET(BuildParams, rows);
SAME_OFFSET(BuildParams, tiles);
SAME_OFFSET(BuildParams, items);
SAME_OFFSET(BuildParams, keys);
SAME_OFFSET(BuildParams, spare);
SAME_OFFSET(BuildParams, entries);
SAME_OFFSET(BuildParams, total);
SAME_OFFSET(BuildParams, item_rows);
SAME_OFFSET(BuildParams, section_rows);
SAME_OFFSET(BuildParams, mask);
SAME_OFFSET(BuildParams, window);

// The first fault wins, and the one that the host looks for first at the same entry. Kept inverted,
// so that zeroed memory means none.
__device__ void report(ScheduleHeader* header, u32 index, Fault fault) {
    atomicMax(&header->fault, ~(u64(index) << 3 | fault));
}

__device__ void check_boundary(const BuildParams& p, u32 index) {
    if (index >= p.entries) return;
    const i64 value = p.cu_seqlens[index];
    if (index == 0) {
        if (value != 0) report(p.header, index, START);
        return;
    }
    if (value < 0) {
        report(p.header, index, NEGATIVE);
    } else if (value < i64(p.cu_seqlens[index - 1])) {
        report(p.header, index, DECREASING);
    } else if (value > i64(p.total)) {
        report(p.header, index, PAST_END);
    } else if (index == p.entries - 1 && value != i64(p.total)) {
        report(p.header, index, END);
    }
}

__device__ int clamped(const BuildParams& p, u32 entry) {
    const i64 value = p.cu_seqlens[entry];
    return int(min(max(value, 0ll), i64(p.total)));
}

// The last document that starts at or before the row. Of boundaries that are not sorted, some
// document: nothing is read or written out of bounds, and the fault is on record.
__device__ RowPlace place_of(const BuildParams& p, u32 row) {
    u32 low = 0, high = p.entries - 2;
    while (low < high) {
        const u32 middle = (low + high + 1) / 2;
        if (i64(p.cu_seqlens[middle]) <= i64(row)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    const int start = clamped(p, low);
    return {int(low), int(row) - start, start, clamped(p, low + 1)};
}

// Blocks of TILE keys that the item's queries see, or of queries that see its keys.
template <Pass PASS>
__device__ u32 cost_of(const BuildParams& p, const RowPlace& place) {
    const i64 len = place.end - place.start;
    const i64 first = place.position;
    const i64 end = min(first + p.item_rows[PASS], len);
    i64 from = 0, to = len;
    if (PASS == FORWARD && p.mask != FULL) to = end;
    if (PASS == FORWARD && p.mask == WINDOW) from = max(first + 1 - i64(p.window), 0ll);
    if (PASS == BACKWARD && p.mask != FULL) from = first;
    if (PASS == BACKWARD && p.mask == WINDOW) to = min(len, end - 1 + i64(p.window));
    return u32((to + TILE - 1) / TILE - from / TILE);
}

extern "C" __global__ void schedule_clear(const __grid_constant__ BuildParams p) {
    constexpr u32 WORDS = sizeof(ScheduleHeader) / sizeof(u32);
    if (threadIdx.x < WORDS) reinterpret_cast<u32*>(p.header)[threadIdx.x] = 0;
}

// What the warps of a CTA found, and where it goes.
struct ExpandShared {
    u32 warp_items[PASSES][WARPS];  // then the slots of the warp's first item
    u32 documents;
    u32 longest;
};

// Which lanes of the warp have a row that begins an item.
template <Pass PASS>
__device__ u32 beginners(const BuildParams& p, u32 row, const RowPlace& place) {
    return __ballot_sync(~0u, row < p.total && u32(place.position) % p.item_rows[PASS] == 0);
}

// Turns the warps' counts into slots, in one warp: with one atomic per CTA, in any order of CTAs.
__device__ void reserve(u32* list_items, u32* warp_items) {
    const u32 lane = threadIdx.x % 32;
    const u32 own = warp_items[lane];
    u32 sum = own;
    for (u32 distance = 1; distance < WARPS; distance *= 2) {
        const u32 before = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += before;
    }
    u32 first = 0;
    if (lane == WARPS - 1 && sum != 0) first = atomicAdd(list_items, sum);
    warp_items[lane] = __shfl_sync(~0u, first, WARPS - 1) + sum - own;
}

template <Pass PASS>
__device__ void append(const BuildParams& p, const ExpandShared& shared, u32 mine, u32 row, const RowPlace& place) {
    const u32 lane = threadIdx.x % 32;
    if ((mine >> lane & 1) == 0) return;
    const u32 slot = shared.warp_items[PASS][threadIdx.x / 32] + __popc(mine & ((1u << lane) - 1));
    const u32 section = min(u32(place.start) / p.section_rows[PASS], MAX_SECTIONS - 1);
    const u32 least_work = (1u << COST_BITS) - 1;
    p.keys[PASS][slot] = u64(section << COST_BITS | (least_work - cost_of<PASS>(p, place))) << 32 | row;
}

extern "C" __global__ void __launch_bounds__(EXPAND_THREADS)
schedule_expand(const __grid_constant__ BuildParams p) {
    __shared__ ExpandShared shared;
    if (threadIdx.x == 0) shared.documents = shared.longest = 0;
    __syncthreads();

    const u32 row = blockIdx.x * EXPAND_THREADS + threadIdx.x;
    check_boundary(p, row);
    RowPlace place = {};
    if (row < p.total) {
        place = place_of(p, row);
        p.rows[row] = place;
        TileBounds* tile = &p.tiles[row / TILE];
        if (row % TILE == 0) {
            tile->first_document = place.document;
            tile->start = place.start;
        }
        if (row % TILE == TILE - 1 || row == p.total - 1) {
            tile->last_document = place.document;
            tile->end = place.end;
        }
    }
    const bool starts = row < p.total && place.position == 0;
    const u32 started = __ballot_sync(~0u, starts);
    const u32 longest = __reduce_max_sync(~0u, starts ? u32(place.end - place.start) : 0);
    if (threadIdx.x % 32 == 0 && started != 0) {
        atomicAdd(&shared.documents, __popc(started));
        atomicMax(&shared.longest, longest);
    }
    const u32 warp = threadIdx.x / 32;
    const u32 forward = beginners<FORWARD>(p, row, place);
    const u32 backward = beginners<BACKWARD>(p, row, place);
    if (threadIdx.x % 32 == 0) {
        shared.warp_items[FORWARD][warp] = __popc(forward);
        shared.warp_items[BACKWARD][warp] = __popc(backward);
    }
    __syncthreads();
    if (warp < PASSES) reserve(&p.header->items[warp], shared.warp_items[warp]);
    __syncthreads();
    append<FORWARD>(p, shared, forward, row, place);
    append<BACKWARD>(p, shared, backward, row, place);
    if (threadIdx.x == 0 && shared.documents != 0) {
        atomicAdd(&p.header->documents, shared.documents);
        atomicMax(&p.header->longest, shared.longest);
    }
}

// The number of keys of a pass; none of unsound boundaries.
__device__ u32 key_count(const BuildParams& p, u32 pass) {
    return p.header->fault == 0 ? p.header->items[pass] : 0;
}

extern "C" __global__ void __launch_bounds__(RUN)
schedule_sort_runs(const __grid_constant__ BuildParams p) {
    __shared__ alignas(16) u64 run[RUN];
    const u32 pass = blockIdx.y;
    const u32 first = blockIdx.x * RUN;
    const u32 all = key_count(p, pass);
    if (first >= all) return;
    const bool present = first + threadIdx.x < all;
    u64* keys = p.keys[pass] + first;
    const u64 key = present ? keys[threadIdx.x] : NO_KEY;
    run[threadIdx.x] = key;
    __syncthreads();

    // In so short a run, counting the smaller keys is quicker than any exchange: every thread reads
    // the same key at the same time, and none waits for another.
    u32 smaller = 0;
    for (u32 index = 0; index < RUN; index += 2) {
        const ulonglong2 pair = *reinterpret_cast<const ulonglong2*>(&run[index]);
        smaller += (pair.x < key) + (pair.y < key);
    }
    if (present) keys[smaller] = key;
}

// Where the key at `index` lands among the FAN_IN runs of `run_len` keys around it: the number of
// keys before it in each of them, its own included. The searches of eight runs go on side by side,
// with all their loads under way at once, since each step waits for memory.
__device__ u32 destination(const u64* keys, u32 count, u32 index, u32 run_len) {
    constexpr u32 SIDE_BY_SIDE = 8;
    const u64 key = keys[index];
    const u32 first_run = index / run_len / FAN_IN * FAN_IN;
    const u32 past_run = min(first_run + FAN_IN, (count + run_len - 1) / run_len);
    if (past_run - first_run == 1) return index;
    u32 place = first_run * run_len;
    for (u32 base = first_run; base < past_run; base += SIDE_BY_SIDE) {
        u32 start[SIDE_BY_SIDE], len[SIDE_BY_SIDE], before[SIDE_BY_SIDE];
#pragma unroll
        for (u32 side = 0; side < SIDE_BY_SIDE; ++side) {
            // Past the last run, once more the last one: a load that is there to be made.
            start[side] = min(base + side, past_run - 1) * run_len;
            len[side] = min(run_len, count - start[side]);
            before[side] = 0;
        }
        for (u32 step = run_len; step > 0; step /= 2) {
            u64 probed[SIDE_BY_SIDE];
#pragma unroll
            for (u32 side = 0; side < SIDE_BY_SIDE; ++side) {
                probed[side] = keys[start[side] + min(before[side] + step, len[side]) - 1];
            }
#pragma unroll
            for (u32 side = 0; side < SIDE_BY_SIDE; ++side) {
                const u32 probe = before[side] + step;
                if (probe <= len[side] && probed[side] < key) before[side] = probe;
            }
        }
#pragma unroll
        for (u32 side = 0; side < SIDE_BY_SIDE; ++side) {
            if (base + side < past_run) place += before[side];
        }
    }
    return place;
}

// A schedule without work, and the reason where the host can read it.
__device__ void empty_schedule(const BuildParams& p, u32 row) {
    if (row < p.total) {
        p.rows[row] = {-1, 0, 0, 0};
        if (row % TILE == 0) p.tiles[row / TILE] = {-1, -1, 0, 0};
    }
    if (row == 0) {
        const u32 index = u32(~p.header->fault >> 3);
        p.header->fault_value = p.cu_seqlens[index];
        p.header->fault_previous = index == 0 ? 0 : i64(p.cu_seqlens[index - 1]);
        p.header->items[FORWARD] = p.header->items[BACKWARD] = 0;
        p.header->documents = p.header->longest = 0;
    }
}

__device__ void choose_acquisition(const BuildParams& p) {
    const u64 longest = p.header->longest;
    const bool skewed = p.total > 0 && longest * p.header->documents >= 4ull * p.total;
    p.header->dynamic = p.mask != FULL || skewed;
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
schedule_merge(const __grid_constant__ BuildParams p, u32 run_len, u32 from_spare, u32 last) {
    const u32 pass = blockIdx.y;
    const u32 index = blockIdx.x * MERGE_THREADS + threadIdx.x;
    if (p.header->fault != 0) {
        if (last && pass == FORWARD) empty_schedule(p, index);
        return;
    }
    if (last && pass == FORWARD && index == 0) choose_acquisition(p);

    const u32 count = p.header->items[pass];
    if (index >= count) return;
    const u64* keys = from_spare ? p.spare[pass] : p.keys[pass];
    const u32 place = destination(keys, count, index, run_len);
    if (last) {
        const RowPlace row = p.rows[u32(keys[index])];
        p.items[pass][place] = {row.document, row.position, row.start, row.end - row.start};
    } else {
        (from_spare ? p.keys[pass] : p.spare[pass])[place] = keys[index];
    }
}
