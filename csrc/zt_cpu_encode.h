/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Elements -> messages, for the vectors of the file that includes zt_cpu_simd.h.
 *
 * Note [Four blocks at once]
 *     From a block's largest magnitude to its first quantized value there are 50 cycles of shuffles and divisions, as
 *     many as a block of 256 takes altogether. So up to four blocks are measured, then four divisions are one, then the
 *     four are encoded. While they are, the next ones are measured: were it one after the other, memory would have
 *     nothing to do while values are encoded. Prefetchers end at each page, so what is measured next is asked for.
 */
#ifndef ZT_CPU_ENCODE_H
#define ZT_CPU_ENCODE_H

namespace {

/* What four blocks are encoded with; `bad` has a bit for each that holds Inf or NaN. */
struct Scaling {
    __m128i stored; /* in the message: FP32 or bytes */
    __m128 inverse;
    int bad;
};

ZT_INLINE Scaling scaling(__m128 span, float top) {
    const __m128i bits = _mm_castps_si128(span);
    const __m128 bad = _mm_castsi128_ps(_mm_cmpgt_epi32(_mm_and_si128(bits, _mm_set1_epi32(0x7fffffff)),
                                                        _mm_set1_epi32(0x7f7fffff)));
    const __m128 unusable = _mm_or_ps(_mm_cmplt_ps(span, _mm_set1_ps(0x1p-100f)), bad);
    const __m128 levels = _mm_set1_ps(top);
    const __m128 scale = _mm_andnot_ps(unusable, _mm_div_ps(span, levels));
    const __m128 nan = _mm_and_ps(bad, _mm_castsi128_ps(_mm_set1_epi32(0x7fc00000)));
    return {_mm_castps_si128(_mm_or_ps(scale, nan)), _mm_andnot_ps(unusable, _mm_div_ps(levels, span)), _mm_movemask_ps(bad)};
}

/* As zt_nf4_byte and zt_nf4_scale; the inverse is what Levels encodes with. */
template <int32_t D> ZT_INLINE Scaling nf4_scaling(__m128 span) {
    const __m128i unit = _mm_castps_si128(_mm_div_ps(span, _mm_set1_ps(127.0f))), all = _mm_set1_epi32(255);
    const __m128i step = _mm_srai_epi32(_mm_sub_epi32(unit, _mm_set1_epi32(ZT_NF4_SCALE - ZT_NF4_NEAREST)), 21);
    const __m128i byte = _mm_min_epi32(_mm_max_epi32(step, _mm_setzero_si128()), all);
    const __m128i scale = _mm_add_epi32(_mm_slli_epi32(byte, 21), _mm_set1_epi32(ZT_NF4_SCALE));
    const __m128i bytes = _mm_packus_epi16(_mm_packus_epi32(byte, byte), _mm_setzero_si128());
    const int bad = _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(byte, all)));
    return {bytes, Levels::inverse<D>(_mm_castsi128_ps(scale)), bad};
}

/* The largest magnitude of a block. */
template <int32_t D> struct Extent {
    V::I first, second;

    ZT_INLINE Extent none() { return {V::zeros(), V::zeros()}; }

    /* 4 kLanes elements. */
    inline __attribute__((always_inline)) void add(const uint8_t *x) {
        for (int i = 0; i < kSize<D>; i += 2) {
            first = V::peak<D>(first, x + i * 4 * V::kLanes);
            second = V::peak<D>(second, x + (i + 1) * 4 * V::kLanes);
        }
    }

    template <class Q> ZT_INLINE Scaling scaled(const Extent *four) {
        V::I peaks[4];
        for (int b = 0; b < 4; ++b) {
            peaks[b] = V::larger<D>(four[b].first, four[b].second);
            if (D != ZT_FP32) peaks[b] = V::larger_halves(peaks[b]);
        }
        const __m128i bits = V::largest(peaks[0], peaks[1], peaks[2], peaks[3]);
        __m128 span = _mm_castsi128_ps(bits);
        if (D == ZT_BF16) span = _mm_castsi128_ps(_mm_slli_epi32(bits, 16));
        if (D == ZT_FP16) span = _mm_cvtph_ps(_mm_packus_epi32(bits, bits));
        return Q::kScaleBytes == 1 ? nf4_scaling<D>(span) : scaling(span, Q::kBits == 8 ? 127.0f : 7.0f);
    }
};

template <int32_t D> ZT_INLINE V::I rounded(const uint8_t *x, V::F inverse) {
    return V::round(V::mul(V::load<D>(x), inverse));
}

/* 4 kLanes elements -> integers. */
template <int32_t D, class Q> ZT_INLINE void put_rounded(const uint8_t *x, V::F inverse, uint8_t *out, bool stream) {
    constexpr int64_t stride = V::kLanes * kSize<D>;
    const V::I a = rounded<D>(x, inverse), b = rounded<D>(x + stride, inverse);
    const V::I c = rounded<D>(x + 2 * stride, inverse), d = rounded<D>(x + 3 * stride, inverse);
    if (Q::kBits == 8)
        V::pack8(out, a, b, c, d, stream);
    else
        V::pack4(out, a, b, c, d, stream);
}

