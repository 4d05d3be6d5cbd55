/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Block quantization on GPUs: quantize, dequantize, sum, and sum and quantize again. The arithmetic is that of
 * zero_topo/quant/reference.py, Note [Arithmetic contract]; how lanes share the work is said in zt_gpu_units.h.
 *
 * A wire block is read once and stays in registers: of up to 32 lanes, so that its extremes are found by shuffles
 * alone, with 4 or 8 units each. More units a lane mean more loads under way and less that each lane does for
 * itself: in a trial on an H200, of which no record was kept, INT4 is quantized at 0.92 of a copy with 8 units and 0.79 with 4, and sums of blocks of 64 take
 * 0.75 with 4 and 0.68 with 2. Sums need no extremes: 64 lanes may share.
 */
#include "zt_gpu_coding.h"

struct zt_quantize_arguments {
    zt_gpu_pieces pieces;
    zt_gpu_messages messages;
    zt_planes planes;
    zt_shares shares;
};

struct zt_requantize_arguments {
    zt_gpu_messages messages, out;
    zt_planes from, planes;
    zt_shares shares;
    float factor;
};

struct zt_reduce_arguments {
    zt_gpu_pieces pieces;
    zt_gpu_messages messages;
    zt_planes planes;
    zt_shares shares;
    zt_reduce reduce;
};
static_assert(sizeof(zt_reduce_arguments) <= 4096, "what every compiler lets a kernel have");

/* -- Kernels ------------------------------------------------------------------------------------------------------- */

/* What lies between the planes of each message is zero. */
ZT_DEVICE void zt_clear_padding(const zt_gpu_messages &messages, const zt_shares &shares, const zt_planes &planes) {
    const int64_t scale_bytes = planes.blocks * zt_wire_scale_bytes(planes.spec), i = threadIdx.x;
    const int64_t begins[2] = {planes.values_end, planes.scales + scale_bytes};
    const int64_t ends[2] = {planes.scales, planes.nbytes};
    for (int64_t member = blockIdx.x; member < shares.members; member += gridDim.x) {
        uint8_t *message = zt_message_at(messages, zt_kept_member(shares, member));
#pragma unroll
        for (int plane = 0; plane < 2; plane++)
            if (begins[plane] + i < ends[plane]) message[begins[plane] + i] = 0;
    }
}

/* Thread blocks that shall fit on a multiprocessor at once, so that enough loads are under way: registers are rationed
 * to that. HIP counts waves of a SIMD, of which a block has one on each; four have 128 registers a lane. */
#if defined(__HIPCC__)
constexpr int zt_residents(int units) { return units == 8 ? 2 : 4; }
#else
constexpr int zt_residents(int units) { return units == 8 ? 2 : 3; }
#endif

template <int UNITS, bool NF4>
ZT_KERNEL(ZT_THREADS, zt_residents(UNITS)) zt_quantize_kernel(ZT_ARGUMENTS zt_quantize_arguments a) {
    const zt_nf4_table *table = zt_shared_nf4<NF4>();
    const int64_t step = gridDim.x;
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += step) {
        const zt_place place = zt_place_of(a.shares, tile);
        float v[UNITS * ZT_UNIT];
        zt_load_units<UNITS>(a.pieces, place, v); /* beyond the last block all is zero */
        zt_encode<UNITS, NF4>(v, place, a.planes, table, a.messages);
    }
    zt_clear_padding(a.messages, a.shares, a.planes);
}

template <int UNITS, int BITS, bool NF4>
ZT_KERNEL(ZT_THREADS, zt_residents(UNITS)) zt_requantize_kernel(ZT_ARGUMENTS zt_requantize_arguments a) {
    zt_clear_padding(a.out, a.shares, a.planes);
    const zt_nf4_table *table = zt_shared_nf4<NF4>();
    const int64_t step = gridDim.x;
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += step) {
        const zt_place place = zt_place_of(a.shares, tile);
        float v[UNITS * ZT_UNIT] = {};
        if (place.block < a.shares.blocks) zt_sum<UNITS, BITS, NF4>(a.messages, NF4 ? a.planes : a.from, place, v);
        zt_multiply<UNITS * ZT_UNIT>(v, a.factor);
        zt_clear_beyond<UNITS>(v, place, a.planes.numel - place.first);
        zt_encode<UNITS, NF4>(v, place, a.planes, table, a.out);
    }
}

template <int UNITS, int BITS, bool NF4>
ZT_KERNEL(ZT_THREADS, zt_residents(UNITS)) zt_reduce_kernel(ZT_ARGUMENTS zt_reduce_arguments a) {
    const int64_t step = gridDim.x;
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += step) {
        const zt_place place = zt_place_of(a.shares, tile);
        if (place.block >= a.shares.blocks) return;
        float v[UNITS * ZT_UNIT];
        zt_sum<UNITS, BITS, NF4>(a.messages, a.planes, place, v);
        zt_multiply<UNITS * ZT_UNIT>(v, a.reduce.factor);
        zt_store_units<UNITS>(a.pieces, place, v, a.reduce.accumulate != 0);
    }
}

/* -- On the host --------------------------------------------------------------------------------------------------- */

