/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Block quantization on GPUs: quantize, dequantize, sum, and sum and quantize again. The arithmetic is that of
 * zero_topo/quant/reference.py, Note [Arithmetic contract]; zt_gpu_stretches.h says how lanes share the work.
 */
#include "zt_gpu_coding.h"

struct zt_quantize_arguments {
    zt_gpu_pieces pieces;
    zt_gpu_messages messages;
    zt_planes planes;
    zt_stretches work;
};

struct zt_requantize_arguments {
    zt_gpu_messages messages, out;
    zt_planes from, planes;
    zt_stretches work;
    float factor;
};

struct zt_reduce_arguments {
    zt_gpu_pieces pieces;
    zt_gpu_messages messages;
    zt_planes planes;
    zt_stretches work;
    zt_reduce reduce;
};
static_assert(sizeof(zt_reduce_arguments) <= 4096, "what every compiler lets a kernel have");

/* -- Messages and pieces ------------------------------------------------------------------------------------------- */

/* What lies between the planes of each message is zero. */
ZT_DEVICE void zt_clear_padding(const zt_gpu_messages &messages, const zt_stretches &work, const zt_planes &planes) {
    const int64_t scale_bytes = planes.blocks * zt_wire_scale_bytes(planes.spec), i = threadIdx.x;
    const int64_t begins[2] = {planes.values_end, planes.scales + scale_bytes};
    const int64_t ends[2] = {planes.scales, planes.nbytes};
    for (int64_t member = blockIdx.x; member < work.members; member += gridDim.x) {
        uint8_t *message = zt_message_at(messages, zt_kept_member(work.skip, member));
#pragma unroll
        for (int plane = 0; plane < 2; plane++)
            if (begins[plane] + i < ends[plane]) message[begins[plane] + i] = 0;
    }
}

/* The first `count` elements of a unit's words become those of other words. */
template <int DTYPE> ZT_DEVICE void zt_replace(uint32_t *words, const uint32_t *others, int count) {
#pragma unroll
    for (int k = 0; k < zt_words<DTYPE>; k++) {
        if (DTYPE == ZT_FP32) {
            words[k] = k < count ? others[k] : words[k];
        } else {
            const uint32_t mask = 2 * k + 1 < count ? ~0u : 2 * k < count ? 0xffffu : 0;
            words[k] = (words[k] & ~mask) | (others[k] & mask);
        }
    }
}

/* The words of a lane's units of a block, as values of DTYPE; what does not exist is 0. Returns by how many values they
 * are turned to the end: see Note [Turned blocks]. */
template <typename F, int UNITS, int DTYPE>
ZT_DEVICE int zt_read_block(const zt_gpu_pieces &pieces, const zt_block &block, const zt_run &run, int lane,
                            uint32_t *words) {
    constexpr int many = zt_words<DTYPE>, bytes = ZT_UNIT * zt_bytes_of(DTYPE), apart = zt_lanes<F, UNITS> * bytes;
    if (run.present >= F::size && run.dtype == DTYPE) {
        const int odd = (int)((uintptr_t)run.data & 15);
        const char *data = run.data - odd + lane * bytes;
#pragma unroll
        for (int u = 0; u < UNITS; u++) zt_load_words<DTYPE, true>(data + u * apart, words + many * u);
        if (odd) {
            uint32_t end[many];
            zt_load_words<DTYPE, true>(lane == 0 ? data + UNITS * apart : data, end);
            zt_replace<DTYPE>(words, end, lane == 0 ? odd / zt_bytes_of(DTYPE) : 0);
        }
        return odd / zt_bytes_of(DTYPE);
    }
#pragma unroll 1
    for (int u = 0; u < UNITS; u++) {
        const int at = (u * zt_lanes<F, UNITS> + lane) * ZT_UNIT;
        float v[ZT_UNIT] = {};
        if (zt_has_elements(zt_unit_run(run, at)))
            zt_walk_unit(pieces, block.member, block.element + at, v, zt_reading{});
#pragma unroll
        for (int k = 0; k < many * (UNITS - 1); k++) words[k] = words[k + many];
        zt_to_words<DTYPE>(v, words + many * (UNITS - 1));
    }
    return 0;
}

