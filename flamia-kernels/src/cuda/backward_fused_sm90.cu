// dQ, dK and dV of packed documents on Hopper in one kernel, from quantised operands: P and dS are computed
// once. `backward_fused.rs` launches it, between a kernel that prepares dQ's accumulators and one that
// makes BF16 rows of them (dq_sums.cu).
//
// As backward_keys_sm90.cu, with whose bits it computes dV; and dQ of each tile of queries, of which a CTA has
// the 128 keys' part. Two warpgroups of 64 keys each write dS to shared memory, transposed by stmatrix. A third one
// multiplies it with K, and has what it gets added up in global memory, in FP16 or FP32. So neither of the two waits
// for dQ or for the other one, but for what is still to be read of its own dS of the tile before. The order in
// which CTAs add up is not the same in every run, and dQ's last bits are not either.
//
// dS is BF16, and so is what it is made of and multiplies with: P and dP - D, and what the codes of Q and K stand for. A row
// of dQ's operand has keys of all warps; in E4M3 all eight would have to agree on a reference before any of them could
// round. And references cost more instructions than BF16 costs cycles of the tensor core, of which it has enough: what
// limits the kernel is how long its warps take for a tile, and shared memory.
// cpu/hopper/fused.rs defines the numbers.
#include "dq_sums.cuh"
#include "key_items_sm90.cuh"
#include "layout.cuh"
#include "output_rows.cuh"
#include "parameters.cuh"

// Constants: those of key_items_sm90.cuh and dq_sums.cuh.

constexpr u32 FUSED_THREADS = THREADS + 128;
// A warpgroup that loads, the one that computes dQ, and two that have keys: 65,536 of the SM for 128 threads each.
constexpr u32 LOADER_REGISTERS = 32;
constexpr u32 DQ_REGISTERS = 64;
constexpr u32 KEY_REGISTERS = 208;

constexpr int DS_ROW_BYTES = 2 * GROUP_KEYS;  // of a query's dS of a warpgroup's keys
constexpr u32 DS_BYTES = QUERIES * DS_ROW_BYTES;
constexpr u32 STEP = 16;  // entries that a step of the BF16 product sums over
constexpr u32 BLOCK_STEPS = BLOCK / STEP;
constexpr u32 GROUP_STEPS = GROUP_KEYS / STEP;
constexpr u32 TILE_STEPS = QUERIES / STEP;
constexpr u32 TILE_VALUES_BYTES = QUERIES * VALUES_BYTES;
constexpr u32 KEY_VALUES_BYTES = ITEM_KEYS * VALUES_BYTES;
static_assert(DS_ROW_BYTES == VALUES_BYTES, "a warpgroup's keys are a row of values");

// A tile's P or dS in BF16: the A operands of products over its queries.
using TileValues = u32[TILE_STEPS][4];

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

struct SharedMemory {
    // The next item's tables, and its keys as soon as no product reads this one's any more.
    static constexpr u32 KEY_SLOTS = 2;
    static constexpr u32 KEY_IMAGES = 1;
    static constexpr u32 DQ_BLOCK_BYTES = DQ_PARTS * DQ_PART_BYTES;
    static constexpr u32 KEY_READERS = WARPS + 4;
    static constexpr u32 EARLY_BLOCKS = 1;
    static constexpr bool COMPUTES_DQ = true;

    u8 k[KEY_IMAGES][ITEM_KEYS * HEAD_DIM];
    u8 v[KEY_IMAGES][ITEM_KEYS * HEAD_DIM];
    u8 k_values[VALUE_PARTS][KEY_VALUES_BYTES];  // BF16, a row for each key
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
    DqTarget dq_targets[2 * STAGES];  // of the tiles that are loaded, and those before them that dQ is still computed of
    Work work[KEY_SLOTS], next;
    u64 keys_full[KEY_SLOTS], keys_empty[KEY_SLOTS];
    u64 full[STAGES], empty[STAGES];
    u64 codes_empty;  // of both operands' keys
    u64 ds_full[WARPGROUPS], ds_empty;
};
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "the host asks for less");

