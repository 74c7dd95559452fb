// Quantises a packed tensor [tokens, heads, HEAD_DIM] to E4M3 with one exponent per 32 tokens of a
// document and head, in the layouts of layout.cuh, from one read. `quantise.rs` launches it.
//
// A CTA takes one block of one head; heads are neighbours in the grid, so that CTAs that run together
// read whole rows of the packed tensor. Each lane holds four tokens by HEAD_DIM / 8 features, the
// tokens being those of four neighbouring bytes of the transposed image: both images are packed from a
// lane's own registers.
//
// Constants: HEAD_DIM (64 or 128), and as 0 or 1 HADAMARD (rotate first), ROW_IMAGE and
// TRANSPOSED_IMAGE (what is written), ROW_SUMS (D = rowsum(x_hat * o) as well, beside a row image).

#include "e4m3.cuh"
#include "layout.cuh"
#include "parameters.cuh"

using bf16 = unsigned short;

// `Parameters` of quantise.rs. Strides are in elements.
struct Parameters {
    const bf16 *input;
    const bf16 *output;
    const int *cu_seqlens;
    u8 *row_image;
    u8 *transposed_image;
    float *scales;
    float *folds;
    float *row_sums;
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
SAME_OFFSET(Parameters, cu_seqlens);
SAME_OFFSET(Parameters, row_image);
SAME_OFFSET(Parameters, transposed_image);
SAME_OFFSET(Parameters, scales);
SAME_OFFSET(Parameters, folds);
SAME_OFFSET(Parameters, row_sums);
SAME_OFFSET(Parameters, token_stride);
SAME_OFFSET(Parameters, head_stride);
SAME_OFFSET(Parameters, output_token_stride);
SAME_OFFSET(Parameters, output_head_stride);
SAME_OFFSET(Parameters, tokens);
SAME_OFFSET(Parameters, documents);
SAME_OFFSET(Parameters, heads);
SAME_OFFSET(Parameters, slots);

constexpr u32 ALL_LANES = 0xffffffff;
constexpr int WARPS = 2;
constexpr int THREADS = 32 * WARPS;
static_assert(THREADS == LAUNCH_THREADS, "not as in quantise.rs");

// Tokens of a lane.
constexpr int TOKENS = 4;
// Features of a 16-byte load.
constexpr int VECTOR = 8;
// Eight lanes side by side load 64 neighbouring features of a token, this many times.
constexpr int SPAN = 8 * VECTOR;
constexpr int SPANS = HEAD_DIM / SPAN;
constexpr int CHUNKS = HEAD_DIM * BLOCK_TOKENS / CHUNK;

// A lane's part of a block: [i][s][j] is token `Place::token(i)`, feature `Place::dim(s) + j`.
template <class T>
using Values = T[TOKENS][SPANS][VECTOR];

// Which part of a block a thread holds.
struct Place {
    int warp;
    // Of the eight that hold a token's features.
    int column;
    // Of the four that hold 16 tokens.
    int group;

    __device__ Place()
        : warp(threadIdx.x / 32), column(threadIdx.x % 8), group(threadIdx.x % 32 / 8) {}

    // The lane's tokens are bytes 4 * group .. of a chunk of the transposed image.
    __device__ __forceinline__ int token(int i) const { return CHUNK * warp + pi_token(4 * group + i); }
    __device__ __forceinline__ int dim(int span) const { return SPAN * span + VECTOR * column; }
};

// Rows of the packed tensor.
struct Rows {
    int first;
    int count;
};

// The rows of the block at slot `slot`: none if it lies past its document's end.
//
// The document is the last one whose padded start is not past the slot. A warp looks at 32 candidates
// at a time, so that the search takes one load up to 32 documents and two up to 1024.
__device__ __forceinline__ Rows rows_of_block(const Parameters &p, int slot) {
    const int lane = threadIdx.x % 32;
    int document = 0;
    for (int candidates = p.documents; candidates > 1;) {
        const int step = (candidates + 31) / 32;
        const int probe = document + lane * step;
        const bool starts = lane * step < candidates && padded_start(__ldg(p.cu_seqlens + probe), probe) <= slot;
        // Lane 0 always says yes.
        const int last = 31 - __clz(__ballot_sync(ALL_LANES, starts));
        document += last * step;
        candidates = min(step, candidates - last * step);
    }
    const int start = __ldg(p.cu_seqlens + document);
    const int end = min(__ldg(p.cu_seqlens + document + 1), p.tokens);
    const int first = start + slot - padded_start(start, document);
    return {first, min(end - first, BLOCK_TOKENS)};
}

// One lane's part of a block of BF16 rows as they lie in memory, zero past the document's end.
__device__ __forceinline__ void load(uint4 (&raw)[TOKENS][SPANS], const bf16 *head, long long stride, Rows rows, Place place) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        const int token = place.token(i);
        const bf16 *row = head + (rows.first + token) * stride;
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            raw[i][s] = token < rows.count ? __ldcs((const uint4 *)(row + place.dim(s))) : make_uint4(0, 0, 0, 0);
        }
    }
}

