/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Values that travel as floats: pieces to messages, and sums of messages to pieces or to messages again. Where a message
 * is written, chunks begin at its aligned words, so that only its ends are written by elements; what is read, and pieces,
 * may lie at any multiple of an element's size (zt_gpu_memory.h, Note [Alignment]).
 */
#include "zt_gpu_tables.h"

#define ZT_CAST_UNITS 2 /* of each lane */
#define ZT_CAST_LANES 32
#define ZT_CAST_VALUES (ZT_CAST_UNITS * ZT_UNIT)
#define ZT_CAST_CHUNK (ZT_CAST_LANES * ZT_CAST_VALUES)
#define ZT_CAST_RESIDENTS 3 /* thread blocks on a multiprocessor */

struct zt_cast_arguments {
    zt_gpu_pieces pieces;
    zt_gpu_messages messages;
    zt_shares shares;
};

struct zt_cast_sum_arguments {
    zt_gpu_pieces pieces;
    zt_gpu_messages messages;
    zt_shares shares;
    zt_reduce reduce;
};
static_assert(sizeof(zt_cast_sum_arguments) <= 4096, "what every compiler lets a kernel have");

struct zt_cast_again_arguments {
    zt_gpu_messages messages, out;
    zt_shares shares;
    int64_t numel;
    float factor;
};

/* -- Kernels ------------------------------------------------------------------------------------------------------- */

/* The same chunk, moved to begin at an aligned word of the message; the first one then begins before it. */
template <int DTYPE> ZT_DEVICE zt_place zt_align(zt_place place, const uint8_t *message) {
    place.first -= (int)((uintptr_t)message & 15) / zt_bytes_of(DTYPE);
    return place;
}

/* Writes a lane's units where the message has such elements. */
template <int DTYPE> ZT_DEVICE void zt_store_line(uint8_t *message, int64_t numel, zt_place place, const float *v) {
    const int bytes = zt_bytes_of(DTYPE);
#pragma unroll
    for (int u = 0; u < ZT_CAST_UNITS; u++) {
        const int64_t at = place.first + zt_unit_offset(place, u);
        char *to = (char *)message + at * bytes;
        if (at >= 0 && at + ZT_UNIT <= numel) {
            zt_store_unit<DTYPE, true>(to, v + u * ZT_UNIT);
            continue;
        }
#pragma unroll
        for (int k = 0; k < ZT_UNIT; k++)
            if ((uint64_t)(at + k) < (uint64_t)numel) zt_store_element(to + k * bytes, DTYPE, v[u * ZT_UNIT + k]);
    }
}

/* Adds a whole chunk's units of MANY messages from `first` on to v, in their order, after reading them all. */
template <int MANY, int DTYPE>
ZT_DEVICE void zt_add_lines(const zt_gpu_messages &messages, int first, const uint8_t *of_member, zt_place place, float *v) {
    float now[MANY][ZT_CAST_VALUES];
    const char *from = (const char *)of_member + place.first * zt_bytes_of(DTYPE);
#pragma unroll
    for (int i = 0; i < MANY; i++)
        zt_load_run<ZT_CAST_UNITS, DTYPE, false>(from + zt_source_offset(messages, first + i), place, now[i]);
#pragma unroll
    for (int i = 0; i < MANY; i++) {
#pragma unroll
        for (int k = 0; k < ZT_CAST_VALUES; k++) v[k] = zt_add(v[k], now[i][k]);
    }
}

/* Adds to v a lane's units of one message, as far as it has them. */
template <int DTYPE> ZT_DEVICE void zt_add_line(const uint8_t *message, int64_t numel, zt_place place, float *v) {
    const int bytes = zt_bytes_of(DTYPE);
#pragma unroll 1
    for (int u = 0; u < ZT_CAST_UNITS; u++) {
        const int64_t at = place.first + zt_unit_offset(place, u);
        const char *from = (const char *)message + at * bytes;
        float now[ZT_UNIT];
        if (at >= 0 && at + ZT_UNIT <= numel) {
            zt_load_unit<DTYPE, false>(from, now);
        } else {
#pragma unroll
            for (int k = 0; k < ZT_UNIT; k++)
                now[k] = (uint64_t)(at + k) < (uint64_t)numel ? zt_load_element(from + k * bytes, DTYPE) : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < ZT_UNIT; k++) v[k] = zt_add(v[k], now[k]);
        zt_rotate<ZT_UNIT, ZT_CAST_VALUES>(v);
    }
}

/* v = the sum of a lane's units over the messages to its member, in their order. */
template <int DTYPE>
ZT_DEVICE void zt_sum_lines(const zt_gpu_messages &messages, int64_t numel, zt_place place, float *v) {
    const uint8_t *of_member = zt_message_at(messages, place.member);
#pragma unroll
    for (int k = 0; k < ZT_CAST_VALUES; k++) v[k] = -0.0f; /* -0 + x is x, whatever x */
    int i = 0;
    if (place.first >= 0 && place.first + ZT_CAST_CHUNK <= numel) {
#pragma unroll 1
        for (; i + 2 <= messages.count; i += 2) zt_add_lines<2, DTYPE>(messages, i, of_member, place, v);
        if (i < messages.count) zt_add_lines<1, DTYPE>(messages, i, of_member, place, v);
        return;
    }
#pragma unroll 1
    for (; i < messages.count; i++) zt_add_line<DTYPE>(of_member + zt_source_offset(messages, i), numel, place, v);
}