// Barriers of the warpgroup of dQ, and of each of those that have keys; 0 is that of all threads.
constexpr u32 DQ_BARRIER = 1, KEY_BARRIER = 2;

// A warpgroup of 64 keys: their dK and dV, and dS for dQ.
struct Consumer : KeyConsumer<Parameters, SharedMemory> {
    using KeyConsumer::KeyConsumer;

    Ring<1> exchanges;  // of dS

    __device__ void run() {
        each_item([&](u32 slot) { compute(slot); });
    }

    // What a warpgroup has in registers from one tile to the next.
    struct Fragments {
        float dk[WORDS], dv[WORDS];
        Tile x;  // S, P and dP in turn: there is no room for two of them
        TileStart start;
        ValueReference dv_reference;
        Poison poison;
    };

    __device__ void compute(u32 slot) {
        Fragments f;
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) f.dk[i] = f.dv[i] = 0;

        barrier_wait(shared.full[tiles.stage()], tiles.parity());
        f.start = prepare_tile(f.dv_reference, slot);
        start_scores(f.x, slot);
        wgmma_wait();
        start_tile(f.x, f.dv, f.start);
        // Most tiles need no mask. Those have code of their own, with nothing in it to jump over: the kernel lost
        // some 7 % of its cycles to instructions that were not there yet.
        for (;;) {
            if (f.start.flags & LAST_TILE) break;
            if (f.start.flags & clear_for(group))
                compute_tile<true, true>(f, slot);
            else
                compute_tile<false, true>(f, slot);
        }
        compute_tile<false, false>(f, slot);
        // Rows are staged where dS was, once dQ of it is there.
        barrier_wait(shared.ds_empty, exchanges.parity() ^ 1);
        constexpr u32 PARTS = HEAD_DIM / 64, HALF_BYTES = DS_BYTES / 8;
        u8* rows = shared.ds[group] + 2 * HALF_BYTES * warp();
        const float one[2] = {1, 1};
        store<PARTS>(f.dk, one, f.dv, f.dv_reference, f.poison, {rows, rows + HALF_BYTES}, slot);
        named_barrier<128>(KEY_BARRIER + group);
    }

    // What a tile gives, whose P is there; and P of the next one, if there is MORE. The tensor core has nothing to do for
    // this warpgroup before and after: ptxas serialises what is under way then.
    template <bool CLEAR, bool MORE>
    __device__ void compute_tile(Fragments& f, u32 slot) {
        const u32 stage = tiles.stage();
        const QueryTable& table = shared.queries[stage];
        const u32 flags = f.start.flags;

        u32 v_steps = ALL_BLOCKS, q_steps = ALL_BLOCKS;
        if (!CLEAR) {
            v_steps = steps(table.do_scale, flags);
            q_steps = steps(table.q_scale, flags);
            f.poison.read(*this, table);
            mask_of(table, slot).apply(f.x);
        }
        TileCodes p_codes;
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++) group_codes(f.x, g, p_codes[g]);
        if (!CLEAR) poison_tile(f.x, table, slot);
        TileValues values;  // P, and dS later
