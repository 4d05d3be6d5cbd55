/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Eight neighbouring values of a message, a unit, are what one lane handles at a time: where they lie in the pieces,
 * and how they are read, written, and decoded from a message.
 *
 * Note [Units]
 *     A unit is 16 bytes of FP16 or BF16, 32 of FP32, 8 of INT8 and 4 of INT4. Lane l of the `lanes` that share a wire
 *     block has units l, l + lanes, l + 2 lanes ... of it, so neighbouring lanes touch neighbouring memory. A block
 *     that lies in one run of one piece (a row, as far as it exists), aligned to 16 bytes, is read and written by
 *     vectors, all loads first. Otherwise each unit finds its own place: by vectors or single elements within one run,
 *     element by element where a run ends inside it. Those loops are rolled, values moving through registers, because
 *     an array with a computed index would lie in slow local memory.
 *
 * Note [Exact tricks]
 *     Placing an unsigned field of b bits at bit k of the word whose exponent gives bit k the weight 1 makes the float
 *     2^(23-k) + field, and subtracting what is not wanted is exact: no shift and no conversion per value. Adding
 *     1.5 * 2^23 to a float rounds it to an integer, half to even, found in the low bits of the sum; adding an even
 *     number more shifts that integer and nothing else. |x * inv| stays below L + 1/2, so nothing needs clamping.
 */
#ifndef ZT_GPU_UNITS_H
#define ZT_GPU_UNITS_H

#include "zt_gpu_portable.h"

#define ZT_UNIT 8
#define ZT_INFINITY 0x7f800000u /* bits of FP32; those of NaN are larger */

struct zt_gpu_piece {
    char *data;
    int64_t start;   /* of its first element, in the message */
    int64_t columns; /* whole rows are merged where they touch */
    int64_t row_stride;
    int64_t limit;
};

/* By value in a kernel's arguments: 2.6 KB. Pieces without elements are left out. */
struct zt_gpu_pieces {
    zt_gpu_piece piece[ZT_GPU_PIECES];
    uint8_t dtype[ZT_GPU_PIECES];
    int64_t numel;
    int32_t count;
};

/* What lies at an element of a message: `left` more elements of the message are adjacent there, `present` exist. */
struct zt_run {
    char *data;
    int64_t left;
    int64_t present;
    int dtype;
};

ZT_DEVICE int zt_bytes_of(int dtype) { return dtype == ZT_FP32 ? 4 : 2; }

ZT_DEVICE zt_run zt_find(const zt_gpu_pieces &pieces, int64_t element) {
    if (element >= pieces.numel) return {nullptr, ZT_UNIT, 0, ZT_FP32}; /* the padding of the last block */
    int at = 0;
    for (int past = pieces.count; past - at > 1;) {
        const int middle = (at + past) / 2;
        if (pieces.piece[middle].start <= element)
            at = middle;
        else
            past = middle;
    }
    const zt_gpu_piece piece = pieces.piece[at];
    const int dtype = pieces.dtype[at];
    const int64_t i = element - piece.start, columns = piece.columns;
    int64_t row = 0;
    if (i >= columns) /* 64-bit divisions are slow, and most pieces are one run or small */
        row = (uint64_t)i >> 32 ? i / columns : (int64_t)((uint32_t)i / (uint32_t)columns);
    const int64_t column = i - row * columns, offset = row * piece.row_stride + column;
    const int64_t left = columns - column, exist = piece.limit - offset;
    return {piece.data + offset * zt_bytes_of(dtype), left, exist < left ? exist : left, dtype};
}

/* -- Elements and units in memory ---------------------------------------------------------------------------------- */

ZT_DEVICE float zt_load_element(const char *from, int dtype) {
    if (dtype == ZT_FP32) return zt_bits<float>(zt_load<uint32_t>(from));
    const uint32_t bits = zt_load<uint16_t>(from);
    return dtype == ZT_BF16 ? zt_from_bf16(bits) : zt_from_fp16(bits);
}

ZT_DEVICE void zt_store_element(char *to, int dtype, float value) {
    if (dtype == ZT_FP32)
        zt_store<uint32_t>(to, zt_bits<uint32_t>(value));
    else if (dtype == ZT_BF16)
        zt_store<uint16_t>(to, (uint16_t)zt_to_bf16x2(value, 0.0f));
    else
        zt_store<uint16_t>(to, (uint16_t)zt_to_fp16x2(value, 0.0f));
}

