// Quantises a packed tensor [tokens, heads, HEAD_DIM] to E4M3 with one exponent per 32 tokens of a
// document and head, in the layouts of layout.cuh, from one read. `quantise.rs` launches it.
//
// A CTA takes one block of one head; heads are neighbours in the grid, so that CTAs that run together
// read whole rows of the packed tensor. A lane holds four tokens whose codes of one feature are a word of
// the transposed image. That image is put together in shared memory; the row image is read off it.
//
// Constants: HEAD_DIM (64 or 128), and as 0 or 1 HADAMARD (rotate first), ROW_IMAGE and
// TRANSPOSED_IMAGE (what is written), ROW_SUMS (D = rowsum(x_hat * o) as well, and beside it LSE in base
// 2; not of rotated rows).

#include "block_rows.cuh"
#include "block_scale.cuh"
#include "e4m3.cuh"
#include "layout.cuh"
#include "parameters.cuh"
#include "ptx.cuh"
#include "quads.cuh"

using bf16 = unsigned short;

// `Parameters` of quantise.rs. Strides are in elements.
struct Parameters {
    const bf16 *input;
    const bf16 *output;
    const float *lse;  // [heads][tokens]
    const int *cu_seqlens;
    u8 *row_image;
    u8 *transposed_image;
    float *scales;
    float *folds;
    float *row_sums;
    float *lse2;
    long long token_stride;
    long long head_stride;
    long long output_token_stride;
    long long output_head_stride;
    int tokens;
    int documents;
    int heads;
    int slots;
};
SAME_OFFSET(Parameters, input);
SAME_OFFSET(Parameters, output);
SAME_OFFSET(Parameters, lse);
SAME_OFFSET(Parameters, cu_seqlens);
SAME_OFFSET(Parameters, row_image);
SAME_OFFSET(Parameters, transposed_image);
SAME_OFFSET(Parameters, scales);
SAME_OFFSET(Parameters, folds);
SAME_OFFSET(Parameters, row_sums);
SAME_OFFSET(Parameters, lse2);
SAME_OFFSET(Parameters, token_stride);
SAME_OFFSET(Parameters, head_stride);
SAME_OFFSET(Parameters, output_token_stride);
SAME_OFFSET(Parameters, output_head_stride);
SAME_OFFSET(Parameters, tokens);
SAME_OFFSET(Parameters, documents);
SAME_OFFSET(Parameters, heads);
SAME_OFFSET(Parameters, slots);

// A warp takes 16 tokens, a chunk of the transposed image.
constexpr int WARPS = BLOCK_TOKENS / CHUNK;
constexpr int THREADS = 32 * WARPS;
static_assert(THREADS == LAUNCH_THREADS, "not as in quantise.rs");

// Tokens of a lane.
constexpr int TOKENS = QUAD_TOKENS;
// Features of a 16-byte load, and lanes that hold a token.
constexpr int VECTOR = 8;
constexpr int COLUMNS = 8;
constexpr int GROUPS = 32 / COLUMNS;
// Lanes side by side load neighbouring features of a token, this many times.
constexpr int SPAN = COLUMNS * VECTOR;
constexpr int SPANS = HEAD_DIM / SPAN;

// A lane's part of a block: [s][k] are features, and then four tokens.
template <class T>
using Features = T[SPANS][VECTOR];
using Quad = float[TOKENS];

// Which part of a block a thread holds.
struct Place {
    int warp;
    // Of the lanes that hold a token.
    int column;
    // Of the four that hold 16 tokens.
    int group;

    __device__ Place()
        : warp(threadIdx.x / 32), column(threadIdx.x % COLUMNS), group(threadIdx.x % 32 / COLUMNS) {}

    __device__ __forceinline__ int quad() const { return warp * (CHUNK / TOKENS) + group; }
    // Feature [0][0] of a loaded part. [s][k] is SPAN * s + k more.
    __device__ __forceinline__ int loaded_dim() const { return VECTOR * column; }
};

// Eight rows of the transposed image, which is padded after them in shared memory: lanes eight rows apart
// meet different banks.
constexpr int DIM_GROUP = 8;
constexpr int GROUP_BYTES = DIM_GROUP * BLOCK_TOKENS + CHUNK;

union Shared {
    // Where a warp exchanges features between lanes: a float4 for a quad, padded for the banks again.
    float4 exchange[HADAMARD ? WARPS : 1][HADAMARD ? GROUPS : 1][SPANS][COLUMNS][VECTOR + 1];
    u8 staged[HEAD_DIM / DIM_GROUP][GROUP_BYTES];

