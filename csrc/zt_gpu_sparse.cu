/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The sparse modes on GPUs: bit masks and selection by a threshold, as in zero_topo/quant/reference_sparse.py. Picks
 * come in ascending order, whatever the order in which threads run.
 */
#include "zt_gpu_memory.h"

#define ZT_MASK_ELEMENTS 16 /* per thread */

#define ZT_CHUNK_UNITS 4 /* per thread, all read before the first is looked at */

static_assert(ZT_GPU_CHUNK == ZT_CHUNK_UNITS * ZT_THREADS * ZT_UNIT, "a chunk is four units a thread");

struct zt_mask_arguments {
    uint8_t *mask, *bits;
    int64_t n;
};

struct zt_above_arguments {
    const char *x;
    int64_t n;
    int64_t *partial; /* counting */
    const int64_t *offsets; /* picking, with the rest */
    int64_t *indices;
    char *values;
    int64_t capacity;
    uint32_t threshold; /* the least size that is selected, as bits of the dtype */
};

/* -- Masks --------------------------------------------------------------------------------------------------------- */

/* Four bytes of 0 or 1 are gathered into four bits, and back, by one product whose terms do not meet. */
ZT_DEVICE uint32_t zt_gather(uint32_t word) { return word * 0x01020408u >> 24 & 15; }
ZT_DEVICE uint32_t zt_spread(uint32_t four) { return (four & 15) * 0x00204081u & 0x01010101u; }

ZT_KERNEL(ZT_THREADS) zt_mask_pack_kernel(ZT_ARGUMENTS zt_mask_arguments a) {
    const int64_t step = (int64_t)gridDim.x * ZT_THREADS * ZT_MASK_ELEMENTS;
    for (int64_t i = ((int64_t)blockIdx.x * ZT_THREADS + threadIdx.x) * ZT_MASK_ELEMENTS; i < a.n; i += step) {
        uint32_t bits = 0;
        if (a.n - i >= ZT_MASK_ELEMENTS && zt_aligned16(a.mask + i)) {
            const uint4 w = zt_load<uint4>(a.mask + i);
            bits = zt_gather(w.x) | zt_gather(w.y) << 4 | zt_gather(w.z) << 8 | zt_gather(w.w) << 12;
        } else {
            for (int k = 0; k < ZT_MASK_ELEMENTS && i + k < a.n; k++) bits |= (uint32_t)(a.mask[i + k] & 1) << k;
        }
        a.bits[i / 8] = (uint8_t)bits;
        if (a.n - i > 8) a.bits[i / 8 + 1] = (uint8_t)(bits >> 8);
    }
}

ZT_KERNEL(ZT_THREADS) zt_mask_unpack_kernel(ZT_ARGUMENTS zt_mask_arguments a) {
    const int64_t step = (int64_t)gridDim.x * ZT_THREADS * ZT_MASK_ELEMENTS;
    for (int64_t i = ((int64_t)blockIdx.x * ZT_THREADS + threadIdx.x) * ZT_MASK_ELEMENTS; i < a.n; i += step) {
        uint32_t bits = a.bits[i / 8];
        if (a.n - i > 8) bits |= (uint32_t)a.bits[i / 8 + 1] << 8;
        if (a.n - i >= ZT_MASK_ELEMENTS && zt_aligned16(a.mask + i)) {
            const uint4 w = {zt_spread(bits), zt_spread(bits >> 4), zt_spread(bits >> 8), zt_spread(bits >> 12)};
            zt_store<uint4>(a.mask + i, w);
        } else {
            for (int k = 0; k < ZT_MASK_ELEMENTS && i + k < a.n; k++) a.mask[i + k] = bits >> k & 1;
        }
    }
}

/* -- Selection -----------------------------------------------------------------------------------------------------
 *
 * Note [Selection]
 *     Bits without their sign order floats by size, NaN above all, and the least of the dtype that reaches a threshold
 *     is known on the host. So nothing is converted: with the sign set, subtracting this least size leaves the top bit
 *     set if a size reaches it, and borrows nothing from the other half of a word. Two instructions take two values of
 *     16 bits.
 */

