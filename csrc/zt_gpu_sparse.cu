/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The sparse modes on GPUs: bit masks and selection by a threshold, as in zero_topo/quant/reference_sparse.py. Picks
 * come in ascending order, whatever the order in which threads run.
 */
#include "zt_gpu_memory.h"

#define ZT_MASK_ELEMENTS 16 /* per thread */

static_assert(ZT_GPU_CHUNK == 2 * ZT_THREADS * ZT_UNIT, "a chunk is two units a thread");

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
    uint32_t threshold; /* the bits of one that is not negative; sizes compare as their bits do, NaN above all */
    int32_t dtype;
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

/* -- Selection ----------------------------------------------------------------------------------------------------- */

/* Reads the unit at element `begin`; which of its elements exist and reach the threshold, as bits. */
ZT_DEVICE uint32_t zt_above(const zt_above_arguments &a, int64_t begin, float *v) {
    const int bytes = zt_bytes_of(a.dtype);
    const char *from = a.x + begin * bytes;
    if (a.n - begin >= ZT_UNIT && zt_aligned16(from)) {
        if (a.dtype == ZT_FP32)
            zt_load_unit<ZT_FP32, true>(from, v);
        else if (a.dtype == ZT_BF16)
            zt_load_unit<ZT_BF16, true>(from, v);
        else
            zt_load_unit<ZT_FP16, true>(from, v);
    } else {
#pragma unroll
        for (int k = 0; k < ZT_UNIT; k++) v[k] = begin + k < a.n ? zt_load_element(from + k * bytes, a.dtype) : 0.0f;
    }
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < ZT_UNIT; k++) {
        const uint32_t size = zt_bits<uint32_t>(v[k]) & 0x7fffffffu;
        bits |= (uint32_t)(size >= a.threshold && begin + k < a.n) << k;
    }
    return bits;
}

ZT_KERNEL(ZT_THREADS) zt_count_kernel(ZT_ARGUMENTS zt_above_arguments a) {
    __shared__ uint32_t shared[ZT_THREADS / 32];
    const int64_t step = gridDim.x;
    for (int64_t chunk = blockIdx.x; chunk < zt_gpu_partials(a.n); chunk += step) {
        const int64_t begin = chunk * ZT_GPU_CHUNK + threadIdx.x * ZT_UNIT;
        float v[ZT_UNIT];
        uint32_t total, mine = __popc(zt_above(a, begin, v));
        mine += __popc(zt_above(a, begin + ZT_THREADS * ZT_UNIT, v));
        (void)zt_scan(mine, shared, &total);
        if (threadIdx.x == 0) a.partial[chunk] = total;
    }
}

ZT_KERNEL(ZT_THREADS) zt_compact_kernel(ZT_ARGUMENTS zt_above_arguments a) {
    __shared__ uint32_t shared[ZT_THREADS / 32];
    const int64_t step = gridDim.x;
    for (int64_t chunk = blockIdx.x; chunk < zt_gpu_partials(a.n); chunk += step) {
        int64_t first = a.offsets[chunk]; /* the same for all threads, as is what follows */
        if (first >= a.capacity) continue;
        for (int half = 0; half < 2; half++) {
            const int64_t begin = chunk * ZT_GPU_CHUNK + (half * ZT_THREADS + threadIdx.x) * ZT_UNIT;
            float v[ZT_UNIT];
            uint32_t total;
            const uint32_t bits = zt_above(a, begin, v);
            int64_t at = first + zt_scan(__popc(bits), shared, &total);
#pragma unroll
            for (int k = 0; k < ZT_UNIT; k++) {
                if (!(bits >> k & 1) || at >= a.capacity) continue;
                a.indices[at] = begin + k;
                zt_store_element(a.values + at * zt_bytes_of(a.dtype), a.dtype, v[k]);
                at++;
            }
            first += total;
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

static uint32_t zt_threshold_bits(float threshold) {
    return threshold > 0.0f ? zt_bits<uint32_t>(threshold) : 0;
}

static int zt_launch_above(void (*kernel)(zt_above_arguments), zt_above_arguments a, void *stream) {
    if (a.dtype != ZT_FP32 && a.dtype != ZT_FP16 && a.dtype != ZT_BF16) return ZT_BAD_DTYPE;
    if (a.n < 0 || a.capacity < 0 || (a.n > 0 && !a.x)) return ZT_BAD_SIZE;
    return a.n == 0 ? ZT_OK : zt_launch(kernel, zt_gpu_partials(a.n), ZT_THREADS, a, stream);
}

int zt_gpu_count_above(const void *x, int32_t dtype, int64_t n, float threshold, int64_t *partial, void *stream) {
    zt_above_arguments a = {};
    a.x = (const char *)x, a.dtype = dtype, a.n = n, a.threshold = zt_threshold_bits(threshold), a.partial = partial;
    if (n > 0 && !partial) return ZT_BAD_SIZE;
    return zt_launch_above(zt_count_kernel, a, stream);
}

int zt_gpu_compact_above(const void *x, int32_t dtype, int64_t n, float threshold, const int64_t *offsets,
                         int64_t capacity, int64_t *indices, void *values, void *stream) {
    zt_above_arguments a = {};
    a.x = (const char *)x, a.dtype = dtype, a.n = n, a.threshold = zt_threshold_bits(threshold), a.offsets = offsets;
    a.capacity = capacity, a.indices = indices, a.values = (char *)values;
    if ((n > 0 && !offsets) || (capacity > 0 && (!indices || !values))) return ZT_BAD_SIZE;
    return zt_launch_above(zt_compact_kernel, a, stream);
}