/* Writes a unit, but the last `rest` values of it BACK bytes before their place. */
template <int DTYPE, int BACK> ZT_DEVICE void zt_store_split(char *to, int rest, const float *v) {
    constexpr int many = zt_words<DTYPE>, per_word = ZT_UNIT / many;
    uint32_t words[many];
    zt_to_words<DTYPE>(v, words);
#pragma unroll
    for (int k = 0; k < many; k++, to += 4) {
        const int first = ZT_UNIT - rest - k * per_word; /* how many from here on are not among the last */
        if (per_word == 2 && first == 1) {
            zt_store<uint16_t>(to, (uint16_t)words[k]);
            zt_store<uint16_t>(to + 2 - BACK, (uint16_t)(words[k] >> 16));
        } else if (first > 0) {
            zt_store<uint32_t>(to, words[k]);
        } else {
            zt_store<uint32_t>(to - BACK, words[k]);
        }
    }
}

/* How many values lie before the first aligned word. */
ZT_DEVICE int zt_values_before(const char *data, int dtype) {
    return (int)(-(uintptr_t)data & 15) / zt_bytes_of(dtype);
}

/* Decodes one message's integers to a run, unit by unit. Those of the first unaligned values are at the end. */
template <typename F, int UNITS, int DTYPE>
ZT_DEVICE void zt_decode_run(char *data, int lane, const zt_packed<F::bits> *packed, float scale) {
    const int turned = zt_values_before(data, DTYPE);
    constexpr int lanes = zt_lanes<F, UNITS>, bytes = ZT_UNIT * zt_bytes_of(DTYPE), apart = lanes * bytes;
    data += turned * zt_bytes_of(DTYPE) + lane * bytes;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        float v[ZT_UNIT];
        zt_add_unit<F, true>(packed[u], scale, 0, v);
        if (u == UNITS - 1 && turned && lane == lanes - 1)
            zt_store_split<DTYPE, UNITS * apart>(data + u * apart, turned, v);
        else
            zt_store_unit<DTYPE, true>(data + u * apart, v);
    }
}

/* -- Kernels ------------------------------------------------------------------------------------------------------- */

/* Thread blocks that shall fit on a multiprocessor, so that enough loads are under way: registers are rationed to that.
 * HIP counts waves of a SIMD, of which a thread block has one on each. */
#define ZT_FEW_RESIDENTS 2  /* each lane has many loads under way */
#define ZT_MORE_RESIDENTS 3

/* A lane has 32 words, but of NF4's 16-bit values half as many. */
template <typename F, int DTYPE> constexpr bool zt_has_few_words = F::nf4 && DTYPE != ZT_FP32;

/* Pieces are all of DTYPE; with FP32 of any. */
template <typename F, int DTYPE>
ZT_KERNEL(ZT_THREADS, (zt_has_few_words<F, DTYPE> ? ZT_MORE_RESIDENTS : ZT_FEW_RESIDENTS))
zt_quantize_kernel(ZT_ARGUMENTS zt_quantize_arguments a) {
    constexpr int units = F::nf4 || DTYPE == ZT_FP32 ? 4 : 8;
    constexpr int lanes = zt_lanes<F, units>, count = units * zt_words<DTYPE>;
    const zt_nf4_table *table = zt_shared_nf4<F::nf4>();
    const int lane = zt_lane<lanes>();
    zt_visit_blocks<F, units>(a.work, a.messages, a.planes.scales, [&](zt_block block, zt_run &run) {
        uint32_t words[count];
        zt_find_block<F, units>(a.pieces, block, run);
        const int turned = zt_read_block<F, units, DTYPE>(a.pieces, block, run, lane, words);
        const uint32_t width = zt_widest<count, DTYPE, lanes>(words);
        zt_encode_block<F, units, DTYPE>(words, width, table, block.exists, block.values, block.scale, turned);
    });
    zt_clear_padding(a.messages, a.work, a.planes);
}