/* The unit at element `begin`; elements that do not exist are zeros. */
template <int DTYPE> ZT_DEVICE void zt_load_present(const zt_above_arguments &a, int64_t begin, uint32_t *words) {
    const char *from = a.x + begin * zt_bytes_of(DTYPE);
    if (a.n - begin >= ZT_UNIT) return zt_load_words<DTYPE, false>(from, words);
#pragma unroll
    for (int k = 0; k < ZT_UNIT; k++) {
        const bool exists = begin + k < a.n;
        if (DTYPE == ZT_FP32)
            words[k] = exists ? zt_load<uint32_t>(from + 4 * k) : 0;
        else if (k % 2 == 0)
            words[k / 2] = exists ? zt_load<uint16_t>(from + 2 * k) : 0;
        else if (exists)
            words[k / 2] |= (uint32_t)zt_load<uint16_t>(from + 2 * k) << 16;
    }
}

/* A thread's units of the chunk that begins at element `first`. */
template <int DTYPE>
ZT_DEVICE void zt_load_chunk(const zt_above_arguments &a, int64_t first, uint32_t (*words)[zt_words<DTYPE>]) {
    const int64_t begin = first + threadIdx.x * ZT_UNIT;
    if (a.n - first >= ZT_GPU_CHUNK && zt_aligned16(a.x)) {
#pragma unroll
        for (int u = 0; u < ZT_CHUNK_UNITS; u++)
            zt_load_words<DTYPE, true>(a.x + (begin + u * ZT_THREADS * ZT_UNIT) * zt_bytes_of(DTYPE), words[u]);
    } else {
#pragma unroll
        for (int u = 0; u < ZT_CHUNK_UNITS; u++) zt_load_present<DTYPE>(a, begin + u * ZT_THREADS * ZT_UNIT, words[u]);
    }
}

/* One bit for each element of a unit that reaches the threshold, see Note [Selection]: of 16-bit values, of elements
 * 2j and 2j + 1 the bits 9 + 2j and 25 + 2j; of FP32 the lowest eight. */
template <int DTYPE> ZT_DEVICE uint32_t zt_flags(const uint32_t *words, uint32_t threshold) {
    uint32_t flags = 0;
    if (DTYPE == ZT_FP32) {
#pragma unroll
        for (int k = ZT_UNIT - 1; k >= 0; k--) flags = zt_funnel((words[k] | 0x80000000u) - threshold, flags, 31);
    } else {
#pragma unroll
        for (int j = 0; j < ZT_UNIT / 2; j++)
            flags |= (((words[j] | 0x80008000u) - (threshold | threshold << 16)) & 0x80008000u) >> 2 * (3 - j);
    }
    return flags;
}

/* The elements at `begin` that exist, as bits. */
ZT_DEVICE uint32_t zt_present(int64_t n, int64_t begin) {
    if (n - begin >= ZT_UNIT) return 0xff;
    return n > begin ? (1u << (n - begin)) - 1 : 0;
}

/* The sum of the values of all threads, on the first one. */
ZT_DEVICE uint32_t zt_sum(uint32_t value, uint32_t *shared) {
    for (int by = 16; by; by /= 2) value += zt_shuffle_xor(value, by, 32);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    uint32_t sum = 0;
    for (int g = 0; threadIdx.x == 0 && g < ZT_THREADS / 32; g++) sum += shared[g];
    __syncthreads(); /* the next call may write */
    return sum;
}

