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

#include "zt_gpu_stretches.h"
#include "zt_nf4.h"

/* The formats of blocks. */
struct zt_int8 {
    static constexpr int bits = 8, size = 256, scale_bytes = 4;
    static constexpr bool nf4 = false;
};
struct zt_int4 {
    static constexpr int bits = 4, size = 256, scale_bytes = 4;
    static constexpr bool nf4 = false;
};
struct zt_nf4 {
    static constexpr int bits = 4, size = 64, scale_bytes = 1;
    static constexpr bool nf4 = true;
};

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

/* The levels of nibbles 0 to 3, 4 to 7, 8 to 11 and 12 to 15, as bytes. */
#define ZT_NF4_WORDS {0x24170c00u, 0x7f584332u, 0xc8b9a481u, 0xf6ece1d5u}

/* The levels of NF4 as integers in floats: those of four nibbles at once become the bytes of a word. */
ZT_DEVICE void zt_unpack_nf4(zt_packed<4> packed, float *q) {
    uint32_t levels[4] = ZT_NF4_WORDS;
    zt_packed<8> bytes;
#pragma unroll
    for (int i = 0; i < 4; i++) levels[i] = zt_in_lane(levels[i]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t nibbles = packed.word[0] >> (16 * half), which = nibbles & 0x7777u;
        const uint32_t low = zt_bytes(levels[0], levels[1], which), high = zt_bytes(levels[2], levels[3], which);
        const uint32_t upper = zt_bytes(zt_in_lane(0xff00u), 0, nibbles >> 3 & 0x1111u);
        bytes.word[half] = (low & ~upper) | (high & upper);
    }
    zt_unpack<8>(bytes, q);
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

/* Note [NF4 by look-up]
 *     The bounds between levels are multiples of 1/2. So x lies above a bound b if the integer ceil(2 x) lies above 2 b,
 *     and that integer finds the nibble in a table of bytes in shared memory. |x| stays below 147 (the rounding of a
 *     scale adds at most 5/32), so ten bits, two's complement, hold every integer. What is in no block of finite
 *     numbers may find any entry: `keep` drops it. */
#define ZT_NF4_ENTRIES 1024

struct zt_nf4_table {
    uint8_t nibble[ZT_NF4_ENTRIES];
};

constexpr zt_nf4_table zt_nf4_made() {
    const float bounds[16] = {ZT_NF4_TREE};
    zt_nf4_table table = {};
    for (int i = 0; i < ZT_NF4_ENTRIES; i++) {
        const int twice = i < ZT_NF4_ENTRIES / 2 ? i : i - ZT_NF4_ENTRIES;
        int number = 0; /* of bounds below */
        for (int k = 1; k < 16; k++) number += (float)twice > 2.0f * bounds[k];
        table.nibble[i] = (uint8_t)(number ^ 8);
    }
    return table;
}

static __device__ const zt_nf4_table zt_nf4_origin = zt_nf4_made();

/* Packs the levels nearest to a unit's values; the coder's inverse is twice that of the scale. */
ZT_DEVICE zt_packed<4> zt_pack_nf4(const float *v, zt_coder coder, const zt_nf4_table &table) {
    uint32_t word = 0;
#pragma unroll
    for (int k = ZT_UNIT; k-- > 0;) {
        const uint32_t twice = zt_ceil_bits(zt_mul(v[k], coder.inverse));
        word = (word << 4) + table.nibble[twice % ZT_NF4_ENTRIES]; /* one LEA */
    }
    return {{word & coder.keep}};
}

/* Moves the values of a block, of which each of LANES lanes has UNITS units, `by` < 8 places to the front, and the first
 * ones to the end. All lanes come here together. */
template <int BITS, int UNITS, int LANES> ZT_DEVICE void zt_turn(zt_packed<BITS> *packed, int lane, int by) {
    const zt_packed<BITS> first = packed[0];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const zt_packed<BITS> after = u + 1 < UNITS ? packed[u + 1] : first; /* lane 0's, for the last lane */
        uint32_t words[BITS / 2];
#pragma unroll
        for (int w = 0; w < BITS / 4; w++) {
            words[w] = packed[u].word[w];
            words[BITS / 4 + w] = zt_shuffle(lane == 0 ? after.word[w] : words[w], (lane + 1) % LANES, LANES);
        }
        if constexpr (BITS == 8) {
#pragma unroll
            for (int w = 0; w < 3; w++) words[w] = by & 4 ? words[w + 1] : words[w];
        }
#pragma unroll
        for (int w = 0; w < BITS / 4; w++) packed[u].word[w] = zt_funnel(words[w], words[w + 1], BITS * by & 31);
    }
}

template <int BITS> ZT_DEVICE void zt_store_packed(uint8_t *to, zt_packed<BITS> packed) {
    if constexpr (BITS == 4)
        zt_store<uint32_t>(to, packed.word[0]);
    else
        zt_store<uint2>(to, uint2{packed.word[0], packed.word[1]});
}

#endif /* ZT_GPU_UNITS_H */
