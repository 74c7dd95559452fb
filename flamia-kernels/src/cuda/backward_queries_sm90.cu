// dQ of MXFP8 attention on Hopper: the half of the backward pass that walks keys.
//
// A persistent grid. In every CTA one warp walks the schedule and keeps a ring of stages filled with
// key tiles, already into the next item while this one is computed; each of two consumer warpgroups
// computes dQ of 64 query rows, from the last key tile that they see down to the first. Nothing is shared
// between warpgroups and no sum has two orders, so that results are the same bits on every run. The
// numbers are those of cpu/hopper/queries.rs.
//
// The tensor core multiplies scores and dP of the next tile while the other warpgroup turns those of its
// own into dS. Operands are as in forward_sm90.cu, and so is what lies past a document's last block: it
// may be NaN, is masked by selection, and never multiplied with.
#include "key_tile.cuh"
#include "layout.cuh"
#include "output_rows.cuh"
#include "parameters.cuh"
#include "ptx.cuh"
#include "running_reference.cuh"
#include "schedule.cuh"

// Constants: HEAD_DIM (64 or 128), ROTATED (0 or 1: whether Q and K are, and dQ is to be rotated back),
// STAGES of the ring, and MASK of tiles.cuh.

constexpr int ITEM_ROWS = 128;
constexpr u32 WARPGROUPS = ITEM_ROWS / GROUP_ROWS;
constexpr u32 THREADS = 128 * (WARPGROUPS + 1);
constexpr u32 PRODUCER_REGISTERS = 24;
constexpr u32 CONSUMER_REGISTERS = 240;
constexpr u32 TILE_BYTES = TILE * HEAD_DIM;
constexpr u32 BLOCK_BYTES = BLOCK * HEAD_DIM;
constexpr u32 GROUP_BYTES = GROUP_ROWS * HEAD_DIM;
constexpr Swizzle ROW_SWIZZLE = swizzle_of_rows(HEAD_DIM);
constexpr u32 WORDS = HEAD_DIM / 2;  // of a thread's fragment of dQ
constexpr float LARGEST_CODE = 448;
constexpr float LARGEST_FINITE = 3.402823466e38f;
// 1 / sqrt(HEAD_DIM), as flamia_format::hadamard has it, or 1 where nothing is rotated.
constexpr float NORM = !ROTATED ? 1.0f : HEAD_DIM == 128 ? 0.08838834764831845f : 0.125f;

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "rows are one swizzle span");

// `Parameters` of backward_queries.rs. Strides are in elements.
struct Parameters {
    const u8 *q;  // [heads][slots] rows
    const float *q_scales;  // [heads][blocks]
    const u8 *d_o;  // [heads][slots] rows
    const float *d_o_scales;
    const float *row_sums;  // [heads][slots]
    const float *lse2;  // [heads][slots]
    const u8 *k;  // [kv_heads][slots] rows
    const u8 *k_transposed;  // [kv_heads][blocks] transposed
    const float *k_scales;
    const u8 *v;  // [kv_heads][slots] rows
    const float *v_scales;
    u16 *dq;  // [tokens][heads][HEAD_DIM], BF16
    const WorkItem *items;
    const ScheduleHeader *header;
    u32 *counter;
    i64 dq_token_stride;
    i64 dq_head_stride;
    int slots;
    u32 heads;
    u32 heads_per_kv_head;
    u32 heads_per_section;
    int window;
    int hysteresis;
    float scale;  // softmax scale
    float scale_log2;  // times log2(e)
};
SAME_OFFSET(Parameters, q);
SAME_OFFSET(Parameters, q_scales);
SAME_OFFSET(Parameters, d_o);
SAME_OFFSET(Parameters, d_o_scales);
SAME_OFFSET(Parameters, row_sums);
SAME_OFFSET(Parameters, lse2);
SAME_OFFSET(Parameters, k);
SAME_OFFSET(Parameters, k_transposed);
SAME_OFFSET(Parameters, k_scales);
SAME_OFFSET(Parameters, v);
SAME_OFFSET(Parameters, v_scales);
SAME_OFFSET(Parameters, dq);
SAME_OFFSET(Parameters, items);
SAME_OFFSET(Parameters, header);
SAME_OFFSET(Parameters, counter);
SAME_OFFSET(Parameters, dq_token_stride);
SAME_OFFSET(Parameters, dq_head_stride);
SAME_OFFSET(Parameters, slots);
SAME_OFFSET(Parameters, heads);
SAME_OFFSET(Parameters, heads_per_kv_head);
SAME_OFFSET(Parameters, heads_per_section);
SAME_OFFSET(Parameters, window);
SAME_OFFSET(Parameters, hysteresis);
SAME_OFFSET(Parameters, scale);
SAME_OFFSET(Parameters, scale_log2);