static zt_planes zt_planes_of(zt_wire_spec spec, int64_t numel) {
    const int64_t blocks = zt_wire_blocks(spec, numel), scales = zt_wire_scales_offset(spec, numel);
    return {spec, blocks, numel, blocks * zt_wire_block_bytes(spec), scales, zt_wire_nbytes(spec, numel)};
}

static int zt_share(const zt_messages &messages, const zt_planes &planes, int32_t units, zt_shares *shares) {
    const int32_t size = planes.spec.block_size;
    return zt_take_shares(messages, planes.blocks, size, size / (units * ZT_UNIT), shares);
}

int zt_gpu_quantize(zt_wire_spec spec, const zt_piece *pieces, int32_t count, const void *table, zt_messages messages,
                    void *stream) {
    zt_quantize_arguments a;
    if (!zt_wire_valid(spec)) return ZT_BAD_SPEC;
    int status = zt_take_pieces(pieces, count, table, messages.members, &a.pieces);
    if (status == ZT_OK) status = zt_take_made(messages, spec, a.pieces.numel, &a.messages);
    if (status != ZT_OK) return status;
    if (zt_wire_is_cast(spec)) return zt_cast_pieces(spec, a.pieces, messages, a.messages, stream);
    a.planes = zt_planes_of(spec, a.pieces.numel);
    const bool small = spec.block_size <= 128;
    status = zt_share(messages, a.planes, small ? 4 : 8, &a.shares);
    if (status != ZT_OK || a.shares.tiles == 0) return status;
    const auto even = small ? zt_quantize_kernel<4, false> : zt_quantize_kernel<8, false>;
    const auto kernel = zt_wire_is_nf4(spec) ? zt_quantize_kernel<4, true> : even;
    return zt_launch(kernel, a.shares.tiles, ZT_THREADS, a, stream);
}

int zt_gpu_requantize(zt_wire_spec from, zt_messages messages, zt_wire_spec to, zt_messages out, int64_t numel,
                      zt_reduce reduce, void *stream) {
    static void (*const kernels[2][2])(zt_requantize_arguments) = {
        {zt_requantize_kernel<4, 4, false>, zt_requantize_kernel<4, 8, false>},
        {zt_requantize_kernel<8, 4, false>, zt_requantize_kernel<8, 8, false>},
    };
    zt_requantize_arguments a;
    if (!zt_wire_valid(from) || !zt_wire_valid(to) || reduce.accumulate) return ZT_BAD_SPEC;
    if (from.block_size != to.block_size || from.dtype != to.dtype) return ZT_BAD_SPEC;
    if (numel < 0 || numel > zt_most || messages.members != out.members) return ZT_BAD_SIZE;
    int status = zt_take_messages(messages, from, numel, &a.messages);
    if (status == ZT_OK) status = zt_take_made(out, to, numel, &a.out);
    if (status != ZT_OK) return status;
    if (zt_wire_is_cast(to)) return zt_cast_again(to, a.messages, out, a.out, numel, reduce.factor, stream);
    a.from = zt_planes_of(from, numel);
    a.planes = zt_planes_of(to, numel);
    a.factor = reduce.factor;
    const bool large = to.block_size > 4 * ZT_UNIT * 32; /* 32 lanes share a block at most */
    status = zt_share(out, a.planes, large ? 8 : 4, &a.shares);
    if (status != ZT_OK || a.shares.tiles == 0) return status;
    const auto kernel = zt_wire_is_nf4(from) ? zt_requantize_kernel<4, 4, true> : kernels[large][from.bits == 8];
    return zt_launch(kernel, a.shares.tiles, ZT_THREADS, a, stream);
}

int zt_gpu_dequantize_reduce(zt_wire_spec spec, zt_messages messages, const zt_piece *pieces, int32_t count,
                             const void *table, zt_reduce reduce, void *stream) {
    zt_reduce_arguments a;
    if (!zt_wire_valid(spec) || (reduce.accumulate != 0 && reduce.accumulate != 1)) return ZT_BAD_SPEC;
    int status = zt_take_pieces(pieces, count, table, messages.members, &a.pieces);
    if (status == ZT_OK) status = zt_take_messages(messages, spec, a.pieces.numel, &a.messages);
    if (status != ZT_OK) return status;
    if (zt_wire_is_cast(spec)) return zt_cast_sum(spec, messages, a.messages, a.pieces, reduce, stream);
    a.planes = zt_planes_of(spec, a.pieces.numel);
    a.reduce = reduce;
    status = zt_share(messages, a.planes, 4, &a.shares);
    if (status != ZT_OK || a.shares.tiles == 0) return status;
    const auto even = spec.bits == 8 ? zt_reduce_kernel<4, 8, false> : zt_reduce_kernel<4, 4, false>;
    const auto kernel = zt_wire_is_nf4(spec) ? zt_reduce_kernel<4, 4, true> : even;
    return zt_launch(kernel, a.shares.tiles, ZT_THREADS, a, stream);
}

int64_t zt_gpu_table_bytes(int32_t count) {
    return count > ZT_GPU_PIECES ? count * (int64_t)sizeof(zt_gpu_piece) : 0;
}

int zt_gpu_table(const zt_piece *pieces, int32_t count, void *host) {
    int64_t numel = 0;
    int32_t taken = 0;
    return zt_take_each(pieces, count, 1, (zt_gpu_piece *)host, &numel, &taken);
}
