// How the backward kernels whose CTAs take keys walk the schedule: a warp that loads, and warpgroups of
// 64 keys that it loads for.
//
// A work item is 128 keys of a key/value head. Its tiles are those of 64 queries that see any of them,
// over the query heads of the group, both ascending.
//
// Constants: HEAD_DIM (64 or 128), STAGES of the ring of tiles, MASK (tiles.cuh), and as 0 or 1 ROTATED,
// whether Q and K were, so that gradients have to be rotated back.
#pragma once

#include "key_rows.cuh"
#include "output_rows.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

constexpr int ITEM_KEYS = 128;
constexpr int GROUP_KEYS = 64;  // of a warpgroup
constexpr int WARP_KEYS = 16;
constexpr int BLOCK = BLOCK_TOKENS;
constexpr u32 KEY_BLOCKS = ITEM_KEYS / BLOCK;
constexpr u32 WARPGROUPS = ITEM_KEYS / GROUP_KEYS;
constexpr u32 WARPS = 4 * WARPGROUPS;  // that compute
constexpr u32 THREADS = 128 * (WARPGROUPS + 1);
constexpr u32 PRODUCER_REGISTERS = 24;
constexpr u32 CONSUMER_REGISTERS = 240;
constexpr u32 TILE_BYTES = QUERIES * HEAD_DIM;
constexpr u32 BLOCK_BYTES = BLOCK * HEAD_DIM;
constexpr Swizzle ROW_SWIZZLE = swizzle_of_rows(HEAD_DIM);
constexpr u32 WORDS = HEAD_DIM / 2;  // of a thread's gradient fragment
constexpr u32 VALUE_PARTS = HEAD_DIM / VALUE_FEATURES;

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "rows are one swizzle span");

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

// What there is to know of a tile, bits of QueryTable::flags. For warpgroup `group`:
__device__ constexpr u32 seen_by(u32 group) { return 1u << 2 * group; }   // queries see some of its keys
__device__ constexpr u32 clear_for(u32 group) { return 2u << 2 * group; }  // nothing has to be masked
constexpr u32 LAST_BIT = 2 * WARPGROUPS, LAST_TILE = 1u << LAST_BIT;       // of the item
// And from this bit on, for each block of keys, the query blocks of which some query sees some key of it: those
// that dK and dV of all of its keys read, and are poisoned by.
constexpr u32 SEEING = LAST_BIT + 1;

// Bit `bit` of them, of the tile of queries from `query` on. Rows are keys, queries come in tiles.
__device__ inline bool tile_flag(u32 bit, const Work& work, int query, bool is_last, int window) {
    const int len = work.item.len;
    if (bit == LAST_BIT) return is_last;
    if (bit > LAST_BIT) {
        const int key = work.item.first + int((bit - SEEING) / BLOCKS) * BLOCK, begin = query + int((bit - SEEING) % BLOCKS) * BLOCK;
        const bool before = MASK != WINDOW || key + BLOCK > begin + 1 - window;
        return begin < len && key < (MASK == FULL ? len : min(begin + BLOCK, len)) && before;
    }
    const Range own = work.group_keys(bit / 2);
    if (bit % 2 == 0) {
        const Range seeing = queries_that_see(own, len, window);
        return query < seeing.end && query + QUERIES > seeing.begin;
    }
    // All keys and both query blocks are there, and all queries see all keys. Queries past the document's
    // end in a block that is there do no harm: their LSE is infinite.
    const bool whole = own.end - own.begin == GROUP_KEYS && query + BLOCK < len;
    const bool after = MASK == FULL || query + 1 >= own.end;
    const bool before = MASK != WINDOW || query + QUERIES - own.begin <= window;
    return whole && after && before;
}

// What a stage of the ring holds. Of Q and dO, both images.
struct QueryTiles {
    u8 q[STAGES][TILE_BYTES];
    u8 d_o[STAGES][TILE_BYTES];
    u8 q_transposed[STAGES][TILE_BYTES];
    u8 d_o_transposed[STAGES][TILE_BYTES];
};

