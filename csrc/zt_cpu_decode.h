/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Messages and sums of messages -> elements, for the vectors of the file that includes zt_cpu_simd.h.
 */
#ifndef ZT_CPU_DECODE_H
#define ZT_CPU_DECODE_H

namespace {

ZT_INLINE float float_at(const uint8_t *p) {
    float x;
    memcpy(&x, p, 4);
    return x;
}

/* What the values of a block of one message stand for. */
template <class Q> ZT_INLINE Q meaning(const Terms &terms, const uint8_t *data, int64_t block) {
    const uint8_t *scale = data + terms.scales + Q::kScaleBytes * block;
    if constexpr (Q::kScaleBytes == 4)
        return Q::of(float_at(scale));
    else
        return Q::of_byte(*scale);
}

/* One tile of one message: N vectors, which begin at byte `offset`; its successor `ahead` is prefetched. */
template <class Q, int N, bool FIRST>
ZT_INLINE void add_tile(const Terms &terms, int32_t source, int64_t block, int64_t offset, int64_t ahead, V::F *total) {
    constexpr int64_t step = V::kLanes * Q::kBits / 8;
    const uint8_t *data = source_of(terms, source), *values = data + offset;
    const Q q = meaning<Q>(terms, data, block);
    for (int64_t line = 0; line < N * step; line += kLine) __builtin_prefetch(values + ahead + line);
    __builtin_prefetch(data + terms.scales + Q::kScaleBytes * block + 128);
    for (int i = 0; i < N; i += Q::kGroup) {
        V::F term[Q::kGroup];
        q.at(values + i * step, term);
        for (int k = 0; k < Q::kGroup; ++k) total[i + k] = FIRST ? term[k] : V::add(total[i + k], term[k]);
    }
}

/* `nan`: a BF16 may be NaN. */
template <int32_t D, int N> ZT_INLINE void store_tile(const V::F *x, uint8_t *out, bool nan, bool stream) {
    constexpr int64_t stride = V::kLanes * kSize<D>;
    if (nan)
        for (int i = 0; i < N; i += 2) V::store_two<D, true>(out + i * stride, x[i], x[i + 1], stream);
    else
        for (int i = 0; i < N; i += 2) V::store_two<D, false>(out + i * stride, x[i], x[i + 1], stream);
}

/* Values -> elements at `out`. */
template <int32_t D, int N> ZT_INLINE void finish_tile(const Terms &terms, V::F *total, uint8_t *out, Writing how) {
    constexpr int64_t stride = V::kLanes * kSize<D>;
    if (terms.factor != 1.0f)
        for (int k = 0; k < N; ++k) total[k] = V::mul(total[k], V::set(terms.factor));
    if (how.accumulate)
        for (int k = 0; k < N; ++k) total[k] = V::add(V::load<D>(out + k * stride), total[k]);
    store_tile<D, N>(total, out, D == ZT_BF16 && V::any_nan<N>(total), how.stream);
}

template <int32_t D, class Q, int N>
void sum_blocks(const Terms &terms, zt_range blocks, uint8_t *out, Writing how) {
    const int64_t block = terms.spec.block_size;
    const int64_t ahead = kSourceAhead / terms.count < kLine ? kLine : kSourceAhead / terms.count;
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        for (int64_t i = 0; i < block; i += N * V::kLanes, out += N * V::kLanes * kSize<D>) {
            const int64_t offset = (b * block + i) * Q::kBits / 8;
            V::F total[N];
            add_tile<Q, N, true>(terms, 0, b, offset, ahead, total);
            for (int32_t s = 1; s < terms.count; ++s) add_tile<Q, N, false>(terms, s, b, offset, ahead, total);
            for (int k = 0; k < N; k += Q::kGroup) Q::in_order(total + k);
            finish_tile<D, N>(terms, total, out, how);
        }
    }
}

