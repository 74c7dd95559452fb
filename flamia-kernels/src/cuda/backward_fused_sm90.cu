// dQ, dK and dV of packed documents on Hopper in one kernel, from quantised operands: P and dS are computed
// once. `backward_fused.rs` launches it, between a kernel that prepares dQ's accumulators and one that
// makes BF16 rows of them (dq_sums.cu).
//
// As backward_keys_sm90.cu, with whose bits it computes dV; and dQ of each tile of queries, of which a CTA has
// the 128 keys' part. dS of all eight warps goes through shared memory, transposed by stmatrix, and is the A operand
// of dQ = dS K: by the time that the next tile's scores are there both warpgroups have written theirs, and dQ is
// computed beside the next probabilities. Each warpgroup computes half of dQ's features. A further warp adds them
// up in global memory, in FP16 or FP32; the order in which CTAs get there is not the same in every run, so
// dQ's last bits are not either.
//
// dS is BF16, and so is what it multiplies with: what the codes of Q and K stand for. A row of dQ's operand
// has keys of all warps; in E4M3 all eight would have to agree on a reference before any of them could round. And
// references cost more instructions than BF16 costs cycles of the tensor core, of which it has enough: what
// limits the kernel is how long its warps take for a tile.
// cpu/hopper/fused.rs defines the numbers.
#include "dq_sums.cuh"
#include "key_items_sm90.cuh"
#include "layout.cuh"
#include "output_rows.cuh"
#include "parameters.cuh"

// Constants: those of key_items_sm90.cuh and dq_sums.cuh.

static_assert(DQ_PARTS == WARPGROUPS, "each warpgroup computes a part of dQ");

constexpr int KEY_VALUES_BYTES = 2 * PART_FEATURES;  // of a key's BF16 row, the part that a warpgroup reads
constexpr int DS_ROW_BYTES = 2 * GROUP_KEYS;         // of a query's dS of a warpgroup's keys
constexpr u32 DS_BYTES = QUERIES * DS_ROW_BYTES;
constexpr u32 STEP = 16;  // entries that a step of the BF16 product sums over
constexpr u32 BLOCK_STEPS = BLOCK / STEP;
constexpr u32 TILE_VALUES_BYTES = QUERIES * VALUES_BYTES;
static_assert(DS_ROW_BYTES == VALUES_BYTES, "a warpgroup's keys are a row of values");

// `Parameters` of backward_fused.rs. Strides are in elements.
struct Parameters {
    const u8 *q;             // [heads][slots] rows
    const u8 *q_values;      // [heads][VALUE_PARTS][slots]
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
    u8 *dq;                     // sums, see dq_sums.cuh
    const float *key_exponents;  // [kv_heads][documents]
    const WorkItem *items;
    const ScheduleHeader *header;
    u32 *counter;
    i64 dk_token_stride;
    i64 dk_head_stride;
    i64 dv_token_stride;
    i64 dv_head_stride;
    int slots;
    int documents;
    u32 kv_heads;
    u32 heads_per_kv_head;
    u32 kv_heads_per_section;
    int window;
    float scale;     // softmax scale times log2(e)
    float dk_scale;  // softmax scale, times 1 / sqrt(HEAD_DIM) where dK is rotated
};
SAME_OFFSET(Parameters, q);
SAME_OFFSET(Parameters, q_values);
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
SAME_OFFSET(Parameters, dq);
SAME_OFFSET(Parameters, key_exponents);
SAME_OFFSET(Parameters, items);
SAME_OFFSET(Parameters, header);
SAME_OFFSET(Parameters, counter);
SAME_OFFSET(Parameters, dk_token_stride);
SAME_OFFSET(Parameters, dk_head_stride);
SAME_OFFSET(Parameters, dv_token_stride);
SAME_OFFSET(Parameters, dv_head_stride);
SAME_OFFSET(Parameters, slots);
SAME_OFFSET(Parameters, documents);
SAME_OFFSET(Parameters, kv_heads);
SAME_OFFSET(Parameters, heads_per_kv_head);
SAME_OFFSET(Parameters, kv_heads_per_section);
SAME_OFFSET(Parameters, window);
SAME_OFFSET(Parameters, scale);
SAME_OFFSET(Parameters, dk_scale);