// ---- the producer warp: walks the schedule and keeps the keys and the ring of stages filled

// `Shared` says with COMPUTES_DQ whether dQ is computed as well: then keys bring along what scales its sums
// (dq_sums.cuh), and tiles where those lie and BF16 values of Q (layout.cuh) instead of its transposed image. It has KEY_SLOTS
// of what keys have in tables and KEY_IMAGES of their codes, which KEY_READERS warps give back. EARLY_BLOCKS are the query
// blocks whose LSE consumers read beside S.
template <class Parameters, class Shared>
struct Producer {
    const Parameters& p;
    Shared& shared;
    u32 lane;
    Ring<Shared::KEY_SLOTS> keys;
    Ring<STAGES> tiles;

    __device__ void run() {
        // Everything that the kernel reads from global memory, this warp reads. What comes next on the stream may
        // start once all of the grid has got here, and with it what was in front is over.
        wait_for_predecessor();
        launch_dependents();
        const HeadSections order = {p.kv_heads, p.kv_heads_per_section};
        const u32 items = p.header->items[BACKWARD];
        const u32 positions = position_count(items, order);
        // A position is acquired while the one before it is loaded.
        u32 next = acquire(positions);
        for (;;) {
            const u32 position = __shfl_sync(FULL_WARP, next, 0);
            if (position >= positions) break;
            next = acquire(positions);
            const Assignment at = assignment_at(position, items, order);
            // Read from there: this warp has few registers.
            __syncwarp();
            if (lane == 0) shared.next = {p.items[at.item], at.head};
            __syncwarp();
            load(shared.next);
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
        if constexpr (Shared::KEY_IMAGES > 1) load_keys(work);
        const WorkItem& item = work.item;
        // Queries that see no key of the item stay where they are, but for the rest of their block.
        const Range seen = covering(queries_that_see(work.keys(), item.len, p.window), QUERIES);
        const u32 first_head = work.kv_head * p.heads_per_kv_head;
        const u32 last_head = first_head + p.heads_per_kv_head - 1;
        // With a single image, keys wait until those before them are done with, with the last tile's products. The first
        // tiles need not.
        u32 ahead = min(STAGES - 1, p.heads_per_kv_head * (seen.end - seen.begin));
        for (u32 head = first_head; head <= last_head; head++)
            for (int tile = seen.begin; tile < seen.end; tile++) {
                load_queries(work, head, tile * QUERIES, head == last_head && tile + 1 == seen.end);
                if constexpr (Shared::KEY_IMAGES == 1)
                    if (--ahead == 0) load_keys(work);
            }
    }

    __device__ void load_keys(const Work& work) {
        const u32 slot = keys.stage();
        u64& full = shared.keys_full[slot];
        const u32 count = round_up(work.keys().end - work.keys().begin, BLOCK);
        const i64 first = i64(work.kv_head) * p.slots + padded_start(work.item.start, work.item.document) + work.item.first;
        barrier_wait(shared.keys_empty[slot], keys.parity() ^ 1);
        if constexpr (Shared::KEY_IMAGES == 1) barrier_wait(shared.codes_empty, slot ^ 1);
        if (lane == 0) {
            const u32 bytes = count * HEAD_DIM;
            shared.work[slot] = work;
            barrier_arrive_expect(full, 2 * bytes);
            bulk_copy(shared.k[slot % Shared::KEY_IMAGES], p.k + first * HEAD_DIM, bytes, full);
            bulk_copy(shared.v[slot % Shared::KEY_IMAGES], p.v + first * HEAD_DIM, bytes, full);
        }
        const u32 block = lane % KEY_BLOCKS;
        if (lane < 2 * KEY_BLOCKS) {
            const bool of_k = lane < KEY_BLOCKS;
            word_copy((of_k ? shared.k_scale[slot] : shared.v_scale[slot]) + block,
                      (of_k ? p.k_scales : p.v_scales) + first / BLOCK + block, block < count / BLOCK);
        }
        if constexpr (Shared::COMPUTES_DQ)
            if (lane == 31)
                word_copy(&shared.key_exponent[slot], p.key_exponents + i64(work.kv_head) * p.documents + work.item.document, true);
        barrier_arrive_after_word_copies(full);
        keys.advance();
    }

    __device__ void load_queries(const Work& work, u32 head, int query, bool is_last) {
        const u32 stage = tiles.stage();
        u64& full = shared.full[stage];
        QueryTable& table = shared.queries[stage];
        const i64 first = i64(head) * p.slots + padded_start(work.item.start, work.item.document) + query;
        const u32 count = min(QUERIES, round_up(work.item.len - query, BLOCK));
        static_assert(SEEING + BLOCKS * KEY_BLOCKS <= 32, "a lane for each");
        const u32 flags = __ballot_sync(FULL_WARP, tile_flag(lane, work, query, is_last, p.window));
        barrier_wait(shared.empty[stage], tiles.parity() ^ 1);
        if (lane == 0) {
            table.query = query;
            if constexpr (Shared::COMPUTES_DQ)
                shared.dq_targets[tiles.step] = {p.dq + first / BLOCK * Shared::DQ_BLOCK_BYTES, count / BLOCK, is_last};
            table.flags = flags;
            // The transposed blocks of a run of rows take as many bytes as the rows, at the same place.
            const u32 bytes = count * HEAD_DIM, table_bytes = count * sizeof(float);
            barrier_arrive_expect(full, (Shared::COMPUTES_DQ ? 5 : 4) * bytes + 2 * table_bytes);
            bulk_copy(shared.tiles.q[stage], p.q + first * HEAD_DIM, bytes, full);
            bulk_copy(table.lse2, p.lse2 + first, table_bytes, full);
            bulk_copy(shared.tiles.d_o[stage], p.d_o + first * HEAD_DIM, bytes, full);
            bulk_copy(table.row_sums, p.row_sums + first, table_bytes, full);
            bulk_copy(shared.tiles.d_o_transposed[stage], p.d_o_transposed + first * HEAD_DIM, bytes, full);
            if constexpr (Shared::COMPUTES_DQ) {
                const i64 before = i64(head) * p.slots, row = first - before;
                for (u32 part = 0; part < VALUE_PARTS; part++)
                    bulk_copy(shared.tiles.q_values[stage][part], p.q_values + (before * VALUE_PARTS + part * p.slots + row) * VALUES_BYTES,
                              count * VALUES_BYTES, full);
            } else {
                bulk_copy(shared.tiles.q_transposed[stage], p.q_transposed + first * HEAD_DIM, bytes, full);
            }
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

// ---- what consumers have in common: a warpgroup has 64 keys, 16 for each warp and two for each thread

struct KeyGroup {
    u32 group;

    __device__ u32 warp() const { return threadIdx.x / 32 % 4; }
    __device__ u32 lane() const { return threadIdx.x % 32; }
    // The first key of the warp, from the item's.
    __device__ u32 warp_key() const { return group * GROUP_KEYS + WARP_KEYS * warp(); }

    __device__ KeyMask key_mask(const Work& work, int query, int window) const {
        return {work.item.first + int(warp_key() + lane() / 4), query, work.item.len, window};
    }

    // The query blocks that see some key of a block of the item's keys, as bits.
    static __device__ u32 blocks_that_see(u32 key_block, u32 flags) { return flags >> (SEEING + BLOCKS * key_block) & ALL_BLOCKS; }
    // Those that see some key of the warp's block.
    __device__ u32 blocks_that_see(u32 flags) const { return blocks_that_see(warp_key() / BLOCK, flags); }

    // The query blocks to multiply with where some keys are not seen: those that some of the warpgroup's keys
    // are seen by. Not a poisoned one, whose scale is NaN: it would spread to all keys.
    __device__ u32 steps(const float (&scales)[BLOCKS], u32 flags) const {
        constexpr u32 GROUP_BLOCKS = GROUP_KEYS / BLOCK;
        u32 steps = 0;
#pragma unroll
        for (u32 i = 0; i < GROUP_BLOCKS; i++) steps |= blocks_that_see(GROUP_BLOCKS * group + i, flags);
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++)
            if (isnan(scales[g])) steps &= ~(1u << g);
        return steps;
    }

    // Whether the warp's keys read a poisoned block which `steps` left out.
    __device__ bool reads_poison(const float (&scales)[BLOCKS], u32 flags) const {
        const u32 blocks = blocks_that_see(flags);
        bool reads = false;
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++) reads |= blocks >> g & isnan(scales[g]);
        return reads;
    }

    // Has the tensor core multiply 64 rows with the rows of a tile, over the head dimension.
    static __device__ void start_product(Tile& x, u64 a, u64 b) {
        pin(x);
        wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < HEAD_DIM / 32; step++)
            wgmma_shared(x, advance(a, 32 * step), advance(b, 32 * step), step > 0);
        wgmma_commit();
    }

    // Has it add codes times the transposed blocks at `base`, or `zero` for those whose bit is not set:
    // ptxas serialises products that are issued under a condition.
    static __device__ void add_product(float (&d)[WORDS], TileCodes& codes, u64 base, u64 zero, u32 steps) {
        pin(d);
        pin(codes);
        wgmma_fence();
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++)
            wgmma_registers(d, codes[g], steps >> g & 1 ? advance(base, g * BLOCK_BYTES) : zero, 1);
        wgmma_commit();
    }

