/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Values that travel as floats: pieces to messages, and sums of messages to pieces or to messages again. What is read,
 * and pieces, may lie at any multiple of an element's size (zt_gpu_memory.h, Note [Alignment]); messages that are summed
 * and all begin at aligned words are read without funnels, by kernels of their own. Where pieces become messages, chunks
 * begin at the message's aligned words, so that only its ends are written by elements.
 */
#include "zt_gpu_stretches.h"

#define ZT_CAST_UNITS 2 /* of each lane, where pieces become messages */
#define ZT_CAST_LANES 32
#define ZT_CAST_CHUNK (ZT_CAST_LANES * ZT_CAST_UNITS * ZT_UNIT)
#define ZT_CAST_RESIDENTS 3 /* thread blocks on a multiprocessor */

#define ZT_SUM_UNITS 4 /* of each lane, where messages are summed */
#define ZT_SUM_VALUES (ZT_SUM_UNITS * ZT_UNIT)

/* Sums go by blocks of as many values as 32 lanes have; of the last one some may not exist, in messages neither. */
template <int DTYPE> struct zt_cast {
    static constexpr int bits = 8 * zt_bytes_of(DTYPE), size = 32 * ZT_SUM_VALUES, scale_bytes = 0;
};

struct zt_cast_arguments {
    zt_gpu_pieces pieces;
    zt_gpu_messages messages;
    zt_shares shares;
};

struct zt_cast_sum_arguments {
    zt_gpu_pieces pieces;
    zt_gpu_messages messages;
    zt_stretches work;
    zt_reduce reduce;
};
static_assert(sizeof(zt_cast_sum_arguments) <= 4096, "what every compiler lets a kernel have");

struct zt_cast_again_arguments {
    zt_gpu_messages messages, out;
    zt_stretches work;
    int64_t numel;
    float factor;
};

/* -- Kernels ------------------------------------------------------------------------------------------------------- */

/* The same chunk, moved to begin at an aligned word of the message; the first one then begins before it. */
template <int DTYPE> ZT_DEVICE zt_place zt_align(zt_place place, const uint8_t *message) {
    place.first -= (int)((uintptr_t)message & 15) / zt_bytes_of(DTYPE);
    return place;
}

/* Writes a lane's units where the message has such elements; v is used up. */
template <int DTYPE, int UNITS> ZT_DEVICE void zt_store_line(uint8_t *message, int64_t numel, zt_place place, float *v) {
    const int bytes = zt_bytes_of(DTYPE), apart = place.lanes * ZT_UNIT;
    int64_t at = place.first + zt_unit_offset(place, 0);
    char *to = (char *)message + at * bytes;
    if (at >= 0 && at + (UNITS - 1) * apart + ZT_UNIT <= numel && zt_aligned16(to)) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) zt_store_unit<DTYPE, true>(to + u * apart * bytes, v + u * ZT_UNIT);
        return;
    }
#pragma unroll 1
    for (int u = 0; u < UNITS; u++) {
        if (at >= 0 && at + ZT_UNIT <= numel) {
            zt_store_unit<DTYPE, false>(to, v);
        } else {
#pragma unroll
            for (int k = 0; k < ZT_UNIT; k++)
                if ((uint64_t)(at + k) < (uint64_t)numel) zt_store_element(to + k * bytes, DTYPE, v[k]);
        }
        zt_rotate<ZT_UNIT, UNITS * ZT_UNIT>(v);
        at += apart, to += apart * bytes;
    }
}

/* v = a lane's units of MANY messages from `begin` on, or += them, in their order, after reading them all. */
template <int DTYPE, bool ALIGNED, int MANY, bool FIRST>
ZT_DEVICE void zt_add_casts(const zt_gpu_messages &messages, int begin, const zt_block &block, float *v) {
    constexpr int words = zt_words<DTYPE>, apart = 32 * ZT_UNIT * zt_bytes_of(DTYPE);
    uint32_t now[MANY][ZT_SUM_UNITS * words];
    int64_t offset = zt_source_offset(messages, begin);
#pragma unroll
    for (int i = 0; i < MANY; i++) {
        if (FIRST && zt_arguments_are_operands) offset = messages.early[i];
        const char *from = (const char *)block.values + offset;
#pragma unroll
        for (int u = 0; u < ZT_SUM_UNITS; u++) zt_load_words<DTYPE, ALIGNED>(from + u * apart, now[i] + u * words);
        offset += zt_step_after(messages, begin + i);
    }
#pragma unroll
    for (int i = 0; i < MANY; i++) {
#pragma unroll
        for (int u = 0; u < ZT_SUM_UNITS; u++) {
            float unit[ZT_UNIT], *sum = v + u * ZT_UNIT;
            zt_from_words<DTYPE>(now[i] + u * words, unit);
#pragma unroll
            for (int k = 0; k < ZT_UNIT; k++) sum[k] = FIRST && i == 0 ? unit[k] : zt_add(sum[k], unit[k]);
        }
    }
}

