/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The inner loops over dense values, written once for the vectors `V`, `Bytes` and `Nibbles` that the including file
 * defines; Note [One file, one instruction set] is in zt_cpu.h.
 *
 * Note [Four blocks at once]
 *     From a block's largest magnitude to its first quantized value there are 50 cycles of shuffles and divisions, as
 *     many as a block of 256 takes altogether. So up to four blocks are measured, then four divisions are one, then the
 *     four are encoded, and meanwhile the next four are prefetched.
 */
#ifndef ZT_CPU_SIMD_H
#define ZT_CPU_SIMD_H

#include "zt_cpu_sparse.h"

namespace {

using zt::Elements;
using zt::Planes;
using zt::Terms;
using zt::Writing;

template <int32_t D> constexpr int64_t kSize = D == ZT_FP32 ? 4 : 2;
constexpr int64_t kLine = 64;
/* How far ahead of their use bytes are prefetched: elements; values, shared among the messages that are summed. */
constexpr int64_t kAhead = 6144;
constexpr int64_t kSourceAhead = 8192;
/* At most this many elements are measured before they are encoded: they have to stay in the first cache. */
constexpr int64_t kGroup = 2048;

#define ZT_FOR_DTYPE(dtype, function) \
    ((dtype) == ZT_FP32 ? function<ZT_FP32> : (dtype) == ZT_FP16 ? function<ZT_FP16> : function<ZT_BF16>)

struct Lesser {
    template <class T> ZT_INLINE T of(T a, T b) { return V::lesser(a, b); }
    ZT_INLINE __m128 of(__m128 a, __m128 b) { return _mm_min_ps(a, b); }
};
struct Greater {
    template <class T> ZT_INLINE T of(T a, T b) { return V::greater(a, b); }
    ZT_INLINE __m128 of(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
};
struct Sum {
    template <class T> ZT_INLINE T of(T a, T b) { return V::add(a, b); }
    ZT_INLINE __m128 of(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
};

/* What four blocks are encoded with; `bad` has a bit for each that holds Inf or NaN. */
struct Scaling {
    __m128 scale, inverse, zero;
    int bad;
};

template <int BITS> ZT_INLINE Scaling scaling(__m128 span, __m128 zero, float top) {
    const __m128i bits = _mm_castps_si128(span);
    const __m128 bad = _mm_castsi128_ps(_mm_cmpgt_epi32(_mm_and_si128(bits, _mm_set1_epi32(0x7fffffff)),
                                                        _mm_set1_epi32(0x7f7fffff)));
    const __m128 unusable = _mm_or_ps(_mm_cmplt_ps(span, _mm_set1_ps(0x1p-100f)), bad);
    const __m128 levels = _mm_set1_ps(top);
    const __m128 scale = _mm_andnot_ps(unusable, _mm_div_ps(span, levels));
    const __m128 nan = _mm_and_ps(bad, _mm_castsi128_ps(_mm_set1_epi32(0x7fc00000)));
    return {_mm_or_ps(scale, nan), _mm_andnot_ps(unusable, _mm_div_ps(levels, span)), _mm_andnot_ps(bad, zero),
            _mm_movemask_ps(bad)};
}

/* Largest magnitude of each of up to four consecutive blocks. */
template <int32_t D, int BITS> ZT_INLINE Scaling measured_symmetric(const uint8_t *x, int64_t block, int64_t blocks) {
    V::I peaks[4] = {V::zeros(), V::zeros(), V::zeros(), V::zeros()};
    constexpr int64_t step = V::kLanes * 4;
    for (int64_t b = 0; b < blocks; ++b, x += block * kSize<D>) {
        V::I first = V::zeros(), second = V::zeros();
        for (int64_t i = 0; i < block * kSize<D>; i += 2 * step) {
            first = V::peak<D>(first, x + i);
            second = V::peak<D>(second, x + i + step);
        }
        peaks[b] = V::larger<D>(first, second);
    }
    if (D != ZT_FP32)
        for (V::I &peak : peaks) peak = V::larger_halves(peak);
    const __m128i bits = V::largest(peaks[0], peaks[1], peaks[2], peaks[3]);
    __m128 span = _mm_castsi128_ps(bits);
    if (D == ZT_BF16) span = _mm_castsi128_ps(_mm_slli_epi32(bits, 16));
    if (D == ZT_FP16) span = _mm_cvtph_ps(_mm_packus_epi32(bits, bits));
    return scaling<BITS>(span, _mm_setzero_ps(), BITS == 8 ? 127.0f : 7.0f);
}

/* Smallest and largest value; a NaN among them makes the span NaN. */
template <int32_t D, int BITS> ZT_INLINE Scaling measured_asymmetric(const uint8_t *x, int64_t block, int64_t blocks) {
    const V::F zero = V::set(0.0f);
    V::F low[4] = {zero, zero, zero, zero}, high[4] = {zero, zero, zero, zero}, odd[4] = {zero, zero, zero, zero};
    for (int64_t b = 0; b < blocks; ++b, x += block * kSize<D>) {
        V::F least = V::load<D>(x), most = least, nan = zero;
        for (int64_t i = 0; i < block; i += V::kLanes) {
            const V::F value = V::load<D>(x + i * kSize<D>);
            least = V::lesser(value, least);
            most = V::greater(value, most);
            nan = V::add(nan, V::sub(value, value));
        }
        low[b] = least, high[b] = most, odd[b] = nan;
    }
    const __m128 least = V::fold<Lesser>(low[0], low[1], low[2], low[3]);
    const __m128 most = V::fold<Greater>(high[0], high[1], high[2], high[3]);
    const __m128 nan = V::fold<Sum>(odd[0], odd[1], odd[2], odd[3]);
    /* + 0 so that of the two zeros the zero point is always the positive one. */
    return scaling<BITS>(_mm_add_ps(_mm_sub_ps(most, least), nan), _mm_add_ps(least, _mm_setzero_ps()),
                         BITS == 8 ? 255.0f : 15.0f);
}

template <int32_t D, bool SYM> ZT_INLINE V::I encoded(const uint8_t *x, V::F inverse, V::F zero, int32_t lowest) {
    const V::F value = V::load<D>(x);
    if (SYM) return V::round(V::mul(value, inverse));
    return V::plus(V::round(V::mul(V::sub(value, zero), inverse)), lowest);
}

/* One block; the lines `ahead` bytes further are prefetched. No value leaves its range, so none is clamped: the largest
 * product, top (1 + 2^-22) or less, rounds to top. */
template <int32_t D, int BITS, bool SYM>
ZT_INLINE void encode(const uint8_t *x, int64_t block, float scale, float low, uint8_t *out, bool stream, int64_t ahead) {
    constexpr int64_t step = 4 * V::kLanes, stride = V::kLanes * kSize<D>;
    constexpr int32_t lowest = BITS == 8 ? -128 : -8;
    const V::F inverse = V::set(scale), zero = V::set(low);
    for (int64_t i = 0; i < block; i += step, x += 4 * stride, out += step * BITS / 8) {
        for (int64_t line = 0; line < 4 * stride; line += kLine) __builtin_prefetch(x + ahead + line);
        const V::I a = encoded<D, SYM>(x, inverse, zero, lowest);
        const V::I b = encoded<D, SYM>(x + stride, inverse, zero, lowest);
        const V::I c = encoded<D, SYM>(x + 2 * stride, inverse, zero, lowest);
        const V::I d = encoded<D, SYM>(x + 3 * stride, inverse, zero, lowest);
        if (BITS == 8)
            V::pack8(out, a, b, c, d, stream);
        else
            V::pack4(out, a, b, c, d, stream);
    }
}

/* The blocks that are measured before they are encoded. */
struct Group {
    float inverse[kGroup / 64], zero[kGroup / 64];
    uint32_t bad;
};

ZT_INLINE void put_floats(uint8_t *out, __m128 x, int64_t n) {
    if (n == 4) return _mm_storeu_ps(reinterpret_cast<float *>(out), x);
    float four[4];
    _mm_storeu_ps(four, x);
    memcpy(out, four, static_cast<size_t>(4 * n));
}

/* Measures up to kMost blocks, four at a time, and writes their scales (and zero points). */
template <int32_t D, int BITS, bool SYM>
ZT_INLINE Group measure(const uint8_t *x, int64_t block, int64_t blocks, Planes out) {
    Group group;
    group.bad = 0;
    for (int64_t b = 0; b < blocks; b += 4, x += 4 * block * kSize<D>) {
        const int64_t now = blocks - b < 4 ? blocks - b : 4;
        const Scaling s = SYM ? measured_symmetric<D, BITS>(x, block, now) : measured_asymmetric<D, BITS>(x, block, now);
        _mm_storeu_ps(group.inverse + b, s.inverse);
        _mm_storeu_ps(group.zero + b, s.zero);
        put_floats(out.scales + 4 * b, s.scale, now);
        if (!SYM) put_floats(out.zero_points + 4 * b, s.zero, now);
        group.bad |= static_cast<uint32_t>(s.bad) << b;
    }
    return group;
}

/* Note [Four blocks at once]. */
template <int32_t D, int BITS, bool SYM>
void quantize_blocks(int64_t block, const uint8_t *x, int64_t blocks, Planes out, bool stream) {
    const int64_t bytes = block * kSize<D>, packed = block * BITS / 8, most = kGroup / block;
    const int64_t ahead = most * bytes + kAhead;
    for (int64_t done = 0; done < blocks; done += most) {
        const int64_t now = blocks - done < most ? blocks - done : most;
        const Group group = measure<D, BITS, SYM>(x, block, now, out);
        out.scales += 4 * now;
        if (!SYM) out.zero_points += 4 * now;
        for (int64_t b = 0; b < now; ++b, x += bytes, out.values += packed) {
            encode<D, BITS, SYM>(x, block, group.inverse[b], group.zero[b], out.values, stream, ahead);
            if (group.bad >> b & 1) memset(out.values, 0, static_cast<size_t>(packed));
        }
    }
}

template <int32_t D> void quantize_from(zt_wire_spec spec, const uint8_t *x, int64_t blocks, Planes out, bool stream) {
    const auto function = spec.symmetric ? (spec.bits == 8 ? quantize_blocks<D, 8, true> : quantize_blocks<D, 4, true>)
                                         : (spec.bits == 8 ? quantize_blocks<D, 8, false> : quantize_blocks<D, 4, false>);
    function(spec.block_size, x, blocks, out, stream);
}

void quantize(zt_wire_spec spec, Elements x, int64_t blocks, Planes out, bool stream) {
    ZT_FOR_DTYPE(x.dtype, quantize_from)(spec, x.data, blocks, out, stream);
}

ZT_INLINE float float_at(const uint8_t *p) {
    float x;
    memcpy(&x, p, 4);
    return x;
}

/* What the values of a block of one message stand for. */
template <class Q> ZT_INLINE Q meaning(const Terms &terms, const uint8_t *data, int64_t block) {
    const float zero = terms.spec.symmetric ? 0.0f : float_at(data + terms.zero_points + 4 * block);
    return Q::of(float_at(data + terms.scales + 4 * block), zero);
}

/* One tile of one message: N vectors, which begin at byte `offset`; its successor `ahead` is prefetched. */
template <class Q, int BITS, int N, bool FIRST>
ZT_INLINE void add_tile(const Terms &terms, int32_t source, int64_t block, int64_t offset, int64_t ahead, V::F *total) {
    constexpr int64_t step = V::kLanes * BITS / 8;
    const uint8_t *data = terms.messages[source].data, *values = data + offset;
    const Q q = meaning<Q>(terms, data, block);
    for (int64_t line = 0; line < N * step; line += kLine) __builtin_prefetch(values + ahead + line);
    __builtin_prefetch(data + terms.scales + 4 * block + 128);
    for (int i = 0; i < N; ++i) total[i] = FIRST ? q.at(values + i * step) : V::add(total[i], q.at(values + i * step));
}

/* Values -> elements at `out`. */
template <int32_t D, int N> ZT_INLINE void finish_tile(const Terms &terms, V::F *total, uint8_t *out, Writing how) {
    constexpr int64_t stride = V::kLanes * kSize<D>;
    if (terms.factor != 1.0f)
        for (int k = 0; k < N; ++k) total[k] = V::mul(total[k], V::set(terms.factor));
    if (how.accumulate)
        for (int k = 0; k < N; ++k) total[k] = V::add(V::load<D>(out + k * stride), total[k]);
    if (D == ZT_BF16 && V::any_nan<N>(total))
        for (int k = 0; k < N; k += 2) V::store_two<D, true>(out + k * stride, total[k], total[k + 1], how.stream);
    else
        for (int k = 0; k < N; k += 2) V::store_two<D, false>(out + k * stride, total[k], total[k + 1], how.stream);
}

template <int32_t D, class Q, int BITS, int N>
void sum_blocks(const Terms &terms, zt_range blocks, uint8_t *out, Writing how) {
    const int64_t block = terms.spec.block_size;
    const int64_t ahead = kSourceAhead / terms.count < kLine ? kLine : kSourceAhead / terms.count;
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        for (int64_t i = 0; i < block; i += N * V::kLanes, out += N * V::kLanes * kSize<D>) {
            const int64_t offset = b * (block * BITS / 8) + i * BITS / 8;
            V::F total[N];
            add_tile<Q, BITS, N, true>(terms, 0, b, offset, ahead, total);
            for (int32_t s = 1; s < terms.count; ++s) add_tile<Q, BITS, N, false>(terms, s, b, offset, ahead, total);
            for (int k = 0; k < N; ++k) total[k] = Q::in_order(total[k]);
            finish_tile<D, N>(terms, total, out, how);
        }
    }
}

ZT_INLINE bool finite(float x) { return x - x == 0.0f; }

/* A single message, neither scaled nor added to anything. NaN can only come from what its block is scaled with. */
template <int32_t D, class Q, int BITS, int N>
void decode_blocks(const Terms &terms, zt_range blocks, uint8_t *out, Writing how) {
    constexpr int64_t step = V::kLanes * BITS / 8, stride = V::kLanes * kSize<D>;
    const int64_t bytes = terms.spec.block_size * BITS / 8;
    const uint8_t *data = terms.messages[0].data, *values = data + blocks.begin * bytes;
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        const Q q = meaning<Q>(terms, data, b);
        const bool nan = D == ZT_BF16 && !q.finite();
        for (const uint8_t *end = values + bytes; values < end; values += N * step, out += N * stride) {
            for (int64_t line = 0; line < N * step; line += kLine) __builtin_prefetch(values + kSourceAhead + line);
            V::F total[N];
            for (int i = 0; i < N; ++i) total[i] = Q::in_order(q.at(values + i * step));
            if (nan)
                for (int i = 0; i < N; i += 2) V::store_two<D, true>(out + i * stride, total[i], total[i + 1], how.stream);
            else
                for (int i = 0; i < N; i += 2) V::store_two<D, false>(out + i * stride, total[i], total[i + 1], how.stream);
        }
    }
}

/* As decode_blocks; what each of the 16 nibbles stands for is rounded once a block. */
template <int32_t D, class Q> void look_up_blocks(const Terms &terms, zt_range blocks, uint8_t *out, Writing how) {
    const int64_t size = terms.spec.block_size;
    const uint8_t *data = terms.messages[0].data, *values = data + blocks.begin * (size / 2);
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        const auto table = meaning<Q>(terms, data, b).template halves<D>();
        for (int64_t i = 0; i < size; i += 64, values += 32, out += 128) {
            __builtin_prefetch(values + kSourceAhead);
            V::look_up(out, values, table, how.stream);
            V::look_up(out + 64, values + 16, table, how.stream);
        }
    }
}

