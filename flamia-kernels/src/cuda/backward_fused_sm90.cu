// dQ, dK and dV of packed documents on Hopper in one kernel, from quantised operands: P and dS are computed
// once. `backward_fused.rs` launches it, between a kernel that prepares dQ's accumulators and one that
// makes BF16 rows of them (dq_sums.cu).
//
// As backward_keys_sm90.cu, with whose bits it computes dK and dV; and dQ of each tile of queries, of
// which a CTA has the 128 keys' part. dS of all eight warps goes through shared memory, transposed by
// stmatrix, and is the A operand of dQ += dS K in the next round: by then both warpgroups have written
// theirs, and dQ is computed beside the next tile's probabilities. Each warpgroup computes half of dQ's
// features. A further warp adds them up in global memory, in FP16 or FP32; the order in which CTAs get
// there is not the same in every run, so dQ's last bits are not either.
//
// A product's rows have one scale each, and a row of dQ's operand has keys of all warps: the CTA has one
// running reference of dS for the first 32 queries of tiles, and one for the others. Codes are made with
// the references so far, each warp tells the largest entries of its own, and all make their codes again if
// those move a reference.
// cpu/hopper/fused.rs defines the numbers.
#include "dq_sums.cuh"
#include "key_items_sm90.cuh"
#include "layout.cuh"
#include "output_rows.cuh"
#include "parameters.cuh"

// Constants: those of key_items_sm90.cuh and dq_sums.cuh.

static_assert(DQ_PARTS == WARPGROUPS, "each warpgroup computes a part of dQ");

constexpr u32 EXCHANGES = 2;

// `Parameters` of backward_fused.rs. Strides are in elements.
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
    const u8 *k_transposed;
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
    int hysteresis;
    u32 reserved;
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
SAME_OFFSET(Parameters, k_transposed);
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
SAME_OFFSET(Parameters, hysteresis);
SAME_OFFSET(Parameters, reserved);

// Where a warpgroup's part of a tile's dQ goes: to each of `blocks` blocks of queries. None of them means
// that the work is over.
struct DqTarget {
    u8* to;
    u32 blocks;
};

struct SharedMemory {
    static constexpr u32 KEY_SLOTS = 1;
    static constexpr bool TRANSPOSED_KEYS = true, KEY_EXPONENTS = true;

    u8 k[KEY_SLOTS][ITEM_KEYS * HEAD_DIM];
    u8 v[KEY_SLOTS][ITEM_KEYS * HEAD_DIM];
    u8 k_transposed[KEY_SLOTS][ITEM_KEYS * HEAD_DIM];
    QueryTiles tiles;
    u8 ds[EXCHANGES][QUERIES * ITEM_KEYS];  // codes, a row for each query
    u8 dq[DQ_PARTS][BLOCKS * DQ_PART_BYTES];
    u8 zeros[BLOCK_BYTES];  // a transposed block
    QueryTable queries[STAGES];
    float ds_amax[EXCHANGES][BLOCKS][WARPS];
    float k_scale[KEY_SLOTS][KEY_BLOCKS];
    float v_scale[KEY_SLOTS][KEY_BLOCKS];
    float key_exponent[KEY_SLOTS];
    DqTarget dq_targets[EXCHANGES][WARPGROUPS];
    Work work[KEY_SLOTS], next;
    u64 keys_full[KEY_SLOTS], keys_empty[KEY_SLOTS];
    u64 full[STAGES], empty[STAGES];
    u64 ds_full[EXCHANGES];
    u64 dq_full[WARPGROUPS], dq_empty[WARPGROUPS];
};
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "the host asks for less");

// Barrier of the consumers; 0 is that of all threads.
constexpr u32 CONSUMERS_BARRIER = 1;

struct Consumer : KeyConsumer<Parameters, SharedMemory> {
    using KeyConsumer::KeyConsumer;

    // Of dS, from one tile to the next, and of dQ.
    Ring<EXCHANGES> exchanges;

