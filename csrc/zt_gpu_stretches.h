/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * How lanes share blocks of messages, and find and write the values of a block in pieces.
 *
 * Note [Stretches]
 *     At the speed of a copy an H200 has 22 issue slots for each value that is quantized, half as many for INT4, and 13
 *     or 8 for each that is summed. So what a lane computes for itself must be little. A block is shared by so few lanes
 *     that each has 4 or 8 units. Formats are template arguments, so that addresses within a block are constants of an
 *     instruction. A thread block takes a stretch of neighbouring blocks, each 32 lanes an adjacent part: the piece and
 *     row of a lane's block are found once and then only advanced, and searched again where a row ends. A stretch lies in
 *     one member: of members with fewer blocks than a thread block takes, 64 or 32, the other lanes have nothing to do.
 *
 *     A block that lies in one row is quantized, and one message decoded, by aligned words of 16 bytes, all loads before
 *     the first use (Note [Turned blocks]). Sums are written so at aligned addresses only. Everything else is moved unit by
 *     unit; those loops are rolled (zt_gpu_pieces.h, Note [Units]).
 *
 * Note [Turned blocks]
 *     DeepSpeed cuts a parameter into ceil(numel / N) values a rank, so rows begin at any multiple of an element's size.
 *     Units are then those of memory: aligned words. The first word also has values of the block before, of which as many
 *     end the block in the word behind its last. One lane puts the two parts together, so that 32 units still are the 256
 *     values, the last of them before the first. No scale depends on their order. It is put right where a value has 4 or 8
 *     bits: a lane gets the next unit from its neighbour, and shifts. Decoding turns the packed values likewise, from the
 *     first aligned word on, and one lane writes its last unit in two parts.
 */
#ifndef ZT_GPU_STRETCHES_H
#define ZT_GPU_STRETCHES_H

#include "zt_gpu_tables.h"

/* -- Blocks -------------------------------------------------------------------------------------------------------- */

/* A format F has `size` values in a block, of `bits` each, and scales of `scale_bytes`. Lanes that share a block, of UNITS
 * units each, and the bytes of its values: */
template <typename F, int UNITS> constexpr int zt_lanes = F::size / (ZT_UNIT * UNITS);
template <typename F> constexpr int zt_block_bytes = F::size / 8 * F::bits;

/* How thread blocks share the blocks of all members. A stretch is what one takes at a time: up to `many` neighbouring
 * blocks of a member, of which each 32 lanes have an adjacent part, so that the run of a lane's block lasts for the next. */
struct zt_stretches {
    int64_t blocks, of_member; /* of each member; the stretches that they are */
    int32_t many;
    int32_t members, skip; /* without the member that is left out */
};

struct zt_stretch {
    int64_t first; /* block */
    int32_t many, member;
};

ZT_WIRE_FN int64_t zt_thread_blocks(const zt_stretches &s) { return s.of_member * s.members; }

ZT_DEVICE zt_stretch zt_stretch_at(const zt_stretches &s, int64_t i) {
    const int64_t member = zt_quotient(i, s.of_member), first = (i - member * s.of_member) * s.many;
    const int64_t left = s.blocks - first;
    return {first, left < s.many ? (int32_t)left : s.many, zt_kept_member(s.skip, member)};
}

/* A block, as a lane of those that share it sees it. */
struct zt_block {
    uint8_t *values, *scale; /* its lane's first unit, and the scale, in the first message to the member */
    int64_t element;         /* its first value, counted in the message */
    int32_t member;
    bool exists;
};

/* The number of a lane among LANES that share a block. */
template <int LANES> ZT_DEVICE int zt_lane() { return zt_kept((int)(threadIdx.x % LANES)); }

/* Calls visit(block, run) for each block of `messages` that a lane shares; `run` is kept from one to the next. All of 32
 * lanes come along, as they shuffle together: those beyond the last block get it too, and must write nothing. */
template <typename F, int UNITS, typename Visit>
ZT_DEVICE void zt_visit_blocks(const zt_stretches &work, const zt_gpu_messages &messages, int64_t scales_at, Visit visit) {
    constexpr int lanes = zt_lanes<F, UNITS>;
    const int each = work.many / (ZT_THREADS / 32);
    const int own = zt_kept((int)(threadIdx.x / 32) * each + (int)(threadIdx.x % 32 / lanes));
    const int64_t stretches = zt_thread_blocks(work), step = gridDim.x;
    for (int64_t i = blockIdx.x; i < stretches; i += step) {
        const zt_stretch stretch = zt_stretch_at(work, i);
        uint8_t *message = zt_message_at(messages, stretch.member);
        uint8_t *values = message + zt_kept(stretch.first * zt_block_bytes<F> + zt_lane<lanes>() * F::bits);
        uint8_t *scales = message + zt_kept(scales_at + stretch.first * F::scale_bytes);
        const int64_t first = zt_kept(stretch.first);
        const int many = zt_kept(stretch.many);
        zt_run run = {nullptr, 0, 0, ZT_FP32};
#pragma unroll 1
        for (int t = 0; t < each; t += 32 / lanes) { /* the same for all lanes: nvcc then knows that they stay together */
            const bool exists = own + t < many;
            const int number = zt_kept(exists ? own + t : many - 1);
            visit(zt_block{values + number * zt_block_bytes<F>, scales + number * F::scale_bytes,
                           (first + number) * F::size, stretch.member, exists},
                  run);
        }
    }
}