// Where a warpgroup's part of a tile's dQ goes: to each of `blocks` blocks of queries. None of them means
// that the work is over.
struct DqTarget {
    u8* to;
    u32 blocks;
};

struct SharedMemory {
    static constexpr u32 KEY_SLOTS = 1;
    static constexpr bool KEY_EXPONENTS = true, QUERY_VALUES = true;

    u8 k[KEY_SLOTS][ITEM_KEYS * HEAD_DIM];
    u8 v[KEY_SLOTS][ITEM_KEYS * HEAD_DIM];
    u8 k_values[DQ_PARTS][ITEM_KEYS * KEY_VALUES_BYTES];  // BF16, a row for each key
    struct {
        u8 q[STAGES][TILE_BYTES];
        u8 d_o[STAGES][TILE_BYTES];
        u8 q_values[STAGES][VALUE_PARTS][TILE_VALUES_BYTES];
        u8 d_o_transposed[STAGES][TILE_BYTES];
    } tiles;
    u8 ds[WARPGROUPS][DS_BYTES];  // BF16 of a warpgroup's keys, a row for each query
    u8 dq[DQ_PARTS][BLOCKS * DQ_PART_BYTES];
    u8 zeros[BLOCK_BYTES];  // a transposed block
    QueryTable queries[STAGES];
    float k_scale[KEY_SLOTS][KEY_BLOCKS];
    float v_scale[KEY_SLOTS][KEY_BLOCKS];
    float key_exponent[KEY_SLOTS];
    DqTarget dq_targets[2][WARPGROUPS];
    Work work[KEY_SLOTS], next;
    u64 keys_full[KEY_SLOTS], keys_empty[KEY_SLOTS];
    u64 full[STAGES], empty[STAGES];
    u64 ds_full, ds_empty;
    u64 dq_full[WARPGROUPS], dq_empty[WARPGROUPS];
};
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "the host asks for less");

// Barriers of each warpgroup; 0 is that of all threads.
constexpr u32 GROUP_BARRIER = 1;

struct Consumer : KeyConsumer<Parameters, SharedMemory> {
    using KeyConsumer::KeyConsumer;

    // Of dS, from one tile to the next, and of dQ.
    Ring<1> exchanges;

