/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Block quantization on GPUs: quantize, dequantize, sum, and sum and quantize again. The arithmetic is that of
 * zero_topo/quant/reference.py, Note [Arithmetic contract]; how lanes share the work is in zt_gpu_units.h, Note [Units].
 *
 * A wire block is read once and stays in registers: by up to 32 lanes, so that its extremes are found by shuffles alone,
 * with 2, 4 or 8 units each. Summing needs no extremes, so there each lane has 2 units of a block of any size.
 */
#include "zt_gpu_units.h"

#define ZT_NAN 0x7fc00000u
#define ZT_INFINITY 0x7f800000u
#define ZT_SMALLEST 0x0d800000u /* 2^-100; blocks below it are zero */

struct zt_gpu_messages {
    const uint8_t *data[ZT_GPU_MESSAGES];
    int32_t count;
};

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

/* -- On the device --------------------------------------------------------------------------------------------------- */

ZT_DEVICE zt_place zt_place_of(zt_shares shares, zt_planes planes, int64_t block) {
    const int lanes = 1 << shares.lane_bits;
    return {block * planes.spec.block_size, (int)threadIdx.x & (lanes - 1), lanes};
}

ZT_DEVICE int64_t zt_block_of(zt_shares shares, int64_t tile) {
    return tile * (ZT_THREADS >> shares.lane_bits) + (threadIdx.x >> shares.lane_bits);
}

/* What lies between the planes is zero. */
ZT_DEVICE void zt_clear_padding(uint8_t *message, zt_planes planes) {
    if (blockIdx.x != 0) return;
    const int64_t scale_bytes = planes.blocks * ZT_WIRE_SCALE_BYTES, i = threadIdx.x;
    const int64_t begins[3] = {planes.blocks * zt_wire_block_bytes(planes.spec), planes.scales + scale_bytes,
                               planes.zero_points + scale_bytes};
    const int64_t ends[3] = {planes.scales, planes.zero_points, zt_wire_nbytes(planes.spec, planes.numel)};
#pragma unroll
    for (int plane = 0; plane < 3; plane++)
        if (begins[plane] + i < ends[plane]) message[begins[plane] + i] = 0;
}

/* A float's bits as an integer that sorts as the float does (-0 below 0, NaN outermost), and back. */
ZT_DEVICE int32_t zt_sortable(uint32_t bits) { return (int32_t)(bits ^ ((uint32_t)((int32_t)bits >> 31) & 0x7fffffffu)); }

struct zt_extremes {
    uint32_t scale; /* bits */
    zt_coder coder;
};

/* Scale and inverse for values in a span of `width` (bits, not negative) that becomes 0..levels. */
ZT_DEVICE zt_extremes zt_scaled(uint32_t width, float levels) {
    if (width >= ZT_INFINITY) return {ZT_NAN, {0.0f, 0.0f, 0}};
    if (width < ZT_SMALLEST) return {0, {0.0f, 0.0f, ~0u}};
    const float span = zt_bits<float>(width);
    return {zt_bits<uint32_t>(zt_div(span, levels)), {0.0f, zt_div(levels, span), ~0u}};
}

