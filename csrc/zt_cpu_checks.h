/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * What the CPU functions refuse, before anything is computed from it, and how they go through the members of a table.
 */
#ifndef ZT_CPU_CHECKS_H
#define ZT_CPU_CHECKS_H

#include "zt_cpu.h"

namespace zt {

/* Larger numbers of elements are taken for nonsense; sums of sizes below cannot overflow. */
constexpr int64_t kMost = int64_t{1} << 56;

/* Returns from the calling function what is not ZT_OK. */
#define ZT_TRY(expression)                                \
    do {                                                  \
        const int status_of_try = (expression);           \
        if (status_of_try != ZT_OK) return status_of_try; \
    } while (0)

/* Whether `count` steps of this length stay within what is addressed. */
inline bool fits(int64_t count, int64_t step) {
    int64_t extent = 0;
    return !__builtin_mul_overflow(count, step, &extent) && extent <= kMost && extent >= -kMost;
}

inline bool inside(zt_range range, int64_t n) {
    return 0 <= range.begin && range.begin <= range.end && range.end <= n;
}

inline int check_piece(const zt_piece &piece, int32_t members, int64_t *numel) {
    if (piece.dtype != ZT_FP32 && piece.dtype != ZT_FP16 && piece.dtype != ZT_BF16) return ZT_BAD_DTYPE;
    if (piece.rows < 0 || piece.present < 0 || piece.present > piece.columns) return ZT_BAD_SIZE;
    if (piece.limit < 0 || piece.limit > kMost || piece.member_stride < 0) return ZT_BAD_SIZE;
    if (!fits(piece.rows, piece.columns)) return ZT_BAD_SIZE;
    *numel = piece.rows * piece.columns;
    if (*numel == 0) return ZT_OK;
    if (piece.rows > 1 && (piece.row_stride < piece.present || !fits(piece.rows, piece.row_stride))) return ZT_BAD_SIZE;
    if (!fits(members, piece.member_stride)) return ZT_BAD_SIZE;
    return piece.limit > 0 && !piece.data ? ZT_BAD_SIZE : ZT_OK;
}

/* Also finds how many values they hold, of each member. */
inline int check_pieces(const zt_piece *pieces, int32_t count, int32_t members, int64_t *numel) {
    *numel = 0;
    if (count < 0 || (count > 0 && !pieces)) return ZT_BAD_SIZE;
    for (int32_t i = 0; i < count; ++i) {
        int64_t of_piece = 0;
        ZT_TRY(check_piece(pieces[i], members, &of_piece));
        *numel += of_piece;
        if (*numel > kMost) return ZT_BAD_SIZE;
    }
    return ZT_OK;
}

/* A table of messages of `numel` values or blocks of each member. */
inline int check_table(const zt_messages &messages, int64_t numel) {
    const int32_t left_out = messages.without_source >= 0;
    if (messages.members < 0 || (messages.members > 0 && messages.inner < 1)) return ZT_BAD_SIZE;
    if (messages.without_source < -1 || messages.without_source >= messages.sources) return ZT_BAD_SIZE;
    if (messages.without_member < -1 || messages.without_member >= messages.members) return ZT_BAD_SIZE;
    if (messages.sources - left_out < 1 || !fits(messages.members, numel)) return ZT_BAD_SIZE;
    if (!fits(messages.sources, messages.source_step) || !fits(messages.inner, messages.inner_step)) return ZT_BAD_SIZE;
    if (!fits(messages.members, messages.outer_step)) return ZT_BAD_SIZE;
    return messages.data || messages.nbytes == 0 || messages.members == 0 ? ZT_OK : ZT_BAD_SIZE;
}

/* That they hold `numel` values of each member. */
inline int check_messages(zt_wire_spec spec, int64_t numel, const zt_messages &messages) {
    return messages.nbytes == zt_wire_nbytes(spec, numel) ? check_table(messages, numel) : ZT_BAD_SIZE;
}

/* One message for each member, which is written. */
inline int check_written(zt_wire_spec spec, int64_t numel, const zt_messages &messages) {
    return messages.sources == 1 ? check_messages(spec, numel, messages) : ZT_BAD_SIZE;
}

inline int check_range(zt_wire_spec spec, int64_t numel, int32_t members, zt_range blocks) {
    return inside(blocks, zt_wire_blocks(spec, numel) * members) ? ZT_OK : ZT_BAD_RANGE;
}

/* The message of source 0 to a member. */
inline uint8_t *message_of(const zt_messages &messages, int64_t member) {
    return messages.data + member / messages.inner * messages.outer_step + member % messages.inner * messages.inner_step;
}

/* Calls f(member, blocks of it) for a range of the blocks of all members but the one left out. */
template <class F> void for_members(int64_t blocks, const zt_messages &messages, zt_range range, const F &f) {
    while (range.begin < range.end) {
        const int64_t member = range.begin / blocks, first = member * blocks;
        const int64_t end = first + blocks < range.end ? first + blocks : range.end;
        if (member != messages.without_member) f(member, zt_range{range.begin - first, end - first});
        range.begin = end;
    }
}

}  // namespace zt

#endif /* ZT_CPU_CHECKS_H */
