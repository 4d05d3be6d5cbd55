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

template <int N, bool NF4> ZT_DEVICE zt_extremes zt_measure(const float *v, int lanes, int bits) {
    uint32_t most = 0;
#pragma unroll
    for (int k = 0; k < N; k++) {
        const uint32_t size = zt_bits<uint32_t>(v[k]) & 0x7fffffffu;
        most = size > most ? size : most;
    }
    for (int by = lanes / 2; by > 0; by /= 2) {
        const uint32_t other = zt_shuffle_xor(most, by, lanes);
        most = other > most ? other : most;
    }
    return NF4 ? zt_scaled_nf4(most) : zt_scaled(most, (float)((1 << (bits - 1)) - 1));
}

template <int UNITS, int BITS, bool NF4>
ZT_DEVICE void zt_store_block(const float *v, zt_place place, zt_coder coder, const zt_nf4_table *table,
                              uint8_t *message) {
    message += zt_packed_offset<BITS>(place);
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        uint8_t *to = message + zt_unit_of(place, u) * BITS;
        if constexpr (NF4)
            zt_store_packed<4>(to, zt_pack_nf4(v + u * ZT_UNIT, coder, *table));
        else
            zt_store_packed<BITS>(to, zt_pack<BITS>(v + u * ZT_UNIT, coder));
    }
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

/* Quantizes one block out of the registers of its lanes. All lanes come here; those of no block write nothing. */
template <int UNITS, bool NF4>
ZT_DEVICE void zt_encode(const float *v, zt_place place, const zt_planes &planes, const zt_nf4_table *table,
                         const zt_gpu_messages &messages) {
    const int bits = planes.spec.bits;
    const zt_extremes extremes = zt_measure<UNITS * ZT_UNIT, NF4>(v, place.lanes, bits);
    if (place.block >= planes.blocks) return;
    uint8_t *message = zt_message_at(messages, place.member), *scales = message + planes.scales;
    if (!NF4 && bits == 8)
        zt_store_block<UNITS, 8, false>(v, place, extremes.coder, table, message);
    else
        zt_store_block<UNITS, 4, NF4>(v, place, extremes.coder, table, message);
    if (place.lane != 0) return;
    if constexpr (NF4)
        zt_store<uint8_t>(scales + place.block, (uint8_t)extremes.scale);
    else
        zt_store<uint32_t>(scales + place.block * ZT_WIRE_SCALE_BYTES, extremes.scale);
}

/* Adds a lane's units of MANY messages from `first` on to v, in their order, after reading them all. */
template <int MANY, int UNITS, int BITS, bool NF4>
ZT_DEVICE void zt_add_messages(const zt_gpu_messages &messages, int first, const zt_planes &planes, zt_place place,
                               const uint8_t *of_member, float *v) {
    zt_packed<BITS> packed[MANY][UNITS];
    float scale[MANY];
#pragma unroll
    for (int i = 0; i < MANY; i++) {
        const uint8_t *message = of_member + zt_source_offset(messages, first + i);
        const uint8_t *values = message + zt_packed_offset<BITS>(place);
        const uint8_t *scales = message + planes.scales;
        if constexpr (NF4)
            scale[i] = zt_bits<float>(zt_nf4_scale(zt_load<uint8_t>(scales + place.block)));
        else
            scale[i] = zt_bits<float>(zt_load<uint32_t>(scales + place.block * ZT_WIRE_SCALE_BYTES));
#pragma unroll
        for (int u = 0; u < UNITS; u++) packed[i][u] = zt_load_packed<BITS>(values + zt_unit_of(place, u) * BITS);
    }
#pragma unroll
    for (int i = 0; i < MANY; i++) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            float q[ZT_UNIT];
            if constexpr (NF4)
                zt_unpack_nf4(packed[i][u], q);
            else
                zt_unpack<BITS>(packed[i][u], q);
#pragma unroll
            for (int k = 0; k < ZT_UNIT; k++)
                v[u * ZT_UNIT + k] = zt_add(v[u * ZT_UNIT + k], zt_mul(q[k], scale[i]));
        }
    }
}

/* v = the sum of a lane's units over the messages to its member, in their order. */
template <int UNITS, int BITS, bool NF4>
ZT_DEVICE void zt_sum(const zt_gpu_messages &messages, const zt_planes &planes, zt_place place, float *v) {
    const int ahead = UNITS == 8 ? 1 : 2; /* as many as registers hold */
    const uint8_t *of_member = zt_message_at(messages, place.member);
#pragma unroll
    for (int k = 0; k < UNITS * ZT_UNIT; k++) v[k] = -0.0f; /* -0 + x is x, whatever x */
    int i = 0;
#pragma unroll 1
    for (; i + ahead <= messages.count; i += ahead)
        zt_add_messages<ahead, UNITS, BITS, NF4>(messages, i, planes, place, of_member, v);
#pragma unroll 1
    for (; i < messages.count; i++)
        zt_add_messages<1, UNITS, BITS, NF4>(messages, i, planes, place, of_member, v);
}

/* Zeros for the padding of the last block: `present` values of this one exist. */
template <int UNITS> ZT_DEVICE void zt_clear_beyond(float *v, zt_place place, int64_t present) {
    if (present >= place.lanes * (UNITS * ZT_UNIT)) return;
#pragma unroll 1
    for (int u = 0; u < UNITS; u++) {
#pragma unroll
        for (int k = 0; k < ZT_UNIT; k++)
            if (zt_unit_offset(place, u) + k >= present) v[k] = 0.0f;
        zt_rotate<ZT_UNIT, UNITS * ZT_UNIT>(v);
    }
}

#endif /* ZT_GPU_CODING_H */
