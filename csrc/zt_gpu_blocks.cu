/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Block quantization on GPUs: quantize, dequantize, sum, and sum and quantize again. The arithmetic is that of
 * zero_topo/quant/reference.py, Note [Arithmetic contract]; how lanes share the work is said in zt_gpu_units.h.
 *
 * A wire block is read once and stays in registers: of up to 32 lanes, so that its extremes are found by shuffles
 * alone, with 2, 4 or 8 units each. More units a lane mean more loads under way and less that each lane does for
 * itself; but fewer than 4 lanes would touch pieces of memory too small. Sums need no extremes: 64 lanes may share.
 */
#include "zt_gpu_coding.h"

/* How threads share blocks: 1 << lane_bits lanes each. */
struct zt_shares {
    int64_t tiles; /* of ZT_THREADS lanes */
    int32_t lane_bits;
};

struct zt_quantize_arguments {
    zt_gpu_pieces pieces;
    zt_planes planes;
    zt_shares shares;
    uint8_t *message;
};

struct zt_requantize_arguments {
    zt_gpu_messages messages;
    zt_planes from, planes;
    zt_shares shares;
    uint8_t *message;
    float factor;
};

struct zt_reduce_arguments {
    zt_gpu_pieces pieces;
    zt_gpu_messages messages;
    zt_planes planes;
    zt_shares shares;
    zt_reduce reduce;
};

/* -- Kernels ------------------------------------------------------------------------------------------------------- */

ZT_DEVICE zt_place zt_place_of(zt_shares shares, zt_planes planes, int64_t block) {
    const int lanes = 1 << shares.lane_bits;
    return {(uint64_t)(block * planes.spec.block_size), (int)threadIdx.x & (lanes - 1), lanes};
}

ZT_DEVICE int64_t zt_block_of(zt_shares shares, int64_t tile) {
    return tile * (ZT_THREADS >> shares.lane_bits) + (threadIdx.x >> shares.lane_bits);
}

/* What lies between the planes is zero. */
ZT_DEVICE void zt_clear_padding(uint8_t *message, zt_planes planes) {
    if (blockIdx.x != 0) return;
    const int64_t scale_bytes = planes.blocks * ZT_WIRE_SCALE_BYTES, i = threadIdx.x;
    const int64_t begins[3] = {planes.values_end, planes.scales + scale_bytes, planes.zero_points + scale_bytes};
    const int64_t ends[3] = {planes.scales, planes.zero_points, planes.nbytes};
#pragma unroll
    for (int plane = 0; plane < 3; plane++)
        if (begins[plane] + i < ends[plane]) message[begins[plane] + i] = 0;
}

/* Thread blocks that shall fit on a multiprocessor at once, so that enough loads are under way: registers are rationed
 * to that. */
constexpr int zt_residents(int units) { return units == 2 ? 4 : units == 4 ? 3 : 2; }

template <int UNITS, bool SYMMETRIC>
ZT_KERNEL(ZT_THREADS, zt_residents(UNITS)) zt_quantize_kernel(ZT_ARGUMENTS zt_quantize_arguments a) {
    zt_clear_padding(a.message, a.planes);
    const int64_t step = gridDim.x;
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += step) {
        const int64_t block = zt_block_of(a.shares, tile);
        const zt_place place = zt_place_of(a.shares, a.planes, block);
        float v[UNITS * ZT_UNIT];
        zt_load_units<UNITS>(a.pieces, place, v); /* beyond the last block all is zero */
        zt_encode<UNITS, SYMMETRIC>(v, place, block, a.planes, a.message);
    }
}

template <int UNITS, int BITS, bool SYMMETRIC>
ZT_KERNEL(ZT_THREADS, zt_residents(UNITS)) zt_requantize_kernel(ZT_ARGUMENTS zt_requantize_arguments a) {
    zt_clear_padding(a.message, a.planes);
    const int64_t step = gridDim.x;
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += step) {
        const int64_t block = zt_block_of(a.shares, tile);
        const zt_place place = zt_place_of(a.shares, a.planes, block);
        float v[UNITS * ZT_UNIT] = {};
        if (block < a.planes.blocks) {
            zt_sum<UNITS, BITS, SYMMETRIC>(a.messages, a.from, place, block, v);
            zt_multiply<UNITS * ZT_UNIT>(v, a.factor);
        }
        zt_clear_beyond<UNITS>(v, place, a.planes.numel - (int64_t)place.first);
        zt_encode<UNITS, SYMMETRIC>(v, place, block, a.planes, a.message);
    }
}

template <int UNITS, int BITS, bool SYMMETRIC>
ZT_KERNEL(ZT_THREADS, zt_residents(UNITS)) zt_reduce_kernel(ZT_ARGUMENTS zt_reduce_arguments a) {
    const int64_t step = gridDim.x;
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += step) {
        const int64_t block = zt_block_of(a.shares, tile);
        if (block >= a.planes.blocks) return;
        const zt_place place = zt_place_of(a.shares, a.planes, block);
        float v[UNITS * ZT_UNIT];
        zt_sum<UNITS, BITS, SYMMETRIC>(a.messages, a.planes, place, block, v);
        zt_multiply<UNITS * ZT_UNIT>(v, a.reduce.factor);
        zt_store_units<UNITS>(a.pieces, place, v, a.reduce.accumulate != 0);
    }
}