/* One message of integers, which stay packed until they are written: a lane then has registers for 8 units. */
template <typename F>
ZT_KERNEL(ZT_THREADS, ZT_MORE_RESIDENTS) zt_dequantize_kernel(ZT_ARGUMENTS zt_reduce_arguments a) {
    constexpr int units = 8, lanes = zt_lanes<F, units>;
    const int lane = zt_lane<lanes>();
    const bool plain = a.reduce.factor == 1.0f && !a.reduce.accumulate;
    zt_visit_blocks<F, units>(a.work, a.messages, a.planes.scales, [&](zt_block block, zt_run &run) {
        zt_packed<F::bits> packed[units];
        const float scale = zt_load_scale<F>(block.scale);
        zt_load_block<F, units>(block.values, packed);
        zt_find_block<F, units>(a.pieces, block, run);
        const bool whole = plain && run.present >= F::size;
        const int turned = whole ? zt_values_before(run.data, run.dtype) : 0;
        if (zt_ballot(turned)) zt_turn<F::bits, units, lanes>(packed, lane, turned);
        if (!block.exists) return;
        if (whole) {
            if (run.dtype == ZT_FP32)
                zt_decode_run<F, units, ZT_FP32>(run.data, lane, packed, scale);
            else if (run.dtype == ZT_BF16)
                zt_decode_run<F, units, ZT_BF16>(run.data, lane, packed, scale);
            else
                zt_decode_run<F, units, ZT_FP16>(run.data, lane, packed, scale);
            return;
        }
#pragma unroll 1
        for (int u = 0; u < units; u++) {
            float v[ZT_UNIT];
            zt_add_unit<F, true>(packed[0], scale, 0, v);
            zt_multiply<ZT_UNIT>(v, a.reduce.factor);
            zt_write_unit(a.pieces, block, run, (u * lanes + lane) * ZT_UNIT, v, {a.reduce.accumulate != 0});
#pragma unroll
            for (int k = 0; k + 1 < units; k++) packed[k] = packed[k + 1];
        }
    });
}

/* Sums, MANY messages at a time. */
template <typename F, int MANY>
ZT_KERNEL(ZT_THREADS, ZT_FEW_RESIDENTS) zt_reduce_kernel(ZT_ARGUMENTS zt_reduce_arguments a) {
    constexpr int units = 4;
    const uint32_t level = F::nf4 ? zt_level_of_lane() : 0;
    zt_visit_blocks<F, units>(a.work, a.messages, a.planes.scales, [&](zt_block block, zt_run &run) {
        float v[units * ZT_UNIT];
        zt_sum<F, units, MANY>(a.messages, block, level, v);
        zt_multiply<units * ZT_UNIT>(v, a.reduce.factor);
        zt_find_block<F, units>(a.pieces, block, run);
        if (!block.exists) return;
        zt_write_block<F, units>(a.pieces, block, run, v, a.reduce.accumulate != 0);
    });
}

/* Writes a lane's units of a sum to the message of its member. */
template <typename F, int UNITS>
ZT_DEVICE void zt_encode_sum(const uint32_t *words, uint32_t width, const zt_nf4_table *table,
                             const zt_requantize_arguments &a, const zt_block &block) {
    const int64_t number = block.element / F::size;
    uint8_t *message = zt_message_at(a.out, block.member);
    uint8_t *values = message + number * zt_block_bytes<F> + zt_lane<zt_lanes<F, UNITS>>() * F::bits;
    uint8_t *scale = message + a.planes.scales + number * F::scale_bytes;
    zt_encode_block<F, UNITS, ZT_FP32>(words, width, table, block.exists, values, scale, 0);
}