template <int N, bool SYMMETRIC> ZT_DEVICE zt_extremes zt_measure(const float *v, int lanes, int bits) {
    if (SYMMETRIC) {
        uint32_t most = 0;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const uint32_t size = zt_bits<uint32_t>(v[k]) & 0x7fffffffu;
            most = size > most ? size : most;
        }
        for (int by = lanes / 2; by > 0; by /= 2) {
            const uint32_t other = zt_shuffle_xor(most, by, lanes);
            most = other > most ? other : most;
        }
        return zt_scaled(most, (float)((1 << (bits - 1)) - 1));
    }
    int32_t low = 0x7fffffff, high = -0x7fffffff - 1;
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int32_t key = zt_sortable(zt_bits<uint32_t>(v[k]));
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    for (int by = lanes / 2; by > 0; by /= 2) {
        const int32_t lower = (int32_t)zt_shuffle_xor((uint32_t)low, by, lanes);
        const int32_t higher = (int32_t)zt_shuffle_xor((uint32_t)high, by, lanes);
        low = lower < low ? lower : low;
        high = higher > high ? higher : high;
    }
    /* Adding 0 makes a zero point of -0 one of 0. */
    const float zero = zt_add(zt_bits<float>((uint32_t)zt_sortable((uint32_t)low)), 0.0f);
    const float top = zt_bits<float>((uint32_t)zt_sortable((uint32_t)high));
    const uint32_t span = zt_bits<uint32_t>(zt_sub(top, zero)) & 0x7fffffffu;
    zt_extremes extremes = zt_scaled(span, (float)((1 << bits) - 1));
    extremes.coder.zero = extremes.coder.keep ? zero : 0.0f;
    return extremes;
}

/* Quantizes one block out of the registers of its lanes. All lanes of a wave come here; those of no block write nothing. */
template <int UNITS, bool SYMMETRIC>
ZT_DEVICE void zt_encode(const float *v, zt_place place, int64_t block, zt_planes planes, uint8_t *message) {
    const int bits = planes.spec.bits;
    const zt_extremes extremes = zt_measure<UNITS * ZT_UNIT, SYMMETRIC>(v, place.lanes, bits);
    if (block >= planes.blocks) return;
    if (bits == 8) {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            zt_store_packed<8>(message + place.first + zt_unit_offset(place, u),
                               zt_pack<8, SYMMETRIC>(v + u * ZT_UNIT, extremes.coder));
    } else {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            zt_store_packed<4>(message + (place.first + zt_unit_offset(place, u)) / 2,
                               zt_pack<4, SYMMETRIC>(v + u * ZT_UNIT, extremes.coder));
    }
    if (place.lane != 0) return;
    zt_store<uint32_t>(message + planes.scales + block * ZT_WIRE_SCALE_BYTES, extremes.scale);
    if (!SYMMETRIC)
        zt_store<uint32_t>(message + planes.zero_points + block * ZT_WIRE_SCALE_BYTES,
                           zt_bits<uint32_t>(extremes.coder.zero));
}

/* Adds a lane's units of MANY messages to v, in their order, after reading them all. */
template <int MANY, int UNITS, int BITS, bool SYMMETRIC>
ZT_DEVICE void zt_add_messages(const uint8_t *const *messages, zt_planes planes, zt_place place, int64_t block, float *v) {
    zt_packed<BITS> packed[MANY][UNITS];
    float scale[MANY], zero[MANY];
#pragma unroll
    for (int i = 0; i < MANY; i++) {
        const uint8_t *message = messages[i], *scales = message + planes.scales + block * ZT_WIRE_SCALE_BYTES;
        scale[i] = zt_bits<float>(zt_load<uint32_t>(scales));
        zero[i] = SYMMETRIC ? 0.0f : zt_bits<float>(zt_load<uint32_t>(scales + (planes.zero_points - planes.scales)));
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            packed[i][u] = zt_load_packed<BITS>(message + (place.first + zt_unit_offset(place, u)) * BITS / 8);
    }
#pragma unroll
    for (int i = 0; i < MANY; i++) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            float q[ZT_UNIT];
            zt_unpack<BITS, SYMMETRIC>(packed[i][u], q);
#pragma unroll
            for (int k = 0; k < ZT_UNIT; k++) {
                const float product = zt_mul(q[k], scale[i]), value = SYMMETRIC ? product : zt_add(product, zero[i]);
                v[u * ZT_UNIT + k] = zt_add(v[u * ZT_UNIT + k], value);
            }
        }
    }
}