    __device__ void run() {
        each_item([&](u32 slot) { compute(slot); });
        // Not before the part before it is under way: barriers are waited for by their parity.
        barrier_wait(shared.dq_empty[group], exchanges.parity() ^ 1);
        aim(nullptr, 0);
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared.dq_full[group]);
    }

    __device__ void compute(u32 slot) {
        float dk[WORDS], dv[WORDS];
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) dk[i] = dv[i] = 0;
        ValueReference dv_reference;
        widen_keys(slot);

        Tile s, dp;
        // Of 128 features, dQ is computed in the registers of a dP that has gone: more there are not.
        constexpr bool IN_PLACE = DQ_WORDS == QUERIES / 2;
        float apart[IN_PLACE ? 1 : DQ_WORDS];
        float (&dq)[DQ_WORDS] = reinterpret_cast<float (&)[DQ_WORDS]>(IN_PLACE ? dp[0] : apart[0]);
        bool is_first = true, more;

        barrier_wait(shared.full[tiles.stage()], tiles.parity());
        TileStart start = prepare_tile(dv_reference, slot);
        start_scores(s, slot);
        wgmma_wait();
        start_tile(s, dv, start, slot);
        do {
            // Here P of the tile is there, dQ of the one before it, and the tensor core has nothing to do for
            // this warpgroup: ptxas serialises what is under way from one round to the next.
            const u32 stage = tiles.stage();
            const QueryTable& table = shared.queries[stage];
            // Tables are read before the tensor core is given more to do, beside which shared memory is slow to answer.
            const GradientStart gradients(table, shared.v_scale[slot][warp_key() / BLOCK]);
            const u32 flags = table.flags;
            // What makes dS of P 2^exponents, times what sums of dQ are kept at (dq_sums.cuh). Finite, since dS of a
            // block of zeros has to stay 0.
            float unfold[BLOCKS];
#pragma unroll
            for (u32 g = 0; g < BLOCKS; g++)
                unfold[g] = fminf(exp2_approximate(-start.exponents[g] - table.do_fold[g]), 0x1p127f);
            if (!is_first) stage_query_gradients(dq);
            start_score_gradients(dp, slot);

            TileCodes p_codes;
#pragma unroll
            for (u32 g = 0; g < BLOCKS; g++) group_codes(s, g, p_codes[g]);
            const bool is_clear = flags & clear_for(group);
            u32 v_steps = ALL_BLOCKS, q_steps = ALL_BLOCKS;
            if (!is_clear) {
                const KeyMask mask = mask_of(table, slot);
                v_steps = steps(table.do_scale, mask);
                q_steps = steps(table.q_scale, mask);
            }
            const u64 zero = transposed_tile(shared.zeros, 0);
            add_product(dv, p_codes, transposed_tile(shared.tiles.d_o_transposed[0], stage), zero, v_steps);
            wgmma_wait<1>();
            pin(dp);
            score_gradients(dp, s, gradients);
            if (!is_clear) mask_gradients(dp, table, slot);
            offer(dp, unfold, table, slot, is_first);

            const auto finish = [&] {
                wgmma_wait();
                pin(dk);
                pin(dq);
                if (!is_clear) {
                    const KeyMask mask = mask_of(table, slot);
                    poison(dv, table.do_scale, mask);
                    poison(dk, table.q_scale, mask);
                }
                release(stage);
                if (lane() == 0) barrier_arrive(shared.ds_empty);
            };
            tiles.advance();
            more = !(flags & LAST_TILE);
            // dK and dQ are computed beside the next probabilities. Written twice, since ptxas serialises what is
            // issued under a condition and waited for outside of it.
            if (more) {
                barrier_wait(shared.full[tiles.stage()], tiles.parity());
                start = prepare_tile(dv_reference, slot);
                start_scores(s, slot);
                settle();
                add_keys(dk, stage, q_steps);
                start_query_gradients(dq, slot);
                wgmma_wait<2>();
                pin(dv);
                pin(p_codes);
                start_tile(s, dv, start, slot);
                finish();
            } else {
                settle();
                add_keys(dk, stage, q_steps);
                start_query_gradients(dq, slot);
                wgmma_wait<2>();
                pin(dv);
                pin(p_codes);
                finish();
            }
            is_first = false;
        } while (more);
        stage_query_gradients(dq);
        async_fence();
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared.dq_full[group]);
        const float one[2] = {1, 1};
        store(dk, one, dv, dv_reference, slot);
    }

    // BF16 rows of what the keys' codes stand for, times what sums of dQ are kept at, of the features that this
    // warpgroup computes dQ of. Zeros for keys that are not there, and of poisoned blocks, which poison through dS.
    __device__ void widen_keys(u32 slot) const {
        constexpr int CHUNKS = PART_FEATURES / CHUNK;
        const int key = threadIdx.x % 128;
        const float own_scale = shared.k_scale[slot][key / BLOCK];
        const float scale = own_scale * pow2(key_scale_exponent(shared.key_exponent[slot]));
        const Work& work = shared.work[slot];
        const bool is_there = !isnan(own_scale) && work.item.first + key / BLOCK * BLOCK < work.item.len;
        const u8* from = shared.k[slot] + key * HEAD_DIM;
        u8* to = shared.k_values[group] + key * KEY_VALUES_BYTES;
        // None before all products with the item before it are over.
        named_barrier<128>(GROUP_BARRIER + group);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const uint4 codes = *reinterpret_cast<const uint4*>(from + row_chunk<HEAD_DIM>(key, int(group) * CHUNKS + i) * CHUNK);
            const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
            u32 pairs[8];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                float values[4];
                unpack_e4m3(is_there ? words[j] : 0, values);
                pairs[2 * j] = bf16x2(values[0] * scale, values[1] * scale);
                pairs[2 * j + 1] = bf16x2(values[2] * scale, values[3] * scale);
                if (!is_there) pairs[2 * j] = pairs[2 * j + 1] = 0;
            }