/* Sums that are quantized again, in the bits of `planes`. */
template <typename F, int MANY>
ZT_KERNEL(ZT_THREADS, ZT_FEW_RESIDENTS) zt_requantize_kernel(ZT_ARGUMENTS zt_requantize_arguments a) {
    constexpr int units = 4, lanes = zt_lanes<F, units>, count = units * ZT_UNIT;
    const zt_nf4_table *table = zt_shared_nf4<F::nf4>();
    const uint32_t level = F::nf4 ? zt_level_of_lane() : 0;
    const int lane = zt_lane<lanes>();
    zt_visit_blocks<F, units>(a.work, a.messages, a.from.scales, [&](zt_block block, zt_run &) {
        float v[count];
        uint32_t words[count];
        zt_sum<F, units, MANY>(a.messages, block, level, v);
        zt_multiply<count>(v, a.factor);
        zt_words_of_sums<F, units>(v, lane, a.planes.numel - block.element, words);
        const uint32_t width = zt_widest<count, ZT_FP32, lanes>(words);
        if constexpr (F::nf4)
            zt_encode_sum<F, units>(words, width, table, a, block);
        else if (a.planes.spec.bits == 8)
            zt_encode_sum<zt_int8, units>(words, width, table, a, block);
        else
            zt_encode_sum<zt_int4, units>(words, width, table, a, block);
    });
    zt_clear_padding(a.out, a.work, a.planes);
}

/* -- On the host --------------------------------------------------------------------------------------------------- */

static zt_planes zt_planes_of(zt_wire_spec spec, int64_t numel) {
    const int64_t blocks = zt_wire_blocks(spec, numel), scales = zt_wire_scales_offset(spec, numel);
    return {spec, blocks, numel, blocks * zt_wire_block_bytes(spec), scales, zt_wire_nbytes(spec, numel)};
}

/* Blocks with `units` units for each lane. */
static int zt_share(const zt_messages &messages, const zt_planes &planes, int32_t units, zt_stretches *work) {
    const int32_t size = planes.spec.block_size;
    return zt_take_stretches(messages, planes.blocks, size, size / (units * ZT_UNIT), work);
}

/* The formats that have kernels, by number; -1: none. Blocks of other sizes are what no config asks for. */
static int zt_format_of(zt_wire_spec spec) {
    if (zt_wire_is_nf4(spec)) return 2;
    return spec.block_size == zt_int8::size ? spec.bits == 4 : -1;
}

#define ZT_OF_FORMAT(kernel, argument) {kernel<zt_int8, argument>, kernel<zt_int4, argument>, kernel<zt_nf4, argument>}

/* The dtype of all pieces; FP32 if they differ. */
static int zt_dtype_of(const zt_piece *pieces, int32_t count) {
    for (int32_t i = 1; i < count; i++)
        if (pieces[i].dtype != pieces[0].dtype) return ZT_FP32;
    return count > 0 ? pieces[0].dtype : ZT_FP32;
}

int zt_gpu_quantize(zt_wire_spec spec, const zt_piece *pieces, int32_t count, const void *table, zt_messages messages,
                    void *stream) {
    static void (*const kernels[3][3])(zt_quantize_arguments) = {
        ZT_OF_FORMAT(zt_quantize_kernel, ZT_FP32),
        ZT_OF_FORMAT(zt_quantize_kernel, ZT_FP16),
        ZT_OF_FORMAT(zt_quantize_kernel, ZT_BF16),
    };
    zt_quantize_arguments a;
    if (!zt_wire_valid(spec)) return ZT_BAD_SPEC;
    int status = zt_take_pieces(pieces, count, table, messages.members, &a.pieces);
    if (status == ZT_OK) status = zt_take_made(messages, spec, a.pieces.numel, &a.messages);
    if (status != ZT_OK) return status;
    if (zt_wire_is_cast(spec)) return zt_cast_pieces(spec, a.pieces, messages, a.messages, stream);
    const int format = zt_format_of(spec), dtype = zt_dtype_of(pieces, count);
    if (format < 0) return ZT_BAD_SPEC;
    a.planes = zt_planes_of(spec, a.pieces.numel);
    status = zt_share(messages, a.planes, dtype == ZT_FP32 || zt_wire_is_nf4(spec) ? 4 : 8, &a.work);
    if (status != ZT_OK) return status;
    return zt_launch(kernels[dtype][format], zt_thread_blocks(a.work), ZT_THREADS, a, stream);
}

