/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The levels and scales of NF4; Note [NF4] in zero_topo/quant/spec.py. Needs neither torch nor Python.
 */
#ifndef ZT_NF4_H
#define ZT_NF4_H

#include "zt_wire.h"

/* The level of each nibble, 0 to 7, then -8 to -1. */
#define ZT_NF4_LEVELS 0, 12, 23, 36, 50, 67, 88, 127, -127, -92, -71, -56, -43, -31, -20, -10
/* The middle between any two neighbouring levels as a search tree: of node n, 2 n and 2 n + 1 are the lower and the
 * upper half. Node 0 is none. */
#define ZT_NF4_TREE                                                                                                  \
    0.0f, -5.0f, -49.5f, 43.0f, -81.5f, -25.5f, 17.5f, 77.5f, -109.5f, -63.5f, -37.0f, -15.0f, 6.0f, 29.5f, 58.5f, 107.5f

#ifdef __cplusplus
/* Note [Cells]
 *     Twice the middle between two levels is an integer, so k = floor(-2 x) tells which level x is nearest to; where x is
 *     a middle, the lower one. A cell has the 16 values k with the same floor(k / 16), of which at most one begins a new
 *     level. So one entry of a cell is enough: where r is the first such k % 16, or 16, and c the code of the cell's first
 *     k, the upper four bits of 16 c + r - 1 - k % 16 are the code of k. An entry is that sum for k = 0, modulo 256; a wide
 *     entry has 12 bits more below the code, for n = floor(-256 x) in place of k. */
struct zt_nf4_cells {
    /* Of cells 0 to 15, then -16 to -1. */
    uint8_t start[32] = {};
    uint16_t wide[32] = {};

    constexpr zt_nf4_cells() {
        constexpr int levels[16] = {ZT_NF4_LEVELS};
        for (int cell = 0; cell < 32; ++cell) {
            const int k = 16 * (cell < 16 ? cell : cell - 32);
            int code = 7, first = 16;
            for (int i = -8; i < 7; ++i) {
                const int bound = -(levels[i & 15] + levels[(i + 1) & 15]); /* from this k on at most level i */
                code -= k >= bound;
                if (k < bound && bound < k + 16) first = bound - k;
            }
            start[cell] = static_cast<uint8_t>(16 * code + first - 1 + k);
            wide[cell] = static_cast<uint16_t>(4096 * code + 128 * (first + k) - 1);
        }
    }
};
#endif

#ifdef __cplusplus
/* Note [Steps of BF16]
 *     A scale has two bits of mantissa, so the level of a BF16 depends on how many BF16 lie between it and the scale, and
 *     on these two bits. Steps are counted from 4.71875 scales on, which no level but 0 lies below: v is 2 for each, and
 *     negative where the element is. A cell has the 256 values v with the same floor(v / 256), an octave. It contains at
 *     most two of the middles, because the first cells begin where they do. So a level is the cell's first one, and one more
 *     after each of two bounds. */
struct zt_nf4_steps {
    /* Of cells 0 to 7, then -8 to -1: the place of the first level among the 16, and the values of v % 256 - 128 after
     * which it rises. */
    struct {
        int8_t first[16] = {}, bound[2][16] = {};
    } of[4];
    bool fits = true;

    constexpr zt_nf4_steps() {
        for (int mantissa = 0; mantissa < 4; ++mantissa)
            for (int cell = -kCells; cell < kCells; ++cell) fill(mantissa, cell);
    }

    static constexpr float kFirst = 4.71875f;

private:
    static constexpr int kCells = 5; /* 5 octaves: up to 150 scales */
    static constexpr int kLevels[16] = {ZT_NF4_LEVELS};

    /* The BF16 that lies so many steps after kFirst scales, rounded down. */
    static constexpr float magnitude(float scale, int steps) {
        float unit = 1.0f;
        while (2 * unit <= kFirst * scale) unit *= 2;
        int digits = static_cast<int>(kFirst * scale / unit * 128) + steps;
        for (; digits >= 256; digits -= 128) unit *= 2;
        return static_cast<float>(digits) * unit / 128;
    }

    /* Between a level and the next one. */
    static constexpr int twice_middle(int level) { return kLevels[level & 15] + kLevels[(level + 1) & 15]; }

    constexpr void fill(int mantissa, int cell) {
        const float scale = 1.0f + static_cast<float>(mantissa) / 4, inverse = 1.0f / scale;
        int level = -8, found = 0;
        for (int place = 0; place < 256; place += 2) {
            const int v = 256 * cell + place;
            const float x = v == 0 ? 0.0f : v < 0 ? -magnitude(scale, -v / 2) : magnitude(scale, v / 2);
            const int before = level;
            while (level < 7 && 2 * (x * inverse) > static_cast<float>(twice_middle(level))) ++level;
            if (place == 0) {
                of[mantissa].first[cell & 15] = static_cast<int8_t>(level + 8);
                of[mantissa].bound[0][cell & 15] = of[mantissa].bound[1][cell & 15] = 127;
            } else if (level > before) {
                if (found == 2 || level > before + 1) fits = false;
                else of[mantissa].bound[found++][cell & 15] = static_cast<int8_t>(place - 1 - 128);
            }
        }
    }
};
#endif

#define ZT_NF4_SCALE 0x2a000000 /* the bits of 2^-43, which byte 0 stands for; bytes count in steps of 2^21 */
#define ZT_NF4_NEAREST 0xc0000

/* The byte of a block's scale, from the bits of its largest magnitude over 127 (not negative); 255 for NaN, Inf and
 * what is too large. */
ZT_WIRE_FN uint32_t zt_nf4_byte(uint32_t bits) {
    const int32_t step = ((int32_t)bits - (ZT_NF4_SCALE - ZT_NF4_NEAREST)) >> 21;
    return step < 0 ? 0u : step > 254 ? 255u : (uint32_t)step;
}

/* The bits of the scale that a byte stands for. */
ZT_WIRE_FN uint32_t zt_nf4_scale(uint32_t byte) { return byte == 255 ? 0x7fc00000u : (byte << 21) + ZT_NF4_SCALE; }

#ifdef __cplusplus
/* What the nibbles stand for, by the byte of their scale: bytes 1 to 3 of FP32, whose byte 0 is 0, as a product has at
 * most ten digits. NaN for the byte 255. */
struct zt_nf4_products {
    uint8_t of[256][3][16] = {};

    constexpr zt_nf4_products() {
        constexpr int levels[16] = {ZT_NF4_LEVELS};
        for (uint32_t byte = 0; byte < 256; ++byte)
            for (int nibble = 0; nibble < 16; ++nibble) {
                const uint32_t bits = product(levels[nibble], byte);
                for (int i = 0; i < 3; ++i) of[byte][i][nibble] = static_cast<uint8_t>(bits >> (8 + 8 * i));
            }
    }

private:
    static constexpr uint32_t product(int level, uint32_t byte) {
        if (byte == 255) return 0x7fc00000u;
        const uint32_t scale = (byte << 21) + ZT_NF4_SCALE, magnitude = static_cast<uint32_t>(level < 0 ? -level : level);
        const uint32_t digits = magnitude * (4 + (byte & 3)); /* four times the product's mantissa */
        if (digits == 0) return 0;
        uint32_t top = 0;
        while (digits >> (top + 1)) ++top;
        const uint32_t exponent = (scale >> 23) + top - 2, mantissa = (digits << (23 - top)) & 0x7fffffu;
        return (level < 0 ? 0x80000000u : 0u) | exponent << 23 | mantissa;
    }
};
#endif

#endif /* ZT_NF4_H */