/* -- On the host --------------------------------------------------------------------------------------------------- */

static int zt_log2(int32_t power) {
    int bits = 0;
    while (power >> (bits + 1)) bits++;
    return bits;
}

/* Larger numbers of elements are taken for nonsense; sums of sizes below cannot overflow. */
static const int64_t zt_most = (int64_t)1 << 56;

static int zt_check_piece(const zt_piece &p, int64_t *numel) {
    int64_t extent = 0;
    if (p.dtype != ZT_FP32 && p.dtype != ZT_FP16 && p.dtype != ZT_BF16) return ZT_BAD_DTYPE;
    if (p.rows < 0 || p.columns < 0 || p.limit < 0 || p.limit > zt_most) return ZT_BAD_SIZE;
    if (__builtin_mul_overflow(p.rows, p.columns, numel) || *numel > zt_most) return ZT_BAD_SIZE;
    if (*numel == 0) return ZT_OK;
    if (p.rows > 1 && (p.row_stride < p.columns || __builtin_mul_overflow(p.rows, p.row_stride, &extent)))
        return ZT_BAD_SIZE;
    return extent > zt_most || (p.limit > 0 && !p.data) ? ZT_BAD_SIZE : ZT_OK;
}

static int zt_take_pieces(const zt_piece *pieces, int32_t count, zt_gpu_pieces *out) {
    out->count = 0;
    out->numel = 0;
    if (count < 0 || (count > 0 && !pieces)) return ZT_BAD_SIZE;
    for (int32_t i = 0; i < count; i++) {
        const zt_piece &p = pieces[i];
        int64_t numel = 0;
        const int status = zt_check_piece(p, &numel);
        if (status != ZT_OK) return status;
        if (numel == 0) continue;
        if (out->count == ZT_GPU_PIECES) return ZT_TOO_MANY;
        const bool touching = p.rows == 1 || p.row_stride == p.columns;
        out->piece[out->count] = {(char *)p.data, out->numel, touching ? numel : p.columns, p.row_stride, p.limit};
        out->dtype[out->count++] = (uint8_t)p.dtype;
        out->numel += numel;
        if (out->numel > zt_most) return ZT_BAD_SIZE;
    }
    return ZT_OK;
}

static zt_planes zt_planes_of(zt_wire_spec spec, int64_t numel) {
    const int64_t blocks = zt_wire_blocks(spec, numel), scales = zt_wire_scales_offset(spec, numel);
    return {spec, blocks, numel, blocks * zt_wire_block_bytes(spec), scales, zt_wire_zero_points_offset(spec, numel),
            zt_wire_nbytes(spec, numel)};
}

static zt_shares zt_shares_of(const zt_planes &planes, int32_t units) {
    const int32_t lanes = planes.spec.block_size / (units * ZT_UNIT);
    return {zt_blocks_for(planes.blocks, ZT_THREADS / lanes), zt_log2(lanes)};
}

static int zt_check_message(zt_message message, zt_wire_spec spec, int64_t numel) {
    if (message.nbytes != zt_wire_nbytes(spec, numel) || (numel > 0 && !message.data)) return ZT_BAD_SIZE;
    return (uintptr_t)message.data & 15 ? ZT_BAD_ALIGNMENT : ZT_OK;
}

/* Where messages lie; false if they are not evenly spaced. */
static bool zt_find_spacing(const zt_message *messages, int32_t count, zt_gpu_messages *out) {
    *out = {messages[0].data, 0, count, count};
    if (count == 1) return true;
    int64_t spacing = messages[1].data - messages[0].data;
    if (count > 2 && messages[2].data - messages[1].data < spacing) spacing = messages[2].data - messages[1].data;
    if (spacing <= 0 || spacing % 16 || spacing / 16 > UINT32_MAX) return false;
    out->spacing = (uint32_t)(spacing / 16);
    for (int32_t i = 1; i < count; i++) {
        const int64_t step = messages[i].data - messages[i - 1].data;
        if (step == spacing) continue;
        if (step != 2 * spacing || out->hole < count) return false;
        out->hole = i;
    }
    return true;
}

static int zt_take_messages(const zt_message *messages, int32_t count, const zt_planes &planes, zt_gpu_messages *out) {
    if (count < 1 || !messages) return ZT_BAD_SIZE;
    for (int32_t i = 0; i < count; i++) {
        const int status = zt_check_message(messages[i], planes.spec, planes.numel);
        if (status != ZT_OK) return status;
    }
    return zt_find_spacing(messages, count, out) || planes.numel == 0 ? ZT_OK : ZT_UNEVEN;
}