#pragma unroll
        for (u32 step = 0; step < TILE_STEPS; step++)
            each_pair(f.x, step, [&](u32 i, u32 pair) { values[step][i] = pair; });
        start_score_gradients(f.x, slot);
        const u64 zero = transposed_tile(shared.zeros, 0);
        add_product(f.dv, p_codes, transposed_tile(shared.tiles.d_o_transposed[0], stage), zero, v_steps);
        // For both: the registers of P's codes are needed.
        wgmma_wait();
        pin(f.dv);
        pin(p_codes);
        pin(f.x);
        if (!MORE) barrier_arrive_once(shared.codes_empty);
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++) center<CLEAR>(f.x, g, block_gradients(f.start, table, g, slot));
        offer(f.x, values);
        tiles.advance();

        // dK is computed beside the next probabilities, and what was written of dS gets ready for dQ beside both.
        if (MORE) {
            barrier_wait(shared.full[tiles.stage()], tiles.parity());
            f.start = prepare_tile(f.dv_reference, slot);
            start_scores(f.x, slot);
        }
        add_keys(f.dk, values, stage, q_steps);
        async_fence();
        __syncwarp();
        barrier_arrive_once(shared.ds_full[group]);
        if (MORE) {
            wgmma_wait<1>();
            start_tile(f.x, f.dv, f.start);
        }
        wgmma_wait();
        pin(f.dk);
        pin(values);
        release(stage);
    }

    // What makes dP - D of dP of a block of queries, times what makes dS of P 2^exponents, times what sums of dQ are kept
    // at (dq_sums.cuh).
    struct BlockGradients {
        float scale;
        float2 row_sums[GROUP_COLUMNS / 2];
    };

    __device__ BlockGradients block_gradients(const TileStart& start, const QueryTable& table, u32 g, u32 slot) const {
        // Finite, since dS of a block of zeros has to stay 0.
        const float factor = fminf(exp2_approximate(-start.exponents[g] - table.do_fold[g]), 0x1p127f);
        BlockGradients block;
        block.scale = table.do_scale[g] * shared.v_scale[slot][warp_key() / BLOCK] * factor;
#pragma unroll
        for (u32 j = 0; j < GROUP_COLUMNS; j += 2) {
            const float2 d = column_pair(table.row_sums, g, j);
            block.row_sums[j / 2] = {d.x * factor, d.y * factor};
        }
        return block;
    }

    // Of BF16.
    static __device__ float finite(float x) { return fminf(fmaxf(x, -0x1p127f), 0x1p127f); }

    // The entries of a step's A operand, pair by pair.
    template <class Pair>
    static __device__ void each_pair(const Tile& x, u32 step, Pair pair) {
        const u32 g = step / BLOCK_STEPS, first = step % BLOCK_STEPS * 4;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 half = i % 2, j = first + i / 2 * 2;
            pair(i, bf16x2(entry(x, g, half, j), entry(x, g, half, j + 1)));
        }
    }

    // NaN in masked P for whatever makes dS NaN where a query sees a key, and in all of a block of queries that read a poisoned
    // block of keys. P decides alone then: of dP - D, NaN becomes finite, so that dS is 0 where P is.
    __device__ void poison_tile(Tile& s, const QueryTable& table, u32 slot) const {
        const u32 key_block = warp_key() / BLOCK;
        const bool is_poisoned = isnan(shared.k_scale[slot][key_block]);
#pragma unroll
        for (u32 g = 0; g < BLOCKS; g++) {
            const bool all = is_poisoned && blocks_that_see(table.flags) >> g & 1;
            const float scale = table.do_scale[g] * shared.v_scale[slot][key_block];
#pragma unroll
            for (u32 j = 0; j < GROUP_COLUMNS; j++) {
                const float2 d = column_pair(table.row_sums, g, j / 2 * 2);
                const float nothing = 0 * scale + 0 * (j % 2 ? d.y : d.x);
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    float& p = entry(s, g, half, j);
                    if (KeyMask::was_seen(p)) p += nothing;
                    if (all) p = NOT_A_NUMBER;
                }
            }
        }
    }

    // dP of a block of queries becomes dP - D.
    template <bool CLEAR>
    static __device__ void center(Tile& dp, u32 g, const BlockGradients& block) {
#pragma unroll
        for (u32 j = 0; j < GROUP_COLUMNS; j += 2) {
            const float2 d = block.row_sums[j / 2];
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float &a = entry(dp, g, half, j), &b = entry(dp, g, half, j + 1);
                a = fmaf(a, block.scale, -d.x);
                b = fmaf(b, block.scale, -d.y);
                if (!CLEAR) a = finite(a), b = finite(b);
            }
        }
    }

    // Makes dS of P in `values`, and writes it for the warpgroup of dQ to read, once it is told.
    __device__ void offer(const Tile& centered, TileValues& values) {
        // Rows of the accumulator are keys: stmatrix transposes 8 x 8 of them. Lane i gives the address of a query's
        // 8 keys in matrix i / 8; those are of the warp's lower and upper keys in turn.
        u8* row = shared.ds[group] + (lane() % 8 + lane() / 16 * 8) * DS_ROW_BYTES;
        row += row_chunk<DS_ROW_BYTES>(int(lane() % 8), int(2 * warp() + lane() / 8 % 2)) * CHUNK;
        barrier_wait(shared.ds_empty, exchanges.parity() ^ 1);
        exchanges.advance();
#pragma unroll
        for (u32 step = 0; step < TILE_STEPS; step++) {
            u32 (&ds)[4] = values[step];
            each_pair(centered, step, [&](u32 i, u32 pair) { ds[i] = multiply_bf16x2(ds[i], pair); });
            store_matrices_transposed(row + step * STEP * DS_ROW_BYTES, ds[0], ds[1], ds[2], ds[3]);
        }
    }

    // Has the tensor core add dS^T Q to dK, of the query blocks whose bit is set: the others may be anything.
    __device__ void add_keys(float (&dk)[WORDS], TileValues& ds, u32 stage, u32 blocks) const {
        const u64 b = advance(values_descriptor(shared.tiles.q_values[0][0], TILE_VALUES_BYTES),
                              stage * VALUE_PARTS * TILE_VALUES_BYTES);
        const u64 zero = values_descriptor(shared.zeros, 0);
        pin(dk);
        pin(ds);
        wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < TILE_STEPS; step++)
            wgmma_registers_bf16(dk, ds[step], blocks >> step / BLOCK_STEPS & 1 ? advance(b, step * STEP * VALUES_BYTES) : zero, 1);
        wgmma_commit();
    }
};

