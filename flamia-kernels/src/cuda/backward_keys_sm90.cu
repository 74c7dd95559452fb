// dK and dV of packed documents on Hopper, from quantised operands: the first of the two kernels of the
// backward pass. `backward_keys.rs` launches it.
//
// A persistent grid. In every CTA one warp walks the schedule and keeps a ring of stages filled with
// tiles of queries, already into the next item while this one is computed; each of two consumer warpgroups
// computes 64 keys of an item, over the query heads of its group and the queries that see them,
// both ascending. Nothing is added up across CTAs: the results are the same bits in every run.
//
// Rows of accumulators are keys: S^T = K Q^T and dP^T = V dO^T, whose fragments, rounded, are the A
// operands of dV += P^T dO and dK += dS^T Q. The numbers are those of cpu/hopper/keys.rs. Accumulators
// stay in the MMA's registers from an item's first query to its last: registers for promoting
// them there are not (Hopper's keep 13 fraction bits; bench/LOG.md has what that costs).
//
// Operands are in padded coordinates and lie in memory as the MMA wants them (layout.cuh). Nothing past a
// document's last block of 32 is copied; what remains in shared memory from earlier tiles may be
// anything, also NaN. It is masked by selection, and never multiplied with: 0 times NaN is NaN.
#include "key_rows.cuh"
#include "layout.cuh"
#include "output_rows.cuh"
#include "parameters.cuh"
#include "schedule.cuh"
#include "tiles.cuh"

// Constants: HEAD_DIM (64 or 128), STAGES of the ring, MASK (tiles.cuh), and as 0 or 1 ROTATED, whether
// Q and K were, so that dK has to be rotated back.

constexpr int ITEM_KEYS = 128;
constexpr int GROUP_KEYS = 64;  // of a warpgroup
constexpr int WARP_KEYS = 16;
constexpr int BLOCK = BLOCK_TOKENS;
constexpr u32 WARPGROUPS = ITEM_KEYS / GROUP_KEYS;
constexpr u32 WARPS = 4 * WARPGROUPS;  // that compute
constexpr u32 THREADS = 128 * (WARPGROUPS + 1);
constexpr u32 PRODUCER_REGISTERS = 24;
constexpr u32 CONSUMER_REGISTERS = 240;
constexpr u32 TILE_BYTES = QUERIES * HEAD_DIM;
constexpr u32 BLOCK_BYTES = BLOCK * HEAD_DIM;
constexpr Swizzle ROW_SWIZZLE = swizzle_of_rows(HEAD_DIM);
constexpr u32 WORDS = HEAD_DIM / 2;  // of a thread's gradient fragment

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "rows are one swizzle span");