    // The word of a quad and feature DIM_GROUP * group + dim.
    __device__ __forceinline__ u32 &word(int quad, int group, int dim) {
        const int chunk = transposed_chunk(dim, quad / (CHUNK / TOKENS));
        return ((u32 *)(staged[group] + dim * BLOCK_TOKENS + chunk * CHUNK))[quad % (CHUNK / TOKENS)];
    }
};

// Calls `visit(i, s, address, inside)` for each 16 bytes of a lane's part of a block; `inside` says
// whether the token is the document's.
template <class Visit>
__device__ __forceinline__ void each_vector(const bf16 *head, long long stride, Rows rows, Place place,
                                            Visit visit) {
    const int token = quad_token(place.quad(), 0);
    const bf16 *first = head + (rows.first + token) * stride + place.loaded_dim();
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            visit(i, s, first + pi_token(i) * stride + SPAN * s, token + pi_token(i) < rows.count);
        }
    }
}

// A lane's part of a block as it lies in memory; zero past the document's end.
using Raw = uint4[TOKENS][SPANS];

__device__ __forceinline__ void load(Raw &raw, const bf16 *head, long long stride, Rows rows, Place place) {
    each_vector(head, stride, rows, place, [&](int i, int s, const bf16 *address, bool inside) {
        raw[i][s] = inside ? __ldcs((const uint4 *)address) : make_uint4(0, 0, 0, 0);
    });
}

// Brings what `load` will read into the L2 cache, where it waits without taking registers.
__device__ __forceinline__ void prefetch(const bf16 *head, long long stride, Rows rows, Place place) {
    each_vector(head, stride, rows, place, [&](int, int, const bf16 *address, bool inside) {
        if (inside) prefetch_l2(address);
    });
}

__device__ __forceinline__ void widen(Features<Quad> &x, const Raw &raw) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            const u32 pairs[VECTOR / 2] = {raw[i][s].x, raw[i][s].y, raw[i][s].z, raw[i][s].w};
#pragma unroll
            for (int k = 0; k < VECTOR; k += 2) {
                x[s][k][i] = __uint_as_float(pairs[k / 2] << 16);
                x[s][k + 1][i] = __uint_as_float(pairs[k / 2] & 0xffff0000);
            }
        }
    }
}

__device__ __forceinline__ void butterfly(Quad &low, Quad &high) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        const float a = low[i], b = high[i];
        low[i] = a + b;
        high[i] = a - b;
    }
}

// Butterflies between features 1, 2 and 4 places apart in a vector.
__device__ __forceinline__ void butterflies(Features<Quad> &x) {
#pragma unroll
    for (int stride = 1; stride < VECTOR; stride *= 2) {
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
#pragma unroll
            for (int k = 0; k < VECTOR; k++) {
                if (!(k & stride)) butterfly(x[s][k], x[s][k + stride]);
            }
        }
    }
}

// The Hadamard rotation in the order of `flamia_format::hadamard`, strides 1, 2, 4, ... over the
// features, but for the final multiplication with NORM.
__device__ __forceinline__ void rotate(Features<Quad> &x, Shared &shared, Place place) {
    butterflies(x);
    // Strides 8, 16 and 32 are between columns. They trade places with the features of a vector, which
    // takes far fewer instructions than shuffles.
    auto &exchange = shared.exchange[place.warp][place.group];
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            exchange[s][place.column][k] = make_float4(x[s][k][0], x[s][k][1], x[s][k][2], x[s][k][3]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            const float4 quad = exchange[s][k][place.column];
            x[s][k][0] = quad.x;
            x[s][k][1] = quad.y;
            x[s][k][2] = quad.z;
            x[s][k][3] = quad.w;
        }
    }
    butterflies(x);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) {
        if constexpr (SPANS == 2) butterfly(x[0][k], x[1][k]);
    }
}

// 1 / sqrt(HEAD_DIM), or 1 where nothing is rotated.
constexpr float NORM = !HADAMARD ? 1.0f : HEAD_DIM == 128 ? 0.08838834764831845f : 0.125f;