template <int DTYPE> ZT_DEVICE void zt_load_unit(const char *from, float *v) {
    const uint4 a = zt_load<uint4>(from);
    if (DTYPE == ZT_FP32) {
        const uint4 b = zt_load<uint4>(from + 16);
        const uint32_t words[ZT_UNIT] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int k = 0; k < ZT_UNIT; k++) v[k] = zt_bits<float>(words[k]);
    } else {
        const uint32_t words[ZT_UNIT / 2] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int k = 0; k < ZT_UNIT; k++) {
            const uint32_t word = words[k / 2];
            if (DTYPE == ZT_BF16)
                v[k] = zt_bits<float>(k % 2 ? word & 0xffff0000u : word << 16);
            else
                v[k] = zt_from_fp16(k % 2 ? word >> 16 : word & 0xffffu);
        }
    }
}

template <int DTYPE> ZT_DEVICE void zt_store_unit(char *to, const float *v) {
    uint32_t words[ZT_UNIT];
#pragma unroll
    for (int k = 0; k < ZT_UNIT; k++) {
        if (DTYPE == ZT_FP32) words[k] = zt_bits<uint32_t>(v[k]);
        if (DTYPE == ZT_FP16 && k % 2 == 0) words[k / 2] = zt_to_fp16x2(v[k], v[k + 1]);
        if (DTYPE == ZT_BF16 && k % 2 == 0) words[k / 2] = zt_to_bf16x2(v[k], v[k + 1]);
    }
    zt_store<uint4>(to, uint4{words[0], words[1], words[2], words[3]});
    if (DTYPE == ZT_FP32) zt_store<uint4>(to + 16, uint4{words[4], words[5], words[6], words[7]});
}

/* -- The units of one lane ----------------------------------------------------------------------------------------- */

/* Where a lane's units lie: of the block that begins at element `first`, units lane, lane + lanes, ... */
struct zt_place {
    uint64_t first;
    int32_t lane, lanes;
};

/* Which of the block's units is the lane's u-th, and where it begins: in elements from the beginning of the block. */
ZT_DEVICE int zt_unit_of(zt_place place, int u) { return u * place.lanes + place.lane; }
ZT_DEVICE int zt_unit_offset(zt_place place, int u) { return zt_unit_of(place, u) * ZT_UNIT; }

/* Where a block begins in a message: a unit takes BITS bytes. */
template <int BITS> ZT_DEVICE int64_t zt_packed_offset(zt_place place) { return place.first / ZT_UNIT * BITS; }

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

ZT_DEVICE void zt_step(zt_run &run) {
    run.data += zt_bytes_of(run.dtype);
    run.left--;
    run.present--;
}

ZT_DEVICE void zt_load_unit_anywhere(const zt_gpu_pieces &pieces, int64_t element, float *v) {
    zt_run run = zt_find(pieces, element);
    if (run.present >= ZT_UNIT && zt_aligned16(run.data)) {
        if (run.dtype == ZT_FP32)
            zt_load_unit<ZT_FP32>(run.data, v);
        else if (run.dtype == ZT_BF16)
            zt_load_unit<ZT_BF16>(run.data, v);
        else
            zt_load_unit<ZT_FP16>(run.data, v);
    } else if (run.present >= ZT_UNIT) {
#pragma unroll
        for (int k = 0; k < ZT_UNIT; k++) v[k] = zt_load_element(run.data + k * zt_bytes_of(run.dtype), run.dtype);
    } else {
#pragma unroll 1
        for (int k = 0; k < ZT_UNIT; k++, zt_step(run)) {
            if (run.left == 0) run = zt_find(pieces, element + k);
            v[0] = run.present > 0 ? zt_load_element(run.data, run.dtype) : 0.0f;
            zt_rotate<1, ZT_UNIT>(v);
        }
    }
}

ZT_DEVICE void zt_store_unit_anywhere(const zt_gpu_pieces &pieces, int64_t element, float *v) {
    zt_run run = zt_find(pieces, element);
    if (run.present >= ZT_UNIT && zt_aligned16(run.data)) {
        if (run.dtype == ZT_FP32)
            zt_store_unit<ZT_FP32>(run.data, v);
        else if (run.dtype == ZT_BF16)
            zt_store_unit<ZT_BF16>(run.data, v);
        else
            zt_store_unit<ZT_FP16>(run.data, v);
    } else if (run.present >= ZT_UNIT) {
#pragma unroll
        for (int k = 0; k < ZT_UNIT; k++) zt_store_element(run.data + k * zt_bytes_of(run.dtype), run.dtype, v[k]);
    } else {
#pragma unroll 1
        for (int k = 0; k < ZT_UNIT; k++, zt_step(run)) {
            if (run.left == 0) run = zt_find(pieces, element + k);
            if (run.present > 0) zt_store_element(run.data, run.dtype, v[0]);
            zt_rotate<1, ZT_UNIT>(v);
        }
    }
}