/* v = the sum of a lane's units over the messages, in their order. */
template <int UNITS, int BITS, bool SYMMETRIC>
ZT_DEVICE void zt_sum(const zt_gpu_messages &messages, zt_planes planes, zt_place place, int64_t block, float *v) {
    const int ahead = UNITS == 2 ? 4 : UNITS == 4 ? 2 : 1;
#pragma unroll
    for (int k = 0; k < UNITS * ZT_UNIT; k++) v[k] = -0.0f; /* -0 + x is x, whatever x */
    int i = 0;
#pragma unroll 1
    for (; i + ahead <= messages.count; i += ahead)
        zt_add_messages<ahead, UNITS, BITS, SYMMETRIC>(messages.data + i, planes, place, block, v);
#pragma unroll 1
    for (; i < messages.count; i++)
        zt_add_messages<1, UNITS, BITS, SYMMETRIC>(messages.data + i, planes, place, block, v);
}

template <int N> ZT_DEVICE void zt_multiply(float *v, float factor) {
    if (factor == 1.0f) return;
#pragma unroll
    for (int k = 0; k < N; k++) v[k] = zt_mul(v[k], factor);
}

/* Zeros for the padding of the last block: `present` values of this one exist. */
template <int UNITS> ZT_DEVICE void zt_clear_beyond(float *v, zt_place place, int64_t present) {
    if (present >= place.lanes * (UNITS * ZT_UNIT)) return;
#pragma unroll 1
    for (int u = 0; u < UNITS; u++) {
#pragma unroll
        for (int k = 0; k < ZT_UNIT; k++)
            if (zt_unit_offset(place, u) + k >= present) v[k] = 0.0f;
        zt_rotate<ZT_UNIT, UNITS * ZT_UNIT>(v);
    }
}

/* -- Kernels ----------------------------------------------------------------------------------------------------------- */

/* Thread blocks that shall fit on a multiprocessor at once, so that enough loads are under way: registers are rationed
 * to that. */
constexpr int zt_residents(int units) { return units == 2 ? 4 : units == 4 ? 3 : 2; }

template <int UNITS, bool SYMMETRIC>
ZT_KERNEL(ZT_THREADS, zt_residents(UNITS)) zt_quantize_kernel(ZT_ARGUMENTS zt_quantize_arguments a) {
    zt_clear_padding(a.message, a.planes);
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += gridDim.x) {
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
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += gridDim.x) {
        const int64_t block = zt_block_of(a.shares, tile);
        const zt_place place = zt_place_of(a.shares, a.planes, block);
        float v[UNITS * ZT_UNIT] = {};
        if (block < a.planes.blocks) {
            zt_sum<UNITS, BITS, SYMMETRIC>(a.messages, a.from, place, block, v);
            zt_multiply<UNITS * ZT_UNIT>(v, a.factor);
        }
        zt_clear_beyond<UNITS>(v, place, a.planes.numel - place.first);
        zt_encode<UNITS, SYMMETRIC>(v, place, block, a.planes, a.message);
    }
}

template <int BITS, bool SYMMETRIC>
ZT_KERNEL(ZT_THREADS, zt_residents(2)) zt_reduce_kernel(ZT_ARGUMENTS zt_reduce_arguments a) {
    for (int64_t tile = blockIdx.x; tile < a.shares.tiles; tile += gridDim.x) {
        const int64_t block = zt_block_of(a.shares, tile);
        if (block >= a.planes.blocks) return;
        const zt_place place = zt_place_of(a.shares, a.planes, block);
        float v[2 * ZT_UNIT];
        zt_sum<2, BITS, SYMMETRIC>(a.messages, a.planes, place, block, v);
        zt_multiply<2 * ZT_UNIT>(v, a.reduce.factor);
        zt_store_units<2>(a.pieces, place, v, a.reduce.accumulate != 0);
    }
}

/* -- On the host ------------------------------------------------------------------------------------------------------- */

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
    return {spec, zt_wire_blocks(spec, numel), numel, zt_wire_scales_offset(spec, numel),
            zt_wire_zero_points_offset(spec, numel)};
}