    __device__ void run() {
        each_item([&](u32 slot) { compute(slot); });
        // Not before the part before it is under way: barriers are waited for by their parity.
        barrier_wait(shared.dq_empty[group], exchanges.step % 2 ^ 1);
        aim(nullptr, 0);
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared.dq_full[group]);
    }

    // What a tile leaves for the next round, beside dS and the reference.
    struct Pending {
        float unfold[BLOCKS];  // what dS of each query block is multiplied with: K's scale, without P's exponents
        int exponent;  // the power of two on sums of dQ
        u32 steps;  // the key blocks to multiply with
    };

    __device__ void compute(u32 slot) {
        float dk[WORDS], dv[WORDS];
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) dk[i] = dv[i] = 0;
        KeyReferences dk_reference;
        ValueReference dv_reference;
        RunningReference dq_references[BLOCKS];
        Pending pending = {};

        Tile s, dp;
        // Of 128 features, dQ is computed in the registers of a dP that has gone: more there are not.
        constexpr bool IN_PLACE = DQ_WORDS == QUERIES / 2;
        float apart[IN_PLACE ? 1 : DQ_WORDS];
        float (&dq)[DQ_WORDS] = reinterpret_cast<float (&)[DQ_WORDS]>(IN_PLACE ? dp[0] : apart[0]);
        bool is_first = true, is_last;
        do {
            const u32 stage = tiles.stage();
            const QueryTable& table = shared.queries[stage];
            barrier_wait(shared.full[stage], tiles.parity());
            if (!is_first) settle(dp, dq_references, pending);
            start_scores(s, slot);
            // Of the tile before; of no use in the first round, but ptxas serialises what is issued under
            // a condition.
            start_query_gradients(dq, pending.steps, slot);
            wgmma_wait<1>();
            start_tile(s, dv, dv_reference, slot);
            wgmma_wait();
            pin(dq);
            if (!is_first) send(dq, up(dq_references) * pow2(pending.exponent));

            start_score_gradients(dp, slot);
            TileCodes p_codes, ds_codes;
#pragma unroll
            for (u32 g = 0; g < BLOCKS; g++) group_codes(s, g, p_codes[g]);
            const u32 flags = table.flags;
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
            score_gradients(dp, s, table, shared.v_scale[slot][warp_key() / BLOCK]);
            if (!is_clear) mask_gradients(dp, table, slot);
            float exponents[BLOCKS];
            dv_reference.exponents(table, exponents);
            BlockMaxima amax;
            block_maxima(dp, amax);
            dk_reference.codes(dp, amax, table, exponents, p.hysteresis, dk, ds_codes);
            add_product(dk, ds_codes, transposed_tile(shared.tiles.q_transposed[0], stage), zero, q_steps);

            // A poisoned block's keys have NaN in dS, whatever that is multiplied with; 0 has to stay 0.
            const float k_scale = fminf(shared.k_scale[slot][warp_key() / BLOCK], 0x1p127f);
#pragma unroll
            for (u32 g = 0; g < BLOCKS; g++) pending.unfold[g] = k_scale * exp2_approximate(-exponents[g]);
            pending.exponent = dq_exponent(table.do_fold[warp() / 2], shared.key_exponent[slot]);
            pending.steps = key_steps(flags, slot);
            offer(dp, amax, dq_references, pending, table, slot);

            wgmma_wait();
            pin(dv);
            pin(dk);
            pin(p_codes);
            pin(ds_codes);
            if (!is_clear) {
                const KeyMask mask = mask_of(table, slot);
                poison(dv, table.do_scale, mask);
                poison(dk, table.q_scale, mask);
            }
            release(stage);
            tiles.advance();
            is_first = false;
            is_last = flags & LAST_TILE;
        } while (!is_last);

        settle(dp, dq_references, pending);
        start_query_gradients(dq, pending.steps, slot);
        wgmma_wait();
        pin(dq);
        send(dq, up(dq_references) * pow2(pending.exponent));
        store(dk, dv, dk_reference, dv_reference, slot);
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

    // The key blocks that are there; of poisoned ones those that all queries see.
    __device__ u32 key_steps(u32 flags, u32 slot) const {
        constexpr u32 ALL_CLEAR = clear_for(0) | clear_for(1);
        const Work& work = shared.work[slot];
        const bool is_clear = (flags & ALL_CLEAR) == ALL_CLEAR;
        u32 steps = 0;
#pragma unroll
        for (u32 block = 0; block < KEY_BLOCKS; block++) {
            const bool is_there = work.item.first + BLOCK * int(block) < work.item.len;
            steps |= u32(is_there && (is_clear || !isnan(shared.k_scale[slot][block]))) << block;
        }
        return steps;
    }

    // ---- dS through shared memory

    // What a warp's part of dQ, of one query block, is multiplied with.
    __device__ float up(const RunningReference (&references)[BLOCKS]) const {
        return warp() / 2 == 0 ? references[0].up() : references[1].up();
    }

    // Writes codes of dS relative to the CTA's references, tells their largest entries, and where dQ goes.
    __device__ void offer(const Tile& ds, const BlockMaxima& maxima, const RunningReference (&references)[BLOCKS],
                          const Pending& pending, const QueryTable& table, u32 slot) {
        u32 amax[BLOCKS];
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++) {
            const float own = fmaxf(fmaxf(maxima[g][0], maxima[g][1]) * pending.unfold[g], 0);
            // Not negative, nor NaN: as integers they compare alike.
            amax[g] = __reduce_max_sync(FULL_WARP, __float_as_uint(own));
        }
        write_codes(ds, references, pending);

        const Work& work = shared.work[slot];
        const i64 block = (i64(table.head) * p.slots + padded_start(work.item.start, work.item.document) + table.query) / BLOCK;
        aim(p.dq + (block * DQ_PARTS + group) * DQ_PART_BYTES, min(int(BLOCKS), (work.item.len - table.query + BLOCK - 1) / BLOCK));
        async_fence();
        __syncwarp();
        if (lane() == 0) {
#pragma unroll
            for (u32 g = 0; g < BLOCKS; g++)
                shared.ds_amax[exchanges.stage()][g][4 * group + warp()] = __uint_as_float(amax[g]);
            barrier_arrive(shared.ds_full[exchanges.stage()]);
        }
    }

    // Waits until all warps have offered theirs. If a reference has to move, all warps know, and write again.
    __device__ void settle(const Tile& ds, RunningReference (&references)[BLOCKS], const Pending& pending) {
        const u32 stage = exchanges.stage();
        barrier_wait(shared.ds_full[stage], exchanges.parity());
        bool moves = false;
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++) {
            float amax = 0;
#pragma unroll
            for (u32 i = 0; i < WARPS; i++) amax = fmaxf(amax, shared.ds_amax[stage][g][i]);
            const int before = references[g].exponent;
            references[g].update(amax, p.hysteresis);
            moves |= references[g].exponent != before;
        }
        if (moves) {
            write_codes(ds, references, pending);
            async_fence();
            named_barrier<CONSUMERS_BARRIER, 32 * WARPS>();
        }
        exchanges.advance();
    }

    // 64 keys of each query's row of 128, in the order of the transposed image of K. Rows of the accumulator
    // are keys, stmatrix transposes pairs of them; pi's pairs are neighbours, which are 4 lanes apart.
    __device__ void write_codes(const Tile& ds, const RunningReference (&references)[BLOCKS], const Pending& pending) const {
        u8* rows = shared.ds[exchanges.stage()];
        const bool is_odd = lane() / 4 % 2;
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++) {
            const float factor = fminf(pending.unfold[g] * references[g].down(), 0x1p127f);
            Tile scaled;
#pragma unroll
            for (u32 i = 16 * g; i < 16 * g + 16; i++) scaled[i] = ds[i] * factor;
            u32 codes[4], words[4];
            group_codes(scaled, g, codes);
#pragma unroll
            for (u32 pair = 0; pair < 2; pair++) {
                const u32 low = codes[2 * pair], high = codes[2 * pair + 1];
                const u32 other = __shfl_xor_sync(FULL_WARP, is_odd ? low : high, 4);
                const u32 first = is_odd ? other : low, second = is_odd ? high : other;
                words[2 * pair] = __byte_perm(first, second, 0x5140);
                words[2 * pair + 1] = __byte_perm(first, second, 0x7362);
            }
            const u32 query = 32 * g + lane(), chunk = 4 * group + warp();
            store_matrices_transposed(rows + query * ITEM_KEYS + (chunk ^ query % 8) * 16, words[0], words[1], words[2],
                                      words[3]);
        }
    }

    // ---- dQ

    // Has the tensor core compute dQ of the tile that was settled last, half of its features.
    __device__ void start_query_gradients(float (&dq)[DQ_WORDS], u32 steps, u32 slot) const {
        const u32 settled = (exchanges.step + EXCHANGES - 1) % EXCHANGES;
        const u64 a = advance(operand_descriptor(shared.ds[0], Swizzle::B128), settled * QUERIES * ITEM_KEYS);
        const u64 b = operand_descriptor(shared.k_transposed[slot] + group * PART_FEATURES * BLOCK, Swizzle::B32);
        const u64 zero = transposed_tile(shared.zeros, 0);
        pin(dq);
        wgmma_fence();
#pragma unroll
        for (u32 block = 0; block < KEY_BLOCKS; block++)
            wgmma_shared(dq, advance(a, 32 * block), steps >> block & 1 ? advance(b, block * BLOCK_BYTES) : zero, block > 0);
        wgmma_commit();
    }

    // For the next part of dQ that is sent.
    __device__ void aim(u8* to, u32 blocks) const {
        if (threadIdx.x % 128 == 0) shared.dq_targets[exchanges.stage()][group] = {to, blocks};
    }

    // Hands dQ over to the warp that adds it up.
    __device__ void send(const float (&dq)[DQ_WORDS], float factor) const {
        // One part has been sent for each exchange that was settled before this one.
        const u32 sent = exchanges.step - 1;
        barrier_wait(shared.dq_empty[group], sent % 2 ^ 1);
        u8* to = shared.dq[group] + warp() / 2 * DQ_PART_BYTES + threadIdx.x % 64 * 16;
#pragma unroll
        for (u32 i = 0; i < DQ_WORDS; i += DQ_CHUNK) {
            u32 words[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                words[j] = DQ_BYTES == 2 ? f16x2(dq[i + 2 * j] * factor, dq[i + 2 * j + 1] * factor)
                                         : __float_as_uint(dq[i + j] * factor);
            *reinterpret_cast<uint4*>(to + i / DQ_CHUNK * CHUNK_STRIDE) = make_uint4(words[0], words[1], words[2], words[3]);
        }
        async_fence();
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared.dq_full[group]);
    }
};

// The lane that adds dQ up in global memory, tile by tile.
__device__ inline void add_up(SharedMemory& shared) {
    for (Ring<EXCHANGES> parts;; parts.advance()) {
        bool is_over = false;
#pragma unroll 1
        for (u32 group = 0; group < WARPGROUPS; group++) {
            barrier_wait(shared.dq_full[group], parts.step % 2);
            const DqTarget target = shared.dq_targets[parts.stage()][group];
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
        for (u32 i = 0; i < EXCHANGES; i++) barrier_init(shared.ds_full[i], WARPS);
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