template <int DTYPE> ZT_KERNEL(ZT_THREADS, 4) zt_count_kernel(ZT_ARGUMENTS zt_above_arguments a) {
    __shared__ uint32_t shared[ZT_THREADS / 32];
    const int64_t step = gridDim.x;
    for (int64_t chunk = blockIdx.x; chunk < zt_gpu_partials(a.n); chunk += step) {
        uint32_t words[ZT_CHUNK_UNITS][zt_words<DTYPE>], flags[ZT_CHUNK_UNITS];
        zt_load_chunk<DTYPE>(a, chunk * ZT_GPU_CHUNK, words);
#pragma unroll
        for (int u = 0; u < ZT_CHUNK_UNITS; u++) flags[u] = zt_flags<DTYPE>(words[u], a.threshold);
        /* The flags of four units fit into one word. */
        uint32_t mine = DTYPE == ZT_FP32 ? __popc(flags[0] | flags[1] << 8 | flags[2] << 16 | flags[3] << 24)
                                         : __popc(flags[0] | flags[1] >> 1 | flags[2] >> 8 | flags[3] >> 9);
        if (a.threshold == 0) { /* zeros in the place of elements that do not exist reach it too */
            const int64_t begin = chunk * ZT_GPU_CHUNK + threadIdx.x * ZT_UNIT;
            mine = 0;
            for (int u = 0; u < ZT_CHUNK_UNITS; u++) mine += __popc(zt_present(a.n, begin + u * ZT_THREADS * ZT_UNIT));
        }
        const uint32_t total = zt_sum(mine, shared);
        if (threadIdx.x == 0) a.partial[chunk] = total;
    }
}

template <int DTYPE> ZT_KERNEL(ZT_THREADS, 4) zt_compact_kernel(ZT_ARGUMENTS zt_above_arguments a) {
    __shared__ uint32_t shared[ZT_THREADS / 32];
    const int bytes = zt_bytes_of(DTYPE);
    const int64_t step = gridDim.x;
    for (int64_t chunk = blockIdx.x; chunk < zt_gpu_partials(a.n); chunk += step) {
        int64_t first = a.offsets[chunk]; /* the same for all threads, as is what follows */
        if (first >= a.capacity) continue;
        const int64_t begin = chunk * ZT_GPU_CHUNK + threadIdx.x * ZT_UNIT;
        uint32_t words[ZT_CHUNK_UNITS][zt_words<DTYPE>], bits[ZT_CHUNK_UNITS];
        zt_load_chunk<DTYPE>(a, chunk * ZT_GPU_CHUNK, words);
#pragma unroll
        for (int u = 0; u < ZT_CHUNK_UNITS; u++) {
            const uint32_t flags = zt_flags<DTYPE>(words[u], a.threshold);
            bits[u] = DTYPE == ZT_FP32 ? flags : (flags >> 9 & 0x55) | (flags >> 24 & 0xaa);
            if (a.threshold == 0) bits[u] = zt_present(a.n, begin + u * ZT_THREADS * ZT_UNIT);
        }
#pragma unroll
        for (int u = 0; u < ZT_CHUNK_UNITS; u += 2) {
            /* Two units in one scan: a half of a word holds the counts of all threads. */
            uint32_t total;
            const uint32_t before = zt_scan(__popc(bits[u]) | __popc(bits[u + 1]) << 16, shared, &total);
            const int64_t at[2] = {first + (before & 0xffff), first + (total & 0xffff) + (before >> 16)};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int64_t to = at[half];
                for (uint32_t left = bits[u + half]; left && to < a.capacity; left &= left - 1, to++) {
                    const int64_t i = begin + (u + half) * ZT_THREADS * ZT_UNIT + __ffs((int)left) - 1;
                    a.indices[to] = i;
                    /* Few are selected: they are read again, from the cache. */
                    if (DTYPE == ZT_FP32)
                        zt_store<uint32_t>(a.values + to * bytes, zt_load<uint32_t>(a.x + i * bytes));
                    else
                        zt_store<uint16_t>(a.values + to * bytes, zt_load<uint16_t>(a.x + i * bytes));
                }
            }
            first += (total & 0xffff) + (total >> 16);
        }
    }
}

/* -- On the host --------------------------------------------------------------------------------------------------- */