/* A single message, neither scaled nor added to anything. NaN can only come from what its block is scaled with. */
template <int32_t D, class Q, int N>
void decode_blocks(const Terms &terms, zt_range blocks, uint8_t *out, Writing how) {
    constexpr int64_t step = V::kLanes * Q::kBits / 8, stride = V::kLanes * kSize<D>;
    const int64_t bytes = terms.spec.block_size * Q::kBits / 8;
    const uint8_t *data = source_of(terms, 0), *values = data + blocks.begin * bytes;
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        const Q q = meaning<Q>(terms, data, b);
        const bool nan = D == ZT_BF16 && !q.finite();
        for (const uint8_t *end = values + bytes; values < end; values += N * step, out += N * stride) {
            for (int64_t line = 0; line < N * step; line += kLine) __builtin_prefetch(values + kSourceAhead + line);
            V::F total[N];
            for (int i = 0; i < N; i += Q::kGroup) {
                q.at(values + i * step, total + i);
                Q::in_order(total + i);
            }
            store_tile<D, N>(total, out, nan, how.stream);
        }
    }
}

/* What the nibbles of NF4 stand for, by the byte of their scale. */
template <int32_t D> struct Meanings {
    decltype(Levels::halves<D>(0.0f)) of[256];

    Meanings() {
        for (uint32_t byte = 0; byte < 256; ++byte) {
            const uint32_t bits = zt_nf4_scale(byte);
            of[byte] = Levels::halves<D>(float_at(reinterpret_cast<const uint8_t *>(&bits)));
        }
    }

    static const Meanings &all() {
        static const Meanings made;
        return made;
    }
};

/* As decode_blocks; what each of the 16 nibbles stands for is rounded once a block, or once for all blocks of NF4. */
template <int32_t D, class Q> void look_up_blocks(const Terms &terms, zt_range blocks, uint8_t *out, Writing how) {
    const int64_t size = terms.spec.block_size;
    const Meanings<D> &meanings = Meanings<D>::all();
    const uint8_t *data = source_of(terms, 0), *values = data + blocks.begin * (size / 2);
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        auto table = meanings.of[0];
        if constexpr (Q::kScaleBytes == 1)
            table = meanings.of[data[terms.scales + b]];
        else
            table = meaning<Q>(terms, data, b).template halves<D>();
        for (int64_t i = 0; i < size; i += 64, values += 32, out += 128) {
            __builtin_prefetch(values + kSourceAhead);
            V::look_up(out, values, table, how.stream);
            V::look_up(out + 64, values + 16, table, how.stream);
        }
    }
}

/* Tiles are of 64 elements, as the smallest blocks, or of what the registers hold. */
template <int32_t D, class Q>
ZT_INLINE void sum_some(const Terms &terms, zt_range blocks, uint8_t *out, Writing how) {
    constexpr int least = 64 / V::kLanes, most = V::kTile;
    const bool single = terms.count == 1 && terms.factor == 1.0f && !how.accumulate;
    if constexpr (Q::kBits == 4 && D != ZT_FP32)
        if (single) return look_up_blocks<D, Q>(terms, blocks, out, how);
    if (single) return decode_blocks<D, Q, least>(terms, blocks, out, how);
    if (terms.spec.block_size >= most * V::kLanes) return sum_blocks<D, Q, most>(terms, blocks, out, how);
    sum_blocks<D, Q, least>(terms, blocks, out, how);
}

template <int32_t D> void sum_to(const Terms &terms, zt_range blocks, uint8_t *out, Writing how) {
    if (terms.spec.bits == 8) return sum_some<D, Bytes>(terms, blocks, out, how);
    if (zt_wire_is_nf4(terms.spec)) return sum_some<D, Levels>(terms, blocks, out, how);
    sum_some<D, Nibbles>(terms, blocks, out, how);
}

void sum(const Terms &terms, zt_range blocks, Elements out, Writing how) {
    ZT_FOR_DTYPE(out.dtype, sum_to)(terms, blocks, out.data, how);
}

}  // namespace

#endif /* ZT_CPU_DECODE_H */
