/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The inner loops over dense values, written once for the vectors `V`, `Bytes`, `Nibbles` and `Levels` that the including
 * file defines; Note [One file, one instruction set] is in zt_cpu.h.
 */
#ifndef ZT_CPU_SIMD_H
#define ZT_CPU_SIMD_H

#include "zt_cpu_sparse.h"

namespace {

using zt::Elements;
using zt::Planes;
using zt::source_of;
using zt::Terms;
using zt::Writing;

template <int32_t D> constexpr int64_t kSize = D == ZT_FP32 ? 4 : 2;
constexpr int64_t kLine = 64;
/* How far ahead of their use values are prefetched, shared among the messages that are summed. */
constexpr int64_t kSourceAhead = 8192;
/* How far ahead elements are fetched into the second cache. */
constexpr int64_t kElementsAhead = 4096;
/* This many elements, or one block, are measured before they are encoded: they have to stay in the first cache. */
constexpr int64_t kGroup = 1024;

#define ZT_FOR_DTYPE(dtype, function) \
    ((dtype) == ZT_FP32 ? function<ZT_FP32> : (dtype) == ZT_FP16 ? function<ZT_FP16> : function<ZT_BF16>)

}  // namespace

#include "zt_cpu_decode.h"
#include "zt_cpu_encode.h"

namespace {

template <int32_t D> void widen_from(const uint8_t *x, int64_t n, uint8_t *out) {
    int64_t i = 0;
    for (; i + V::kLanes <= n; i += V::kLanes) {
        __builtin_prefetch(x + i * kSize<D> + kElementsAhead, 0, 2);
        V::store<ZT_FP32>(out + 4 * i, V::load<D>(x + i * kSize<D>));
    }
    if (i < n) V::store_some<ZT_FP32>(out + 4 * i, V::load_some<D>(x + i * kSize<D>, n - i), n - i);
}

void widen(Elements x, int64_t n, uint8_t *out) { ZT_FOR_DTYPE(x.dtype, widen_from)(x.data, n, out); }

template <int32_t D> void narrow_to(const uint8_t *x, int64_t n, uint8_t *out) {
    int64_t i = 0;
    for (; i + V::kLanes <= n; i += V::kLanes) {
        __builtin_prefetch(x + 4 * i + kElementsAhead, 0, 2);
        V::store<D>(out + i * kSize<D>, V::load<ZT_FP32>(x + 4 * i));
    }
    if (i < n) V::store_some<D>(out + i * kSize<D>, V::load_some<ZT_FP32>(x + 4 * i, n - i), n - i);
}

void narrow(const uint8_t *x, int64_t n, Elements out) { ZT_FOR_DTYPE(out.dtype, narrow_to)(x, n, out.data); }

template <int32_t D> void add_from(const uint8_t *x, int64_t n, uint8_t *total) {
    int64_t i = 0;
    for (; i + V::kLanes <= n; i += V::kLanes, x += V::kLanes * kSize<D>, total += V::kLanes * 4) {
        __builtin_prefetch(x + kElementsAhead, 0, 2);
        V::store<ZT_FP32>(total, V::add(V::load<ZT_FP32>(total), V::load<D>(x)));
    }
    if (i == n) return;
    const V::F sum = V::add(V::load_some<ZT_FP32>(total, n - i), V::load_some<D>(x, n - i));
    V::store_some<ZT_FP32>(total, sum, n - i);
}

void add(Elements x, int64_t n, uint8_t *total) { ZT_FOR_DTYPE(x.dtype, add_from)(x.data, n, total); }

void stream(const uint8_t *x, int64_t bytes, uint8_t *out) {
    int64_t i = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out) % kLine);
    i = i < bytes ? i : bytes;
    memcpy(out, x, static_cast<size_t>(i));
    for (; i + kLine <= bytes; i += kLine) V::stream_line(out + i, x + i);
    memcpy(out + i, x + i, static_cast<size_t>(bytes - i));
}

/* Bit k is set if element k of a vector is above; `left` of them exist. */
template <int32_t D> ZT_INLINE uint32_t above_at(const uint8_t *x, int64_t left, V::F bound) {
    if (left >= V::kLanes) return V::above(V::load<D>(x), bound);
    return V::above(V::load_some<D>(x, left), bound) & ((1u << left) - 1);
}

template <int32_t D> int64_t count_above_in(const uint8_t *x, int64_t n, float threshold) {
    const V::F bound = V::set(threshold);
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += V::kLanes) found += __builtin_popcount(above_at<D>(x + i * kSize<D>, n - i, bound));
    return found;
}

int64_t count_above(Elements x, int64_t n, float threshold) {
    return ZT_FOR_DTYPE(x.dtype, count_above_in)(x.data, n, threshold);
}

template <int32_t D> int64_t compact_above_in(const uint8_t *x, zt_range elements, float threshold, zt::Picks picks) {
    const V::F bound = V::set(threshold);
    int64_t found = 0;
    for (int64_t i = elements.begin; i < elements.end; i += V::kLanes) {
        const uint8_t *p = x + i * kSize<D>;
        const uint32_t chosen = above_at<D>(p, elements.end - i, bound);
        if (!chosen) continue;
        if (found < picks.capacity)
            V::pick<D>(p, i, chosen, {picks.indices + found, picks.values + found * kSize<D>, picks.capacity - found});
        found += __builtin_popcount(chosen);
    }
    return found;
}

int64_t compact_above(Elements x, zt_range elements, float threshold, zt::Picks picks) {
    return ZT_FOR_DTYPE(x.dtype, compact_above_in)(x.data, elements, threshold, picks);
}

void mask_pack(const uint8_t *mask, int64_t n, uint8_t *bits) {
    int64_t i = 0;
    for (; i + V::kMaskBytes <= n; i += V::kMaskBytes) V::pack_mask(mask + i, bits + i / 8);
    pack_rest(mask + i, n - i, bits + i / 8);
}

void mask_unpack(const uint8_t *bits, int64_t n, uint8_t *mask) {
    int64_t i = 0;
    for (; i + V::kMaskBytes <= n; i += V::kMaskBytes) V::unpack_mask(bits + i / 8, mask + i);
    unpack_rest(bits + i / 8, n - i, mask + i);
}

}  // namespace

#include "zt_cpu_codes.h"

namespace {

constexpr zt::Kernels kTable = {quantize,    sum,           widen,     narrow,      add,           stream,
                                count_above, compact_above, mask_pack, mask_unpack, sketch_insert, sketch_peel,
                                assess,      recode};

}  // namespace

#endif /* ZT_CPU_SIMD_H */