// What a CTA does at a time: query rows of a document for one head. The work is over when the document has
// no rows.
struct Work {
    int document;
    int start;  // the document's first row in the packed row
    int len;    // rows of the document
    Range rows;
    u32 head;
};

constexpr u32 QUERY_SLOTS = 2;  // the next item's queries come in while this one's are used

// The query side of an item. Finished rows of dQ wait in what their warpgroup has no more use for.
struct Queries {
    u8 q[ITEM_ROWS * HEAD_DIM];
    u8 d_o[ITEM_ROWS * HEAD_DIM];
};

struct SharedMemory {
    Queries queries[QUERY_SLOTS];
    u8 k[STAGES][TILE_BYTES];
    u8 k_transposed[STAGES][TILE_BYTES];
    u8 v[STAGES][TILE_BYTES];
    u8 zeros[BLOCK_BYTES];  // a transposed block
    float lse2[QUERY_SLOTS][ITEM_ROWS];
    float row_sums[QUERY_SLOTS][ITEM_ROWS];
    float q_scale[QUERY_SLOTS][ITEM_ROWS / BLOCK];
    float d_o_scale[QUERY_SLOTS][ITEM_ROWS / BLOCK];
    float k_scale[STAGES][GROUPS];
    float v_scale[STAGES][GROUPS];
    Work work[QUERY_SLOTS];
    u64 queries_full[QUERY_SLOTS], queries_empty[QUERY_SLOTS];
    u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "the host asks for less");

// The list is the one that dK and dV are computed from: items of 128 keys, those that most queries see
// first. Seen from the document's other end they are items of 128 queries, those that see most keys first.
__device__ inline Work work_of(const WorkItem& item, u32 head) {
    const int first = round_up(item.len, ITEM_ROWS) - ITEM_ROWS - item.first;
    return {item.document, item.start, item.len, {first, min(first + ITEM_ROWS, item.len)}, head};
}

// ---- the producer warp: walks the schedule and keeps the queries and the ring of stages filled

struct Producer {
    const Parameters& p;
    SharedMemory& shared;
    u32 lane;
    Ring<QUERY_SLOTS> queries;
    Ring<STAGES> tiles;

    __device__ void run() {
        const HeadSections order = {p.heads, p.heads_per_section};
        const u32 items = p.header->items[BACKWARD];
        const u32 positions = position_count(items, order);
        // A position is acquired while the one before it is loaded.
        u32 next = acquire(positions);
        for (;;) {
            const u32 position = __shfl_sync(FULL_WARP, next, 0);
            if (position >= positions) break;
            next = acquire(positions);
            const Assignment at = assignment_at(position, items, order);
            load(work_of(p.items[at.item], at.head));
        }
        barrier_wait(shared.queries_empty[queries.stage()], queries.parity() ^ 1);
        if (lane == 0) {
            shared.work[queries.stage()].len = 0;
            barrier_arrive(shared.queries_full[queries.stage()]);
        }
        barrier_arrive_after_word_copies(shared.queries_full[queries.stage()]);
        // Whoever waits for this kernel waits for the one in front of it as well.
        wait_for_predecessor();
    }

    // For lane 0.
    __device__ u32 acquire(u32 positions) const { return lane == 0 ? acquire_position(p.counter, positions) : 0; }

    __device__ void load(const Work& work) {
        const int document = padded_start(work.start, work.document);
        load_queries(work, i64(work.head) * p.slots + document + work.rows.begin);

        // Keys that the item does not see stay where they are, but for the rest of their block.
        const Range keys = keys_seen(work.rows, work.len, p.window);
        const Range seen = covering(keys, TILE);
        const i64 start = i64(work.head / p.heads_per_kv_head) * p.slots + document;
        for (int tile = seen.end - 1; tile >= seen.begin; tile--) {
            const int first = tile * TILE;
            load_keys(start + first, min(TILE, round_up(keys.end - first, BLOCK)));
        }
    }