// `Parameters` of backward_keys.rs. Strides are in elements.
struct Parameters {
    const u8 *q;             // [heads][slots] rows
    const u8 *q_transposed;  // [heads][blocks] transposed
    const float *q_scales;   // [heads][blocks]
    const u8 *d_o;
    const u8 *d_o_transposed;
    const float *d_o_scales;
    const float *d_o_folds;
    const float *row_sums;  // [heads][slots]
    const float *lse2;
    const u8 *k;  // [kv_heads][slots] rows
    const float *k_scales;
    const u8 *v;
    const float *v_scales;
    u16 *dk;  // [tokens][kv_heads][HEAD_DIM], BF16
    u16 *dv;
    const WorkItem *items;
    const ScheduleHeader *header;
    u32 *counter;
    i64 dk_token_stride;
    i64 dk_head_stride;
    i64 dv_token_stride;
    i64 dv_head_stride;
    int slots;
    u32 kv_heads;
    u32 heads_per_kv_head;
    u32 kv_heads_per_section;
    int window;
    float scale;     // softmax scale times log2(e)
    float dk_scale;  // softmax scale, times 1 / sqrt(HEAD_DIM) where dK is rotated
    int hysteresis;
};
SAME_OFFSET(Parameters, q);
SAME_OFFSET(Parameters, q_transposed);
SAME_OFFSET(Parameters, q_scales);
SAME_OFFSET(Parameters, d_o);
SAME_OFFSET(Parameters, d_o_transposed);
SAME_OFFSET(Parameters, d_o_scales);
SAME_OFFSET(Parameters, d_o_folds);
SAME_OFFSET(Parameters, row_sums);
SAME_OFFSET(Parameters, lse2);
SAME_OFFSET(Parameters, k);
SAME_OFFSET(Parameters, k_scales);
SAME_OFFSET(Parameters, v);
SAME_OFFSET(Parameters, v_scales);
SAME_OFFSET(Parameters, dk);
SAME_OFFSET(Parameters, dv);
SAME_OFFSET(Parameters, items);
SAME_OFFSET(Parameters, header);
SAME_OFFSET(Parameters, counter);
SAME_OFFSET(Parameters, dk_token_stride);
SAME_OFFSET(Parameters, dk_head_stride);
SAME_OFFSET(Parameters, dv_token_stride);
SAME_OFFSET(Parameters, dv_head_stride);
SAME_OFFSET(Parameters, slots);
SAME_OFFSET(Parameters, kv_heads);
SAME_OFFSET(Parameters, heads_per_kv_head);
SAME_OFFSET(Parameters, kv_heads_per_section);
SAME_OFFSET(Parameters, window);
SAME_OFFSET(Parameters, scale);
SAME_OFFSET(Parameters, dk_scale);
SAME_OFFSET(Parameters, hysteresis);

// What a CTA does at a time: an item for one key/value head. The work is over when the document has no
// rows.
struct Work {
    WorkItem item;
    u32 kv_head;

    __device__ Range keys() const { return {item.first, min(item.first + ITEM_KEYS, item.len)}; }
    __device__ Range group_keys(u32 group) const {
        const int begin = item.first + int(group) * GROUP_KEYS;
        return {begin, min(begin + GROUP_KEYS, item.len)};
    }
};

constexpr u32 KEY_SLOTS = 2;  // the next item's keys come in while this one's are used

struct SharedMemory {
    u8 k[KEY_SLOTS][ITEM_KEYS * HEAD_DIM];
    u8 v[KEY_SLOTS][ITEM_KEYS * HEAD_DIM];
    u8 q[STAGES][TILE_BYTES];
    u8 d_o[STAGES][TILE_BYTES];
    u8 q_transposed[STAGES][TILE_BYTES];
    u8 d_o_transposed[STAGES][TILE_BYTES];
    u8 zeros[BLOCK_BYTES];  // a transposed block
    QueryTable queries[STAGES];
    float k_scale[KEY_SLOTS][ITEM_KEYS / BLOCK];
    float v_scale[KEY_SLOTS][ITEM_KEYS / BLOCK];
    Work work[KEY_SLOTS];
    u64 keys_full[KEY_SLOTS], keys_empty[KEY_SLOTS];
    u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "the host asks for less");

// ---- the producer warp: walks the schedule and keeps the keys and the ring of stages filled

struct Producer {
    const Parameters& p;
    SharedMemory& shared;
    u32 lane;
    Ring<KEY_SLOTS> keys;
    Ring<STAGES> tiles;

    __device__ void run() {
        const HeadSections order = {p.kv_heads, p.kv_heads_per_section};
        const u32 items = p.header->items[BACKWARD];
        const bool dynamic = acquires_dynamically(p.header, order);
        const u32 positions = position_count(items, order);
        // A position is acquired while the one before it is loaded.
        u32 next = dynamic ? acquire(positions) : alternating_position(0);
        for (u32 round = 1;; round++) {
            const u32 position = __shfl_sync(FULL_WARP, next, 0);
            if (position >= positions) break;
            next = dynamic ? acquire(positions) : alternating_position(round);
            const Assignment at = assignment_at(position, items, order);
            load({p.items[at.item], at.head});
        }
        barrier_wait(shared.keys_empty[keys.stage()], keys.parity() ^ 1);
        if (lane == 0) {
            shared.work[keys.stage()].item.len = 0;
            barrier_arrive(shared.keys_full[keys.stage()]);
        }
        barrier_arrive_after_word_copies(shared.keys_full[keys.stage()]);
    }

