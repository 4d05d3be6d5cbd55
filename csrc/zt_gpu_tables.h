/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * What kernels on tables of messages share: which block of which member a lane has, where a message lies, and, on the
 * host, the checks of their arguments.
 */
#ifndef ZT_GPU_TABLES_H
#define ZT_GPU_TABLES_H

#include "zt_gpu_pieces.h"

#define ZT_EARLY 8

/* The table of zt_messages, without the source that is left out. */
struct zt_gpu_messages {
    uint8_t *data;
    int64_t source_step, outer_step, inner_step;
    int32_t inner, count, hole;
    int64_t early[ZT_EARLY]; /* zt_source_offset of the first ones: no instruction looks for the hole */
};

/* How threads share the blocks of all members: 1 << lane_bits lanes each. */
struct zt_shares {
    int64_t blocks; /* of a member, each of `size` values */
    int64_t tiles;  /* of ZT_THREADS lanes */
    int32_t size, lane_bits;
    int32_t members, skip; /* without the member that is left out */
};

ZT_DEVICE uint8_t *zt_message_at(const zt_gpu_messages &m, int32_t member) {
    const int32_t outer = member < m.inner ? 0 : member / m.inner, inner = member - outer * m.inner;
    return m.data + (outer * m.outer_step + inner * m.inner_step);
}

/* From a member's message of the first source to that of its i-th one. */
ZT_WIRE_FN int64_t zt_source_offset(const zt_gpu_messages &m, int i) { return (i + (i >= m.hole)) * m.source_step; }

/* From there to the message of the source that follows it. */
ZT_DEVICE int64_t zt_step_after(const zt_gpu_messages &m, int i) {
    return i + 1 == m.hole ? 2 * m.source_step : m.source_step;
}

/* The i-th member but the one that is left out. */
ZT_DEVICE int32_t zt_kept_member(int32_t skip, int64_t i) { return (int32_t)(i + (i >= skip)); }

/* Lanes beyond the last block get the one behind a member's last, which is all padding. */
ZT_DEVICE zt_place zt_place_of(const zt_shares &shares, int64_t tile) {
    const int lanes = 1 << shares.lane_bits, lane = (int)threadIdx.x & (lanes - 1);
    const int64_t index = tile * (ZT_THREADS >> shares.lane_bits) + (threadIdx.x >> shares.lane_bits);
    const int64_t member = zt_quotient(index, shares.blocks);
    const int64_t block = member < shares.members ? index - member * shares.blocks : shares.blocks;
    return {block, block * shares.size, zt_kept_member(shares.skip, member), lane, lanes};
}

template <int N> ZT_DEVICE void zt_multiply(float *v, float factor) {
    if (factor == 1.0f) return;
#pragma unroll
    for (int k = 0; k < N; k++) v[k] = zt_mul(v[k], factor);
}

/* -- On the host --------------------------------------------------------------------------------------------------- */

/* Larger numbers of elements are taken for nonsense; sums of sizes below cannot overflow. */
static const int64_t zt_most = (int64_t)1 << 56;

/* a * b, or more than zt_most; of numbers that are not negative. */
static inline int64_t zt_product(int64_t a, int64_t b) {
    int64_t product = 0;
    return __builtin_mul_overflow(a, b, &product) || product > zt_most ? zt_most + 1 : product;
}

static inline int zt_check_piece(const zt_piece &p, int32_t members) {
    const int64_t rows = p.rows > 0 ? p.rows - 1 : 0, others = members > 0 ? members - 1 : 0;
    if (p.dtype != ZT_FP32 && p.dtype != ZT_FP16 && p.dtype != ZT_BF16) return ZT_BAD_DTYPE;
    if (p.rows < 0 || p.present < 0 || p.present > p.columns || p.limit < 0 || p.limit > zt_most) return ZT_BAD_SIZE;
    if (p.member_stride < 0 || zt_product(p.member_stride, others) > zt_most) return ZT_BAD_SIZE;
    if (zt_product(p.rows, p.columns) > zt_most) return ZT_BAD_SIZE;
    if (rows > 0 && (p.row_stride < p.present || zt_product(p.row_stride, rows) > zt_most)) return ZT_BAD_SIZE;
    return p.limit > 0 && !p.data ? ZT_BAD_SIZE : ZT_OK;
}

/* Pieces for a kernel: into its arguments, `into`, or a table; *numel and *count are of those that have elements. */
static inline int zt_take_each(const zt_piece *pieces, int32_t count, int32_t members, zt_gpu_piece *into,
                               int64_t *numel, int32_t *taken) {
    *numel = 0, *taken = 0;
    if (count < 0 || (count > 0 && !pieces)) return ZT_BAD_SIZE;
    for (int32_t i = 0; i < count; i++) {
        const zt_piece &p = pieces[i];
        const int status = zt_check_piece(p, members);
        if (status != ZT_OK) return status;
        const int64_t size = p.rows * p.columns;
        if (size == 0) continue;
        const bool merged = p.rows > 1 && p.row_stride == p.columns && p.present == p.columns;
        const int64_t columns = merged ? size : p.columns, present = merged ? size : p.present;
        if (into)
            into[*taken] = {(char *)p.data, *numel * 4 + p.dtype, columns, present, p.row_stride, p.member_stride, p.limit};
        (*taken)++;
        *numel += size;
        if (*numel > zt_most) return ZT_BAD_SIZE;
    }
    return ZT_OK;
}