/* Tiles are of 64 elements, as the smallest blocks, or of what the registers hold. */
template <int32_t D, class Q, int BITS>
ZT_INLINE void sum_some(const Terms &terms, zt_range blocks, uint8_t *out, Writing how) {
    constexpr int least = 64 / V::kLanes, most = V::kTile<BITS>;
    const bool single = terms.count == 1 && terms.factor == 1.0f && !how.accumulate;
    if constexpr (BITS == 4 && D != ZT_FP32)
        if (single) return look_up_blocks<D, Q>(terms, blocks, out, how);
    if (single) return decode_blocks<D, Q, BITS, least>(terms, blocks, out, how);
    if (terms.spec.block_size >= most * V::kLanes) return sum_blocks<D, Q, BITS, most>(terms, blocks, out, how);
    sum_blocks<D, Q, BITS, least>(terms, blocks, out, how);
}

template <int32_t D> void sum_to(const Terms &terms, zt_range blocks, uint8_t *out, Writing how) {
    if (terms.spec.bits == 8)
        return terms.spec.symmetric ? sum_some<D, Bytes<true>, 8>(terms, blocks, out, how)
                                    : sum_some<D, Bytes<false>, 8>(terms, blocks, out, how);
    return terms.spec.symmetric ? sum_some<D, Nibbles<true>, 4>(terms, blocks, out, how)
                                : sum_some<D, Nibbles<false>, 4>(terms, blocks, out, how);
}