    // For lane 0.
    __device__ u32 acquire(u32 positions) const { return lane == 0 ? acquire_position(p.counter, positions) : 0; }

    __device__ void load(const Work& work) {
        load_keys(work);
        const WorkItem& item = work.item;
        // Queries that see no key of the item stay where they are, but for the rest of their block.
        const Range queries = queries_that_see(work.keys(), item.len, p.window);
        const Range seen = covering(queries, QUERIES);
        const u32 first_head = work.kv_head * p.heads_per_kv_head;
        for (u32 head = first_head; head < first_head + p.heads_per_kv_head; head++) {
            const i64 start = i64(head) * p.slots + padded_start(item.start, item.document);
            for (int tile = seen.begin; tile < seen.end; tile++) {
                const int first = tile * QUERIES;
                load_queries(start + first, min(QUERIES, round_up(item.len - first, BLOCK)));
            }
        }
    }

    __device__ void load_keys(const Work& work) {
        const u32 slot = keys.stage();
        u64& full = shared.keys_full[slot];
        const u32 count = round_up(work.keys().end - work.keys().begin, BLOCK);
        const i64 first = i64(work.kv_head) * p.slots + padded_start(work.item.start, work.item.document) + work.item.first;
        barrier_wait(shared.keys_empty[slot], keys.parity() ^ 1);
        if (lane == 0) {
            shared.work[slot] = work;
            barrier_arrive_expect(full, 2 * count * HEAD_DIM);
            bulk_copy(shared.k[slot], p.k + first * HEAD_DIM, count * HEAD_DIM, full);
            bulk_copy(shared.v[slot], p.v + first * HEAD_DIM, count * HEAD_DIM, full);
        }
        constexpr u32 SCALES = ITEM_KEYS / BLOCK;
        const u32 block = lane % SCALES;
        if (lane < 2 * SCALES) {
            const bool of_k = lane < SCALES;
            word_copy((of_k ? shared.k_scale[slot] : shared.v_scale[slot]) + block,
                      (of_k ? p.k_scales : p.v_scales) + first / BLOCK + block, block < count / BLOCK);
        }
        barrier_arrive_after_word_copies(full);
        keys.advance();
    }

    // `count` queries from row `first` of all heads' rows on.
    __device__ void load_queries(i64 first, u32 count) {
        const u32 stage = tiles.stage();
        u64& full = shared.full[stage];
        QueryTable& table = shared.queries[stage];
        barrier_wait(shared.empty[stage], tiles.parity() ^ 1);
        if (lane == 0) {
            // The transposed blocks of a run of rows take as many bytes as the rows, at the same place.
            const u32 bytes = count * HEAD_DIM, table_bytes = count * sizeof(float);
            barrier_arrive_expect(full, 4 * bytes + 2 * table_bytes);
            bulk_copy(shared.q[stage], p.q + first * HEAD_DIM, bytes, full);
            bulk_copy(table.lse2, p.lse2 + first, table_bytes, full);
            bulk_copy(shared.d_o[stage], p.d_o + first * HEAD_DIM, bytes, full);
            bulk_copy(table.row_sums, p.row_sums + first, table_bytes, full);
            bulk_copy(shared.d_o_transposed[stage], p.d_o_transposed + first * HEAD_DIM, bytes, full);
            bulk_copy(shared.q_transposed[stage], p.q_transposed + first * HEAD_DIM, bytes, full);
        }
        // Absent blocks get harmless scales: what is computed with them is masked.
        const u32 block = lane % BLOCKS, kind = lane / BLOCKS;
        if (kind < 3) {
            float* to = kind == 0 ? table.q_scale : kind == 1 ? table.do_scale : table.do_fold;
            const float* from = kind == 0 ? p.q_scales : kind == 1 ? p.d_o_scales : p.d_o_folds;
            word_copy(to + block, from + first / BLOCK + block, block < count / BLOCK);
        }
        barrier_arrive_after_word_copies(full);
        tiles.advance();
    }
};

