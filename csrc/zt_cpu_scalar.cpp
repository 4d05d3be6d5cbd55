/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The inner loops in plain C++, for any processor; what they compute is Note [Arithmetic contract] in
 * zero_topo/quant/reference.py, line by line.
 */
#include <math.h>

#include "zt_cpu.h"
#include "zt_nf4.h"

#define ZT_INLINE static inline

namespace {

struct V {
    /* Bit i is set if counts[i] == 1, of 16. */
    ZT_INLINE uint32_t ones(const uint32_t *counts) {
        uint32_t found = 0;
        for (int i = 0; i < 16; ++i) found |= static_cast<uint32_t>(counts[i] == 1) << i;
        return found;
    }
};

}  // namespace

#include "zt_cpu_sparse.h"

namespace {
constexpr auto mask_pack = pack_rest;
}

#include "zt_cpu_codes.h"

namespace {

using zt::Elements;
using zt::Planes;
using zt::Terms;
using zt::Writing;

ZT_INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

ZT_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

template <class T> ZT_INLINE T read(const uint8_t *p) {
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}

template <class T> ZT_INLINE void write(uint8_t *p, T x) { memcpy(p, &x, sizeof x); }

/* FP16 -> FP32, exact. */
ZT_INLINE float from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest > 0x7c00) return float_of(sign | 0x7fc00000 | rest << 13);
    if (rest == 0x7c00) return float_of(sign | 0x7f800000);
    /* 2^112 makes up for the exponents' biases, for denormal halves too. */
    return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
}

/* FP32 -> FP16, to nearest even; NaN stays NaN. */
ZT_INLINE uint16_t to_half(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (rest < 0x38800000) /* denormal: adding 0.5 puts the units of 2^-24 at the end of the fraction */
        return static_cast<uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000));
    return static_cast<uint16_t>(sign | ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13));
}