// The largest magnitude of the block; NaN if there is one.
__device__ __forceinline__ float block_amax(const Features<Quad> &x, Place place) {
    float amax = 0.0f;
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
#pragma unroll
            for (int i = 0; i < TOKENS; i++) amax = max_magnitude(amax, x[s][k][i]);
        }
    }
    // Magnitudes compare as their bits do, and a NaN's are above all.
    const u32 of_warp = __reduce_max_sync(ALL_LANES, __float_as_uint(amax));
    __shared__ u32 of_warps[WARPS];
    if (threadIdx.x % 32 == 0) of_warps[place.warp] = of_warp;
    __syncthreads();
    return __uint_as_float(max(of_warps[0], of_warps[1]));
}

// Replaces the values of a block that is not ordinary by some that dividing and rounding turn into its
// codes: zeros whatever their signs, NaN in all rows of the document, or, under the floor, what rounding
// at the block's own exponent leaves, as in the CPU profile.
__device__ __forceinline__ void replace(Features<Quad> &x, const BlockScale &block, Rows rows, Place place) {
    const float down = pow2(-block.exponent), up = pow2(block.exponent);
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            Quad &v = x[s][k];
            Quad rounded;
#pragma unroll
            for (int i = 0; i < TOKENS; i++) v[i] = v[i] * NORM * down;
            unpack_e4m3(pack_e4m3(v[0], v[1], v[2], v[3]), rounded);
#pragma unroll
            for (int i = 0; i < TOKENS; i++) {
                const bool inside = quad_token(place.quad(), i) < rows.count;
                const float nan = __uint_as_float(0x7fffffff);
                v[i] = block.poisoned ? (inside ? nan : 0.0f) : block.zero ? 0.0f : rounded[i] * up;
            }
        }
    }
}

// The codes of a block, a word for each feature.
__device__ __forceinline__ void encode(Features<u32> &codes, Features<Quad> &x, const BlockScale &block,
                                       Rows rows, Place place) {
    const float down = pow2(-block.floored());
    // One multiplication for both: scaling by a power of two changes no rounding, except of values far
    // below the smallest code.
    float factor = NORM * down;
    if (!block.ordinary()) {
        replace(x, block, rows, place);
        factor = down;
    }
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            const Quad &v = x[s][k];
            codes[s][k] = pack_e4m3(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor);
        }
    }
}

// Puts the transposed image together, all of it once the threads have met.
__device__ __forceinline__ void stage(Shared &shared, const Features<u32> &codes, Place place) {
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            // After `rotate`, columns and the features of a vector have traded places.
            const int group = COLUMNS * s + (HADAMARD ? k : place.column);
            shared.word(place.quad(), group, HADAMARD ? place.column : k) = codes[s][k];
        }
    }
}

__device__ __forceinline__ void store_transposed(u8 *block, const Shared &shared) {
    constexpr int GROUP_CHUNKS = DIM_GROUP * BLOCK_TOKENS / CHUNK;
    const int group = threadIdx.x / GROUP_CHUNKS, chunk = threadIdx.x % GROUP_CHUNKS;
#pragma unroll
    for (int first = 0; first < HEAD_DIM / DIM_GROUP; first += THREADS / GROUP_CHUNKS) {
        const uint4 *staged = (const uint4 *)shared.staged[first + group];
        ((uint4 *)block)[first * GROUP_CHUNKS + threadIdx.x] = staged[chunk];
    }
}

// Writes the row image: a thread takes four tokens and an eighth of their features, so that the 32
// lanes write whole sectors and read one word of every bank.
__device__ __forceinline__ void store_rows(u8 *block, Shared &shared) {
    constexpr int PART = HEAD_DIM / (THREADS / QUADS);
    const int quad = threadIdx.x % QUADS, part = threadIdx.x / QUADS;
    u32 words[PART / 4][4];
#pragma unroll
    for (int w = 0; w < PART / 4; w++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int dim = 4 * w + k;
            words[w][k] = shared.word(quad, part * (PART / DIM_GROUP) + dim / DIM_GROUP, dim % DIM_GROUP);
        }
        transpose_bytes(words[w]);
    }
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        u8 *row = block + row_byte<HEAD_DIM>(quad_token(quad, i), part * PART);
        if constexpr (PART == 16) *(uint4 *)row = make_uint4(words[0][i], words[1][i], words[2][i], words[3][i]);
        if constexpr (PART == 8) *(uint2 *)row = make_uint2(words[0][i], words[1][i]);
    }
}

// Lane m of four, which are 2 apart, holds values[i]; afterwards it holds in values[i] what lane i held
// in values[m].
__device__ __forceinline__ void transpose(float (&values)[4], int m) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = m & bit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & bit) continue;
            float &low = values[i], &high = values[i + bit];
            const float received = __shfl_xor_sync(ALL_LANES, upper ? low : high, 2 * bit);
            low = upper ? received : low;
            high = upper ? high : received;
        }
    }
}