// ---- consumers: a warpgroup has 64 keys, 16 for each warp and two for each thread

struct Consumer {
    const Parameters& p;
    SharedMemory& shared;
    u32 group;
    Ring<KEY_SLOTS> keys;
    Ring<STAGES> tiles;

    __device__ void run() {
        for (;;) {
            const u32 slot = keys.stage();
            barrier_wait(shared.keys_full[slot], keys.parity());
            if (shared.work[slot].item.len == 0) break;
            compute(slot);
            keys.advance();
            // Every warp, since each reads the work item until the end, and stages its rows in the keys'
            // place, which copies will be made to.
            async_fence();
            __syncwarp();
            if (lane() == 0) barrier_arrive(shared.keys_empty[slot]);
        }
    }

    __device__ u32 warp() const { return threadIdx.x / 32 % 4; }
    __device__ u32 lane() const { return threadIdx.x % 32; }
    // The first key of the warp, from the item's.
    __device__ u32 warp_key() const { return group * GROUP_KEYS + WARP_KEYS * warp(); }

    // The tiles that are loaded for an item, one query head after the other.
    struct Walk {
        Range loaded;  // for each head
        int tile;
        u32 left;  // with this one
    };

    // Waits for the next tile that this warpgroup's keys are seen by, and lets go of those before it. False
    // if there is none.
    __device__ bool reach_tile(Walk& walk, u32 slot) {
        const Work& work = shared.work[slot];
        const Range seen = covering(queries_that_see(work.group_keys(group), work.item.len, p.window), QUERIES);
        for (; walk.left > 0; pass_tile(walk)) {
            barrier_wait(shared.full[tiles.stage()], tiles.parity());
            if (seen.contains(walk.tile)) return true;
            release(tiles.stage());
        }
        return false;
    }

    __device__ void pass_tile(Walk& walk) {
        walk.left--;
        walk.tile = walk.tile + 1 == walk.loaded.end ? walk.loaded.begin : walk.tile + 1;
        tiles.advance();
    }