template <int UNITS, int DTYPE> ZT_DEVICE void zt_load_run(const char *data, zt_place place, float *v) {
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        zt_load_unit<DTYPE>(data + zt_unit_offset(place, u) * zt_bytes_of(DTYPE), v + u * ZT_UNIT);
}

/* Two units at a time: registers do not hold what is read of all. */
template <int UNITS, int DTYPE> ZT_DEVICE void zt_store_run(char *data, zt_place place, float *v, bool accumulate) {
#pragma unroll
    for (int first = 0; first < UNITS; first += 2) {
        char *to[2];
#pragma unroll
        for (int u = 0; u < 2; u++) to[u] = data + zt_unit_offset(place, first + u) * zt_bytes_of(DTYPE);
        float *now = v + first * ZT_UNIT;
        if (accumulate) {
            float before[2 * ZT_UNIT];
            zt_load_unit<DTYPE>(to[0], before);
            zt_load_unit<DTYPE>(to[1], before + ZT_UNIT);
#pragma unroll
            for (int k = 0; k < 2 * ZT_UNIT; k++) now[k] = zt_add(before[k], now[k]);
        }
        zt_store_unit<DTYPE>(to[0], now);
        zt_store_unit<DTYPE>(to[1], now + ZT_UNIT);
    }
}

/* Whether all units of all lanes may be read and written by vectors. */
ZT_DEVICE bool zt_is_one_run(zt_run run, zt_place place, int units) {
    return run.present >= place.lanes * units * ZT_UNIT && zt_aligned16(run.data);
}

/* Reads the values of a lane's units, v[ZT_UNIT * UNITS]; what does not exist is 0. */
template <int UNITS> ZT_DEVICE void zt_load_units(const zt_gpu_pieces &pieces, zt_place place, float *v) {
    const zt_run run = zt_find(pieces, (int64_t)place.first);
    if (zt_is_one_run(run, place, UNITS)) {
        if (run.dtype == ZT_FP32)
            zt_load_run<UNITS, ZT_FP32>(run.data, place, v);
        else if (run.dtype == ZT_BF16)
            zt_load_run<UNITS, ZT_BF16>(run.data, place, v);
        else
            zt_load_run<UNITS, ZT_FP16>(run.data, place, v);
        return;
    }
#pragma unroll 1
    for (int u = 0; u < UNITS; u++) {
        zt_load_unit_anywhere(pieces, (int64_t)place.first + zt_unit_offset(place, u), v);
        zt_rotate<ZT_UNIT, UNITS * ZT_UNIT>(v);
    }
}

/* Writes or adds them where they exist; v is used up. */
template <int UNITS>
ZT_DEVICE void zt_store_units(const zt_gpu_pieces &pieces, zt_place place, float *v, bool accumulate) {
    const zt_run run = zt_find(pieces, (int64_t)place.first);
    if (zt_is_one_run(run, place, UNITS)) {
        if (run.dtype == ZT_FP32)
            zt_store_run<UNITS, ZT_FP32>(run.data, place, v, accumulate);
        else if (run.dtype == ZT_BF16)
            zt_store_run<UNITS, ZT_BF16>(run.data, place, v, accumulate);
        else
            zt_store_run<UNITS, ZT_FP16>(run.data, place, v, accumulate);
        return;
    }
#pragma unroll 1
    for (int u = 0; u < UNITS; u++) {
        const int64_t element = (int64_t)place.first + zt_unit_offset(place, u);
        if (accumulate) {
            float before[ZT_UNIT];
            zt_load_unit_anywhere(pieces, element, before);
#pragma unroll
            for (int k = 0; k < ZT_UNIT; k++) v[k] = zt_add(before[k], v[k]);
        }
        zt_store_unit_anywhere(pieces, element, v);
        zt_rotate<ZT_UNIT, UNITS * ZT_UNIT>(v);
    }
}

