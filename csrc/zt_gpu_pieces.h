/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Where the values of a message lie in pieces, and how lanes read and write them there.
 *
 * Note [Units]
 *     Eight neighbouring values of a message, a unit, are what one lane handles at a time: 16 bytes of FP16 or BF16, 32
 *     of FP32, 8 of INT8 and 4 of INT4. Lane l of the `lanes` that share a block has units l, l + lanes, l + 2 lanes ...
 *     of it, so neighbouring lanes touch neighbouring memory. A block that lies in one run of one piece (a row, as far
 *     as it exists) is read by vectors, all loads first or, where they are not aligned, as many as registers hold; and
 *     written by vectors where they are aligned. Otherwise one unit comes after the other, by vectors within a run,
 *     element by element where a run ends inside it. Those loops are rolled, values moving through registers (one move a
 *     value for each unit of the lane), because an array with a computed index would lie in slow local memory.
 *
 * Note [Registers]
 *     These kernels are at the limit of what their thread blocks may have. Pieces are looked up at two places only, when
 *     little else is alive, and a table's entry is turned into a run at once.
 */
#ifndef ZT_GPU_PIECES_H
#define ZT_GPU_PIECES_H

#include "zt_gpu_memory.h"

struct zt_gpu_piece {
    char *data;
    int64_t key;     /* where it begins in the message, times 4, and its dtype */
    int64_t columns; /* whole rows are merged where they touch */
    int64_t present;
    int64_t row_stride;
    int64_t member_stride;
    int64_t limit;
};

/* In a kernel's arguments, the pieces themselves with them (3.6 KB) unless there is a table of them in device memory.
 * Pieces without elements are left out. */
struct zt_gpu_pieces {
    zt_gpu_piece piece[ZT_GPU_PIECES];
    const zt_gpu_piece *table;
    int64_t numel;
    int32_t count;
};

/* What lies at an element of a message: `left` more elements of the message are adjacent there, `present` exist; both
 * are cut off at 2^30. */
struct zt_run {
    char *data;
    int32_t left, present, dtype;
};

/* Where a lane's units lie: of the block of a member that begins at element `first`, units lane, lane + lanes, ... */
struct zt_place {
    int64_t block, first;
    int32_t member, lane, lanes;
};

/* Which of the block's units is the lane's u-th, and where it begins: in elements from the beginning of the block. */
ZT_DEVICE int zt_unit_of(zt_place place, int u) { return u * place.lanes + place.lane; }
ZT_DEVICE int zt_unit_offset(zt_place place, int u) { return zt_unit_of(place, u) * ZT_UNIT; }

/* i / by. Divisions of 64 bits are slow, and most need none at all. */
ZT_DEVICE int64_t zt_quotient(int64_t i, int64_t by) {
    if (i < by) return 0;
    return (uint64_t)i >> 32 ? (int64_t)((uint64_t)i / (uint64_t)by) : (int64_t)((uint32_t)i / (uint32_t)by);
}

ZT_DEVICE int64_t zt_key_of(const zt_gpu_pieces &pieces, int at) {
    if (pieces.table) return (int64_t)zt_fetch(&pieces.table[at].key);
    return pieces.piece[at].key;
}

/* The i-th element of a piece, and what follows. */
ZT_DEVICE zt_run zt_run_of(const zt_gpu_piece &piece, int32_t member, int64_t i) {
    const int dtype = (int)piece.key & 3;
    const int64_t most = 1 << 30, row = zt_quotient(i, piece.columns), column = i - row * piece.columns;
    const int64_t offset = member * piece.member_stride + row * piece.row_stride + column;
    int64_t left = piece.columns - column, present = piece.present - column;
    present = present < piece.limit - offset ? present : piece.limit - offset;
    left = left < most ? left : most;
    present = present < most ? present : most;
    return {piece.data + offset * zt_bytes_of(dtype), (int32_t)left, (int32_t)(present > 0 ? present : 0), dtype};
}

ZT_DEVICE zt_run zt_find(const zt_gpu_pieces &pieces, int32_t member, int64_t element) {
    if ((uint64_t)element >= (uint64_t)pieces.numel) /* before the first, or the padding of the last block */
        return {nullptr, element < 0 ? (int32_t)-element : ZT_UNIT, 0, ZT_FP32};
    int at = 0;
    for (int past = pieces.count; past - at > 1;) {
        const int middle = (at + past) / 2;
        if (zt_key_of(pieces, middle) >> 2 <= element)
            at = middle;
        else
            past = middle;
    }
    if (!pieces.table) return zt_run_of(pieces.piece[at], member, element - (pieces.piece[at].key >> 2));
    const zt_gpu_piece *p = &pieces.table[at];
    const zt_gpu_piece piece = {zt_fetch(&p->data),       zt_fetch(&p->key),           zt_fetch(&p->columns),
                                zt_fetch(&p->present),    zt_fetch(&p->row_stride),    zt_fetch(&p->member_stride),
                                zt_fetch(&p->limit)};
    return zt_run_of(piece, member, element - (piece.key >> 2));
}

/* -- One unit ------------------------------------------------------------------------------------------------------ */

/* Moves the first K of N values to the end. */
template <int K, int N> ZT_DEVICE void zt_rotate(float *v) {
    float moved[K];
#pragma unroll
    for (int k = 0; k < K; k++) moved[k] = v[k];
#pragma unroll
    for (int k = 0; k < N - K; k++) v[k] = v[k + K];
#pragma unroll
    for (int k = 0; k < K; k++) v[N - K + k] = moved[k];
}