    // `first` counts the rows of all heads.
    __device__ void load_queries(const Work& work, i64 first) {
        const u32 slot = queries.stage();
        u64& full = shared.queries_full[slot];
        const u32 count = round_up(work.rows.end - work.rows.begin, BLOCK);
        barrier_wait(shared.queries_empty[slot], queries.parity() ^ 1);
        if (lane == 0) {
            shared.work[slot] = work;
            const u32 codes = count * HEAD_DIM, table = count * sizeof(float);
            barrier_arrive_expect(full, 2 * codes + 2 * table);
            bulk_copy(shared.queries[slot].q, p.q + first * HEAD_DIM, codes, full);
            bulk_copy(shared.queries[slot].d_o, p.d_o + first * HEAD_DIM, codes, full);
            bulk_copy(shared.lse2[slot], p.lse2 + first, table, full);
            bulk_copy(shared.row_sums[slot], p.row_sums + first, table, full);
        }
        constexpr u32 BLOCKS = ITEM_ROWS / BLOCK;
        if (lane < 2 * BLOCKS) {
            const u32 block = lane % BLOCKS;
            float* to = lane < BLOCKS ? shared.q_scale[slot] : shared.d_o_scale[slot];
            const float* from = lane < BLOCKS ? p.q_scales : p.d_o_scales;
            word_copy(to + block, from + first / BLOCK + block, block < count / BLOCK);
        }
        barrier_arrive_after_word_copies(full);
        queries.advance();
    }

    // `count` keys and values from row `first` of all heads' rows on.
    __device__ void load_keys(i64 first, u32 count) {
        const u32 stage = tiles.stage();
        u64& full = shared.full[stage];
        barrier_wait(shared.empty[stage], tiles.parity() ^ 1);
        if (lane == 0) {
            // The transposed blocks of a run of keys take as many bytes as its rows, at the same place.
            const u32 bytes = count * HEAD_DIM;
            barrier_arrive_expect(full, 3 * bytes);
            bulk_copy(shared.k[stage], p.k + first * HEAD_DIM, bytes, full);
            bulk_copy(shared.v[stage], p.v + first * HEAD_DIM, bytes, full);
            bulk_copy(shared.k_transposed[stage], p.k_transposed + first * HEAD_DIM, bytes, full);
        }
        // Absent blocks get harmless scales: what is computed with them is masked.
        if (lane < 2 * GROUPS) {
            const u32 block = lane % GROUPS;
            float* to = lane < GROUPS ? shared.k_scale[stage] : shared.v_scale[stage];
            const float* from = lane < GROUPS ? p.k_scales : p.v_scales;
            word_copy(to + block, from + first / BLOCK + block, block < count / BLOCK);
        }
        barrier_arrive_after_word_copies(full);
        tiles.advance();
    }
};

// ---- consumers

// The unit of one row's dS while a tile of it is computed, a power of two: the running reference as it was
// before the tile, since it rarely moves. Where the row has none yet, or one so small that D in that unit
// might overflow, it is another, and what comes out is put right afterwards.
struct Unit {
    static constexpr int SMALLEST = -100 * RunningReference::UNIT;

    int exponent;  // in multiples of RunningReference::UNIT

    __device__ explicit Unit(const RunningReference& reference)
        : exponent(reference.exponent == RunningReference::NONE ? 0 : max(reference.exponent, SMALLEST)) {}

    __device__ bool is(const RunningReference& reference) const { return exponent == reference.exponent; }
    __device__ float up() const { return __int_as_float(RunningReference::BIAS + exponent); }
    __device__ float down() const { return __int_as_float(RunningReference::BIAS - exponent); }
    // From this unit to a reference.
    __device__ float correction(const RunningReference& reference) const {
        return reference.exponent == RunningReference::NONE
                   ? 1
                   : __int_as_float(max(RunningReference::BIAS + exponent - reference.exponent, 0));
    }
};

// A warpgroup: 64 query rows, 16 for each warp and two for each thread.
struct Consumer {
    const Parameters& p;
    SharedMemory& shared;
    u32 group;
    Ring<QUERY_SLOTS> queries;
    Ring<STAGES> tiles;

    __device__ void run() {
        for (;;) {
            const u32 slot = queries.stage();
            barrier_wait(shared.queries_full[slot], queries.parity());
            if (shared.work[slot].len == 0) break;
            compute(slot);
            queries.advance();
            // Every warp, since each reads the work until the end and leaves rows in the slot.
            async_fence();
            __syncwarp();
            if (lane() == 0) barrier_arrive(shared.queries_empty[slot]);
        }
    }