/* Adds a lane's units of one message, as far as it has them: `left` values from the block's first on. */
template <int DTYPE> ZT_DEVICE void zt_add_end(const char *from, int64_t left, float *v) {
    const int bytes = zt_bytes_of(DTYPE);
    left -= zt_lane<32>() * ZT_UNIT;
#pragma unroll 1
    for (int u = 0; u < ZT_SUM_UNITS; u++) {
        float now[ZT_UNIT];
        if (left >= ZT_UNIT) {
            zt_load_unit<DTYPE, false>(from, now);
        } else {
#pragma unroll
            for (int k = 0; k < ZT_UNIT; k++) now[k] = k < left ? zt_load_element(from + k * bytes, DTYPE) : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < ZT_UNIT; k++) v[k] = zt_add(v[k], now[k]);
        zt_rotate<ZT_UNIT, ZT_SUM_VALUES>(v);
        from += 32 * ZT_UNIT * bytes, left -= 32 * ZT_UNIT;
    }
}

/* v = the sum of a lane's units over all messages of `numel` values. */
template <int DTYPE, bool ALIGNED>
ZT_DEVICE void zt_sum_casts(const zt_gpu_messages &messages, const zt_block &block, int64_t numel, float *v) {
    constexpr int many = (DTYPE == ZT_FP32 ? 2 : 4) >> !ALIGNED; /* as many as registers hold */
    const int64_t left = numel - block.element;
    if (left < zt_cast<DTYPE>::size) {
#pragma unroll
        for (int k = 0; k < ZT_SUM_VALUES; k++) v[k] = -0.0f; /* -0 + x is x, whatever x */
#pragma unroll 1
        for (int i = 0; i < messages.count; i++)
            zt_add_end<DTYPE>((const char *)block.values + zt_source_offset(messages, i), left, v);
        return;
    }
    int i = many;
    if (messages.count >= many) {
        zt_add_casts<DTYPE, ALIGNED, many, true>(messages, 0, block, v);
    } else {
        zt_add_casts<DTYPE, ALIGNED, 1, true>(messages, 0, block, v);
        i = 1;
    }
#pragma unroll 1
    for (; i + many <= messages.count; i += many) zt_add_casts<DTYPE, ALIGNED, many, false>(messages, i, block, v);
#pragma unroll 1
    for (; i < messages.count; i++) zt_add_casts<DTYPE, ALIGNED, 1, false>(messages, i, block, v);
}

template <int DTYPE> ZT_KERNEL(ZT_THREADS, ZT_CAST_RESIDENTS) zt_cast_kernel(ZT_ARGUMENTS zt_cast_arguments a) {
    const int64_t step = gridDim.x;
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += step) {
        const zt_place chunk = zt_place_of(a.shares, tile);
        if (chunk.block >= a.shares.blocks) return;
        uint8_t *message = zt_message_at(a.messages, chunk.member);
        const zt_place place = zt_align<DTYPE>(chunk, message);
        float v[ZT_CAST_UNITS * ZT_UNIT];
        zt_load_units<ZT_CAST_UNITS>(a.pieces, place, v);
        zt_store_line<DTYPE, ZT_CAST_UNITS>(message, a.pieces.numel, place, v);
    }
}

template <int DTYPE, bool ALIGNED> ZT_KERNEL(ZT_THREADS, 2) zt_cast_sum_kernel(ZT_ARGUMENTS zt_cast_sum_arguments a) {
    typedef zt_cast<DTYPE> format;
    zt_visit_blocks<format, ZT_SUM_UNITS>(a.work, a.messages, 0, [&](zt_block block, zt_run &run) {
        float v[ZT_SUM_VALUES];
        if (!block.exists) return;
        zt_sum_casts<DTYPE, ALIGNED>(a.messages, block, a.pieces.numel, v);
        zt_multiply<ZT_SUM_VALUES>(v, a.reduce.factor);
        zt_find_block<format, ZT_SUM_UNITS>(a.pieces, block, run);
        zt_write_block<format, ZT_SUM_UNITS>(a.pieces, block, run, v, a.reduce.accumulate != 0);
    });
}