void sum(const Terms &terms, zt_range blocks, Elements out, Writing how) {
    ZT_FOR_DTYPE(out.dtype, sum_to)(terms, blocks, out.data, how);
}

template <int32_t D> void widen_from(const uint8_t *x, int64_t n, uint8_t *out) {
    int64_t i = 0;
    for (; i + V::kLanes <= n; i += V::kLanes) V::store<ZT_FP32>(out + 4 * i, V::load<D>(x + i * kSize<D>));
    if (i < n) V::store_some<ZT_FP32>(out + 4 * i, V::load_some<D>(x + i * kSize<D>, n - i), n - i);
}

void widen(Elements x, int64_t n, uint8_t *out) { ZT_FOR_DTYPE(x.dtype, widen_from)(x.data, n, out); }

template <int32_t D> void narrow_to(const uint8_t *x, int64_t n, uint8_t *out) {
    int64_t i = 0;
    for (; i + V::kLanes <= n; i += V::kLanes) V::store<D>(out + i * kSize<D>, V::load<ZT_FP32>(x + 4 * i));
    if (i < n) V::store_some<D>(out + i * kSize<D>, V::load_some<ZT_FP32>(x + 4 * i, n - i), n - i);
}

void narrow(const uint8_t *x, int64_t n, Elements out) { ZT_FOR_DTYPE(out.dtype, narrow_to)(x, n, out.data); }