    __device__ u32 warp() const { return threadIdx.x / 32 % 4; }
    __device__ u32 lane() const { return threadIdx.x % 32; }

    // The first row of the warp, and of the thread, counted from the document's start.
    __device__ int first_row(const Work& work) const {
        return work.rows.begin + int(group * GROUP_ROWS + WARP_ROWS * warp());
    }
    __device__ int thread_row(const Work& work) const { return first_row(work) + int(lane() / 4); }

    // What a thread keeps of its two rows.
    struct Rows {
        float lse2[2];
        float row_sum[2];  // D; NaN once the row is poisoned by what is not multiplied with it
        RunningReference reference[2];
    };

    // The work is read from shared memory where it is needed: registers are for fragments.
    __device__ void compute(u32 slot) {
        const Work& work = shared.work[slot];
        const Range loaded = covering(keys_seen(work.rows, work.len, p.window), TILE);
        const Range rows_here = group_rows(work.rows, group);
        const Range seen = covering(keys_seen(rows_here, work.len, p.window), TILE);
        const Range clear = tiles_without_mask(rows_here, work.len, p.window);

        float dq[WORDS];
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) dq[i] = 0;
        Rows rows;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 row = group * GROUP_ROWS + WARP_ROWS * warp() + 8 * half + lane() / 4;
            rows.lse2[half] = shared.lse2[slot][row];
            rows.row_sum[half] = shared.row_sums[slot][row];
        }

        // Also tiles of which this warpgroup sees nothing: so none gets ahead of the ring.
        int tile = loaded.end - 1;
        for (; tile >= max(seen.end, loaded.begin); tile--) pass();
        if (tile >= seen.begin) {
            float s[64], dp[64];
            barrier_wait(shared.full[tiles.stage()], tiles.parity());
            start_products(s, dp, slot, tiles.stage());
            wgmma_wait();
            pin(s);
            pin(dp);
            // The diagonal is the first, and the edge of a window the last.
            const int last = seen.begin;
            for (; tile > max(clear.end - 1, last); tile--) step<true, false>(s, dp, rows, dq, slot, tile);
            for (; tile > max(clear.begin - 1, last); tile--) step<false, false>(s, dp, rows, dq, slot, tile);
            for (; tile > last; tile--) step<true, false>(s, dp, rows, dq, slot, tile);
            if (clear.contains(last))
                step<false, true>(s, dp, rows, dq, slot, last);
            else
                step<true, true>(s, dp, rows, dq, slot, last);
            tile--;
        }
        for (; tile >= loaded.begin; tile--) pass();
        store(dq, rows, slot);
    }

    // Adds a tile to dQ, whose products are there, and computes those of the next if it is not the LAST.
    template <bool MASKED, bool LAST>
    __device__ void step(float (&s)[64], float (&dp)[64], Rows& rows, float (&dq)[WORDS], u32 slot, int tile) {
        const u32 stage = tiles.stage();
        u32 codes[GROUPS][4];
        gradient<MASKED>(s, dp, rows, dq, codes, slot, stage, tile);
        const u32 blocks = MASKED ? blocks_to_add(rows, stage, shared.work[slot], tile) : 0;
        add_keys<MASKED>(dq, codes, stage, blocks);
        tiles.advance();
        if (!LAST) {
            barrier_wait(shared.full[tiles.stage()], tiles.parity());
            start_products(s, dp, slot, tiles.stage());
        }
        wgmma_wait();
        pin(s);
        pin(dp);
        pin(dq);
        pin(codes);
        release(stage);
    }

    // Every warp gives a stage back by itself: no MMA waits for what the others read of scales, nor for one that has
    // yet to see a stage full of which the warpgroup sees nothing.
    __device__ void release(u32 stage) const {
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared.empty[stage]);
    }

    // The warps of the warpgroup.
    __device__ void meet() const {
        named_barrier<128>(1 + group);
    }

    // A tile that the others see.
    __device__ void pass() {
        barrier_wait(shared.full[tiles.stage()], tiles.parity());
        release(tiles.stage());
        tiles.advance();
    }

    // Has the tensor core compute S = Q K^T and dP = dO V^T, of codes.
    __device__ void start_products(float (&s)[64], float (&dp)[64], u32 slot, u32 stage) const {
        const Queries& queries = shared.queries[slot];
        const u64 q = operand_descriptor(queries.q + group * GROUP_BYTES, ROW_SWIZZLE);
        const u64 k = operand_descriptor(shared.k[stage], ROW_SWIZZLE);
        const u64 d_o = operand_descriptor(queries.d_o + group * GROUP_BYTES, ROW_SWIZZLE);
        const u64 v = operand_descriptor(shared.v[stage], ROW_SWIZZLE);
        pin(s);
        pin(dp);
        wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < HEAD_DIM / 32; step++)
            wgmma_shared(s, advance(q, 32 * step), advance(k, 32 * step), step > 0);
        wgmma_commit();