/* -- Units in messages --------------------------------------------------------------------------------------------- */

/* Where the planes of a message lie. */
struct zt_planes {
    zt_wire_spec spec;
    int64_t blocks, numel;
    int64_t values_end, scales, zero_points, nbytes; /* bytes from the beginning of the message */
};

/* The bytes of a unit of INT8 or INT4, as they lie. */
template <int BITS> struct zt_packed {
    uint32_t word[BITS / 4];
};

template <int BITS> ZT_DEVICE zt_packed<BITS> zt_load_packed(const uint8_t *from) {
    if constexpr (BITS == 4) {
        return {{zt_load<uint32_t>(from)}};
    } else {
        const uint2 both = zt_load<uint2>(from);
        return {{both.x, both.y}};
    }
}

/* The values of a unit as integers in floats; from -128 (or -8) on, or from 0 on if not SIGNED. */
template <int BITS, bool SIGNED> ZT_DEVICE void zt_unpack(zt_packed<BITS> packed, float *q) {
    const uint32_t field = (1u << BITS) - 1, bias = 1u << (BITS - 1), per_word = 32 / BITS;
    const uint32_t flip = BITS == 4 ? 0x88888888u : 0x80808080u; /* two's complement -> biased */
#pragma unroll
    for (unsigned k = 0; k < ZT_UNIT; k++) {
        const uint32_t word = packed.word[k / per_word], at = k % per_word * BITS, shift = at & 15;
        const float unwanted = (float)(1u << (23 - shift)) + (SIGNED ? (float)bias : 0.0f);
        const uint32_t bits = zt_masked(at < 16 ? word : word >> 16, field << shift, flip, (150 - shift) << 23);
        q[k] = zt_sub(zt_bits<float>(bits), unwanted);
    }
}

/* What turns values into integers: (x - zero) * inverse; nothing is kept of a block that holds Inf or NaN. */
struct zt_coder {
    float zero, inverse;
    uint32_t keep; /* all bits, or none */
};

/* Rounds a unit of values and packs it. The biased integers are summed up in the words' fields, and the rest of the
 * sums' bits is subtracted at once. */
template <int BITS, bool SYMMETRIC> ZT_DEVICE zt_packed<BITS> zt_pack(const float *v, zt_coder coder) {
    const uint32_t flip = BITS == 4 ? 0x88888888u : 0x80808080u, per_word = 32 / BITS;
    const float magic = 12582912.0f + (SYMMETRIC ? (float)(1 << (BITS - 1)) : 0.0f);
    zt_packed<BITS> packed;
#pragma unroll
    for (unsigned w = 0; w < BITS / 4; w++) {
        uint32_t sum = 0, rest = 0;
#pragma unroll
        for (unsigned k = per_word; k-- > 0;) {
            float x = v[w * per_word + k];
            if (!SYMMETRIC) x = zt_sub(x, coder.zero);
            sum = (sum << BITS) + zt_bits<uint32_t>(zt_add(zt_mul(x, coder.inverse), magic));
            rest = (rest << BITS) + 0x4b400000u;
        }
        packed.word[w] = ((sum - rest) ^ flip) & coder.keep;
    }
    return packed;
}

template <int BITS> ZT_DEVICE void zt_store_packed(uint8_t *to, zt_packed<BITS> packed) {
    if constexpr (BITS == 4)
        zt_store<uint32_t>(to, packed.word[0]);
    else
        zt_store<uint2>(to, uint2{packed.word[0], packed.word[1]});
}

/* -- Thread blocks ------------------------------------------------------------------------------------------------- */

/* The sum of the values of the threads before this one; *total is that of all. `shared` has a place for each 32. */
ZT_DEVICE uint32_t zt_scan(uint32_t value, uint32_t *shared, uint32_t *total) {
    const int lane = threadIdx.x & 31, group = threadIdx.x >> 5;
    uint32_t sum = value;
    for (int by = 1; by < 32; by *= 2) {
        const uint32_t other = zt_shuffle_up(sum, by, 32);
        if (lane >= by) sum += other;
    }
    if (lane == 31) shared[group] = sum;
    __syncthreads();
    uint32_t before = 0, all = 0;
    for (int g = 0; g < ZT_THREADS / 32; g++) {
        if (g < group) before += shared[g];
        all += shared[g];
    }
    __syncthreads(); /* the next call may write */
    *total = all;
    return before + sum - value;
}

#endif /* ZT_GPU_UNITS_H */