ZT_INLINE uint16_t to_bfloat(float x) {
    const uint32_t bits = bits_of(x);
    return x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

ZT_INLINE float element(Elements x, int64_t i) {
    if (x.dtype == ZT_FP32) return read<float>(x.data + 4 * i);
    const uint16_t bits = read<uint16_t>(x.data + 2 * i);
    return x.dtype == ZT_FP16 ? from_half(bits) : float_of(static_cast<uint32_t>(bits) << 16);
}

ZT_INLINE void put(Elements out, int64_t i, float x) {
    if (out.dtype == ZT_FP32) return write(out.data + 4 * i, x);
    write(out.data + 2 * i, out.dtype == ZT_FP16 ? to_half(x) : to_bfloat(x));
}

constexpr float kTree[16] = {ZT_NF4_TREE};
constexpr int8_t kLevels[16] = {ZT_NF4_LEVELS};

struct Scaling {
    uint32_t stored; /* in the message: an FP32's bits or a byte */
    float inverse;
    bool bad;
};

Scaling measured(const float *x, zt_wire_spec spec) {
    uint32_t most = 0;
    for (int64_t i = 0; i < spec.block_size; ++i) {
        const uint32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    const float span = float_of(most), top = spec.bits == 8 ? 127.0f : 7.0f;
    if (zt_wire_is_nf4(spec)) {
        const uint32_t byte = zt_nf4_byte(bits_of(span / 127.0f));
        return {byte, 1.0f / float_of(zt_nf4_scale(byte)), byte == 255};
    }
    if (!(span <= 0x1.fffffep127f)) return {0x7fc00000, 0.0f, true};
    if (span < 0x1p-100f) return {0, 0.0f, false};
    return {bits_of(span / top), top / span, false};
}

/* To the nearest integer, the even one of two; |x| < 2^22. */
ZT_INLINE int32_t rounded(float x) { return static_cast<int32_t>(bits_of(x + 0x1.8p23f) - bits_of(0x1.8p23f)); }

/* The level nearest to x, as the number of it. */
ZT_INLINE int32_t nf4_of(float x) {
    int32_t node = 1;
    for (int level = 0; level < 4; ++level) node = 2 * node + (x > kTree[node]);
    return node - 24;
}

void quantize_block(const float *x, zt_wire_spec spec, Scaling s, uint8_t *out) {
    for (int64_t i = 0; i < spec.block_size; ++i) {
        const int32_t q = s.bad ? 0 : zt_wire_is_nf4(spec) ? nf4_of(x[i] * s.inverse) : rounded(x[i] * s.inverse);
        if (spec.bits == 8)
            out[i] = static_cast<uint8_t>(q);
        else if (i % 2 == 0)
            out[i / 2] = static_cast<uint8_t>(q & 15);
        else
            out[i / 2] = static_cast<uint8_t>(out[i / 2] | (q & 15) << 4);
    }
}

void widen(Elements x, int64_t n, uint8_t *out) {
    for (int64_t i = 0; i < n; ++i) write(out + 4 * i, element(x, i));
}

void narrow(const uint8_t *x, int64_t n, Elements out) {
    for (int64_t i = 0; i < n; ++i) put(out, i, read<float>(x + 4 * i));
}

void add(Elements x, int64_t n, uint8_t *total) {
    for (int64_t i = 0; i < n; ++i) write(total + 4 * i, read<float>(total + 4 * i) + element(x, i));
}

void quantize(zt_wire_spec spec, Elements x, int64_t blocks, Planes out, bool) {
    float buffer[2048];
    for (int64_t b = 0; b < blocks; ++b) {
        for (int64_t i = 0; i < spec.block_size; ++i) buffer[i] = element(x, i);
        const Scaling s = measured(buffer, spec);
        quantize_block(buffer, spec, s, out.values + b * zt_wire_block_bytes(spec));
        memcpy(out.scales + zt_wire_scale_bytes(spec) * b, &s.stored, static_cast<size_t>(zt_wire_scale_bytes(spec)));
        x.data += spec.block_size * (x.dtype == ZT_FP32 ? 4 : 2);
    }
}

ZT_INLINE int32_t quantized(const uint8_t *values, int64_t i, zt_wire_spec spec) {
    if (spec.bits == 8) return static_cast<int8_t>(values[i]);
    const int32_t nibble = values[i / 2] >> (i % 2 * 4) & 15;
    return zt_wire_is_nf4(spec) ? kLevels[nibble] : (nibble ^ 8) - 8;
}

/* total = (first) or total += the values of a block of one message. */
void add_block(const Terms &terms, const uint8_t *data, int64_t block, bool first, float *total) {
    const zt_wire_spec spec = terms.spec;
    const uint8_t *values = data + block * zt_wire_block_bytes(spec);
    const uint8_t *at = data + terms.scales + zt_wire_scale_bytes(spec) * block;
    const float scale = zt_wire_is_nf4(spec) ? float_of(zt_nf4_scale(*at)) : read<float>(at);
    for (int64_t i = 0; i < spec.block_size; ++i) {
        const float x = static_cast<float>(quantized(values, i, spec)) * scale;
        total[i] = first ? x : total[i] + x;
    }
}

void sum(const Terms &terms, zt_range blocks, Elements out, Writing how) {
    const int64_t size = terms.spec.block_size;
    float total[2048];
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        for (int32_t s = 0; s < terms.count; ++s) add_block(terms, zt::source_of(terms, s), block, s == 0, total);
        for (int64_t i = 0; terms.factor != 1.0f && i < size; ++i) total[i] *= terms.factor;
        for (int64_t i = 0; how.accumulate && i < size; ++i) total[i] = element(out, i) + total[i];
        for (int64_t i = 0; i < size; ++i) put(out, i, total[i]);
        out.data += size * (out.dtype == ZT_FP32 ? 4 : 2);
    }
}

void stream(const uint8_t *x, int64_t bytes, uint8_t *out) { memcpy(out, x, static_cast<size_t>(bytes)); }

int64_t count_above(Elements x, int64_t n, float threshold) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) found += !(fabsf(element(x, i)) < threshold);
    return found;
}

int64_t compact_above(Elements x, zt_range elements, float threshold, zt::Picks picks) {
    int64_t found = 0;
    const Elements values = {picks.values, x.dtype};
    const int64_t size = x.dtype == ZT_FP32 ? 4 : 2;
    for (int64_t i = elements.begin; i < elements.end; ++i) {
        if (fabsf(element(x, i)) < threshold) continue;
        if (found < picks.capacity) {
            picks.indices[found] = i;
            memcpy(values.data + found * size, x.data + i * size, static_cast<size_t>(size));
        }
        ++found;
    }
    return found;
}

}  // namespace

const zt::Kernels zt::kScalar = {quantize,    sum,           widen,     narrow,      add,           stream,
                                 count_above, compact_above, mask_pack, unpack_rest, sketch_insert, sketch_peel,
                                 assess,      recode};