#pragma unroll
        for (u32 step = 0; step < HEAD_DIM / 32; step++)
            wgmma_shared(dp, advance(d_o, 32 * step), advance(v, 32 * step), step > 0);
        wgmma_commit();
    }

    // dS times the scales of K, in E4M3 relative to the rows' references, with which dQ is rescaled: ready
    // as the A operand over keys in pi order. Uses up S and dP.
    template <bool MASKED>
    __device__ void gradient(float (&s)[64], float (&dp)[64], Rows& rows, float (&dq)[WORDS], u32 (&codes)[GROUPS][4],
                             u32 slot, u32 stage, int tile) const {
        const u32 block = (group * GROUP_ROWS + WARP_ROWS * warp()) / BLOCK;
        const float q_scale = p.scale_log2 * shared.q_scale[slot][block];
        const float d_o_scale = shared.d_o_scale[slot][block];
        const Unit unit[2] = {Unit(rows.reference[0]), Unit(rows.reference[1])};
        const float down[2] = {unit[0].down(), unit[1].down()};
        const Work& work = shared.work[slot];
        const VisibleGroups groups(first_row(work), work.len, tile, p.window);

#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            if (MASKED && !(groups.partly >> g & 1)) continue;
            const float k_scale = shared.k_scale[stage][g];
            // As in the forward pass, bit for bit.
            const float multiplier = fmaxf(q_scale * k_scale, SMALLEST_NORMAL);
            const float dp_scale = d_o_scale * shared.v_scale[stage][g];
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const float fold = fminf(k_scale * down[half], LARGEST_FINITE);
                const float scale = dp_scale * fold, row_sum = rows.row_sum[half] * fold;
#pragma unroll
                for (u32 j = 0; j < GROUP_COLUMNS; j++) {
                    const float probability =
                        exp2_approximate(fmaf(entry(s, g, half, j), multiplier, -rows.lse2[half]));
                    float& ds = entry(dp, g, half, j);
                    ds = probability * fmaf(ds, scale, -row_sum);
                }
            }
        }
        if (MASKED)
            replace_unseen(dp, groups.partly & ~groups.wholly, thread_row(work), work.len, tile, p.window, 0);

        float amax[2] = {0, 0};
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            if (MASKED && !(groups.partly >> g & 1)) continue;
#pragma unroll
            for (u32 half = 0; half < 2; half++)
#pragma unroll
                for (u32 j = 0; j < GROUP_COLUMNS; j++) amax[half] = fmaxf(amax[half], fabsf(entry(dp, g, half, j)));
        }
        update_references(amax, unit, rows, dp, dq);

#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            if (MASKED && !(groups.partly >> g & 1))
                codes[g][0] = codes[g][1] = codes[g][2] = codes[g][3] = 0;
            else
                group_codes(dp, g, codes[g]);
        }
    }

    // Takes the largest magnitudes of a tile into account, which are in these units, and brings dS and dQ
    // into those of the references. The vote saves work and decides nothing: what one row needs must not
    // show in another.
    __device__ void update_references(float (&amax)[2], const Unit (&unit)[2], Rows& rows, float (&ds)[64],
                                      float (&dq)[WORDS]) const {
        const float low = LARGEST_CODE * pow2(-p.hysteresis);
        bool moves = false;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            amax[half] = quad_max(amax[half]);
            const bool stays = amax[half] == 0 || unit[half].is(rows.reference[half]) && amax[half] > low &&
                                                      amax[half] <= LARGEST_CODE;
            moves |= !stays;
        }
        if (!__any_sync(FULL_WARP, moves)) return;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            RunningReference& reference = rows.reference[half];
            const float rescale = reference.update(amax[half] * unit[half].up(), p.hysteresis);
            const float correction = unit[half].correction(reference);
            // Too large for FP32: never a finite number that is wrong.
            if (amax[half] == INF) rows.row_sum[half] = NOT_A_NUMBER;
