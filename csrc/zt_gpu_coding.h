/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Blocks in the registers of the lanes that share them: finding scales, quantizing, and summing messages up.
 */
#ifndef ZT_GPU_CODING_H
#define ZT_GPU_CODING_H

#include "zt_gpu_units.h"

#define ZT_NAN 0x7fc00000u
#define ZT_SMALLEST 0x0d800000u /* 2^-100; blocks below it are zero */

struct zt_extremes {
    uint32_t scale; /* bits */
    zt_coder coder;
};

/* Scale and inverse for values in a span of `width` (bits, not negative) that becomes 0..levels. */
ZT_DEVICE zt_extremes zt_scaled(uint32_t width, float levels) {
    if (width >= ZT_INFINITY) return {ZT_NAN, {0.0f, 0}};
    if (width < ZT_SMALLEST) return {0, {0.0f, ~0u}};
    const float span = zt_bits<float>(width);
    return {zt_bits<uint32_t>(zt_div(span, levels)), {zt_div(levels, span), ~0u}};
}

/* As zt_scaled for NF4; the scale is a byte, and values become 0..254 (Note [NF4 by look-up]). */
ZT_DEVICE zt_extremes zt_scaled_nf4(uint32_t width) {
    const uint32_t byte = zt_nf4_byte(zt_bits<uint32_t>(zt_div(zt_bits<float>(width), zt_in_lane(127.0f))));
    return {byte, {zt_div(2.0f, zt_bits<float>(zt_nf4_scale(byte))), byte == 255 ? 0 : ~0u}};
}

/* -- Quantizing ---------------------------------------------------------------------------------------------------- */

/* The bits of the largest |x| in a block, of which each of LANES lanes has WORDS words. Two 16-bit values are compared at
 * once; that a NaN becomes the canonical one does not matter, as the scale of its block is one constant. */
template <int WORDS, int DTYPE, int LANES> ZT_DEVICE uint32_t zt_widest(const uint32_t *words) {
    const uint32_t sizes = DTYPE == ZT_FP32 ? 0x7fffffffu : 0x7fff7fffu; /* without signs */
    uint32_t most = words[0] & sizes;
#pragma unroll
    for (int k = 1; k < WORDS; k++) {
        const uint32_t size = words[k] & sizes;
        if (DTYPE == ZT_FP32)
            most = size > most ? size : most;
        else
            most = zt_larger_two<DTYPE>(most, size);
    }
    if (DTYPE != ZT_FP32) most = zt_larger_two<DTYPE>(most, most >> 16) & 0xffffu;
    if (DTYPE == ZT_BF16) most <<= 16;
    if (DTYPE == ZT_FP16) most = zt_bits<uint32_t>(zt_from_fp16(most)) & 0x7fffffffu;
#pragma unroll
    for (int by = LANES / 2; by > 0; by /= 2) {
        const uint32_t other = zt_shuffle_xor(most, by, LANES);
        most = other > most ? other : most;
    }
    return most;
}

/* NF4's table in shared memory; none for other formats. All threads of the block come here. */
template <bool NF4> ZT_DEVICE const zt_nf4_table *zt_shared_nf4() {
    if constexpr (NF4) {
        __shared__ uint32_t words[ZT_NF4_ENTRIES / 4];
        static_assert(ZT_NF4_ENTRIES / 4 == ZT_THREADS, "a word for each thread");
        words[threadIdx.x] = ((const uint32_t *)&zt_nf4_origin)[threadIdx.x];
        __syncthreads();
        return (const zt_nf4_table *)words;
    } else {
        return nullptr;
    }
}

/* Writes a lane's units, whose words are values of DTYPE, `turned` to the end, and the block's scale, if the block
 * exists. */
template <typename F, int UNITS, int DTYPE>
ZT_DEVICE void zt_encode_block(const uint32_t *words, uint32_t width, const zt_nf4_table *table, bool exists, uint8_t *values,
                               uint8_t *scale, int turned) {
    constexpr int lanes = zt_lanes<F, UNITS>;
    const int lane = zt_lane<lanes>();
    const zt_extremes extremes = F::nf4 ? zt_scaled_nf4(width) : zt_scaled(width, (float)((1 << (F::bits - 1)) - 1));
    zt_packed<F::bits> packed[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        float v[ZT_UNIT];
        zt_from_words<DTYPE>(words + zt_words<DTYPE> * u, v);
        if constexpr (F::nf4)
            packed[u] = zt_pack_nf4(v, extremes.coder, *table);
        else
            packed[u] = zt_pack<F::bits>(v, extremes.coder);
    }
    if (zt_ballot(turned)) zt_turn<F::bits, UNITS, lanes>(packed, lane, turned);
    if (!exists) return;
#pragma unroll
    for (int u = 0; u < UNITS; u++) zt_store_packed<F::bits>(values + u * (lanes * F::bits), packed[u]);
    if (lane != 0) return;
    if constexpr (F::nf4)
        zt_store<uint8_t>(scale, (uint8_t)extremes.scale);
    else
        zt_store<uint32_t>(scale, extremes.scale);
}