// Brings what `load` will read into the L2 cache, where it waits without taking registers.
__device__ __forceinline__ void prefetch(const bf16 *head, long long stride, Rows rows, Place place) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        const int token = place.token(i);
        const bf16 *row = head + (rows.first + token) * stride;
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            if (token < rows.count) asm volatile("prefetch.global.L2 [%0];" ::"l"(row + place.dim(s)));
        }
    }
}

__device__ __forceinline__ void widen(float &low, float &high, u32 pair) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000);
}

// The normalised Hadamard rotation, in the order of `flamia_format::hadamard`: butterflies with
// strides 1, 2, 4, ... over the features, then one multiplication.
__device__ __forceinline__ void rotate(Values<float> &x, Place place) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
#pragma unroll
        for (int stride = 1; stride < VECTOR; stride *= 2) {
#pragma unroll
            for (int s = 0; s < SPANS; s++) {
#pragma unroll
                for (int j = 0; j < VECTOR; j++) {
                    if (j & stride) continue;
                    const float low = x[i][s][j], high = x[i][s][j + stride];
                    x[i][s][j] = low + high;
                    x[i][s][j + stride] = low - high;
                }
            }
        }
#pragma unroll
        for (int lanes = 1; lanes < SPAN / VECTOR; lanes *= 2) {
            const float sign = place.column & lanes ? -1.0f : 1.0f;
#pragma unroll
            for (int s = 0; s < SPANS; s++) {
#pragma unroll
                for (int j = 0; j < VECTOR; j++) {
                    const float other = __shfl_xor_sync(ALL_LANES, x[i][s][j], lanes);
                    // The sum or the difference with its one rounding: the product is exact.
                    x[i][s][j] = fmaf(x[i][s][j], sign, other);
                }
            }
        }
        if constexpr (SPANS == 2) {
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                const float low = x[i][0][j], high = x[i][1][j];
                x[i][0][j] = low + high;
                x[i][1][j] = low - high;
            }
        }
        constexpr float NORM = HEAD_DIM == 128 ? 0.08838834764831845f : 0.125f;
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
#pragma unroll
            for (int j = 0; j < VECTOR; j++) x[i][s][j] *= NORM;
        }
    }
}

// The bits of the largest magnitude of the block. A NaN's are above every number's.
__device__ __forceinline__ u32 block_amax(const Values<float> &x, Place place) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
#pragma unroll
            for (int j = 0; j < VECTOR; j++) amax = max(amax, __float_as_uint(x[i][s][j]) & 0x7fffffff);
        }
    }
    __shared__ u32 of_warps[WARPS];
    amax = __reduce_max_sync(ALL_LANES, amax);
    if (threadIdx.x % 32 == 0) of_warps[place.warp] = amax;
    __syncthreads();
    return max(of_warps[0], of_warps[1]);
}

// 2^e for e from -127, a subnormal, to 127.
__device__ __forceinline__ float pow2(int e) {
    return __uint_as_float(e == -127 ? 0x00400000 : (e + 127) << 23);
}

// The smallest exponent of a block: folding V's exponents into P takes them out of the row sum again,
// as 2^-e, and that has to stay finite.
constexpr int MIN_EXPONENT = -96;
// The smallest exponent before that, which stands for a block of zeros as well.
constexpr int SMALLEST_EXPONENT = -127;

// How the values of a block become codes.
struct BlockScale {
    // The smallest that takes the largest magnitude to 448 or less, from SMALLEST_EXPONENT.
    int exponent;
    // A block of zeros has codes 0, whatever the zeros' signs.
    bool zero;
    // A block with a NaN or an infinity has NaN codes.
    bool poisoned;