void stream(const uint8_t *x, int64_t bytes, uint8_t *out) {
    const int64_t first = (kLine - reinterpret_cast<uintptr_t>(out) % kLine) % kLine, head = first < bytes ? first : bytes;
    memcpy(out, x, static_cast<size_t>(head));
    int64_t i = head;
    for (; i + kLine <= bytes; i += kLine) V::stream_line(out + i, x + i);
    memcpy(out + i, x + i, static_cast<size_t>(bytes - i));
}

template <int32_t D> int64_t count_above_in(const uint8_t *x, int64_t n, float threshold) {
    const V::F bound = V::set(threshold);
    int64_t found = 0, i = 0;
    for (; i + V::kLanes <= n; i += V::kLanes) found += __builtin_popcount(V::above(V::load<D>(x + i * kSize<D>), bound));
    if (i < n) found += __builtin_popcount(V::above(V::load_some<D>(x + i * kSize<D>, n - i), bound) & ((1u << (n - i)) - 1));
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
        const int64_t left = elements.end - i;
        const uint32_t chosen = left >= V::kLanes ? V::above(V::load<D>(p), bound)
                                                  : V::above(V::load_some<D>(p, left), bound) & ((1u << left) - 1);
        if (!chosen) continue;
        if (found < picks.capacity)
            V::pick<D>(p, i, chosen, picks.capacity - found, picks.indices + found, picks.values + found * kSize<D>);
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

constexpr zt::Kernels kTable = {quantize,      sum,       widen,       narrow,        stream,     count_above,
                                compact_above, mask_pack, mask_unpack, sketch_insert, sketch_peel};

}  // namespace

#endif /* ZT_CPU_SIMD_H */