template <int DTYPE, bool ALIGNED> ZT_KERNEL(ZT_THREADS, 2) zt_cast_again_kernel(ZT_ARGUMENTS zt_cast_again_arguments a) {
    zt_visit_blocks<zt_cast<DTYPE>, ZT_SUM_UNITS>(a.work, a.messages, 0, [&](zt_block block, zt_run &) {
        float v[ZT_SUM_VALUES];
        if (!block.exists) return;
        zt_sum_casts<DTYPE, ALIGNED>(a.messages, block, a.numel, v);
        zt_multiply<ZT_SUM_VALUES>(v, a.factor);
        const zt_place place = {0, block.element, block.member, zt_lane<32>(), 32};
        zt_store_line<DTYPE, ZT_SUM_UNITS>(zt_message_at(a.out, block.member), a.numel, place, v);
    });
}

/* -- On the host --------------------------------------------------------------------------------------------------- */

#define ZT_OF_DTYPE(kernel) {kernel<ZT_FP32>, kernel<ZT_FP16>, kernel<ZT_BF16>}
#define ZT_OF_ALIGNED(kernel)                                                                                          \
    {                                                                                                                  \
        {kernel<ZT_FP32, false>, kernel<ZT_FP32, true>}, {kernel<ZT_FP16, false>, kernel<ZT_FP16, true>},              \
            {kernel<ZT_BF16, false>, kernel<ZT_BF16, true>},                                                           \
    }

/* Blocks of sums. */
static int zt_take_sums(const zt_messages &messages, int64_t numel, zt_stretches *out) {
    const int32_t size = zt_cast<ZT_FP32>::size;
    return zt_take_stretches(messages, zt_blocks_for(numel, size), size, 32, out);
}

static bool zt_are_aligned(const zt_messages &messages) { return !zt_is_odd(zt_address_bits(messages), 16); }

/* A message that does not begin in an aligned word has elements in one chunk more. */
int zt_cast_pieces(zt_wire_spec spec, const zt_gpu_pieces &pieces, const zt_messages &out, const zt_gpu_messages &taken,
                   void *stream) {
    static void (*const kernels[])(zt_cast_arguments) = ZT_OF_DTYPE(zt_cast_kernel);
    zt_cast_arguments a = {pieces, taken, {}};
    const int64_t moved = zt_are_aligned(out) ? 0 : ZT_UNIT - 1;
    const int64_t chunks = pieces.numel > 0 ? zt_blocks_for(pieces.numel + moved, ZT_CAST_CHUNK) : 0;
    const int status = zt_take_shares(out, chunks, ZT_CAST_CHUNK, ZT_CAST_LANES, &a.shares);
    if (status != ZT_OK) return status;
    return zt_launch(kernels[spec.dtype], a.shares.tiles, ZT_THREADS, a, stream);
}

int zt_cast_sum(zt_wire_spec spec, const zt_messages &messages, const zt_gpu_messages &taken, const zt_gpu_pieces &pieces,
                zt_reduce reduce, void *stream) {
    static void (*const kernels[3][2])(zt_cast_sum_arguments) = ZT_OF_ALIGNED(zt_cast_sum_kernel);
    zt_cast_sum_arguments a = {pieces, taken, {}, reduce};
    const int status = zt_take_sums(messages, pieces.numel, &a.work);
    if (status != ZT_OK) return status;
    return zt_launch(kernels[spec.dtype][zt_are_aligned(messages)], zt_thread_blocks(a.work), ZT_THREADS, a, stream);
}

int zt_cast_again(zt_wire_spec spec, const zt_messages &messages, const zt_gpu_messages &taken, const zt_messages &out,
                  const zt_gpu_messages &made, int64_t numel, float factor, void *stream) {
    static void (*const kernels[3][2])(zt_cast_again_arguments) = ZT_OF_ALIGNED(zt_cast_again_kernel);
    zt_cast_again_arguments a = {taken, made, {}, numel, factor};
    const int status = zt_take_sums(out, numel, &a.work);
    if (status != ZT_OK) return status;
    return zt_launch(kernels[spec.dtype][zt_are_aligned(messages)], zt_thread_blocks(a.work), ZT_THREADS, a, stream);
}