static zt_shares zt_shares_of(const zt_planes &planes, int32_t lanes) {
    return {zt_blocks_for(planes.blocks, ZT_THREADS / lanes), zt_log2(lanes)};
}

static int zt_check_message(zt_message message, zt_wire_spec spec, int64_t numel) {
    if (message.nbytes != zt_wire_nbytes(spec, numel) || (numel > 0 && !message.data)) return ZT_BAD_SIZE;
    return (uintptr_t)message.data & 15 ? ZT_BAD_ALIGNMENT : ZT_OK;
}

static int zt_take_messages(const zt_message *messages, int32_t count, const zt_planes &planes, zt_gpu_messages *out) {
    if (count < 1 || !messages) return ZT_BAD_SIZE;
    if (count > ZT_GPU_MESSAGES) return ZT_TOO_MANY;
    out->count = count;
    for (int32_t i = 0; i < count; i++) {
        const int status = zt_check_message(messages[i], planes.spec, planes.numel);
        if (status != ZT_OK) return status;
        out->data[i] = messages[i].data;
    }
    return ZT_OK;
}

/* Up to 32 lanes share a block, each with as few units as that leaves, but at least 2. */
static int32_t zt_coding_lanes(zt_wire_spec spec) { return spec.block_size >= 512 ? 32 : spec.block_size / (2 * ZT_UNIT); }

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
    a.shares = zt_shares_of(a.planes, zt_coding_lanes(spec));
    a.message = message.data;
    const int size = spec.block_size <= 512 ? 0 : spec.block_size == 1024 ? 1 : 2;
    return zt_launch(kernels[size][spec.symmetric], a.shares.tiles, ZT_THREADS, a, stream);
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
    a.shares = zt_shares_of(a.planes, zt_coding_lanes(to));
    a.message = message.data;
    a.factor = reduce.factor;
    int status = zt_take_messages(messages, sources, a.from, &a.messages);
    if (status == ZT_OK) status = zt_check_message(message, to, numel);
    if (status != ZT_OK || numel == 0) return status;
    const int size = to.block_size <= 512 ? 0 : to.block_size == 1024 ? 1 : 2;
    return zt_launch(kernels[size][from.bits == 8][to.symmetric], a.shares.tiles, ZT_THREADS, a, stream);
}

int zt_gpu_dequantize_reduce(zt_wire_spec spec, const zt_message *messages, int32_t sources, const zt_piece *pieces,
                             int32_t count, zt_reduce reduce, void *stream) {
    static void (*const kernels[2][2])(zt_reduce_arguments) = {
        {zt_reduce_kernel<4, false>, zt_reduce_kernel<4, true>},
        {zt_reduce_kernel<8, false>, zt_reduce_kernel<8, true>},
    };
    zt_reduce_arguments a;
    if (!zt_wire_valid(spec) || (reduce.accumulate != 0 && reduce.accumulate != 1)) return ZT_BAD_SPEC;
    int status = zt_take_pieces(pieces, count, &a.pieces);
    if (status != ZT_OK) return status;
    a.planes = zt_planes_of(spec, a.pieces.numel);
    a.shares = zt_shares_of(a.planes, spec.block_size / (2 * ZT_UNIT));
    a.reduce = reduce;
    status = zt_take_messages(messages, sources, a.planes, &a.messages);
    if (status != ZT_OK || a.pieces.numel == 0) return status;
    return zt_launch(kernels[spec.bits == 8][spec.symmetric], a.shares.tiles, ZT_THREADS, a, stream);
}

int zt_gpu_dequantize(zt_wire_spec spec, zt_message message, const zt_piece *pieces, int32_t count, void *stream) {
    return zt_gpu_dequantize_reduce(spec, &message, 1, pieces, count, {1.0f, 0}, stream);
}
