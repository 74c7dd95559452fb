// The forward pass of MXFP8 attention on Hopper: O and LSE of packed documents.
//
// A persistent grid. In every pipeline of a CTA one warp walks the schedule and keeps rings of stages filled
// with keys and values, already into the next item while this one is computed; each of its consumer
// warpgroups computes 64 query rows, from the last key tile that the item sees down to the first.
// Three warpgroups share what one pipeline loads. Or, with items of 64 rows, each has a pipeline of its own:
// that loads more, and lets one warpgroup begin and end an item while the others are in the middle of theirs,
// which pays where items are short. The numbers are those of cpu/hopper/forward.rs.
//
// Operands are in padded coordinates and lie in memory as the MMA wants them (layout.cuh), so that
// every tile is one contiguous copy. Nothing past a document's last block of 32 is copied; what
// remains in shared memory from earlier tiles may be anything, also NaN. It is never multiplied with
// a value that counts: scores are masked by selection, and P V visits no block that a row does not
// see, since 0 times NaN is NaN.
//
// Rounded probabilities do not sum to the unrounded ones. So that O is a mean all the same, V is followed by
// a few columns of ones: P V comes with what its rounded weights sum to, and is made up for it tile by tile.
#include "key_tile.cuh"
#include "layout.cuh"
#include "output_rows.cuh"
#include "parameters.cuh"
#include "ptx.cuh"
#include "schedule.cuh"
#include "softmax.cuh"
#include "tiles.cuh"

// Constants: HEAD_DIM (64 or 128), ITEM_ROWS (64 or 192), K_STAGES and V_STAGES of the rings, and MASK
// (tiles.cuh).

constexpr u32 WARPGROUPS = 3;
constexpr u32 SHARERS = ITEM_ROWS / GROUP_ROWS;  // warpgroups of a pipeline
constexpr u32 PIPELINES = WARPGROUPS / SHARERS;
constexpr u32 THREADS = 128 * (WARPGROUPS + 1);
constexpr u32 PRODUCER_REGISTERS = 32;
constexpr u32 CONSUMER_REGISTERS = 160;
constexpr u32 TILE_BYTES = TILE * HEAD_DIM;
constexpr u32 V_BLOCK_BYTES = BLOCK * HEAD_DIM;
// Behind V's transposed block, 8 rows of ones: what P is multiplied with to know how heavy its codes are.
constexpr u32 ONES_BYTES = BLOCK * 8;
constexpr u32 V_PITCH = V_BLOCK_BYTES + ONES_BYTES;
constexpr Swizzle ROW_SWIZZLE = swizzle_of_rows(HEAD_DIM);
constexpr u32 WORDS = HEAD_DIM / 2;  // of a thread's output fragment
constexpr u32 PV_WORDS = WORDS + 4;  // and of P V, with the sum of P in further columns
constexpr float LN_2 = 0.693147180559945f;

constexpr u32 ALL_GROUPS = (1 << GROUPS) - 1;

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "rows are one swizzle span");
static_assert(ITEM_ROWS == GROUP_ROWS || ITEM_ROWS == WARPGROUPS * GROUP_ROWS, "one warpgroup of an item, or all");
static_assert(PIPELINES > 1 || K_STAGES == V_STAGES, "keys and values share their barriers");

// `Parameters` of forward.rs. Strides are in elements.
struct Parameters {
    const u8 *q;  // [heads][slots] rows
    const float *q_scales;  // [heads][blocks]
    const u8 *k;  // [kv_heads][slots] rows
    const float *k_scales;
    const u8 *v;  // [kv_heads][blocks] transposed
    const float *v_folds;
    u16 *o;  // [tokens][heads][HEAD_DIM], BF16
    float *lse;  // [heads][tokens]
    const WorkItem *items;
    const ScheduleHeader *header;
    u32 *counter;
    i64 o_token_stride;
    i64 o_head_stride;
    int tokens;
    int slots;
    u32 heads;
    u32 heads_per_kv_head;
    u32 heads_per_section;
    int window;
    float scale;  // softmax scale times log2(e)
    float c;
    float tau;
    u32 reserved;
};
SAME_OFFSET(Parameters, q);
SAME_OFFSET(Parameters, q_scales);
SAME_OFFSET(Parameters, k);
SAME_OFFSET(Parameters, k_scales);
SAME_OFFSET(Parameters, v);
SAME_OFFSET(Parameters, v_folds);
SAME_OFFSET(Parameters, o);
SAME_OFFSET(Parameters, lse);
SAME_OFFSET(Parameters, items);
SAME_OFFSET(Parameters, header);
SAME_OFFSET(Parameters, counter);
SAME_OFFSET(Parameters, o_token_stride);
SAME_OFFSET(Parameters, o_head_stride);
SAME_OFFSET(Parameters, tokens);
SAME_OFFSET(Parameters, slots);
SAME_OFFSET(Parameters, heads);
SAME_OFFSET(Parameters, heads_per_kv_head);
SAME_OFFSET(Parameters, heads_per_section);
SAME_OFFSET(Parameters, window);
SAME_OFFSET(Parameters, scale);
SAME_OFFSET(Parameters, c);
SAME_OFFSET(Parameters, tau);
SAME_OFFSET(Parameters, reserved);