static inline int zt_take_pieces(const zt_piece *pieces, int32_t count, const void *table, int32_t members,
                                 zt_gpu_pieces *out) {
    const bool many = count > ZT_GPU_PIECES;
    out->table = many ? (const zt_gpu_piece *)table : nullptr;
    if (many && !table) return ZT_NO_TABLE;
    return zt_take_each(pieces, count, members, many ? nullptr : out->piece, &out->numel, &out->count);
}

/* Whether an address or a step is no multiple of `bytes`, a power of two. */
static inline bool zt_is_odd(int64_t number, int64_t bytes) { return (number & (bytes - 1)) != 0; }

/* Whether so many steps lead backwards or beyond all memory; one message needs none. */
static inline bool zt_is_wild(int64_t step, int64_t count) {
    return count > 1 && (step < 0 || zt_product(step, count) > zt_most);
}

/* The bits of its address and steps, as far as there is another message at the end of them. */
static inline int64_t zt_address_bits(const zt_messages &m) {
    const int64_t outer = m.members > m.inner ? m.outer_step : 0, inner = m.inner > 1 ? m.inner_step : 0;
    return (int64_t)(uintptr_t)m.data | (m.sources > 1 ? m.source_step : 0) | outer | inner;
}

/* Messages of any bytes, at multiples of `alignment`. */
static inline int zt_take_table(const zt_messages &m, int64_t alignment, zt_gpu_messages *out) {
    const int left = m.without_source >= 0;
    if (m.sources - left < 1 || m.without_source < -1 || m.without_source >= m.sources) return ZT_BAD_SIZE;
    if (m.members < 0 || m.without_member < -1 || m.without_member >= m.members) return ZT_BAD_SIZE;
    if (m.members > 0 && (m.inner < 1 || m.members % m.inner)) return ZT_BAD_SIZE;
    if (m.members > 0 && (zt_is_wild(m.source_step, m.sources) || zt_is_wild(m.outer_step, m.members / m.inner) ||
                          zt_is_wild(m.inner_step, m.inner)))
        return ZT_BAD_SIZE;
    if (m.nbytes > 0 && !m.data) return ZT_BAD_SIZE;
    if (m.nbytes > 0 && m.members > 0 && zt_is_odd(zt_address_bits(m), alignment)) return ZT_BAD_ALIGNMENT;
    const bool first = m.without_source == 0; /* then the table begins with the second one, and no hole is left */
    const int32_t hole = left && !first ? m.without_source : INT32_MAX;
    *out = {m.data + (first ? m.source_step : 0), m.source_step, m.outer_step, m.inner_step, m.inner, m.sources - left, hole, {}};
    for (int i = 0; i < ZT_EARLY && i < out->count; i++) out->early[i] = zt_source_offset(*out, i);
    if (m.inner == 1) out->inner_step = m.outer_step;
    if (m.inner == 1 || m.outer_step == m.inner * m.inner_step) out->inner = m.members; /* then there is but one level */
    return ZT_OK;
}

static inline int zt_take_messages(const zt_messages &m, zt_wire_spec spec, int64_t numel, zt_gpu_messages *out) {
    if (m.nbytes != zt_wire_nbytes(spec, numel)) return ZT_BAD_SIZE;
    return zt_take_table(m, zt_wire_is_cast(spec) ? spec.bits / 8 : 16, out);
}

/* Messages to be written. */
static inline int zt_take_made(const zt_messages &m, zt_wire_spec spec, int64_t numel, zt_gpu_messages *out) {
    return m.sources != 1 || m.without_source != -1 ? (int)ZT_BAD_SIZE : zt_take_messages(m, spec, numel, out);
}

static inline int zt_log2(int32_t power) {
    int bits = 0;
    while (power >> (bits + 1)) bits++;
    return bits;
}

/* `lanes` lanes for each block of `size` values, of which each member has `blocks`. */
static inline int zt_take_shares(const zt_messages &m, int64_t blocks, int32_t size, int32_t lanes, zt_shares *out) {
    const int left = m.without_member >= 0;
    const int32_t members = m.members - left;
    const int64_t total = zt_product(blocks, members);
    *out = {blocks, zt_blocks_for(total, ZT_THREADS / lanes), size, zt_log2(lanes), members,
            left ? m.without_member : INT32_MAX};
    return zt_product(total, size) > zt_most ? ZT_BAD_SIZE : ZT_OK;
}

/* -- Casts, in zt_gpu_casts.cu; arguments are checked -------------------------------------------------------------- */

int zt_cast_pieces(zt_wire_spec spec, const zt_gpu_pieces &pieces, const zt_messages &out, const zt_gpu_messages &made,
                   void *stream);
int zt_cast_sum(zt_wire_spec spec, const zt_messages &messages, const zt_gpu_messages &taken, const zt_gpu_pieces &pieces,
                zt_reduce reduce, void *stream);
int zt_cast_again(zt_wire_spec spec, const zt_messages &messages, const zt_gpu_messages &taken, const zt_messages &out,
                  const zt_gpu_messages &made, int64_t numel, float factor, void *stream);

#endif /* ZT_GPU_TABLES_H */