/* -- Runs that last from block to block ---------------------------------------------------------------------------- */

/* Makes the run of one block that of the next, which begins `values` later, at `element`. Searches only where a row ends. */
ZT_DEVICE void zt_advance(zt_run &run, int values, const zt_gpu_pieces &pieces, int32_t member, int64_t element) {
    run.left -= values;
    if (run.left <= 0) {
        run = zt_find(pieces, member, element);
    } else {
        run.data += values * zt_bytes_of(run.dtype);
        run.present -= values;
    }
}

/* What a block's run is for the unit that begins `at` values after the block. */
ZT_DEVICE zt_run zt_unit_run(const zt_run &block, int at) {
    return {block.data + at * zt_bytes_of(block.dtype), block.left - at, block.present - at, block.dtype};
}

/* Whether any of a unit's elements exists, as far as its run says. */
ZT_DEVICE bool zt_has_elements(const zt_run &unit) { return unit.left < ZT_UNIT || unit.present > 0; }

/* One unit that may lie in several runs, or in none. */
template <typename Work>
ZT_DEVICE void zt_walk_unit(const zt_gpu_pieces &pieces, int32_t member, int64_t element, float *v, Work work) {
    zt_walk<1>(pieces, {0, element, member, 0, 1}, {nullptr, 0, 0, ZT_FP32}, v, work);
}

/* Makes the run of the lane's last block that of this one. */
template <typename F, int UNITS>
ZT_DEVICE void zt_find_block(const zt_gpu_pieces &pieces, const zt_block &block, zt_run &run) {
    zt_advance(run, 32 / zt_lanes<F, UNITS> * F::size, pieces, block.member, block.element);
}

/* -- Writing ------------------------------------------------------------------------------------------------------- */

/* Writes a unit of a block, `at` values after its beginning, where it exists. */
ZT_DEVICE void zt_write_unit(const zt_gpu_pieces &pieces, const zt_block &block, const zt_run &run, int at, float *v,
                             zt_writing writing) {
    const zt_run unit = zt_unit_run(run, at);
    if (unit.present >= ZT_UNIT)
        writing.unit(unit, v);
    else if (zt_has_elements(unit))
        zt_walk_unit(pieces, block.member, block.element + at, v, writing);
}

/* Writes a lane's units to an aligned run. */
template <typename F, int UNITS, int DTYPE> ZT_DEVICE void zt_write_aligned(char *data, int lane, float *v, bool accumulate) {
    constexpr int apart = zt_lanes<F, UNITS> * ZT_UNIT * zt_bytes_of(DTYPE);
    data += lane * (ZT_UNIT * zt_bytes_of(DTYPE));
    if (accumulate) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            float before[ZT_UNIT];
            zt_load_unit<DTYPE, true>(data + u * apart, before);
#pragma unroll
            for (int k = 0; k < ZT_UNIT; k++) v[u * ZT_UNIT + k] = zt_add(before[k], v[u * ZT_UNIT + k]);
        }
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) zt_store_unit<DTYPE, true>(data + u * apart, v + u * ZT_UNIT);
}

/* Writes a lane's units where they exist; v is used up. */
template <typename F, int UNITS>
ZT_DEVICE void zt_write_block(const zt_gpu_pieces &pieces, const zt_block &block, const zt_run &run, float *v, bool accumulate) {
    const int lane = zt_lane<zt_lanes<F, UNITS>>();
    if (run.present >= F::size && zt_aligned16(run.data)) {
        if (run.dtype == ZT_FP32)
            zt_write_aligned<F, UNITS, ZT_FP32>(run.data, lane, v, accumulate);
        else if (run.dtype == ZT_BF16)
            zt_write_aligned<F, UNITS, ZT_BF16>(run.data, lane, v, accumulate);
        else
            zt_write_aligned<F, UNITS, ZT_FP16>(run.data, lane, v, accumulate);
        return;
    }
#pragma unroll 1
    for (int u = 0; u < UNITS; u++) {
        zt_write_unit(pieces, block, run, (u * zt_lanes<F, UNITS> + lane) * ZT_UNIT, v, {accumulate});
        zt_rotate<ZT_UNIT, UNITS * ZT_UNIT>(v);
    }
}

/* -- On the host --------------------------------------------------------------------------------------------------- */

#define ZT_LONGEST 8 /* tiles of a stretch */

/* `lanes` lanes for each of the `blocks` of `size` values that each member has. */
static inline int zt_take_stretches(const zt_messages &m, int64_t blocks, int32_t size, int32_t lanes, zt_stretches *out) {
    zt_shares shares;
    const int status = zt_take_shares(m, blocks, size, lanes, &shares);
    const int64_t fit = shares.tiles / zt_shared_tiles(), tiles = fit < 1 ? 1 : fit < ZT_LONGEST ? fit : ZT_LONGEST;
    const int32_t many = (int32_t)tiles * (ZT_THREADS / lanes);
    *out = {blocks, zt_blocks_for(blocks, many), many, shares.members, shares.skip};
    return status;
}

#endif /* ZT_GPU_STRETCHES_H */
