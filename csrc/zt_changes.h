/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The wire format of changed INT8 codes and the rule of their scales, for C, C++, CUDA and HIP.
 *
 *     [ends: two uint32 per 32 blocks: blocks sent whole and bytes of changes; padded to 128 bytes]
 *     [counts: uint8 per tile of min(block, 128) values; padded to 128 bytes]
 *     [scales: fp32 per block sent whole; padded to 128 bytes]
 *     [codes: int8, a block's values per block sent whole]
 *     [changes: of each tile of the other blocks the positions and signs, or positions and new codes, of its changes;
 *      padded to 128 bytes]
 *
 * zero_topo/quant/spec.py says what they mean; tests/kernels/test_wire_header.py holds the two equal.
 */
#ifndef ZT_CHANGES_H
#define ZT_CHANGES_H

#include <string.h>

#include "zt_wire.h"

#define ZT_CHANGES_CHUNK ((int64_t)32) /* blocks with one entry of ends */
#define ZT_CHANGES_TILE 128            /* values of a tile, or all of a smaller block */
#define ZT_CHANGES_LARGE 128           /* added to the count of a tile in which a code changes by more than 1 */
#define ZT_CHANGES_WHOLE 255           /* the count of the tiles of a block sent whole */

/* 1 if blocks may have so many values, else 0. */
ZT_WIRE_FN int zt_changes_valid(int32_t block) {
    const zt_wire_spec spec = {8, block, 0};
    return block != 1 && zt_wire_valid(spec);
}

ZT_WIRE_FN int32_t zt_changes_tile(int32_t block) { return block < ZT_CHANGES_TILE ? block : ZT_CHANGES_TILE; }
ZT_WIRE_FN int64_t zt_changes_chunks(int64_t blocks) { return (blocks + ZT_CHANGES_CHUNK - 1) / ZT_CHANGES_CHUNK; }

/* The most changes of a tile; a block that has a tile with more is sent whole. */
ZT_WIRE_FN int32_t zt_changes_most(int32_t tile) { return tile - tile / 8; }

/* How many codes change in a tile with such a count, and whether one of them changes by more than 1. */
ZT_WIRE_FN int32_t zt_changes_number(int32_t count) { return count & (ZT_CHANGES_LARGE - 1); }
ZT_WIRE_FN int zt_changes_large(int32_t count) { return count >= ZT_CHANGES_LARGE; }

/* Bytes of the signs of a mask, or of the new codes. */
ZT_WIRE_FN int32_t zt_changes_values(int32_t count) {
    return zt_changes_large(count) ? zt_changes_number(count) : (count + 7) / 8;
}

/* Whether the positions are a list, whose bytes hold the signs too, or a mask. */
ZT_WIRE_FN int zt_changes_listed(int32_t tile, int32_t count) {
    return zt_changes_number(count) <= tile / 8 + (zt_changes_large(count) ? 0 : zt_changes_values(count));
}

/* Bytes of a tile with such a count. */
ZT_WIRE_FN int32_t zt_changes_bytes(int32_t tile, int32_t count) {
    const int32_t values = zt_changes_values(count);
    if (!zt_changes_listed(tile, count)) return tile / 8 + values;
    return zt_changes_number(count) + (zt_changes_large(count) ? values : 0);
}

/* Bytes at which the counts, the scales, the codes and the changes begin. */
ZT_WIRE_FN int64_t zt_changes_counts_offset(int64_t blocks) { return zt_wire_padded(zt_changes_chunks(blocks) * 8); }

ZT_WIRE_FN int64_t zt_changes_scales_offset(int32_t block, int64_t blocks) {
    return zt_changes_counts_offset(blocks) + zt_wire_padded(blocks * (block / zt_changes_tile(block)));
}

ZT_WIRE_FN int64_t zt_changes_codes_offset(int32_t block, int64_t blocks, int64_t whole) {
    return zt_changes_scales_offset(block, blocks) + zt_wire_padded(whole * ZT_WIRE_SCALE_BYTES);
}

ZT_WIRE_FN int64_t zt_changes_offset(int32_t block, int64_t blocks, int64_t whole) {
    return zt_changes_codes_offset(block, blocks, whole) + whole * block;
}

/* Bytes of a message with so many bytes of changes. */
ZT_WIRE_FN int64_t zt_changes_nbytes(int32_t block, int64_t blocks, int64_t whole, int64_t changes) {
    return zt_wire_padded(zt_changes_offset(block, blocks, whole) + changes);
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

#endif /* ZT_CHANGES_H */
