/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The inner loops of codes and trits, for the compiler to vectorise; included once by the file of each instruction set.
 * Note [One file, one instruction set] is in zt_cpu.h.
 */
#ifndef ZT_CPU_CODES_H
#define ZT_CPU_CODES_H

#include "zt_cpu.h"

namespace {

/* Bytes ahead of their use at which masters and codes are fetched into the first cache: blocks mostly follow one
 * another, but processors see no streams in what several loops read. */
constexpr int64_t kMastersAhead = 4096, kCodesAhead = 2560;
/* So many values are fetched at a time; a divisor of every block, so that compilers know how long loops are. */
constexpr int64_t kTile = 64;

ZT_INLINE void fetch(const float *x, const int8_t *codes, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(reinterpret_cast<const char *>(x + i) + kMastersAhead);
    for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(codes + i + kCodesAhead, 1);
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

/* The change of a code + 1: 0, 1 or 2 if it is a trit. */
ZT_INLINE uint8_t digit_of(uint8_t code, int8_t old) {
    return static_cast<uint8_t>(code - static_cast<uint8_t>(old) + 1);
}

/* Values of a block whose scale is neither 0 nor NaN; else zeros, which NaN or Inf times 0 is not. */
ZT_INLINE const float *usable(const float *x, float inverse) {
    static const float zeros[2048] = {};
    return inverse > 0.0f ? x : zeros;
}

struct Measured {
    uint32_t top; /* the bits of the largest |x|; those of NaN are larger than those of any number */
    uint8_t most; /* the largest digit */
};

ZT_INLINE Measured measure(const float *x, float inverse, const int8_t *codes, int64_t n) {
    uint32_t top = 0;
    uint8_t most = 0;
    for (int64_t i = 0; i < (n & -kTile); ++i) { /* that is n, and says that no part of a vector is left */
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        const uint8_t digit = digit_of(code_of(x[i], inverse), codes[i]);
        top = bits > top ? bits : top;
        most = digit > most ? digit : most;
    }
    return {top, most};
}

/* A block that gets another scale escapes, so what its codes would be does not matter: one pass finds all. */
bool assess(const float *x, const int8_t *codes, int64_t n, float *scale) {
    const float inverse = zt_codes_inverse(*scale);
    fetch(x, codes, n);
    Measured found = measure(x, inverse, codes, n);
    float top;
    memcpy(&top, &found.top, 4);
    const float now = zt_codes_scale(top, *scale);
    const bool rescaled = memcmp(&now, scale, 4) != 0;
    *scale = now;
    if (!(inverse > 0.0f)) found = measure(usable(x, inverse), inverse, codes, n);
    return rescaled || found.most > 2;
}

void recode(const float *x, float inverse, int64_t n, int8_t *__restrict codes) {
    x = usable(x, inverse);
    for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<int8_t>(code_of(x[i], inverse));
}

void advance(const float *x, float inverse, int64_t n, uint8_t weight, int8_t *__restrict codes,
             uint8_t *__restrict trits) {
    x = usable(x, inverse);
    for (int64_t tile = 0; tile < n; tile += kTile) {
        fetch(x + tile, codes + tile, kTile);
        for (int64_t i = tile; i < tile + kTile; ++i) {
            const auto code = static_cast<int8_t>(code_of(x[i], inverse));
            const int step = (code > codes[i]) - (code < codes[i]); /* also if the master was edited since assess */
            trits[i] = static_cast<uint8_t>(trits[i] + weight * (step + 1));
            codes[i] = static_cast<int8_t>(codes[i] + step);
        }
    }
}

/* Note [Reading trits]
 *     A byte v is taken for the fraction v / 243, in 8 bits and rounded up so that no digit is lost; the digits, most
 *     significant first, are what each product by 3 carries out of those bits. A byte above 242 is v - 243.
 */
void decode(const uint8_t *trits, int64_t n, int8_t *const *codes) {
    for (int64_t tile = 0; tile < n; tile += kTile) {
        uint8_t part[kTile];
        for (int64_t i = 0; i < kTile; ++i)
            part[i] = static_cast<uint8_t>(trits[tile + i] + ((trits[tile + i] * 55 + 1023) >> 10));
        for (int k = 4; k >= 0; --k) {
            int8_t *const code = codes[k] + tile;
            __builtin_prefetch(code + kCodesAhead, 1);
            for (int64_t i = 0; i < kTile; ++i) {
                code[i] = static_cast<int8_t>(code[i] + (part[i] >= 86) + (part[i] >= 171) - 1);
                part[i] = static_cast<uint8_t>(part[i] * 3);
            }
        }
    }
}

}  // namespace

#endif /* ZT_CPU_CODES_H */