// What a pipeline does at a time: an item for one head. The work is over when the document has no rows.
struct Work {
    WorkItem item;
    Range rows;  // see balanced_rows()
    u32 head;
};

constexpr u32 Q_SLOTS = 2;  // the next item's queries come in while this one's are used
// Output leaves through shared memory, of shorter rows where there is no room for whole ones.
constexpr u32 OUTPUT_PARTS = HEAD_DIM == 64 ? 1 : 2;
constexpr u32 STAGING_BYTES = WARP_ROWS * HEAD_DIM * 2 / OUTPUT_PARTS;  // of a warp

struct Tiles {
    u8 q[Q_SLOTS][ITEM_ROWS * HEAD_DIM];
    u8 k[K_STAGES][TILE_BYTES];
    u8 v[V_STAGES][GROUPS * V_PITCH];
    u8 o[4 * SHARERS][STAGING_BYTES];
};

struct Pipeline {
    float q_scale[Q_SLOTS][ITEM_ROWS / BLOCK];
    float k_scale[K_STAGES][GROUPS];
    float v_fold[K_STAGES][GROUPS];
    Work work[Q_SLOTS];
    u64 q_full[Q_SLOTS], q_empty[Q_SLOTS];
    u64 k_full[K_STAGES], k_empty[K_STAGES];
    u64 v_full[V_STAGES], v_empty[V_STAGES];  // not used by a single pipeline
};

struct SharedMemory {
    Tiles tiles[PIPELINES];
    Pipeline pipelines[PIPELINES];
};
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "the host asks for less");

// The rows of an item. As the schedule cuts it, the last item of a document may leave warpgroups without
// rows; here the last ones share what is missing, one run of 64 rows each.
__device__ inline Range balanced_rows(const WorkItem& item) {
    const int items = (item.len + ITEM_ROWS - 1) / ITEM_ROWS;
    if (items == 1) return {0, item.len};
    const int missing = items * int(SHARERS) - (item.len + GROUP_ROWS - 1) / GROUP_ROWS;
    const int nth_short = item.first / ITEM_ROWS - (items - missing);
    const int begin = item.first - GROUP_ROWS * max(0, nth_short);
    return {begin, min(begin + ITEM_ROWS - (nth_short >= 0 ? GROUP_ROWS : 0), item.len)};
}

// ---- the producer warp: walks the schedule and keeps the queries and the rings of stages filled

struct Producer {
    const Parameters& p;
    Tiles& tiles;
    Pipeline& pipeline;
    u32 index;  // of the pipeline
    u32 lane;
    Ring<Q_SLOTS> queries;
    Ring<K_STAGES> keys;
    Ring<V_STAGES> values;

    __device__ void run() {
        // Everything that the kernel reads from global memory, producers read.
        wait_for_predecessor();
        const HeadSections order = {p.heads, p.heads_per_section};
        const u32 items = p.header->items[FORWARD];
        const bool dynamic = acquires_dynamically(p.header, order);
        const u32 positions = position_count(items, order);
        // A position is acquired while the one before it is loaded.
        u32 next = dynamic ? acquire(positions) : assigned(0);
        for (u32 round = 1;; round++) {
            const u32 position = __shfl_sync(FULL_WARP, next, 0);
            if (position >= positions) break;
            next = dynamic ? acquire(positions) : assigned(round);
            const Assignment at = assignment_at(position, items, order);
            const WorkItem item = p.items[at.item];
            load({item, balanced_rows(item), at.head});
        }
        barrier_wait(pipeline.q_empty[queries.stage()], queries.parity() ^ 1);
        if (lane == 0) {
            pipeline.work[queries.stage()].item.len = 0;
            barrier_arrive(pipeline.q_full[queries.stage()]);
        }
        barrier_arrive_after_word_copies(pipeline.q_full[queries.stage()]);
    }

