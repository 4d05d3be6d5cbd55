/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The inner loops of codes and trits, for the compiler to vectorise; included once by the file of each instruction set.
 * Note [One file, one instruction set] is in zt_cpu.h.
 */
#ifndef ZT_CPU_CODES_H
#define ZT_CPU_CODES_H

#include "zt_cpu.h"

namespace {

/* The largest |x|; NaN, whose bits are larger than those of any number, if one is. */
ZT_INLINE float largest(const float *x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float top;
    memcpy(&top, &most, 4);
    return top;
}

/* The code of a value, clamped and then rounded to nearest even: 1.5 * 2^23 puts units at the end of the fraction. */
ZT_INLINE int32_t code_of(float x, float inverse) {
    const float y = x * inverse;
    const float low = y > -127.0f ? y : -127.0f;
    const float shifted = (low < 127.0f ? low : 127.0f) + 0x1.8p23f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    return bits - 0x4b400000;
}

/* Values of a block whose scale is neither 0 nor NaN; else zeros, which NaN or Inf times 0 is not. */
ZT_INLINE const float *usable(const float *x, float inverse) {
    static const float zeros[2048] = {};
    return inverse > 0.0f ? x : zeros;
}

bool assess(const float *x, const int8_t *codes, int64_t n, float *scale) {
    const float now = zt_codes_scale(largest(x, n), *scale);
    const bool rescaled = memcmp(&now, scale, 4) != 0;
    *scale = now;
    if (rescaled) return true;
    const float inverse = zt_codes_inverse(now);
    x = usable(x, inverse);
    uint32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t change = static_cast<uint32_t>(code_of(x[i], inverse) - codes[i] + 1);
        most = change > most ? change : most;
    }
    return most > 2;
}

void recode(const float *x, float inverse, int64_t n, int8_t *__restrict codes) {
    x = usable(x, inverse);
    for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<int8_t>(code_of(x[i], inverse));
}

void advance(const float *x, float inverse, int64_t n, int8_t *__restrict codes, uint8_t *__restrict trits) {
    x = usable(x, inverse);
    for (int64_t i = 0; i < n; ++i) {
        const auto code = static_cast<uint8_t>(code_of(x[i], inverse));
        const auto digit = static_cast<uint8_t>(code - static_cast<uint8_t>(codes[i]) + 1);
        codes[i] = static_cast<int8_t>(code);
        trits[i] = static_cast<uint8_t>(trits[i] * 3 + digit);
    }
}

/* Note [Reading trits]
 *     A byte of v is taken for the fraction v / 243, in 8 bits and rounded up so that no digit is lost; the digits, most
 *     significant first, are what each product by 3 carries out of those bits. Bytes above 242 are v - 243.
 */
void decode(const uint8_t *__restrict trits, int64_t n, int8_t *const *codes) {
    int8_t *__restrict a = codes[0], *__restrict b = codes[1], *__restrict c = codes[2];
    int8_t *__restrict d = codes[3], *__restrict e = codes[4];
    for (int64_t i = 0; i < n; ++i) {
        const uint8_t v = trits[i];
        const auto p4 = static_cast<uint8_t>(v + ((v * 55 + 1023) >> 10));
        const auto p3 = static_cast<uint8_t>(p4 * 3), p2 = static_cast<uint8_t>(p3 * 3);
        const auto p1 = static_cast<uint8_t>(p2 * 3), p0 = static_cast<uint8_t>(p1 * 3);
        e[i] = static_cast<int8_t>(e[i] + (p4 >= 86) + (p4 >= 171) - 1);
        d[i] = static_cast<int8_t>(d[i] + (p3 >= 86) + (p3 >= 171) - 1);
        c[i] = static_cast<int8_t>(c[i] + (p2 >= 86) + (p2 >= 171) - 1);
        b[i] = static_cast<int8_t>(b[i] + (p1 >= 86) + (p1 >= 171) - 1);
        a[i] = static_cast<int8_t>(a[i] + (p0 >= 86) + (p0 >= 171) - 1);
    }
}

}  // namespace

#endif /* ZT_CPU_CODES_H */