    __device__ void release(u32 stage) const {
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared.empty[stage]);
    }

    // The work item is read from shared memory where it is needed: registers are for fragments.
    __device__ void compute(u32 slot) {
        const Work& work = shared.work[slot];
        const int len = work.item.len;
        const Range own = work.group_keys(group);
        const Range loaded = covering(queries_that_see(work.keys(), len, p.window), QUERIES);
        Walk walk = {loaded, loaded.begin, p.heads_per_kv_head * (loaded.end - loaded.begin)};

        float dk[WORDS], dv[WORDS];
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) dk[i] = dv[i] = 0;
        KeyReferences dk_reference;
        ValueReference dv_reference;

        Tile s, dp;
        bool more = reach_tile(walk, slot);
        if (more) {
            start_scores(s, slot);
            start_score_gradients(dp, slot);
            wgmma_wait<1>();
            start_tile(s, dv, dv_reference, own, walk.tile, slot);
            wgmma_wait();
        }
        while (more) {
            pin(dp);
            const u32 stage = tiles.stage();
            const QueryTable& table = shared.queries[stage];
            const bool is_clear = tiles_without_mask(own, len).contains(walk.tile);
            const KeyMask mask = key_mask(own, walk.tile, len);
            const u32 v_steps = is_clear ? ALL_BLOCKS : steps(table.do_scale, mask);
            const u32 q_steps = is_clear ? ALL_BLOCKS : steps(table.q_scale, mask);

            TileCodes p_codes, ds_codes;
#pragma unroll
            for (u32 g = 0; g < BLOCKS; g++) group_codes(s, g, p_codes[g]);
            add_product(dv, p_codes, shared.d_o_transposed[stage], v_steps);
            score_gradients(dp, s, table, shared.v_scale[slot][warp_key() / BLOCK]);
            if (!is_clear) mask.apply(dp);
            float exponents[BLOCKS];
            dv_reference.exponents(table, exponents);

            const auto add_keys = [&] {
                dk_reference.codes(dp, table, exponents, p.hysteresis, dk, ds_codes);
                add_product(dk, ds_codes, shared.q_transposed[stage], q_steps);
            };
            const auto finish = [&] {
                wgmma_wait();
                pin(dv);
                pin(dk);
                pin(p_codes);
                pin(ds_codes);
                if (!is_clear) {
                    poison(dv, table.do_scale, mask);
                    poison(dk, table.q_scale, mask);
                }
                release(stage);
            };
            pass_tile(walk);
            more = reach_tile(walk, slot);
            // The tensor core has the next tile's products to compute beside this one's codes, and the next
            // probabilities are computed beside the last of those. Written twice, since ptxas serialises
            // what is issued under a condition and waited for outside of it.
            if (more) {
                start_scores(s, slot);
                add_keys();
                start_score_gradients(dp, slot);
                wgmma_wait<2>();
                start_tile(s, dv, dv_reference, own, walk.tile, slot);
                finish();
            } else {
                add_keys();
                finish();
            }
        }
        store(dk, dv, dk_reference, dv_reference, slot);
    }

    __device__ KeyMask key_mask(Range own, int tile, int len) const {
        return {own.begin + int(WARP_KEYS * warp() + lane() / 4), own.begin + int(warp() / 2) * BLOCK, tile * QUERIES, len,
                p.window};
    }

    // From S of a tile to its probabilities, times the powers of two that dV's reference leaves them.
    __device__ void start_tile(Tile& s, float (&dv)[WORDS], ValueReference& dv_reference,
                               Range own, int tile, u32 slot) const {
        pin(s);
        const QueryTable& table = shared.queries[tiles.stage()];
        const int len = shared.work[slot].item.len;
        const bool is_clear = tiles_without_mask(own, len).contains(tile);
        const KeyMask mask = key_mask(own, tile, len);
        dv_reference.update(table, is_clear ? ALL_BLOCKS : mask.blocks_that_see(mask.block), dv);
        float exponents[BLOCKS];
        dv_reference.exponents(table, exponents);
        probabilities(s, table, p.scale, shared.k_scale[slot][warp_key() / BLOCK], exponents);
        if (!is_clear) mask.apply(s);
    }

    // Has the tensor core compute S = K Q^T, of codes.
    __device__ void start_scores(Tile& s, u32 slot) const {
        start_product(s, shared.k[slot] + group * GROUP_KEYS * HEAD_DIM, shared.q[tiles.stage()]);
    }

    // Has it compute dP = V dO^T.
    __device__ void start_score_gradients(Tile& dp, u32 slot) const {
        start_product(dp, shared.v[slot] + group * GROUP_KEYS * HEAD_DIM, shared.d_o[tiles.stage()]);
    }

    static __device__ void start_product(Tile& x, const u8* a_rows, const u8* b_rows) {
        const u64 a = operand_descriptor(a_rows, ROW_SWIZZLE), b = operand_descriptor(b_rows, ROW_SWIZZLE);
        pin(x);
        wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < HEAD_DIM / 32; step++)
            wgmma_shared(x, advance(a, 32 * step), advance(b, 32 * step), step > 0);
        wgmma_commit();
    }

    // Has it add codes times the transposed blocks at `base`, or zero for those whose bit is not set:
    // ptxas serialises products that are issued under a condition.
    __device__ void add_product(float (&d)[WORDS], TileCodes& codes, const u8* base, u32 steps) const {
        pin(d);
        pin(codes);
        wgmma_fence();
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++)
            wgmma_registers(d, codes[g], transposed_block(steps >> g & 1 ? base + g * BLOCK_BYTES : shared.zeros), 1);
        wgmma_commit();
    }

    // The query blocks to multiply with where some keys are not seen: those that some of the warpgroup's keys
    // are seen by. Not a poisoned one, whose scale is NaN: it would spread to all keys.
    __device__ u32 steps(const float (&scales)[BLOCKS], const KeyMask& mask) const {
        const int first = mask.block - int(warp() / 2) * BLOCK;
        u32 steps = mask.blocks_that_see(first) | mask.blocks_that_see(first + BLOCK);
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++)
            if (isnan(scales[g])) steps &= ~(1u << g);
        return steps;
    }

    // Makes rows NaN that read a poisoned block which `steps` left out.
    __device__ void poison(float (&d)[WORDS], const float (&scales)[BLOCKS], const KeyMask& mask) const {
        const u32 blocks = mask.blocks_that_see(mask.block);
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++)
            if (blocks >> g & isnan(scales[g]))