    // Pipelines of the grid. Those of a CTA get work of different lengths.
    static __device__ u32 pipelines() { return gridDim.x * PIPELINES; }
    __device__ u32 assigned(u32 round) const {
        return alternating_position(round, index * gridDim.x + blockIdx.x, pipelines());
    }
    // For lane 0.
    __device__ u32 acquire(u32 positions) const {
        return lane == 0 ? acquire_position(p.counter, positions, pipelines()) : 0;
    }

    __device__ void load(const Work& work) {
        const WorkItem& item = work.item;
        load_queries(work);

        // Keys that the item does not see stay where they are, but for the rest of their block.
        const Range seen = keys_seen(work.rows, item.len, p.window);
        const Range covered = covering(seen, TILE);
        const i64 start = i64(work.head / p.heads_per_kv_head) * p.slots + padded_start(item.start, item.document);
        for (int tile = covered.end - 1; tile >= covered.begin; tile--) {
            const int first = tile * TILE;
            load_tile(start + first, min(TILE, round_up(seen.end - first, BLOCK)));
        }
    }

    __device__ void load_queries(const Work& work) {
        const u32 slot = queries.stage();
        u64& full = pipeline.q_full[slot];
        const u32 count = round_up(work.rows.end - work.rows.begin, BLOCK);
        const i64 first = i64(work.head) * p.slots + padded_start(work.item.start, work.item.document) + work.rows.begin;
        barrier_wait(pipeline.q_empty[slot], queries.parity() ^ 1);
        if (lane == 0) {
            pipeline.work[slot] = work;
            barrier_arrive_expect(full, count * HEAD_DIM);
            bulk_copy(tiles.q[slot], p.q + first * HEAD_DIM, count * HEAD_DIM, full);
        }
        if (lane < ITEM_ROWS / BLOCK)
            word_copy(&pipeline.q_scale[slot][lane], p.q_scales + first / BLOCK + lane, lane < count / BLOCK);
        barrier_arrive_after_word_copies(full);
        queries.advance();
    }

    // Block by block, between the ones.
    __device__ void load_values(u32 stage, i64 first, u32 count, u64& full) const {
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++)
            if (g < count / BLOCK)
                bulk_copy(tiles.v[stage] + g * V_PITCH, p.v + first * HEAD_DIM + g * V_BLOCK_BYTES, V_BLOCK_BYTES, full);
    }

    // `count` keys and values from row `first` of all heads' rows on.
    __device__ void load_tile(i64 first, u32 count) {
        const u32 stage = keys.stage();
        u64& full = pipeline.k_full[stage];
        // The transposed blocks of a run of keys take as many bytes as its rows, at the same place.
        const u32 bytes = count * HEAD_DIM;
        barrier_wait(pipeline.k_empty[stage], keys.parity() ^ 1);
        if (lane == 0) {
            barrier_arrive_expect(full, PIPELINES == 1 ? 2 * bytes : bytes);
            bulk_copy(tiles.k[stage], p.k + first * HEAD_DIM, bytes, full);
            if (PIPELINES == 1) load_values(stage, first, count, full);
        }
        // Absent blocks get harmless scales: what is computed with them is masked.
        const u32 block = lane % GROUPS;
        if (lane < 2 * GROUPS) {
            const bool of_keys = lane < GROUPS;
            float* to = of_keys ? pipeline.k_scale[stage] : pipeline.v_fold[stage];
            const float* from = of_keys ? p.k_scales : p.v_folds;
            word_copy(to + block, from + first / BLOCK + block, block < count / BLOCK);
        }
        barrier_arrive_after_word_copies(full);
        keys.advance();
        if (PIPELINES == 1) return;

        u64& values_full = pipeline.v_full[values.stage()];
        barrier_wait(pipeline.v_empty[values.stage()], values.parity() ^ 1);
        if (lane == 0) {
            barrier_arrive_expect(values_full, bytes);
            load_values(values.stage(), first, count, values_full);
        }
        values.advance();
    }
};