int zt_gpu_even(const zt_message *messages, int32_t sources) {
    zt_gpu_messages found;
    return sources > 0 && zt_find_spacing(messages, sources, &found);
}

/* Units of each lane, where up to `lanes` may share a block. */
static int32_t zt_units_of(zt_wire_spec spec, int32_t lanes) {
    return spec.block_size <= 128 ? 2 : spec.block_size <= 4 * ZT_UNIT * lanes ? 4 : 8;
}

int zt_gpu_quantize(zt_wire_spec spec, const zt_piece *pieces, int32_t count, zt_message message, void *stream) {
    static void (*const kernels[3][2])(zt_quantize_arguments) = {
        {zt_quantize_kernel<2, false>, zt_quantize_kernel<2, true>},
        {zt_quantize_kernel<4, false>, zt_quantize_kernel<4, true>},
        {zt_quantize_kernel<8, false>, zt_quantize_kernel<8, true>},
    };
    zt_quantize_arguments a;
    if (!zt_wire_valid(spec)) return ZT_BAD_SPEC;
    int status = zt_take_pieces(pieces, count, &a.pieces);
    if (status == ZT_OK) status = zt_check_message(message, spec, a.pieces.numel);
    if (status != ZT_OK || a.pieces.numel == 0) return status;
    a.planes = zt_planes_of(spec, a.pieces.numel);
    const int32_t units = zt_units_of(spec, 32);
    a.shares = zt_shares_of(a.planes, units);
    a.message = message.data;
    return zt_launch(kernels[units / 4][spec.symmetric], a.shares.tiles, ZT_THREADS, a, stream);
}

int zt_gpu_requantize(zt_wire_spec from, const zt_message *messages, int32_t sources, zt_wire_spec to,
                      zt_message message, int64_t numel, zt_reduce reduce, void *stream) {
#define ZT_ROW(units)                                                                                                  \
    {{zt_requantize_kernel<units, 4, false>, zt_requantize_kernel<units, 4, true>},                                    \
     {zt_requantize_kernel<units, 8, false>, zt_requantize_kernel<units, 8, true>}}
    static void (*const kernels[3][2][2])(zt_requantize_arguments) = {ZT_ROW(2), ZT_ROW(4), ZT_ROW(8)};
#undef ZT_ROW
    zt_requantize_arguments a;
    if (!zt_wire_valid(from) || !zt_wire_valid(to) || reduce.accumulate) return ZT_BAD_SPEC;
    if (from.block_size != to.block_size || from.symmetric != to.symmetric) return ZT_BAD_SPEC;
    if (numel < 0 || numel > zt_most) return ZT_BAD_SIZE;
    a.from = zt_planes_of(from, numel);
    a.planes = zt_planes_of(to, numel);
    const int32_t units = zt_units_of(to, 32);
    a.shares = zt_shares_of(a.planes, units);
    a.message = message.data;
    a.factor = reduce.factor;
    int status = zt_take_messages(messages, sources, a.from, &a.messages);
    if (status == ZT_OK) status = zt_check_message(message, to, numel);
    if (status != ZT_OK || numel == 0) return status;
    return zt_launch(kernels[units / 4][from.bits == 8][to.symmetric], a.shares.tiles, ZT_THREADS, a, stream);
}

int zt_gpu_dequantize_reduce(zt_wire_spec spec, const zt_message *messages, int32_t sources, const zt_piece *pieces,
                             int32_t count, zt_reduce reduce, void *stream) {
    static void (*const kernels[2][2][2])(zt_reduce_arguments) = {
        {{zt_reduce_kernel<2, 4, false>, zt_reduce_kernel<2, 4, true>},
         {zt_reduce_kernel<2, 8, false>, zt_reduce_kernel<2, 8, true>}},
        {{zt_reduce_kernel<4, 4, false>, zt_reduce_kernel<4, 4, true>},
         {zt_reduce_kernel<4, 8, false>, zt_reduce_kernel<4, 8, true>}},
    };
    zt_reduce_arguments a;
    if (!zt_wire_valid(spec) || (reduce.accumulate != 0 && reduce.accumulate != 1)) return ZT_BAD_SPEC;
    int status = zt_take_pieces(pieces, count, &a.pieces);
    if (status != ZT_OK) return status;
    a.planes = zt_planes_of(spec, a.pieces.numel);
    const int32_t units = zt_units_of(spec, 64);
    a.shares = zt_shares_of(a.planes, units);
    a.reduce = reduce;
    status = zt_take_messages(messages, sources, a.planes, &a.messages);
    if (status != ZT_OK || a.pieces.numel == 0) return status;
    return zt_launch(kernels[units / 4][spec.bits == 8][spec.symmetric], a.shares.tiles, ZT_THREADS, a, stream);
}

int zt_gpu_dequantize(zt_wire_spec spec, zt_message message, const zt_piece *pieces, int32_t count, void *stream) {
    return zt_gpu_dequantize_reduce(spec, &message, 1, pieces, count, {1.0f, 0}, stream);
}