#pragma unroll
                for (u32 i = 0; i < WORDS; i++) d[i] = NOT_A_NUMBER;
    }

    static __device__ u64 transposed_block(const u8* block) { return operand_descriptor(block, Swizzle::B32); }

    // The tiles of which every query is there and sees all of some keys. Queries past the document's end in a
    // block that is there do no harm: their LSE is infinite.
    __device__ Range tiles_without_mask(Range own, int len) const {
        const int begin = MASK == FULL ? 0 : (own.end - 1 + QUERIES - 1) / QUERIES;
        const int end = (len + BLOCK - 1) / QUERIES;
        return {begin, MASK == WINDOW ? min(end, own.begin / QUERIES + p.window / QUERIES) : end};
    }

    // The keys' rows of both gradients, of the document alone.
    __device__ void store(float (&dk)[WORDS], const float (&dv)[WORDS], const KeyReferences& dk_reference,
                          const ValueReference& dv_reference, u32 slot) const {
        const Work& work = shared.work[slot];
        const i64 row = work.item.start + work.item.first + int(warp_key());
        const int rows = work.item.len - work.item.first - int(warp_key());
        // What only this warp's part of the MMA reads of the keys, which are no longer needed.
        const RowStaging staging = {shared.k[slot] + warp_key() * HEAD_DIM, shared.v[slot] + warp_key() * HEAD_DIM};
        const float up = dv_reference.up(), both[2] = {up, up};
        store_rows(dv, both, staging, p.dv + row * p.dv_token_stride + i64(work.kv_head) * p.dv_head_stride,
                   p.dv_token_stride, rows);
        if constexpr (ROTATED) rotate_rows(dk);
        const float factor[2] = {dk_reference.up(0) * p.dk_scale, dk_reference.up(1) * p.dk_scale};
        store_rows(dk, factor, staging, p.dk + row * p.dk_token_stride + i64(work.kv_head) * p.dk_head_stride,
                   p.dk_token_stride, rows);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_keys(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
    // The same for a warp, which the compiler cannot know of threadIdx.x.
    const u32 warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);

    if (threadIdx.x < BLOCK_BYTES / 16) {
        reinterpret_cast<uint4*>(shared.zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
        async_fence();
    }
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < KEY_SLOTS; i++) {
            barrier_init(shared.keys_full[i], LOAD_ARRIVALS);
            barrier_init(shared.keys_empty[i], WARPS);
        }
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(shared.full[i], LOAD_ARRIVALS);
            barrier_init(shared.empty[i], WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (warp < 4) {
        registers_release<PRODUCER_REGISTERS>();
        if (warp == 0) Producer{p, shared, threadIdx.x}.run();
    } else {
        registers_acquire<CONSUMER_REGISTERS>();
        Consumer{p, shared, warp / 4 - 1}.run();
    }
}
