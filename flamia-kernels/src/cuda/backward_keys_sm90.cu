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
#include "key_items_sm90.cuh"
#include "layout.cuh"
#include "output_rows.cuh"
#include "parameters.cuh"

// Constants: those of key_items_sm90.cuh.

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

struct SharedMemory {
    static constexpr u32 KEY_SLOTS = 2;  // the next item's keys come in while this one's are used
    static constexpr u32 KEY_IMAGES = KEY_SLOTS;
    static constexpr u32 KEY_READERS = WARPS;
    static constexpr u32 EARLY_BLOCKS = BLOCKS;
    static constexpr bool COMPUTES_DQ = false;

    u8 k[KEY_SLOTS][ITEM_KEYS * HEAD_DIM];
    u8 v[KEY_SLOTS][ITEM_KEYS * HEAD_DIM];
    QueryTiles tiles;
    u8 zeros[BLOCK_BYTES];  // a transposed block
    QueryTable queries[STAGES];
    float k_scale[KEY_SLOTS][KEY_BLOCKS];
    float v_scale[KEY_SLOTS][KEY_BLOCKS];
    Work work[KEY_SLOTS], next;
    u64 keys_full[KEY_SLOTS], keys_empty[KEY_SLOTS];
    u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "the host asks for less");

struct Consumer : KeyConsumer<Parameters, SharedMemory> {
    using KeyConsumer::KeyConsumer;

    __device__ void run() {
        each_item([&](u32 slot) { compute(slot); });
    }

    // Waits for the item's next tile that this warpgroup's keys are seen by, and lets go of those before it.
    // False if there is none.
    __device__ bool reach_tile() {
        for (;; tiles.advance()) {
            const u32 stage = tiles.stage();
            barrier_wait(shared.full[stage], tiles.parity());
            const u32 flags = shared.queries[stage].flags;
            if (flags & seen_by(group)) return true;
            release(stage);
            if (flags & LAST_TILE) break;
        }
        tiles.advance();
        return false;
    }

    // The work item is read from shared memory where it is needed: registers are for fragments.
    __device__ void compute(u32 slot) {
        float dk[WORDS], dv[WORDS];
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) dk[i] = dv[i] = 0;
        KeyReferences dk_reference;
        ValueReference dv_reference;
        Poison poison;

        Tile s, dp;
        bool more = reach_tile();
        if (more) {
            start_scores(s, slot);
            start_score_gradients(dp, slot);
            const TileStart start = prepare_tile(dv_reference, slot);
            wgmma_wait<1>();
            start_tile(s, dv, start);
            wgmma_wait();
        }
        while (more) {
            pin(dp);
            const u32 stage = tiles.stage();
            const QueryTable& table = shared.queries[stage];
            const u32 flags = table.flags;
            const bool is_clear = flags & clear_for(group);
            u32 v_steps = ALL_BLOCKS, q_steps = ALL_BLOCKS;
            if (!is_clear) {
                mask_of(table, slot).apply(s);
                v_steps = steps(table.do_scale, flags);
                q_steps = steps(table.q_scale, flags);
            }

            const GradientStart gradients(table, shared.v_scale[slot][warp_key() / BLOCK]);
            TileCodes p_codes, ds_codes;
#pragma unroll
            for (u32 g = 0; g < BLOCKS; g++) group_codes(s, g, p_codes[g]);
            const u64 zero = transposed_tile(shared.zeros, 0);
            add_product(dv, p_codes, transposed_tile(shared.tiles.d_o_transposed[0], stage), zero, v_steps);
            score_gradients(dp, s, gradients);
            if (!is_clear) mask_of(table, slot).apply(dp);
            float exponents[BLOCKS];
            dv_reference.exponents(table, exponents);

            const auto add_keys = [&] {
                BlockMaxima amax;
                block_maxima(dp, amax);
                dk_reference.codes(dp, amax, table, exponents, p.hysteresis, dk, ds_codes);
                add_product(dk, ds_codes, transposed_tile(shared.tiles.q_transposed[0], stage), zero, q_steps);
            };
            const auto finish = [&] {
                wgmma_wait();
                pin(dv);
                pin(dk);
                pin(p_codes);
                pin(ds_codes);
                if (!is_clear) poison.read(*this, table);
                release(stage);
            };
            tiles.advance();
            more = !(flags & LAST_TILE) && reach_tile();
            // The tensor core has the next tile's products to compute beside this one's codes, and the next
            // probabilities are computed beside the last of those. Written twice, since ptxas serialises
            // what is issued under a condition and waited for outside of it.
            if (more) {
                start_scores(s, slot);
                add_keys();
                start_score_gradients(dp, slot);
                const TileStart start = prepare_tile(dv_reference, slot);
                wgmma_wait<2>();
                start_tile(s, dv, start);
                finish();
            } else {
                add_keys();
                finish();
            }
        }
        const float dk_up[2] = {dk_reference.up(0), dk_reference.up(1)};
        // What only this warp's part of the MMA reads of the keys, which are no longer needed.
        const RowStaging staging = {shared.k[slot] + warp_key() * HEAD_DIM, shared.v[slot] + warp_key() * HEAD_DIM};
        store<1>(dk, dk_up, dv, dv_reference, poison, staging, slot);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_keys(const __grid_constant__ Parameters p) {
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory());
    // The same for a warp, which the compiler cannot know of threadIdx.x.
    const u32 warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);

    clear_block(shared.zeros);
    if (threadIdx.x == 0) {
        init_key_barriers(shared);
        barrier_init_fence();
    }
    __syncthreads();

    if (warp < 4) {
        registers_release<PRODUCER_REGISTERS>();
        if (warp == 0) Producer<Parameters, SharedMemory>{p, shared, threadIdx.x}.run();
    } else {
        registers_acquire<CONSUMER_REGISTERS>();
        Consumer(p, shared, warp / 4 - 1).run();
    }
}