template <int DTYPE> ZT_KERNEL(ZT_THREADS, ZT_CAST_RESIDENTS) zt_cast_kernel(ZT_ARGUMENTS zt_cast_arguments a) {
    const int64_t step = gridDim.x;
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += step) {
        const zt_place chunk = zt_place_of(a.shares, tile);
        if (chunk.block >= a.shares.blocks) return;
        uint8_t *message = zt_message_at(a.messages, chunk.member);
        const zt_place place = zt_align<DTYPE>(chunk, message);
        float v[ZT_CAST_VALUES];
        zt_load_units<ZT_CAST_UNITS>(a.pieces, place, v);
        zt_store_line<DTYPE>(message, a.pieces.numel, place, v);
    }
}

template <int DTYPE> ZT_KERNEL(ZT_THREADS, ZT_CAST_RESIDENTS) zt_cast_sum_kernel(ZT_ARGUMENTS zt_cast_sum_arguments a) {
    const int64_t step = gridDim.x;
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += step) {
        const zt_place place = zt_place_of(a.shares, tile);
        if (place.block >= a.shares.blocks) return;
        float v[ZT_CAST_VALUES];
        zt_sum_lines<DTYPE>(a.messages, a.pieces.numel, place, v);
        zt_multiply<ZT_CAST_VALUES>(v, a.reduce.factor);
        zt_store_units<ZT_CAST_UNITS>(a.pieces, place, v, a.reduce.accumulate != 0);
    }
}

template <int DTYPE>
ZT_KERNEL(ZT_THREADS, ZT_CAST_RESIDENTS) zt_cast_again_kernel(ZT_ARGUMENTS zt_cast_again_arguments a) {
    const int64_t step = gridDim.x;
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += step) {
        const zt_place chunk = zt_place_of(a.shares, tile);
        if (chunk.block >= a.shares.blocks) return;
        uint8_t *message = zt_message_at(a.out, chunk.member);
        const zt_place place = zt_align<DTYPE>(chunk, message);
        float v[ZT_CAST_VALUES];
        zt_sum_lines<DTYPE>(a.messages, a.numel, place, v);
        zt_multiply<ZT_CAST_VALUES>(v, a.factor);
        zt_store_line<DTYPE>(message, a.numel, place, v);
    }
}

/* -- On the host --------------------------------------------------------------------------------------------------- */

/* Of messages that are written, one that begins in an aligned word has elements in one chunk more. */
static int zt_take_chunks(const zt_messages &m, int64_t numel, bool written, zt_shares *out) {
    const int64_t moved = written && zt_is_odd(zt_address_bits(m), 16) ? ZT_UNIT - 1 : 0;
    const int64_t chunks = numel > 0 ? zt_blocks_for(numel + moved, ZT_CAST_CHUNK) : 0;
    return zt_take_shares(m, chunks, ZT_CAST_CHUNK, ZT_CAST_LANES, out);
}

#define ZT_OF_DTYPE(kernel) {kernel<ZT_FP32>, kernel<ZT_FP16>, kernel<ZT_BF16>}

int zt_cast_pieces(zt_wire_spec spec, const zt_gpu_pieces &pieces, const zt_messages &out, const zt_gpu_messages &taken,
                   void *stream) {
    static void (*const kernels[])(zt_cast_arguments) = ZT_OF_DTYPE(zt_cast_kernel);
    zt_cast_arguments a = {pieces, taken, {}};
    const int status = zt_take_chunks(out, pieces.numel, true, &a.shares);
    if (status != ZT_OK || a.shares.tiles == 0) return status;
    return zt_launch(kernels[spec.dtype], a.shares.tiles, ZT_THREADS, a, stream);
}

int zt_cast_sum(zt_wire_spec spec, const zt_messages &messages, const zt_gpu_messages &taken, const zt_gpu_pieces &pieces,
                zt_reduce reduce, void *stream) {
    static void (*const kernels[])(zt_cast_sum_arguments) = ZT_OF_DTYPE(zt_cast_sum_kernel);
    zt_cast_sum_arguments a = {pieces, taken, {}, reduce};
    const int status = zt_take_chunks(messages, pieces.numel, false, &a.shares);
    if (status != ZT_OK || a.shares.tiles == 0) return status;
    return zt_launch(kernels[spec.dtype], a.shares.tiles, ZT_THREADS, a, stream);
}

int zt_cast_again(zt_wire_spec spec, const zt_gpu_messages &taken, const zt_messages &out, const zt_gpu_messages &made,
                  int64_t numel, float factor, void *stream) {
    static void (*const kernels[])(zt_cast_again_arguments) = ZT_OF_DTYPE(zt_cast_again_kernel);
    zt_cast_again_arguments a = {taken, made, {}, numel, factor};
    const int status = zt_take_chunks(out, numel, true, &a.shares);
    if (status != ZT_OK || a.shares.tiles == 0) return status;
    return zt_launch(kernels[spec.dtype], a.shares.tiles, ZT_THREADS, a, stream);
}
