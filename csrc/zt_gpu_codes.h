/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels on codes share: where blocks lie, who finds it, and bytes worked on in pairs.
 *
 * Note [Homes]
 *     To find where a block lies takes about a hundred instructions, as much as all else that is done for a lane's share
 *     of its values. So 32 lanes first find those of 32 blocks, one each, and then work on one block after the other (or
 *     on as many as they have lanes for), whose place the lane that found it tells the others.
 *
 * Note [Two in a word]
 *     Bytes are worked on in pairs: every other one of a word, in its two halves of 16 bits. Sums and differences of
 *     codes are kept to 8 bits, and no product needs more than 16, so that neither half reaches into the other.
 */
#ifndef ZT_GPU_CODES_H
#define ZT_GPU_CODES_H

#include "zt_gpu_units.h"

#define ZT_WARP 32
#define ZT_WARPS (ZT_THREADS / ZT_WARP)
#define ZT_HALVES 0x00ff00ffu

struct zt_codes_arguments {
    zt_codes codes;
    zt_part part;
    int64_t blocks, tiles; /* of a message; what 32 lanes take at a time */
    zt_masters masters;    /* assessing and emitting */
    float *scales;         /* assessing */
    uint8_t *counts, *steps;
    int64_t *sizes;
    zt_change change; /* emitting */
    uint8_t *message;
    int64_t nbytes; /* of a message */
    zt_gpu_messages messages; /* applying */
    int32_t skip;
};

/* -- Where blocks lie ---------------------------------------------------------------------------------------------- */

struct zt_home {
    uint8_t *codes, *scale; /* none if there is no such block */
    const char *values;     /* its masters, of which `present` exist */
    int32_t present;
};

ZT_DEVICE int64_t zt_first_tile(void) { return (int64_t)blockIdx.x * ZT_WARPS + threadIdx.x / ZT_WARP; }
ZT_DEVICE int64_t zt_tile_step(void) { return (int64_t)gridDim.x * ZT_WARPS; }

/* Block i of a member's part; its masters only if there are any. */
ZT_DEVICE zt_home zt_home_of(const zt_codes_arguments &a, int64_t member, int64_t i) {
    const int64_t width = a.part.end - a.part.begin, row = zt_quotient(i, width), column = a.part.begin + i - row * width;
    const int64_t *param = a.codes.params + 6 * (int64_t)zt_load<int32_t>(a.codes.param_of + column);
    const int64_t here = column - zt_fetch(param + 3), begin = here * a.codes.block;
    const int64_t index = (member + row * a.part.members) * zt_fetch(param + 2) + here;
    zt_home home = {a.codes.stored + zt_fetch(param) + index * a.codes.block, a.codes.stored + zt_fetch(param + 1) + index * 4,
                    nullptr, 0};
    const int64_t from = zt_fetch(param + 4) + begin - a.masters.first;
    int64_t present = zt_fetch(param + 5) - begin;
    present = present < a.masters.columns - from ? present : a.masters.columns - from;
    present = present < a.codes.block ? present : a.codes.block;
    if (from < 0 || present <= 0) return home;
    home.values = (const char *)(a.masters.data + row * a.masters.row_stride + from);
    home.present = (int32_t)present;
    return home;
}

ZT_DEVICE uint64_t zt_shuffle_wide(uint64_t value, int lane) {
    const uint64_t high = zt_shuffle((uint32_t)(value >> 32), lane, ZT_WARP);
    return high << 32 | zt_shuffle((uint32_t)value, lane, ZT_WARP);
}

/* The home that another lane found; without the scale, which is that lane's business. */
ZT_DEVICE zt_home zt_home_of_lane(zt_home home, int lane) {
    uint8_t *codes = (uint8_t *)(uintptr_t)zt_shuffle_wide((uintptr_t)home.codes, lane);
    const char *values = (const char *)(uintptr_t)zt_shuffle_wide((uintptr_t)home.values, lane);
    return {codes, nullptr, values, (int32_t)zt_shuffle((uint32_t)home.present, lane, ZT_WARP)};
}

ZT_DEVICE uint32_t zt_even(uint32_t word) { return word & ZT_HALVES; }
ZT_DEVICE uint32_t zt_odd(uint32_t word) { return word >> 8 & ZT_HALVES; }
ZT_DEVICE uint32_t zt_joined(uint32_t even, uint32_t odd) { return (even & ZT_HALVES) | (odd << 8 & ~ZT_HALVES); }

/* -- Tiles: each of 32 lanes has four values of one, or none --------------------------------------------------------- */

/* A lane's four bits of a mask. */
ZT_DEVICE uint32_t zt_four_of(const uint8_t *mask, int tile, int lane) {
    return 4 * lane < tile ? zt_load<uint8_t>(mask + lane / 2) >> 4 * (lane & 1) & 15u : 0;
}

/* How many bits the lanes before this one have set, of four each. */
ZT_DEVICE uint32_t zt_before_lane(uint32_t four, int lane) {
    uint32_t before = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) before += (uint32_t)__popc(zt_ballot((int)(four >> k & 1)) & ((1u << lane) - 1));
    return before;
}

/* Four bits -> the lowest bits of four bytes. */
ZT_DEVICE uint32_t zt_spread(uint32_t four) { return four * 0x00204081u & 0x01010101u; }

/* Increases a lane's codes by one, and decreases them. */
ZT_DEVICE void zt_step(uint8_t *codes, int lane, uint32_t more, uint32_t less) {
    if (!(more | less)) return;
    const uint32_t by = zt_spread(more) + zt_spread(less) * 255, old = zt_load<uint32_t>(codes + 4 * lane);
    zt_store<uint32_t>(codes + 4 * lane, zt_joined(zt_even(old) + zt_even(by), zt_odd(old) + zt_odd(by)));
}


/* -- On the host --------------------------------------------------------------------------------------------------------- */

static inline int zt_take_codes(zt_codes codes, zt_part part, zt_codes_arguments *out) {
    const int64_t columns = part.end - part.begin;
    if (!zt_changes_valid(codes.block)) return ZT_BAD_SPEC;
    if (codes.count < 0 || codes.nbytes < 0 || codes.nbytes > zt_most) return ZT_BAD_SIZE;
    if (part.begin < 0 || columns < 0 || part.end > codes.columns || part.rows < 0 || part.members < 1) return ZT_BAD_SIZE;
    out->codes = codes, out->part = part;
    out->blocks = zt_product(part.rows, columns);
    if (out->blocks > INT32_MAX || zt_product(zt_product(out->blocks, part.members), codes.block) > codes.nbytes)
        return ZT_BAD_SIZE;
    if (out->blocks > 0 && (!codes.stored || !codes.params || !codes.param_of)) return ZT_BAD_SIZE;
    return zt_is_odd((int64_t)(uintptr_t)codes.stored, 16) ? ZT_BAD_ALIGNMENT : ZT_OK;
}

static inline int zt_launch_codes(void (*kernel)(zt_codes_arguments), const zt_codes_arguments &a, void *stream) {
    return a.tiles ? zt_launch(kernel, zt_blocks_for(a.tiles, ZT_WARPS), ZT_THREADS, a, stream) : (int)ZT_OK;
}


#endif /* ZT_GPU_CODES_H */