/* The run that all units of all lanes are in; without elements if there is none. */
ZT_DEVICE zt_run zt_whole_run(const zt_gpu_pieces &pieces, zt_place place, int units) {
    zt_run run = zt_find(pieces, place.member, place.first);
    if (run.present < place.lanes * units * ZT_UNIT) run.present = 0;
    return run;
}

/* Brings a lane's values and those in memory together, unit by unit: by `work.unit` where a unit lies in one run, as
 * `whole` says of all of them if it has elements, and else by `work.element`. */
template <int UNITS, typename Work>
ZT_DEVICE void zt_walk(const zt_gpu_pieces &pieces, zt_place place, zt_run whole, float *v, Work work) {
    zt_run run = whole;
    run.data += zt_unit_offset(place, 0) * zt_bytes_of(run.dtype);
#pragma unroll 1
    for (int u = 0; u < UNITS; u++) {
        if (whole.present == 0) run.left = 0;
#pragma unroll 1
        for (int k = 0; k < ZT_UNIT;) {
            if (run.left == 0) run = zt_find(pieces, place.member, place.first + zt_unit_offset(place, u) + k);
            if (k == 0 && run.present >= ZT_UNIT) {
                work.unit(run, v);
                break;
            }
            work.element(run, v);
            zt_rotate<1, ZT_UNIT>(v);
            run.data += zt_bytes_of(run.dtype);
            run.left--, run.present--, k++;
        }
        run.data += place.lanes * ZT_UNIT * zt_bytes_of(run.dtype);
        zt_rotate<ZT_UNIT, UNITS * ZT_UNIT>(v);
    }
}

/* -- The units of one lane ----------------------------------------------------------------------------------------- */

template <int UNITS, int DTYPE, bool ALIGNED> ZT_DEVICE void zt_load_run(const char *data, zt_place place, float *v) {
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        zt_load_unit<DTYPE, ALIGNED>(data + zt_unit_offset(place, u) * zt_bytes_of(DTYPE), v + u * ZT_UNIT);
}

/* The same of a run that is not aligned, AHEAD units at a time: as many as registers hold before they are in place. */
template <int UNITS, int DTYPE> ZT_DEVICE void zt_load_odd_run(const char *data, zt_place place, float *v) {
    const int ahead = UNITS < 4 ? UNITS : DTYPE == ZT_FP32 || UNITS == 8 ? 2 : 4;
#pragma unroll 1
    for (int u = 0; u < UNITS; u += ahead) {
        zt_load_run<ahead, DTYPE, false>(data, place, v);
        data += ahead * place.lanes * ZT_UNIT * zt_bytes_of(DTYPE);
        zt_rotate<ahead * ZT_UNIT, UNITS * ZT_UNIT>(v);
    }
}

struct zt_reading {
    ZT_METHOD void element(zt_run run, float *v) const {
        v[0] = run.present > 0 ? zt_load_element(run.data, run.dtype) : 0.0f;
    }
    ZT_METHOD void unit(zt_run run, float *v) const {
        if (run.dtype == ZT_FP32)
            zt_load_unit<ZT_FP32, false>(run.data, v);
        else if (run.dtype == ZT_BF16)
            zt_load_unit<ZT_BF16, false>(run.data, v);
        else
            zt_load_unit<ZT_FP16, false>(run.data, v);
    }
};

struct zt_writing {
    bool accumulate;
    ZT_METHOD void element(zt_run run, float *v) const {
        if (run.present <= 0) return;
        if (accumulate) v[0] = zt_add(zt_load_element(run.data, run.dtype), v[0]);
        zt_store_element(run.data, run.dtype, v[0]);
    }
    ZT_METHOD void unit(zt_run run, float *v) const {
        if (run.dtype == ZT_FP32)
            unit_of<ZT_FP32>(run.data, v);
        else if (run.dtype == ZT_BF16)
            unit_of<ZT_BF16>(run.data, v);
        else
            unit_of<ZT_FP16>(run.data, v);
    }
    template <int DTYPE> ZT_METHOD void unit_of(char *data, float *v) const {
        if (accumulate) {
            float before[ZT_UNIT];
            zt_load_unit<DTYPE, false>(data, before);
#pragma unroll
            for (int k = 0; k < ZT_UNIT; k++) v[k] = zt_add(before[k], v[k]);
        }
        if (zt_aligned16(data))
            zt_store_unit<DTYPE, true>(data, v);
        else
            zt_store_unit<DTYPE, false>(data, v);
    }
};

/* Reads the values of a lane's units, v[ZT_UNIT * UNITS]; what does not exist is 0. */
template <int UNITS> ZT_DEVICE void zt_load_units(const zt_gpu_pieces &pieces, zt_place place, float *v) {
    const zt_run run = zt_whole_run(pieces, place, UNITS);
    if (run.present == 0)
        zt_walk<UNITS>(pieces, place, run, v, zt_reading{});
    else if (zt_aligned16(run.data)) {
        if (run.dtype == ZT_FP32)
            zt_load_run<UNITS, ZT_FP32, true>(run.data, place, v);
        else if (run.dtype == ZT_BF16)
            zt_load_run<UNITS, ZT_BF16, true>(run.data, place, v);
        else
            zt_load_run<UNITS, ZT_FP16, true>(run.data, place, v);
    } else {
        if (run.dtype == ZT_FP32)
            zt_load_odd_run<UNITS, ZT_FP32>(run.data, place, v);
        else if (run.dtype == ZT_BF16)
            zt_load_odd_run<UNITS, ZT_BF16>(run.data, place, v);
        else
            zt_load_odd_run<UNITS, ZT_FP16>(run.data, place, v);
    }
}

#endif /* ZT_GPU_PIECES_H */