// ---- consumers

// A warpgroup: 64 query rows, 16 for each warp and two for each thread.

struct Consumer {
    const Parameters& p;
    Tiles& tiles;
    Pipeline& pipeline;
    u32 group;  // of the pipeline's
    Ring<Q_SLOTS> queries;
    Ring<K_STAGES> keys;
    Ring<V_STAGES> values;

    __device__ void run() {
        for (;;) {
            const u32 slot = queries.stage();
            barrier_wait(pipeline.q_full[slot], queries.parity());
            if (pipeline.work[slot].item.len == 0) break;
            compute(slot);
            queries.advance();
            release(pipeline.q_empty[slot]);
        }
    }

    // Every warp gives a stage back by itself: no MMA waits for what the others read of scales and of the work
    // item, nor for one that has yet to see a stage full of which the warpgroup sees nothing.
    __device__ void release(u64& empty) const {
        __syncwarp();
        if (lane() == 0) barrier_arrive(empty);
    }

    __device__ u32 warp() const { return threadIdx.x / 32 % 4; }
    __device__ u32 lane() const { return threadIdx.x % 32; }

    // The first row of the warp, and one of the thread's two, counted from the document's start.
    __device__ int first_row(const Work& work) const {
        return work.rows.begin + int(group * GROUP_ROWS + WARP_ROWS * warp());
    }
    __device__ int thread_row(const Work& work, u32 half) const {
        return first_row(work) + int(8 * half + lane() / 4);
    }

    // The work item is read from shared memory where it is needed: registers are for fragments.
    __device__ void compute(u32 slot) {
        const Work& work = pipeline.work[slot];
        const WorkItem& item = work.item;
        const Range loaded = covering(keys_seen(work.rows, item.len, p.window), TILE);
        const Range seen = covering(keys_seen(group_rows(work.rows, group), item.len, p.window), TILE);
        const Range clear = tiles_without_mask(group_rows(work.rows, group), item.len, p.window);

        float o[WORDS];
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) o[i] = 0;
        SoftmaxRows softmax;