    // The rows `rows` at the start of an array, and a whole number of tiles further on.
    static __device__ u64 row_tile(const u8* rows, u32 tile) {
        return advance(operand_descriptor(rows, ROW_SWIZZLE), tile * TILE_BYTES);
    }
    static __device__ u64 transposed_tile(const u8* blocks, u32 tile) {
        return advance(operand_descriptor(blocks, Swizzle::B32), tile * TILE_BYTES);
    }
};

// What a consumer of either kernel does with the keys of its item and a tile that has been loaded.
template <class Parameters, class Shared>
struct KeyConsumer : KeyGroup {
    const Parameters& p;
    Shared& shared;
    Ring<Shared::KEY_SLOTS> keys;
    Ring<STAGES> tiles;

    __device__ KeyConsumer(const Parameters& p, Shared& shared, u32 group) : KeyGroup{group}, p(p), shared(shared) {}

    // Calls `compute(slot)` for every item.
    template <class Compute>
    __device__ void each_item(Compute compute) {
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

    __device__ void release(u32 stage) const {
        __syncwarp();
        barrier_arrive_once(shared.empty[stage]);
    }

    __device__ KeyMask mask_of(const QueryTable& table, u32 slot) const {
        return key_mask(shared.work[slot], table.query, p.window);
    }

    // Has the tensor core compute S = K Q^T, of codes.
    __device__ void start_scores(Tile& s, u32 slot) const {
        start_product(s, row_tile(shared.k[0], WARPGROUPS * (slot % Shared::KEY_IMAGES) + group), row_tile(shared.tiles.q[0], tiles.stage()));
    }

    // Has it compute dP = V dO^T.
    __device__ void start_score_gradients(Tile& dp, u32 slot) const {
        start_product(dp, row_tile(shared.v[0], WARPGROUPS * (slot % Shared::KEY_IMAGES) + group), row_tile(shared.tiles.d_o[0], tiles.stage()));
    }

    // What a tile's probabilities take beside S, for reading while S is still computed: shared memory is slow
    // to answer beside the tensor core.
    struct TileStart {
        float multiplier[BLOCKS];
        float exponents[BLOCKS];                     // the powers of two that dV's reference leaves to P
        BlockAddends addends[Shared::EARLY_BLOCKS];  // with those, of the blocks that there are registers for
        float rescale;                               // of dV
        u32 flags;
    };

    __device__ TileStart prepare_tile(ValueReference& dv_reference, u32 slot) const {
        const QueryTable& table = shared.queries[tiles.stage()];
        TileStart start;
        score_scales(table, p.scale, shared.k_scale[slot][warp_key() / BLOCK], start.multiplier);
        start.flags = table.flags;
        start.rescale = dv_reference.update(table, blocks_that_see(start.flags));
        dv_reference.exponents(table, start.exponents);
#pragma unroll
        for (u32 g = 0; g < Shared::EARLY_BLOCKS; g++) probability_addends(table, g, start.exponents[g], start.addends[g]);
        return start;
    }

    // From S of a tile to its probabilities, not masked yet, once dV is at rest.
    __device__ void start_tile(Tile& s, float (&dv)[WORDS], const TileStart& start) const {
        pin(s);
        if (start.rescale != 1) {
#pragma unroll
            for (u32 i = 0; i < WORDS; i++) dv[i] *= start.rescale;
        }
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++) {
            if (g < Shared::EARLY_BLOCKS) {
                probabilities(s, g, start.multiplier[g], start.addends[g]);
            } else {
                BlockAddends addends;
                probability_addends(shared.queries[tiles.stage()], g, start.exponents[g], addends);
                probabilities(s, g, start.multiplier[g], addends);
            }
        }
    }

