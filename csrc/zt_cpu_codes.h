/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The inner loops of codes, for the compiler to vectorise; included once by the file of each instruction set, which
 * defines mask_pack. Note [One file, one instruction set] is in zt_cpu.h.
 */
#ifndef ZT_CPU_CODES_H
#define ZT_CPU_CODES_H

#include "zt_cpu.h"

namespace {

/* Bytes ahead of their use at which masters and codes are fetched into the first cache: blocks mostly follow one
 * another, but processors see no streams in what several loops read. */
constexpr int64_t kMastersAhead = 4096, kCodesAhead = 2560;
/* So many values are measured at a time; a divisor of every tile, so that compilers know how long loops are. */
constexpr int64_t kWord = 64;

ZT_INLINE void fetch(const float *x, const int8_t *codes, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(reinterpret_cast<const char *>(x + i) + kMastersAhead);
    for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(codes + i + kCodesAhead);
}

/* The code of a value, to nearest even: adding 1.5 * 2^23 puts units at the end of the fraction. The bits of the sum
 * are in order even where that is not so, hence clamped as integers (of floats, compilers make branches). */
ZT_INLINE uint8_t code_of(float x, float inverse) {
    const float shifted = x * inverse + 0x1.8p23f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = bits < 0x4b400000 - 127 ? 0x4b400000 - 127 : bits;
    return static_cast<uint8_t>(bits > 0x4b400000 + 127 ? 0x4b400000 + 127 : bits);
}

/* Values of a block whose scale is neither 0 nor NaN; else zeros, which NaN or Inf times 0 is not. */
ZT_INLINE const float *usable(const float *x, float inverse) {
    static const float zeros[2048] = {};
    return inverse > 0.0f ? x : zeros;
}

/* Writes the masks and the count of each tile. Returns the bits of the largest |x|; those of NaN are larger than those of
 * any number. */
ZT_INLINE uint32_t measure(const float *x, float inverse, const int8_t *codes, int64_t n, zt::Steps out) {
    const int64_t tile = n < ZT_CHANGES_TILE ? n : ZT_CHANGES_TILE;
    uint32_t top = 0;
    for (int64_t word = 0; word < n; word += kWord) {
        uint8_t changed[kWord], less[kWord], most = 0; /* the largest change + 1, modulo 256: above 2 if one is large */
        for (int64_t i = 0; i < kWord; ++i) {
            uint32_t bits;
            memcpy(&bits, x + word + i, 4);
            bits &= 0x7fffffff;
            const auto change = static_cast<uint8_t>(code_of(x[word + i], inverse) + 1 - codes[word + i]);
            top = bits > top ? bits : top;
            most = change > most ? change : most;
            changed[i] = change != 1;
            less[i] = change == 0;
        }
        uint8_t *const masks = out.masks + word / tile * (tile / 4) + word % tile / 8;
        uint64_t set;
        mask_pack(changed, kWord, masks);
        mask_pack(less, kWord, masks + tile / 8);
        memcpy(&set, masks, 8);
        uint8_t *const count = out.counts + word / tile;
        const int before = word % tile ? *count : 0, number = zt_changes_number(before) + __builtin_popcountll(set);
        const bool large = most > 2 || zt_changes_large(before);
        *count = static_cast<uint8_t>((number < 127 ? number : 127) | (large ? ZT_CHANGES_LARGE : 0));
    }
    return top;
}

/* A block that gets another scale is sent whole, so what its codes would be does not matter: one pass is enough. */
void assess(const float *x, const int8_t *codes, int64_t n, float *scale, zt::Steps out) {
    const float inverse = zt_codes_inverse(*scale);
    fetch(x, codes, n);
    const uint32_t bits = measure(x, inverse, codes, n, out);
    float top;
    memcpy(&top, &bits, 4);
    const float now = zt_codes_scale(top, *scale);
    const bool rescaled = memcmp(&now, scale, 4) != 0;
    *scale = now;
    if (!(inverse > 0.0f)) measure(usable(x, inverse), inverse, codes, n, out);
    const auto tile = static_cast<int32_t>(n < ZT_CHANGES_TILE ? n : ZT_CHANGES_TILE);
    const int64_t tiles = n / tile;
    bool whole = rescaled;
    out.size[0] = out.size[1] = 0;
    for (int64_t t = 0; t < tiles; ++t) {
        whole |= zt_changes_number(out.counts[t]) > zt_changes_most(tile);
        out.size[1] += zt_changes_bytes(tile, out.counts[t]);
    }
    if (!whole) return;
    out.size[0] = 1, out.size[1] = 0;
    memset(out.counts, ZT_CHANGES_WHOLE, static_cast<size_t>(tiles));
}

void recode(const float *x, float inverse, int64_t n, int8_t *__restrict codes) {
    x = usable(x, inverse);
    for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<int8_t>(code_of(x[i], inverse));
}

}  // namespace

#endif /* ZT_CPU_CODES_H */