// D = rowsum(x_hat * o) of the block's tokens, added in the order of the CPU's `lane_sum`: 16 sums
// over every sixteenth feature, in their order, then pairs of sums.
__device__ __forceinline__ void store_row_sums(float *block, const Features<u32> &codes, const Raw &output,
                                               float scale, Place place) {
    static_assert(!ROW_SUMS || !HADAMARD, "o is not rotated");
    Features<Quad> o;
    widen(o, output);
    // Lanes 2m and 2m + 1 hold the features of term m of every four terms, for all of their tokens.
    // They take token m instead, with all terms.
    const int m = place.column / 2;
    float sums[VECTOR];
#pragma unroll
    for (int k = 0; k < VECTOR; k++) {
        sums[k] = 0.0f;
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            Quad terms;
            unpack_e4m3(codes[s][k], terms);
#pragma unroll
            for (int i = 0; i < TOKENS; i++) terms[i] = __fmul_rn(terms[i] * scale, o[s][k][i]);
            transpose(terms, m);
#pragma unroll
            for (int term = 0; term < 4; term++) sums[k] = __fadd_rn(sums[k], terms[term]);
        }
    }
#pragma unroll
    for (int k = 0; k < VECTOR; k++) sums[k] += __shfl_xor_sync(ALL_LANES, sums[k], 1);
#pragma unroll
    for (int width = VECTOR / 2; width >= 1; width /= 2) {
#pragma unroll
        for (int k = 0; k < width; k++) sums[k] += sums[k + width];
    }
    if (place.column % 2 == 0) block[quad_token(place.quad(), m)] = sums[0];
}

// LSE in base 2; past the document's end +inf, so that probabilities are 0 there.
__device__ __forceinline__ void store_lse2(float *block, const float *lse, Rows rows) {
    constexpr float LOG2_E = 1.44269504088896341f;
    const int token = threadIdx.x;
    if (token >= BLOCK_TOKENS) return;
    block[token] = token < rows.count ? lse[rows.first + token] * LOG2_E : __int_as_float(0x7f800000);
}

__device__ __forceinline__ void quantise_block(const Parameters &p) {
    const int head = blockIdx.x % p.heads;
    const int block = blockIdx.x / p.heads;
    const Rows rows = rows_of_block(p.cu_seqlens, p.documents, p.tokens, block * BLOCK_TOKENS);
    if (rows.count <= 0) return;

    const Place place;
    Raw raw;
    load(raw, p.input + head * p.head_stride, p.token_stride, rows, place);
    const bf16 *output = p.output + head * p.output_head_stride;
    if constexpr (ROW_SUMS) prefetch(output, p.output_token_stride, rows, place);

    __shared__ Shared shared;
    Features<Quad> x;
    widen(x, raw);
    if constexpr (HADAMARD) rotate(x, shared, place);
    const BlockScale scale(block_amax(x, place) * NORM);
    Features<u32> codes;
    encode(codes, x, scale, rows, place);

    const u64 slot = (u64)head * p.slots + block * BLOCK_TOKENS;
    if (threadIdx.x == 0) {
        p.scales[slot / BLOCK_TOKENS] = scale.scale();
        p.folds[slot / BLOCK_TOKENS] = scale.fold();
    }
    stage(shared, codes, place);
    __syncthreads();
    if constexpr (TRANSPOSED_IMAGE) store_transposed(p.transposed_image + slot * HEAD_DIM, shared);
    if constexpr (ROW_IMAGE) store_rows(p.row_image + slot * HEAD_DIM, shared);
    if constexpr (ROW_SUMS) {
        load(raw, output, p.output_token_stride, rows, place);
        store_row_sums(p.row_sums + slot, codes, raw, scale.factor(), place);
        store_lse2(p.lse2 + slot, p.lse + (u64)head * p.tokens, rows);
    }
}

// CTAs that an SM holds at least: warps whose loads hide one another's latency are worth registers, up to
// here. With 12, and 80 registers for each thread, rotated rows take 9 % longer.
constexpr int CTAS = HEAD_DIM == 128 ? 10 : 16;

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) quantise(const __grid_constant__ Parameters p) {
    launch_dependents();
    quantise_block(p);
    // Whoever waits for this kernel waits for those in front of it as well.
    wait_for_predecessor();
}