static int zt_launch_mask(void (*kernel)(zt_mask_arguments), zt_mask_arguments a, void *stream) {
    if (a.n < 0 || (a.n > 0 && (!a.mask || !a.bits))) return ZT_BAD_SIZE;
    if (a.n == 0) return ZT_OK;
    return zt_launch(kernel, zt_blocks_for(a.n, ZT_THREADS * ZT_MASK_ELEMENTS), ZT_THREADS, a, stream);
}

int zt_gpu_mask_pack(const uint8_t *mask, int64_t n, uint8_t *bits, void *stream) {
    return zt_launch_mask(zt_mask_pack_kernel, {(uint8_t *)mask, bits, n}, stream);
}

int zt_gpu_mask_unpack(const uint8_t *bits, int64_t n, uint8_t *mask, void *stream) {
    return zt_launch_mask(zt_mask_unpack_kernel, {mask, (uint8_t *)bits, n}, stream);
}

/* The bits of the least size of a dtype that reaches a threshold; infinity for one that no number reaches. */
static uint32_t zt_least_size(float threshold, int32_t dtype) {
    if (!(threshold > 0.0f)) return 0;
    const uint32_t bits = zt_bits<uint32_t>(threshold);
    if (dtype == ZT_FP32) return bits;
    if (dtype == ZT_BF16) return (bits + 0xffffu) >> 16;
    const int exponent = (int)(bits >> 23), shift = 126 - exponent;
    if (exponent < 113) /* subnormal in FP16: a multiple of 2^-24, rounded up */
        return shift > 24 ? 1 : ((bits & 0x7fffffu) + 0x800000u + (1u << shift) - 1) >> shift;
    const uint32_t rounded = (bits - (112u << 23) + 0x1fffu) >> 13;
    return rounded < 0x7c00u ? rounded : 0x7c00u;
}

typedef void (*zt_above_kernel)(zt_above_arguments);

/* `kernels` for FP32, FP16 and BF16. */
static int zt_launch_above(const zt_above_kernel *kernels, int32_t dtype, float threshold, zt_above_arguments a,
                           void *stream) {
    static_assert(ZT_FP32 == 0 && ZT_FP16 == 1 && ZT_BF16 == 2, "they index the kernels");
    if (dtype != ZT_FP32 && dtype != ZT_FP16 && dtype != ZT_BF16) return ZT_BAD_DTYPE;
    if (a.n < 0 || a.capacity < 0 || (a.n > 0 && !a.x)) return ZT_BAD_SIZE;
    a.threshold = zt_least_size(threshold, dtype);
    return a.n == 0 ? ZT_OK : zt_launch(kernels[dtype], zt_gpu_partials(a.n), ZT_THREADS, a, stream);
}

int zt_gpu_count_above(const void *x, int32_t dtype, int64_t n, float threshold, int64_t *partial, void *stream) {
    const zt_above_kernel kernels[] = {zt_count_kernel<ZT_FP32>, zt_count_kernel<ZT_FP16>, zt_count_kernel<ZT_BF16>};
    zt_above_arguments a = {};
    a.x = (const char *)x, a.n = n, a.partial = partial;
    if (n > 0 && !partial) return ZT_BAD_SIZE;
    return zt_launch_above(kernels, dtype, threshold, a, stream);
}

int zt_gpu_compact_above(const void *x, int32_t dtype, int64_t n, float threshold, const int64_t *offsets,
                         int64_t capacity, int64_t *indices, void *values, void *stream) {
    const zt_above_kernel kernels[] = {zt_compact_kernel<ZT_FP32>, zt_compact_kernel<ZT_FP16>,
                                       zt_compact_kernel<ZT_BF16>};
    zt_above_arguments a = {};
    a.x = (const char *)x, a.n = n, a.offsets = offsets;
    a.capacity = capacity, a.indices = indices, a.values = (char *)values;
    if ((n > 0 && !offsets) || (capacity > 0 && (!indices || !values))) return ZT_BAD_SIZE;
    return zt_launch_above(kernels, dtype, threshold, a, stream);
}