        for (int tile = loaded.end - 1; tile >= loaded.begin; tile--) {
            // Also where this warpgroup sees nothing of the tile: so none gets ahead of the ring.
            const u32 stage = keys.stage(), value_stage = PIPELINES == 1 ? stage : values.stage();
            barrier_wait(pipeline.k_full[stage], keys.parity());
            if (seen.contains(tile)) {
                float s[64];
                start_scores(s, slot, stage);
                const float q_scale = p.scale * pipeline.q_scale[slot][(group * GROUP_ROWS + WARP_ROWS * warp()) / BLOCK];
                const TileScales scales(q_scale, pipeline.k_scale[stage], pipeline.v_fold[stage]);
                wgmma_wait();
                pin(s);
                if (PIPELINES > 1) release(pipeline.k_empty[stage]);
                u32 codes[GROUPS][4];
                TileSums sums;
                if (clear.contains(tile)) {
                    if (__any_sync(FULL_WARP, softmax.may_pass(s, scales, p.tau)))
                        softmax.raise_references(s, scales, p.tau, ALL_GROUPS, o);
#pragma unroll
                    for (u32 g = 0; g < GROUPS; g++) softmax.probabilities(s, scales, p.c, g, sums, codes[g]);
                    if (PIPELINES > 1) barrier_wait(pipeline.v_full[value_stage], values.parity());
                    add_values(o, sums, codes, value_stage);
                } else {
                    const VisibleGroups groups(first_row(work), item.len, tile, p.window);
                    replace_unseen(s, groups.partly & ~groups.wholly, thread_row(work, 0), item.len, tile, p.window, -INF);
                    softmax.raise_references(s, scales, p.tau, groups.partly, o);
#pragma unroll
                    for (u32 g = 0; g < GROUPS; g++) {
                        codes[g][0] = codes[g][1] = codes[g][2] = codes[g][3] = 0;
                        if (groups.partly >> g & 1) softmax.probabilities(s, scales, p.c, g, sums, codes[g]);
                    }
                    if (PIPELINES > 1) barrier_wait(pipeline.v_full[value_stage], values.parity());
                    add_values_masked(o, sums, codes, value_stage, work, tile);
                }
            }
            // A pipeline of one warpgroup loads nothing that it does not see.
            release(PIPELINES == 1 ? pipeline.k_empty[stage] : pipeline.v_empty[value_stage]);
            keys.advance();
            if (PIPELINES > 1) values.advance();
        }
        store(o, softmax, work);
    }

    // Has the tensor core compute S = Q K^T, of codes.
    __device__ void start_scores(float (&s)[64], u32 slot, u32 stage) const {
        const u64 q = operand_descriptor(tiles.q[slot] + group * GROUP_ROWS * HEAD_DIM, ROW_SWIZZLE);
        const u64 k = operand_descriptor(tiles.k[stage], ROW_SWIZZLE);
        pin(s);
        wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < HEAD_DIM / 32; step++)
            wgmma_shared(s, advance(q, 32 * step), advance(k, 32 * step), step > 0);
        wgmma_commit();
    }

    // O += P V, with a fresh accumulator for P V: Hopper's keeps 13 fraction bits.
    __device__ void add_values(float (&o)[WORDS], const TileSums& sums, u32 (&codes)[GROUPS][4], u32 stage) const {
        const float weights[2] = {quad_sum(sums.sum[0]), quad_sum(sums.sum[1])};
        float t[PV_WORDS];
        pin(t);
        pin(codes);
        wgmma_fence();
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) wgmma_registers(t, codes[g], v_block(stage, g), g > 0);
        wgmma_commit();
        wgmma_wait();
        pin(t);
        pin(codes);
        promote(o, t, weights);
    }

    __device__ u64 v_block(u32 stage, u32 block) const {
        return operand_descriptor(tiles.v[stage] + block * V_PITCH, Swizzle::B32);
    }

    static __device__ void promote(float (&o)[WORDS], const float (&t)[PV_WORDS], const float (&weights)[2]) {
        const float factor[2] = {make_up(weights[0], t[WORDS]), make_up(weights[1], t[WORDS + 2])};
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) o[i] = fmaf(t[i], factor[i / 2 % 2], o[i]);
    }

    // The same block by block. A warp's rows lie in one block of 32; the lower half of the warpgroup may see
    // a block in front of what the upper half sees, and the upper half one behind. What a half does not
    // see may be NaN, which a probability of 0 does not undo, although both multiply together: the
    // upper half starts anew after the one, and the lower half is done before the other.
    __device__ void add_values_masked(float (&o)[WORDS], const TileSums& sums, u32 (&codes)[GROUPS][4], u32 stage,
                                      const Work& work, int tile) const {
        const u32 plan = multiplications(work, tile);
        const float weights[2] = {quad_sum(sums.sum[0]), quad_sum(sums.sum[1])};
        float t[PV_WORDS];
#pragma unroll
        for (u32 i = 0; i < PV_WORDS; i++) t[i] = 0;
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            if (!(plan >> g & BY_BOTH)) continue;
            multiply(t, codes[g], stage, g);
            if (MASK == WINDOW && plan >> g & START_ANEW) {
#pragma unroll
                for (u32 i = 0; i < PV_WORDS; i++) t[i] = 0;
            }
        }
        if (!(plan & IS_UPPER)) promote(o, t, weights);
        // Warpgroups start at an even block.