/* The words of a lane's units of sums; of the block `present` values exist, and the others are 0. */
template <typename F, int UNITS> ZT_DEVICE void zt_words_of_sums(const float *v, int lane, int64_t present, uint32_t *words) {
    const int limit = present < F::size ? (int)present : F::size;
#pragma unroll
    for (int k = 0; k < UNITS * ZT_UNIT; k++) {
        const int at = (k / ZT_UNIT * zt_lanes<F, UNITS> + lane) * ZT_UNIT + k % ZT_UNIT;
        words[k] = at < limit ? zt_bits<uint32_t>(v[k]) : 0;
    }
}

/* -- Sums ---------------------------------------------------------------------------------------------------------- */

/* A level of NF4 for each lane, all of them twice in 32: a shuffle looks a nibble up. */
ZT_DEVICE uint32_t zt_level_of_lane() {
    float q[ZT_UNIT];
    zt_unpack_nf4({{(threadIdx.x & 15) * 0x11111111u}}, q);
    return zt_bits<uint32_t>(q[0]);
}

/* v = a unit's values, or += them: a product and a sum, one rounding each. NF4's products are exact, 7 bits times 3, so
 * that a fused operation has the same bits. All lanes come here together. */
template <typename F, bool FIRST>
ZT_DEVICE void zt_add_unit(zt_packed<F::bits> packed, float scale, uint32_t level, float *v) {
    float q[ZT_UNIT];
    if constexpr (F::nf4) {
#pragma unroll
        for (int k = 0; k < ZT_UNIT; k++)
            q[k] = zt_bits<float>(zt_shuffle(level, (int)(packed.word[0] >> (4 * k)), 16));
    } else {
        zt_unpack<F::bits>(packed, q);
    }
#pragma unroll
    for (int k = 0; k < ZT_UNIT; k++) {
        if constexpr (FIRST)
            v[k] = zt_mul(q[k], scale);
        else if constexpr (F::nf4)
            v[k] = zt_fma(q[k], scale, v[k]);
        else
            v[k] = zt_add(v[k], zt_mul(q[k], scale));
    }
}

template <typename F> ZT_DEVICE float zt_load_scale(const uint8_t *scale) {
    if constexpr (F::nf4)
        return zt_bits<float>(zt_nf4_scale(zt_load<uint8_t>(scale)));
    else
        return zt_bits<float>(zt_load<uint32_t>(scale));
}

/* A lane's units of a block, of which the first lies at `values`. */
template <typename F, int UNITS> ZT_DEVICE void zt_load_block(const uint8_t *values, zt_packed<F::bits> *packed) {
#pragma unroll
    for (int u = 0; u < UNITS; u++) packed[u] = zt_load_packed<F::bits>(values + u * (zt_lanes<F, UNITS> * F::bits));
}

/* v = a lane's units of MANY messages from `begin` on, or += them, in their order, after reading them all. */
template <typename F, int UNITS, int MANY, bool FIRST>
ZT_DEVICE void zt_add_messages(const zt_gpu_messages &messages, int begin, const zt_block &block, uint32_t level, float *v) {
    zt_packed<F::bits> packed[MANY][UNITS];
    float scale[MANY];
    int64_t offset = zt_source_offset(messages, begin);
#pragma unroll
    for (int i = 0; i < MANY; i++) {
        if (FIRST && zt_arguments_are_operands) offset = messages.early[i];
        scale[i] = zt_load_scale<F>(block.scale + offset);
        zt_load_block<F, UNITS>(block.values + offset, packed[i]);
        offset += zt_step_after(messages, begin + i);
    }
#pragma unroll
    for (int i = 0; i < MANY; i++) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            if (FIRST && i == 0)
                zt_add_unit<F, true>(packed[i][u], scale[i], level, v + u * ZT_UNIT);
            else
                zt_add_unit<F, false>(packed[i][u], scale[i], level, v + u * ZT_UNIT);
        }
    }
}

/* v = the sum of a lane's units over all messages, MANY at a time; with MANY = 1 there is only one. */
template <typename F, int UNITS, int MANY>
ZT_DEVICE void zt_sum(const zt_gpu_messages &messages, const zt_block &block, uint32_t level, float *v) {
    int i = MANY;
    if (MANY == 1 || messages.count >= MANY) {
        zt_add_messages<F, UNITS, MANY, true>(messages, 0, block, level, v);
    } else {
        zt_add_messages<F, UNITS, 1, true>(messages, 0, block, level, v);
        i = 1;
    }
    if constexpr (MANY > 1) {
#pragma unroll 1
        for (; i + MANY <= messages.count; i += MANY) zt_add_messages<F, UNITS, MANY, false>(messages, i, block, level, v);
#pragma unroll 1
        for (; i < messages.count; i++) zt_add_messages<F, UNITS, 1, false>(messages, i, block, level, v);
    }
}

#endif /* ZT_GPU_CODING_H */
