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

#endif /* ZT_NF4_H */