// The warpgroup of dQ.
struct QueryGradients {
    const Parameters& p;
    SharedMemory& shared;
    Ring<SharedMemory::KEY_SLOTS> keys;
    Ring<1> exchanges;
    Ring<STAGES> tiles;

    __device__ u32 thread() const { return threadIdx.x % 128; }

    __device__ void run() {
        for (;;) {
            const u32 slot = keys.stage();
            barrier_wait(shared.keys_full[slot], keys.parity());
            if (shared.work[slot].item.len == 0) break;
            widen_keys(slot);
            keys.advance();
            bool is_last;
            do is_last = compute();
            while (!is_last);
        }
        if (thread() == 0) bulk_wait();
    }

    // BF16 rows of what the keys' codes stand for, times what sums of dQ are kept at. Zeros for keys that are not
    // there, and of poisoned blocks, which poison through dS.
    __device__ void widen_keys(u32 slot) const {
        const int key = int(thread());
        const float own_scale = shared.k_scale[slot][key / BLOCK];
        const float scale = own_scale * pow2(key_scale_exponent(shared.key_exponent[slot]));
        const Work& work = shared.work[slot];
        const bool is_there = !isnan(own_scale) && work.item.first + key / BLOCK * BLOCK < work.item.len;
        const u8* from = shared.k[0] + key * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / CHUNK; i++) {
            const uint4 codes = *reinterpret_cast<const uint4*>(from + row_chunk<HEAD_DIM>(key, i) * CHUNK);
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
            constexpr int PART_CHUNKS = VALUE_FEATURES / CHUNK;
            u8* to = shared.k_values[i / PART_CHUNKS] + key * VALUES_BYTES;
#pragma unroll
            for (int j = 0; j < 2; j++)
                *reinterpret_cast<uint4*>(to + row_chunk<VALUES_BYTES>(key, 2 * (i % PART_CHUNKS) + j) * CHUNK) =
                    make_uint4(pairs[4 * j], pairs[4 * j + 1], pairs[4 * j + 2], pairs[4 * j + 3]);
        }
        async_fence();
        named_barrier<128>(DQ_BARRIER);
        barrier_arrive_once(shared.codes_empty);
        barrier_arrive_once(shared.keys_empty[slot]);
    }

    // dQ of a tile, 64 features at a time. Whether it was the item's last.
    __device__ bool compute() {
        bool is_last = false;
#pragma unroll
        for (u32 part = 0; part < VALUE_PARTS; part++) {
            float dq[QUERIES / 2];
            pin(dq);
#pragma unroll
            for (u32 group = 0; group < WARPGROUPS; group++) {
                if (part == 0) barrier_wait(shared.ds_full[group], exchanges.parity());
                wgmma_fence();
                const u64 a = operand_descriptor(shared.ds[group], swizzle_of_rows(DS_ROW_BYTES));
                const u64 b = operand_descriptor(shared.k_values[part] + group * GROUP_KEYS * VALUES_BYTES, swizzle_of_rows(VALUES_BYTES));
#pragma unroll
                for (u32 step = 0; step < GROUP_STEPS; step++)
                    wgmma_shared_bf16(dq, advance(a, step * 2 * STEP), advance(b, step * STEP * VALUES_BYTES), group + step > 0);
            }
            wgmma_commit();
            const DqTarget target = shared.dq_targets[tiles.step];
            is_last = target.is_last;
            // What was staged here before has been read.
            if (thread() == 0) bulk_wait_read<VALUE_PARTS - 1>();
            wgmma_wait();
            pin(dq);
            if (part == VALUE_PARTS - 1) {
                __syncwarp();
                barrier_arrive_once(shared.ds_empty);
            }
            named_barrier<128>(DQ_BARRIER);
            stage(dq, part);
            async_fence();
            named_barrier<128>(DQ_BARRIER);
            if (thread() == 0) send(target, part);
        }
        exchanges.advance();
        tiles.advance();
        return is_last;
    }

    static constexpr u32 PASS_PARTS = DQ_PARTS / VALUE_PARTS;  // parts of dQ's sums that 64 features are

    __device__ void stage(const float (&dq)[QUERIES / 2], u32 pass) const {
#pragma unroll
        for (u32 i = 0; i < QUERIES / 2; i += DQ_CHUNK) {
            u8* to = shared.dq[pass * PASS_PARTS + i / DQ_WORDS] + thread() / 64 * DQ_PART_BYTES + thread() % 64 * 16;
            u32 words[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                words[j] = DQ_BYTES == 2 ? f16x2(dq[i + 2 * j], dq[i + 2 * j + 1]) : __float_as_uint(dq[i + j]);
            *reinterpret_cast<uint4*>(to + i % DQ_WORDS / DQ_CHUNK * CHUNK_STRIDE) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }

    // Has it added up in global memory. For one thread.
    __device__ void send(const DqTarget& target, u32 pass) const {
#pragma unroll
        for (u32 i = 0; i < PASS_PARTS; i++)
            for (u32 block = 0; block < target.blocks; block++) {
                const u32 part = pass * PASS_PARTS + i;
                const u8* from = shared.dq[part] + block * DQ_PART_BYTES;
                u8* to = target.to + (block * DQ_PARTS + part) * DQ_PART_BYTES;
                if constexpr (DQ_BYTES == 2)
                    bulk_add_f16(to, from, DQ_PART_BYTES);
                else
                    bulk_add_f32(to, from, DQ_PART_BYTES);
            }
        bulk_commit();
    }
};

extern "C" __global__ void __launch_bounds__(FUSED_THREADS, 1) attention_backward_fused(const __grid_constant__ Parameters p) {
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory());
    // The same for a warp, which the compiler cannot know of threadIdx.x.
    const u32 warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);

    clear_block(shared.zeros);
    if (threadIdx.x == 0) {
        init_key_barriers(shared);
        barrier_init(shared.codes_empty, SharedMemory::KEY_READERS);
        barrier_init(shared.ds_empty, 4);
        for (u32 i = 0; i < WARPGROUPS; i++) barrier_init(shared.ds_full[i], 4);
        barrier_init_fence();
    }
    __syncthreads();

    if (warp < 4) {
        registers_release<LOADER_REGISTERS>();
        if (warp == 0) Producer<Parameters, SharedMemory>{p, shared, threadIdx.x}.run();
    } else if (warp < 8) {
        registers_release<DQ_REGISTERS>();
        QueryGradients{p, shared}.run();
    } else {
        registers_acquire<KEY_REGISTERS>();
        Consumer(p, shared, warp / 4 - 2).run();
    }
}