template <int32_t D, class Q> ZT_INLINE auto encoder(float inverse) {
    if constexpr (Q::kScaleBytes == 1)
        return Q::template encoder<D>(inverse);
    else
        return V::set(inverse);
}

/* One block, while another one of the same size is measured. No value leaves its range, so none is clamped: the largest
 * product, top (1 + 2^-22) or less, rounds to top. */
template <int32_t D, class Q>
ZT_INLINE Extent<D> encode(const uint8_t *x, int64_t block, float factor, uint8_t *out, bool stream,
                           const uint8_t *other) {
    constexpr bool levels = Q::kScaleBytes == 1; /* NF4: 64 elements at a time */
    constexpr int64_t step = levels ? 64 : 4 * V::kLanes, bytes = step * kSize<D>;
    const auto how = encoder<D, Q>(factor);
    auto extent = Extent<D>::none();
    for (int64_t i = 0; i < block; i += step, x += bytes, other += bytes, out += step * Q::kBits / 8) {
        for (int64_t line = 0; line < bytes; line += kLine) __builtin_prefetch(other + kElementsAhead + line, 0, 2);
        for (int64_t part = 0; part < step; part += 4 * V::kLanes) extent.add(other + part * kSize<D>);
        if constexpr (levels)
            Q::template put<D>(x, how, out, stream);
        else
            put_rounded<D, Q>(x, how, out, stream);
    }
    return extent;
}

/* The blocks that are measured before they are encoded. */
struct Group {
    float inverse[kGroup / 64];
    uint32_t bad;
};

ZT_INLINE void put_some(uint8_t *out, __m128i x, int64_t bytes) {
    if (bytes == 16) return _mm_storeu_si128(reinterpret_cast<__m128i *>(out), x);
    if (bytes == 4) return _mm_storeu_si32(out, x); /* no call for the scales of NF4 */
    uint8_t all[16];
    _mm_storeu_si128(reinterpret_cast<__m128i *>(all), x);
    memcpy(out, all, static_cast<size_t>(bytes));
}

/* Of blocks that were measured, four at a time; writes their scales. */
template <int32_t D, class Q> ZT_INLINE Group scaled(const Extent<D> *extents, int64_t blocks, Planes &out) {
    Group group;
    group.bad = 0;
    for (int64_t b = 0; b < blocks; b += 4) {
        const int64_t now = blocks - b < 4 ? blocks - b : 4;
        const Scaling s = Extent<D>::template scaled<Q>(extents + b);
        _mm_storeu_ps(group.inverse + b, s.inverse);
        put_some(out.scales, s.stored, Q::kScaleBytes * now);
        out.scales += Q::kScaleBytes * now;
        group.bad |= static_cast<uint32_t>(s.bad) << b;
    }
    return group;
}

/* Note [Four blocks at once]. */
template <int32_t D, class Q>
void quantize_blocks(int64_t size, const uint8_t *x, int64_t blocks, Planes out, bool stream) {
    const int64_t block = Q::kScaleBytes == 1 ? 64 : size; /* NF4 has no other, which saves it a loop */
    const int64_t bytes = block * kSize<D>, packed = block * Q::kBits / 8, step = 4 * V::kLanes * kSize<D>;
    const int64_t most = block < kGroup ? kGroup / block : 1;
    Extent<D> extents[kGroup / 64];
    for (auto &extent : extents) extent = Extent<D>::none();
    for (int64_t b = 0; b < most && b < blocks; ++b)
        for (int64_t i = 0; i < bytes; i += step) extents[b].add(x + b * bytes + i);
    for (int64_t left = blocks; left > 0; left -= most) {
        const int64_t now = left < most ? left : most;
        const Group group = scaled<D, Q>(extents, now, out);
        for (int64_t b = 0; b < now; ++b, x += bytes, out.values += packed) {
            const uint8_t *const next = b + most < left ? x + most * bytes : x;
            extents[b] = encode<D, Q>(x, block, group.inverse[b], out.values, stream, next);
            if (group.bad >> b & 1) memset(out.values, 0, static_cast<size_t>(packed));
        }
    }
}

template <int32_t D> void quantize_from(zt_wire_spec spec, const uint8_t *x, int64_t blocks, Planes out, bool stream) {
    const auto four = zt_wire_is_nf4(spec) ? quantize_blocks<D, Levels> : quantize_blocks<D, Nibbles>;
    (spec.bits == 8 ? quantize_blocks<D, Bytes> : four)(spec.block_size, x, blocks, out, stream);
}

void quantize(zt_wire_spec spec, Elements x, int64_t blocks, Planes out, bool stream) {
    ZT_FOR_DTYPE(x.dtype, quantize_from)(spec, x.data, blocks, out, stream);
}

}  // namespace

#endif /* ZT_CPU_ENCODE_H */