int zt_gpu_requantize(zt_wire_spec from, zt_messages messages, zt_wire_spec to, zt_messages out, int64_t numel,
                      zt_reduce reduce, void *stream) {
    static void (*const kernels[3])(zt_requantize_arguments) = ZT_OF_FORMAT(zt_requantize_kernel, 4);
    zt_requantize_arguments a;
    if (!zt_wire_valid(from) || !zt_wire_valid(to) || reduce.accumulate) return ZT_BAD_SPEC;
    if (from.block_size != to.block_size || from.dtype != to.dtype) return ZT_BAD_SPEC;
    if (numel < 0 || numel > zt_most || messages.members != out.members) return ZT_BAD_SIZE;
    int status = zt_take_messages(messages, from, numel, &a.messages);
    if (status == ZT_OK) status = zt_take_made(out, to, numel, &a.out);
    if (status != ZT_OK) return status;
    if (zt_wire_is_cast(to)) return zt_cast_again(to, messages, a.messages, out, a.out, numel, reduce.factor, stream);
    const int format = zt_format_of(from);
    if (format < 0) return ZT_BAD_SPEC;
    a.from = zt_planes_of(from, numel);
    a.planes = zt_planes_of(to, numel);
    a.factor = reduce.factor;
    status = zt_share(out, a.planes, 4, &a.work);
    if (status != ZT_OK) return status;
    return zt_launch(kernels[format], zt_thread_blocks(a.work), ZT_THREADS, a, stream);
}

int zt_gpu_dequantize_reduce(zt_wire_spec spec, zt_messages messages, const zt_piece *pieces, int32_t count,
                             const void *table, zt_reduce reduce, void *stream) {
    static void (*const kernels[2][3])(zt_reduce_arguments) = {
        {zt_reduce_kernel<zt_int8, 4>, zt_reduce_kernel<zt_int4, zt_messages_ahead>,
         zt_reduce_kernel<zt_nf4, zt_messages_ahead>},
        {zt_dequantize_kernel<zt_int8>, zt_dequantize_kernel<zt_int4>, zt_reduce_kernel<zt_nf4, 1>},
    };
    zt_reduce_arguments a;
    if (!zt_wire_valid(spec) || (reduce.accumulate != 0 && reduce.accumulate != 1)) return ZT_BAD_SPEC;
    int status = zt_take_pieces(pieces, count, table, messages.members, &a.pieces);
    if (status == ZT_OK) status = zt_take_messages(messages, spec, a.pieces.numel, &a.messages);
    if (status != ZT_OK) return status;
    if (zt_wire_is_cast(spec)) return zt_cast_sum(spec, messages, a.messages, a.pieces, reduce, stream);
    const bool one = a.messages.count == 1;
    const int format = zt_format_of(spec);
    if (format < 0) return ZT_BAD_SPEC;
    a.planes = zt_planes_of(spec, a.pieces.numel);
    a.reduce = reduce;
    status = zt_share(messages, a.planes, one && !zt_wire_is_nf4(spec) ? 8 : 4, &a.work);
    if (status != ZT_OK) return status;
    return zt_launch(kernels[one][format], zt_thread_blocks(a.work), ZT_THREADS, a, stream);
}

int64_t zt_gpu_table_bytes(int32_t count) {
    return count > ZT_GPU_PIECES ? count * (int64_t)sizeof(zt_gpu_piece) : 0;
}

int zt_gpu_table(const zt_piece *pieces, int32_t count, void *host) {
    int64_t numel = 0;
    int32_t taken = 0;
    return zt_take_each(pieces, count, 1, (zt_gpu_piece *)host, &numel, &taken);
}