#pragma unroll
        for (u32 g = 1; g < GROUPS; g += 2)
            if (plan >> g & BY_UPPER) multiply(t, codes[g], stage, g);
        if (plan & IS_UPPER) promote(o, t, weights);
    }

    // What to do with each block of a tile, a bit each and every four of them for all blocks: few registers are left.
    static constexpr u32 BY_BOTH = 1, BY_UPPER = 1 << 4, START_ANEW = 1 << 8, IS_UPPER = 1 << 12;

    __device__ u32 multiplications(const Work& work, int tile) const {
        const int len = work.item.len;
        const Range rows = group_rows(work.rows, group);
        const Range lower = blocks_seen({rows.begin, min(rows.begin + BLOCK, rows.end)}, len);
        const Range upper = blocks_seen({rows.begin + BLOCK, rows.end}, len);
        u32 plan = warp() >= 2 ? IS_UPPER : 0;
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            const int block = tile * int(GROUPS) + int(g);
            if (lower.contains(block)) plan |= BY_BOTH << g;
            if (block == lower.end && upper.end > lower.end) plan |= BY_UPPER << g;
            if (MASK == WINDOW && plan & IS_UPPER && block < upper.begin) plan |= START_ANEW << g;
        }
        return plan;
    }

    __device__ Range blocks_seen(Range rows, int len) const { return covering(keys_seen(rows, len, p.window), BLOCK); }

    // One block's part of P V.
    __device__ void multiply(float (&t)[PV_WORDS], u32 (&codes)[4], u32 stage, u32 block) const {
        pin(t);
        pin(codes);
        wgmma_fence();
        wgmma_registers(t, codes, v_block(stage, block), 1);
        wgmma_commit();
        wgmma_wait();
        pin(t);
        pin(codes);
    }

    // Normalised rows of the document in BF16, and their LSE. A row that saw no key is zero, with +inf.
    __device__ void store(float (&o)[WORDS], const SoftmaxRows& softmax, const Work& work) const {
        const WorkItem& item = work.item;
        float factor[2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const float sum = quad_sum(softmax.sum[half]);
            factor[half] = sum == 0 ? 0 : 1 / sum;
            const int row = thread_row(work, half);
            if (row < work.rows.end && lane() % 4 == 0)
                p.lse[i64(work.head) * p.tokens + item.start + row] =
                    sum == 0 ? INF : (softmax.reference[half] - p.c + log2f(sum)) * LN_2;
        }

        u8* staging = tiles.o[group * 4 + warp()];
        u16* to = p.o + i64(item.start + first_row(work)) * p.o_token_stride + i64(work.head) * p.o_head_stride;
        constexpr u32 COUNT = WORDS / OUTPUT_PARTS;
        using Part = float[COUNT];
#pragma unroll
        for (u32 part = 0; part < OUTPUT_PARTS; part++)
            store_rows(reinterpret_cast<const Part&>(o[part * COUNT]), factor, {staging, staging + STAGING_BYTES / 2},
                       to + part * (HEAD_DIM / OUTPUT_PARTS), p.o_token_stride, work.rows.end - first_row(work));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(const __grid_constant__ Parameters p) {
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory());
    // The same for a warp, which the compiler cannot know of threadIdx.x.
    const u32 warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);

    if (threadIdx.x < PIPELINES) {
        Pipeline& pipeline = shared.pipelines[threadIdx.x];
        for (u32 i = 0; i < Q_SLOTS; i++) {
            barrier_init(pipeline.q_full[i], LOAD_ARRIVALS);
            barrier_init(pipeline.q_empty[i], 4 * SHARERS);
        }
        for (u32 i = 0; i < K_STAGES; i++) {
            barrier_init(pipeline.k_full[i], LOAD_ARRIVALS);
            barrier_init(pipeline.k_empty[i], 4 * SHARERS);
        }
        for (u32 i = 0; i < V_STAGES; i++) {
            barrier_init(pipeline.v_full[i], 1);
            barrier_init(pipeline.v_empty[i], 4 * SHARERS);
        }
        barrier_init_fence();
    }
    for (u32 i = threadIdx.x / (ONES_BYTES / 16); i < PIPELINES * V_STAGES * GROUPS; i += THREADS / (ONES_BYTES / 16)) {
        constexpr u32 ones = 0x38383838;
        u8* rows = shared.tiles[i / GROUPS / V_STAGES].v[i / GROUPS % V_STAGES] + i % GROUPS * V_PITCH + V_BLOCK_BYTES;
        reinterpret_cast<uint4*>(rows)[threadIdx.x % (ONES_BYTES / 16)] = make_uint4(ones, ones, ones, ones);
    }
    async_fence();
    __syncthreads();

    if (warp < 4) {
        registers_release<PRODUCER_REGISTERS>();
        if (warp < PIPELINES)
            Producer{p, shared.tiles[warp], shared.pipelines[warp], warp, threadIdx.x % 32}.run();
    } else {
        registers_acquire<CONSUMER_REGISTERS>();
        const u32 warpgroup = warp / 4 - 1, pipeline = PIPELINES == 1 ? 0 : warpgroup;
        Consumer{p, shared.tiles[pipeline], shared.pipelines[pipeline], PIPELINES == 1 ? warpgroup : 0}.run();
    }
}