#pragma unroll
            for (u32 i = 0; i < 64; i++)
                if (i / 2 % 2 == half) ds[i] *= correction;
#pragma unroll
            for (u32 i = 0; i < WORDS; i++)
                if (i / 2 % 2 == half) dq[i] *= rescale;
        }
    }

    // Has the tensor core add dS K to dQ, of the blocks of K whose bit is set, and otherwise of zeros: ptxas
    // serialises products that are issued under a condition.
    template <bool MASKED>
    __device__ void add_keys(float (&dq)[WORDS], u32 (&codes)[GROUPS][4], u32 stage, u32 blocks) const {
        const u64 k = operand_descriptor(shared.k_transposed[stage], Swizzle::B32);
        const u64 zeros = operand_descriptor(shared.zeros, Swizzle::B32);
        pin(dq);
        pin(codes);
        wgmma_fence();
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++)
            wgmma_registers(dq, codes[g], !MASKED || blocks >> g & 1 ? advance(k, g * BLOCK_BYTES) : zeros, 1);
        wgmma_commit();
    }

    // The blocks of a tile to multiply with where some keys are not seen: those that the warpgroup sees some
    // of. Its halves of 32 rows may see different ones, although both multiply together: a poisoned block is
    // left out, since 0 times NaN is NaN, and poisons the rows of the halves that see it.
    __device__ u32 blocks_to_add(Rows& rows, u32 stage, const Work& work, int tile) const {
        const Range rows_here = group_rows(work.rows, group);
        const Range seen = covering(keys_seen(rows_here, work.len, p.window), BLOCK);
        const int begin = rows_here.begin + (warp() < 2 ? 0 : BLOCK);
        const Range rows_of_half = {begin, min(begin + BLOCK, rows_here.end)};
        const Range seen_by_half = covering(keys_seen(rows_of_half, work.len, p.window), BLOCK);
        u32 blocks = 0;
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            const int block = tile * int(GROUPS) + int(g);
            const bool is_poisoned = isnan(shared.k_scale[stage][g]);
            if (is_poisoned && seen_by_half.contains(block)) rows.row_sum[0] = rows.row_sum[1] = NOT_A_NUMBER;
            blocks |= u32(!is_poisoned && seen.contains(block)) << g;
        }
        return blocks;
    }

    // Rows of the document in BF16.
    __device__ void store(float (&dq)[WORDS], const Rows& rows, u32 slot) const {
        const Work& work = shared.work[slot];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            // A row whose D is NaN is poisoned.
            const float factor = fmaf(rows.row_sum[half], 0, rows.reference[half].up() * p.scale);
#pragma unroll
            for (u32 i = 0; i < WORDS; i++)
                if (i / 2 % 2 == half) dq[i] *= factor;
        }
        if (ROTATED) rotate_rows(dq);

        // The queries are done with once all warps are.
        meet();
        constexpr u32 HALF_BYTES = WARP_ROWS / 2 * HEAD_DIM * 2;
        const u32 offset = group * GROUP_BYTES + warp() * HALF_BYTES;
        const RowStaging staging = {shared.queries[slot].q + offset, shared.queries[slot].d_o + offset};
        const float norm[2] = {NORM, NORM};
        const int row = first_row(work);
        store_rows(dq, norm, staging, p.dq + i64(work.start + row) * p.dq_token_stride + i64(work.head) * p.dq_head_stride,
                   p.dq_token_stride, work.rows.end - row);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_queries(const __grid_constant__ Parameters p) {
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory());
    // The same for a warp, which the compiler cannot know of threadIdx.x.
    const u32 warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);

    if (threadIdx.x < BLOCK_BYTES / 16) {
        reinterpret_cast<uint4*>(shared.zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
        async_fence();
    }
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < QUERY_SLOTS; i++) {
            barrier_init(shared.queries_full[i], LOAD_ARRIVALS);
            barrier_init(shared.queries_empty[i], 4 * WARPGROUPS);
        }
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(shared.full[i], LOAD_ARRIVALS);
            barrier_init(shared.empty[i], 4 * WARPGROUPS);
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
