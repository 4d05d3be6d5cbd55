/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The wire format of changed INT8 codes and the rule of their scales, for C, C++, CUDA and HIP.
 *
 *     [escaped: uint32; padded to 128 bytes]
 *     [mask: a bit per block that escapes; zero-padded to 64 blocks, then to 128 bytes]
 *     [before: uint32 per 64 blocks; padded to 128 bytes]
 *     [scales: fp32 per escaped block; padded to 128 bytes]
 *     [codes: int8, a block's values per escaped block]
 *     [trits: a block's bytes for five blocks that do not escape; padded to 128 bytes]
 *
 * zero_topo/quant/spec.py says what they mean; tests/kernels/test_wire_header.py holds the two equal.
 */
#ifndef ZT_TRITS_H
#define ZT_TRITS_H

#include <string.h>

#include "zt_wire.h"

#define ZT_TRITS_GROUP ((int64_t)5)  /* blocks that share their bytes */
#define ZT_TRITS_CHUNK ((int64_t)64) /* blocks with one count of those that escaped before */
#define ZT_TRITS_MASK ((int64_t)128) /* byte at which the mask begins */

/* 1 if blocks may have so many values, else 0. */
ZT_WIRE_FN int zt_trits_valid(int32_t block) {
    const zt_wire_spec spec = {8, block, 0};
    return block != 1 && zt_wire_valid(spec);
}

ZT_WIRE_FN int64_t zt_trits_chunks(int64_t blocks) { return (blocks + ZT_TRITS_CHUNK - 1) / ZT_TRITS_CHUNK; }

/* Bytes at which the counts, the scales, the codes and the trits begin. */
ZT_WIRE_FN int64_t zt_trits_before_offset(int64_t blocks) {
    return ZT_TRITS_MASK + zt_wire_padded(zt_trits_chunks(blocks) * (ZT_TRITS_CHUNK / 8));
}

ZT_WIRE_FN int64_t zt_trits_scales_offset(int64_t blocks) {
    return zt_trits_before_offset(blocks) + zt_wire_padded(zt_trits_chunks(blocks) * 4);
}

ZT_WIRE_FN int64_t zt_trits_codes_offset(int64_t blocks, int64_t escaped) {
    return zt_trits_scales_offset(blocks) + zt_wire_padded(escaped * ZT_WIRE_SCALE_BYTES);
}

ZT_WIRE_FN int64_t zt_trits_offset(int32_t block, int64_t blocks, int64_t escaped) {
    return zt_trits_codes_offset(blocks, escaped) + escaped * block;
}

/* Bytes of a message. */
ZT_WIRE_FN int64_t zt_trits_nbytes(int32_t block, int64_t blocks, int64_t escaped) {
    const int64_t groups = (blocks - escaped + ZT_TRITS_GROUP - 1) / ZT_TRITS_GROUP;
    return zt_wire_padded(zt_trits_offset(block, blocks, escaped) + groups * block);
}

/* The scale of a block from now on: of its largest |x| (NaN if one is) and the scale it has. */
ZT_WIRE_FN float zt_codes_scale(float top, float old) {
    const int fits = top >= old * 90.0f && top <= old * 127.49f && top <= 0x1.fffffep127f; /* the product may be Inf */
    if (old > 0.0f && fits) return old;
    if (top < 0x1p-100f) return 0.0f;
    const float fresh = top * 1.0625f / 127.0f;
    if (fresh <= 0x1.fffffep127f) return fresh;
    const uint32_t bits = 0x7fc00000;
    float nan;
    memcpy(&nan, &bits, 4);
    return nan;
}

/* What a block's values are multiplied by; 0 (and its codes are 0) where the scale is 0 or NaN. */
ZT_WIRE_FN float zt_codes_inverse(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

#endif /* ZT_TRITS_H */