    __device__ explicit BlockScale(u32 amax) {
        constexpr u32 LARGEST = 0x43e00000;  // 448
        constexpr u32 MANTISSA = 0x7fffff;
        const int biased = amax >> 23;
        exponent = biased - (int)(LARGEST >> 23) + ((amax & MANTISSA) > (LARGEST & MANTISSA));
        exponent = max(exponent, SMALLEST_EXPONENT);
        zero = amax == 0;
        poisoned = biased == 255;
    }

    __device__ __forceinline__ int floored() const { return max(exponent, MIN_EXPONENT); }
    // Whether the block has a scale: it is neither zero, as good as zero, nor poisoned.
    __device__ __forceinline__ bool regular() const { return exponent != SMALLEST_EXPONENT && !poisoned; }
    // What codes are multiplied with. NaN codes need no scale to poison.
    __device__ __forceinline__ float scale() const { return regular() ? pow2(floored()) : 0.0f; }
    // The exponent to fold into another operand. A zero block never sets a reference there.
    __device__ __forceinline__ float fold() const { return regular() ? floored() : MIN_EXPONENT; }
};

// Divides a block by its scale. A block under the floor is rounded to its own exponent first, as the
// CPU profile does.
__device__ __forceinline__ void divide(Values<float> &x, const BlockScale &block) {
    if (block.exponent < MIN_EXPONENT) {
        const float down = pow2(-block.exponent), up = pow2(block.exponent);
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
#pragma unroll
            for (int s = 0; s < SPANS; s++) {
#pragma unroll
                for (int j = 0; j < VECTOR; j += 4) {
                    float(&v)[VECTOR] = x[i][s];
                    float rounded[4];
                    unpack_e4m3(pack_e4m3(v[j] * down, v[j + 1] * down, v[j + 2] * down, v[j + 3] * down), rounded);
#pragma unroll
                    for (int k = 0; k < 4; k++) v[j + k] = rounded[k] * up;
                }
            }
        }
    }
    const float down = pow2(-block.floored());
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
#pragma unroll
            for (int j = 0; j < VECTOR; j++) x[i][s][j] *= down;
        }
    }
}

// What zero and poisoned blocks have instead of their values' codes.
struct Overrides {
    u32 keep;
    // A byte for each of the lane's tokens; 0 past the document's end, whose codes are always 0.
    u32 poison;

    __device__ Overrides(const BlockScale &block, Rows rows, Place place) {
        keep = block.zero || block.poisoned ? 0 : 0xffffffff;
        poison = 0;
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
            if (block.poisoned && place.token(i) < rows.count) poison |= 0x7fu << (8 * i);
        }
    }

    // Four codes of one token.
    __device__ __forceinline__ u32 row(u32 codes, int i) const {
        return (codes & keep) | __byte_perm(poison, 0, 0x1111 * i);
    }
    // A code of each token.
    __device__ __forceinline__ u32 column(u32 codes) const { return (codes & keep) | poison; }
};

// Eight features of a token as codes.
using RowCodes = uint2[TOKENS][SPANS];

__device__ __forceinline__ void encode_rows(RowCodes &codes, const Values<float> &x, const Overrides &overrides) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            const float(&v)[VECTOR] = x[i][s];
            codes[i][s].x = overrides.row(pack_e4m3(v[0], v[1], v[2], v[3]), i);
            codes[i][s].y = overrides.row(pack_e4m3(v[4], v[5], v[6], v[7]), i);
        }
    }
}

// Eight lanes write half a row or a whole one: whole sectors, so that no staging is needed.
__device__ __forceinline__ void store_rows(u8 *block, const RowCodes &codes, Place place) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            *(uint2 *)(block + row_byte<HEAD_DIM>(place.token(i), place.dim(s))) = codes[i][s];
        }
    }
}

// Where a chunk of the transposed block is staged: lanes that write side by side are eight rows of the
// image apart, and must meet different banks.
__device__ __forceinline__ int staged(int chunk) {
    return chunk ^ ((chunk >> 4) & 7);
}

