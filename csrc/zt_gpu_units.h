/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * How units of eight values are encoded in quantized messages and decoded from them.
 *
 * Note [Exact tricks]
 *     Placing an unsigned field of b bits at bit k of the word whose exponent gives bit k the weight 1 makes the float
 *     2^(23-k) + field, and subtracting what is not wanted is exact: no shift and no conversion per value. Adding
 *     1.5 * 2^23 to a float rounds it to an integer, half to even, found in the low bits of the sum; adding an even
 *     number more shifts that integer and nothing else. |x * inv| stays below L + 1/2, so nothing needs clamping.
 */
#ifndef ZT_GPU_UNITS_H
#define ZT_GPU_UNITS_H

#include "zt_gpu_tables.h"

/* Where a block begins in a message: a unit takes BITS bytes. */
template <int BITS> ZT_DEVICE int64_t zt_packed_offset(zt_place place) { return place.first / ZT_UNIT * BITS; }

/* Where the planes of a message lie. */
struct zt_planes {
    zt_wire_spec spec;
    int64_t blocks, numel;
    int64_t values_end, scales, nbytes; /* bytes from the beginning of the message */
};

/* The bytes of a unit of INT8 or INT4, as they lie. */
template <int BITS> struct zt_packed {
    uint32_t word[BITS / 4];
};

template <int BITS> ZT_DEVICE zt_packed<BITS> zt_load_packed(const uint8_t *from) {
    if constexpr (BITS == 4) {
        return {{zt_load<uint32_t>(from)}};
    } else {
        const uint2 both = zt_load<uint2>(from);
        return {{both.x, both.y}};
    }
}

/* The values of a unit as integers in floats. */
template <int BITS> ZT_DEVICE void zt_unpack(zt_packed<BITS> packed, float *q) {
    const uint32_t field = (1u << BITS) - 1, bias = 1u << (BITS - 1), per_word = 32 / BITS;
    const uint32_t flip = BITS == 4 ? 0x88888888u : 0x80808080u; /* two's complement -> biased */
#pragma unroll
    for (unsigned k = 0; k < ZT_UNIT; k++) {
        const uint32_t word = packed.word[k / per_word], at = k % per_word * BITS, shift = at & 15;
        const float unwanted = (float)(1u << (23 - shift)) + (float)bias;
        const uint32_t bits = zt_masked(at < 16 ? word : word >> 16, field << shift, flip, (150 - shift) << 23);
        q[k] = zt_sub(zt_bits<float>(bits), unwanted);
    }
}

/* What turns values into integers: x * inverse; nothing is kept of a block that holds Inf or NaN. */
struct zt_coder {
    float inverse;
    uint32_t keep; /* all bits, or none */
};

/* Rounds a unit of values and packs it. The biased integers are summed up in the words' fields, and the rest of the
 * sums' bits is subtracted at once. */
template <int BITS> ZT_DEVICE zt_packed<BITS> zt_pack(const float *v, zt_coder coder) {
    const uint32_t flip = BITS == 4 ? 0x88888888u : 0x80808080u, per_word = 32 / BITS;
    const float magic = 12582912.0f + (float)(1 << (BITS - 1));
    zt_packed<BITS> packed;
#pragma unroll
    for (unsigned w = 0; w < BITS / 4; w++) {
        uint32_t sum = 0, rest = 0;
#pragma unroll
        for (unsigned k = per_word; k-- > 0;) {
            const float product = zt_mul(v[w * per_word + k], coder.inverse);
            sum = (sum << BITS) + zt_bits<uint32_t>(zt_add(product, magic));
            rest = (rest << BITS) + 0x4b400000u;
        }
        packed.word[w] = ((sum - rest) ^ flip) & coder.keep;
    }
    return packed;
}

template <int BITS> ZT_DEVICE void zt_store_packed(uint8_t *to, zt_packed<BITS> packed) {
    if constexpr (BITS == 4)
        zt_store<uint32_t>(to, packed.word[0]);
    else
        zt_store<uint2>(to, uint2{packed.word[0], packed.word[1]});
}

#endif /* ZT_GPU_UNITS_H */