#pragma unroll
            for (int j = 0; j < 2; j++)
                *reinterpret_cast<uint4*>(to + row_chunk<KEY_VALUES_BYTES>(key, 2 * i + j) * CHUNK) =
                    make_uint4(pairs[4 * j], pairs[4 * j + 1], pairs[4 * j + 2], pairs[4 * j + 3]);
        }
        async_fence();
        named_barrier<128>(GROUP_BARRIER + group);
    }

    // Zero where a query does not see a key; but NaN in all of a block of queries that read a poisoned block
    // of keys.
    __device__ void mask_gradients(Tile& ds, const QueryTable& table, u32 slot) const {
        const KeyMask mask = mask_of(table, slot);
        mask.apply(ds);
        if (!isnan(shared.k_scale[slot][warp_key() / BLOCK])) return;
        const u32 blocks = mask.blocks_that_see(mask.block);
#pragma unroll
        for (u32 i = 0; i < QUERIES / 2; i++)
            if (blocks >> i / 16 & 1) ds[i] = NOT_A_NUMBER;
    }

    // ---- dS in BF16

    // Writes dS, which `unfold` makes of what is given, for both warpgroups to read, and tells where dQ of the
    // tile goes. Sends off what was staged of the tile before, if any: one fence for both.
    __device__ void offer(const Tile& ds, const float (&unfold)[BLOCKS], const QueryTable& table, u32 slot,
                          bool is_first) const {
        // Rows of the accumulator are keys: stmatrix transposes 8 x 8 of them. Lane i gives the address of a query's
        // 8 keys in matrix i / 8; those are of the warp's lower and upper keys in turn.
        u8* row = shared.ds[group] + (lane() % 8 + lane() / 16 * 8) * DS_ROW_BYTES;
        row += row_chunk<DS_ROW_BYTES>(int(lane() % 8), int(2 * warp() + lane() / 8 % 2)) * CHUNK;
        barrier_wait(shared.ds_empty, exchanges.parity() ^ 1);
#pragma unroll
        for (u32 step = 0; step < BLOCKS * BLOCK_STEPS; step++) {
            const u32 g = step / BLOCK_STEPS, first = step % BLOCK_STEPS * 4;
            // A BF16 value is the upper half of an FP32.
            const u32 factors = __byte_perm(__float_as_uint(unfold[g]), 0, 0x3232);
            u32 pairs[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 half = i % 2, j = first + i / 2 * 2;
                pairs[i] = multiply_bf16x2(bf16x2(entry(ds, g, half, j), entry(ds, g, half, j + 1)), factors);
            }
            store_matrices_transposed(row + step * STEP * DS_ROW_BYTES, pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        const Work& work = shared.work[slot];
        const i64 block = (i64(table.head) * p.slots + padded_start(work.item.start, work.item.document) + table.query) / BLOCK;
        aim(p.dq + (block * DQ_PARTS + group) * DQ_PART_BYTES, min(int(BLOCKS), (work.item.len - table.query + BLOCK - 1) / BLOCK));
        async_fence();
        __syncwarp();
        if (lane() == 0) {
            barrier_arrive(shared.ds_full);
            if (!is_first) barrier_arrive(shared.dq_full[group]);
        }
    }

    // Waits until both warpgroups have written dS.
    __device__ void settle() {
        barrier_wait(shared.ds_full, exchanges.parity());
        exchanges.advance();
    }

    // Has the tensor core add dS^T Q to dK, of the query blocks whose bit is set: the others may be anything.
    __device__ void add_keys(float (&dk)[WORDS], u32 stage, u32 blocks) const {
        const u64 a = values_descriptor(shared.ds[group], 0);
        const u64 b = advance(values_descriptor(shared.tiles.q_values[0][0], TILE_VALUES_BYTES),
                              stage * VALUE_PARTS * TILE_VALUES_BYTES);
        const u64 zero = values_descriptor(shared.zeros, 0);
        pin(dk);
        wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < BLOCKS * BLOCK_STEPS; step++)
            wgmma_shared_bf16<true>(dk, advance(a, step * STEP * DS_ROW_BYTES),
                                    blocks >> step / BLOCK_STEPS & 1 ? advance(b, step * STEP * VALUES_BYTES) : zero, 1);
        wgmma_commit();
    }

    // ---- dQ

    // Has the tensor core compute dQ of the tile that was settled last, half of its features.
    __device__ void start_query_gradients(float (&dq)[DQ_WORDS], u32 slot) const {
        constexpr u32 GROUP_STEPS = GROUP_KEYS / STEP;
        const u64 a = operand_descriptor(shared.ds[0], swizzle_of_rows(DS_ROW_BYTES));
        const u64 b = operand_descriptor(shared.k_values[group], swizzle_of_rows(KEY_VALUES_BYTES));
        pin(dq);
        wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < ITEM_KEYS / STEP; step++)
            wgmma_shared_bf16<false>(dq, advance(a, step / GROUP_STEPS * DS_BYTES + step % GROUP_STEPS * 2 * STEP),
                              advance(b, step * STEP * KEY_VALUES_BYTES), step > 0);
        wgmma_commit();
    }

    // For the next part of dQ that is sent.
    __device__ void aim(u8* to, u32 blocks) const {
        if (threadIdx.x % 128 == 0) shared.dq_targets[exchanges.step][group] = {to, blocks};
    }

    // Puts dQ where the warp that adds it up takes it from.
    __device__ void stage_query_gradients(const float (&dq)[DQ_WORDS]) const {
        barrier_wait(shared.dq_empty[group], exchanges.parity());
        u8* to = shared.dq[group] + warp() / 2 * DQ_PART_BYTES + threadIdx.x % 64 * 16;
#pragma unroll
        for (u32 i = 0; i < DQ_WORDS; i += DQ_CHUNK) {
            u32 words[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                words[j] = DQ_BYTES == 2 ? f16x2(dq[i + 2 * j], dq[i + 2 * j + 1]) : __float_as_uint(dq[i + j]);
            *reinterpret_cast<uint4*>(to + i / DQ_CHUNK * CHUNK_STRIDE) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

// The lane that adds dQ up in global memory, tile by tile.
__device__ inline void add_up(SharedMemory& shared) {
    for (Ring<1> parts;; parts.advance()) {
        bool is_over = false;
#pragma unroll 1
        for (u32 group = 0; group < WARPGROUPS; group++) {
            barrier_wait(shared.dq_full[group], parts.parity());
            const DqTarget target = shared.dq_targets[parts.step][group];
            is_over |= target.blocks == 0;
            for (u32 block = 0; block < target.blocks; block++) {
                const u8* from = shared.dq[group] + block * DQ_PART_BYTES;
                u8* to = target.to + block * DQ_PARTS * DQ_PART_BYTES;
                if constexpr (DQ_BYTES == 2)
                    bulk_add_f16(to, from, DQ_PART_BYTES);
                else
                    bulk_add_f32(to, from, DQ_PART_BYTES);
            }
            bulk_commit();
            bulk_wait_read();
            barrier_arrive(shared.dq_empty[group]);
        }
        if (is_over) break;
    }
    bulk_wait();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_fused(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
    // The same for a warp, which the compiler cannot know of threadIdx.x.
    const u32 warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);

    clear_block(shared.zeros);
    if (threadIdx.x == 0) {
        init_key_barriers(shared);
        barrier_init(shared.ds_full, WARPS);
        barrier_init(shared.ds_empty, WARPS);
        for (u32 i = 0; i < WARPGROUPS; i++) {
            barrier_init(shared.dq_full[i], 4);
            barrier_init(shared.dq_empty[i], 1);
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (warp < 4) {
        registers_release<PRODUCER_REGISTERS>();
        if (warp == 0) Producer<Parameters, SharedMemory>{p, shared, threadIdx.x}.run();
        if (warp == 1 && threadIdx.x % 32 == 0) add_up(shared);
    } else {
        registers_acquire<CONSUMER_REGISTERS>();
        Consumer(p, shared, warp / 4 - 1).run();
    }
}