// Writes the transposed image of a block through shared memory.
__device__ __forceinline__ void store_transposed(u8 *block, const Values<float> &x, const Overrides &overrides, Place place) {
    __shared__ uint4 staging[CHUNKS];
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            const int dim = place.dim(s) + j;
            const int chunk = dim * (BLOCK_TOKENS / CHUNK) + transposed_chunk(dim, place.warp);
            u32 *words = (u32 *)&staging[staged(chunk)];
            words[place.group] = overrides.column(pack_e4m3(x[0][s][j], x[1][s][j], x[2][s][j], x[3][s][j]));
        }
    }
    __syncthreads();
#pragma unroll
    for (int chunk = threadIdx.x; chunk < CHUNKS; chunk += THREADS) {
        ((uint4 *)block)[chunk] = staging[staged(chunk)];
    }
}

// Lane m of four, which are `2 m` apart, holds values[i]; afterwards it holds in values[i] what lane i
// held in values[m].
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
__device__ __forceinline__ void store_row_sums(float *block, const RowCodes &codes, const uint4 (&output)[TOKENS][SPANS],
                                               float scale, Place place) {
    // Lanes 2m and 2m + 1 hold the features of term m of every four terms, for all of their tokens.
    // They take token m instead, with all terms.
    const int m = place.column / 2;
    float sums[VECTOR];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float(&sum)[4] = (float(&)[4])sums[4 * half];
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] = 0.0f;
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            float terms[4][TOKENS];
#pragma unroll
            for (int i = 0; i < TOKENS; i++) {
                float x[4], o[4];
                unpack_e4m3(half ? codes[i][s].y : codes[i][s].x, x);
                widen(o[0], o[1], half ? output[i][s].z : output[i][s].x);
                widen(o[2], o[3], half ? output[i][s].w : output[i][s].y);
#pragma unroll
                for (int j = 0; j < 4; j++) terms[j][i] = __fmul_rn(x[j] * scale, o[j]);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                transpose(terms[j], m);
#pragma unroll
                for (int k = 0; k < 4; k++) sum[j] = __fadd_rn(sum[j], terms[j][k]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < VECTOR; j++) sums[j] += __shfl_xor_sync(ALL_LANES, sums[j], 1);
#pragma unroll
    for (int width = VECTOR / 2; width >= 1; width /= 2) {
#pragma unroll
        for (int j = 0; j < width; j++) sums[j] += sums[j + width];
    }
    if (place.column % 2 == 0) block[place.token(m)] = sums[0];
}

// CTAs that an SM holds at least: warps whose loads hide one another's latency are worth more than
// registers.
constexpr int CTAS = HEAD_DIM == 128 ? 10 : 16;

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) quantise(const __grid_constant__ Parameters p) {
    const int head = blockIdx.x % p.heads;
    const int block = blockIdx.x / p.heads;
    const Rows rows = rows_of_block(p, block * BLOCK_TOKENS);
    if (rows.count <= 0) return;

    const Place place;
    uint4 raw[TOKENS][SPANS];
    load(raw, p.input + head * p.head_stride, p.token_stride, rows, place);
    const bf16 *output = ROW_SUMS ? p.output + head * p.output_head_stride : nullptr;
    if constexpr (ROW_SUMS) prefetch(output, p.output_token_stride, rows, place);

    Values<float> x;
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            widen(x[i][s][0], x[i][s][1], raw[i][s].x);
            widen(x[i][s][2], x[i][s][3], raw[i][s].y);
            widen(x[i][s][4], x[i][s][5], raw[i][s].z);
            widen(x[i][s][6], x[i][s][7], raw[i][s].w);
        }
    }
    if constexpr (HADAMARD) rotate(x, place);
    const BlockScale scale(block_amax(x, place));
    divide(x, scale);

    const Overrides overrides(scale, rows, place);
    const u64 slot = (u64)head * p.slots + block * BLOCK_TOKENS;
    if (threadIdx.x == 0) {
        p.scales[slot / BLOCK_TOKENS] = scale.scale();
        p.folds[slot / BLOCK_TOKENS] = scale.fold();
    }
    RowCodes codes;
    if constexpr (ROW_IMAGE) {
        encode_rows(codes, x, overrides);
        store_rows(p.row_image + slot * HEAD_DIM, codes, place);
    }
    if constexpr (TRANSPOSED_IMAGE) store_transposed(p.transposed_image + slot * HEAD_DIM, x, overrides, place);
    if constexpr (ROW_SUMS) {
        load(raw, output, p.output_token_stride, rows, place);
        store_row_sums(p.row_sums + slot, codes, raw, scale.scale(), place);
    }
}