    template <u32 PARTS>
    static __device__ void store_parts(const float (&x)[WORDS], const float (&factor)[2], RowStaging staging, u16* to, i64 stride,
                                       int rows) {
        constexpr u32 COUNT = WORDS / PARTS;
        using Part = float[COUNT];
#pragma unroll
        for (u32 part = 0; part < PARTS; part++)
            store_rows(reinterpret_cast<const Part&>(x[part * COUNT]), factor, staging, to + part * (HEAD_DIM / PARTS), stride, rows);
    }

    // What the warp's keys have read of poisoned blocks: all of their gradients' rows are NaN then.
    struct Poison {
        static constexpr u32 DK = 1, DV = 2;
        u32 of = 0;

        __device__ void read(const KeyConsumer& consumer, const QueryTable& table) {
            of |= consumer.reads_poison(table.q_scale, table.flags) ? DK : 0;
            of |= consumer.reads_poison(table.do_scale, table.flags) ? DV : 0;
        }
    };

    // The keys' rows of both gradients, of the document alone, a part of each at a time. dK is multiplied with `dk_up` first.
    template <u32 PARTS>
    __device__ void store(float (&dk)[WORDS], const float (&dk_up)[2], const float (&dv)[WORDS],
                          const ValueReference& dv_reference, const Poison& poison, RowStaging staging, u32 slot) const {
        const Work& work = shared.work[slot];
        const i64 row = work.item.start + work.item.first + int(warp_key());
        const int rows = work.item.len - work.item.first - int(warp_key());
        const float up = poison.of & Poison::DV ? NOT_A_NUMBER : dv_reference.up(), both[2] = {up, up};
        store_parts<PARTS>(dv, both, staging, p.dv + row * p.dv_token_stride + i64(work.kv_head) * p.dv_head_stride,
                   p.dv_token_stride, rows);
        if constexpr (ROTATED) rotate_rows(dk);
        const float scale = poison.of & Poison::DK ? NOT_A_NUMBER : p.dk_scale, factor[2] = {dk_up[0] * scale, dk_up[1] * scale};
        store_parts<PARTS>(dk, factor, staging, p.dk + row * p.dk_token_stride + i64(work.kv_head) * p.dk_head_stride,
                   p.dk_token_stride, rows);
    }
};

// Of a CTA, by one thread.
template <class Shared>
__device__ inline void init_key_barriers(Shared& shared) {
    for (u32 i = 0; i < Shared::KEY_SLOTS; i++) {
        barrier_init(shared.keys_full[i], LOAD_ARRIVALS);
        barrier_init(shared.keys_empty[i], Shared::KEY_READERS);
    }
    for (u32 i = 0; i < STAGES; i++) {
        barrier_init(shared.full[i], LOAD_ARRIVALS);
        barrier_init(shared.empty[i], WARPS);
    }
}

// Of a CTA, by all threads: before the MMA reads it.
__device__ inline void clear_block(u8 (&zeros)[BLOCK_BYTES]) {
    if (threadIdx.x < BLOCK_BYTES / 16) {
        reinterpret_cast<uint4*>(zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
        async_fence();
    }
}
