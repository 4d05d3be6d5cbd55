/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Masters become INT8 codes on GPUs, and a message says what changed; zero_topo/quant/ops.py, Note [Codes], and
 * zt_trits.h say how.
 */
#include "zt_gpu_codes.h"

static_assert(ZT_TRITS_GROUP == 5, "as places are shared");

#define ZT_PLACED 20 /* places of change.order that 32 lanes take: four groups, so that blocks of 64 keep all busy */

/* -- Values -> codes ----------------------------------------------------------------------------------------------- */

/* The masters of a lane's units; zero where there are none. */
template <int UNITS> ZT_DEVICE void zt_load_masters(zt_home home, int32_t block, zt_place place, float *v) {
    if (home.present == block && zt_aligned16(home.values)) {
        zt_load_run<UNITS, ZT_FP32, true>(home.values, place, v);
    } else if (home.present == block) {
        zt_load_odd_run<UNITS, ZT_FP32>(home.values, place, v);
    } else {
#pragma unroll 1
        for (int u = 0; u < UNITS; u++) {
            const int begin = zt_unit_offset(place, u);
#pragma unroll
            for (int k = 0; k < ZT_UNIT; k++)
                v[k] = begin + k < home.present ? zt_load_element(home.values + 4 * (begin + k), ZT_FP32) : 0.0f;
            zt_rotate<ZT_UNIT, UNITS * ZT_UNIT>(v);
        }
    }
}

/* A unit's codes, 128 more than they are: as bytes from 1 to 255; Note [Exact tricks]. All are 0 if inverse is. */
ZT_DEVICE zt_packed<8> zt_code_unit(const float *v, float inverse) {
    const uint32_t keep = inverse > 0.0f ? ~0u : 0;
    zt_packed<8> packed;
#pragma unroll
    for (int w = 0; w < 2; w++) {
        uint32_t sum = 0;
#pragma unroll
        for (int k = 3; k >= 0; k--) {
            const float code = fminf(fmaxf(zt_mul(v[4 * w + k], inverse), -127.0f), 127.0f);
            sum = (sum << 8) + zt_bits<uint32_t>(zt_add(code, 12582912.0f + 128.0f));
        }
        packed.word[w] = ((sum - 0x8b400000u) & keep) | (0x80808080u & ~keep);
    }
    return packed;
}

ZT_DEVICE zt_packed<8> zt_biased(zt_packed<8> packed) {
    return {{packed.word[0] ^ 0x80808080u, packed.word[1] ^ 0x80808080u}};
}

/* Bits where bytes are more than 1 apart: halves of 257 + d say so of every other one. */
ZT_DEVICE uint32_t zt_far(uint32_t now, uint32_t before) {
    const uint32_t even = zt_even(now) + 0x01010101u - zt_even(before);
    const uint32_t odd = zt_odd(now) + 0x01010101u - zt_odd(before);
    return (((even ^ 0x01000100u) + 0x00010001u) | ((odd ^ 0x01000100u) + 0x00010001u)) & 0xfffcfffcu;
}

/* Whether any code of a lane's units is to change by more than one. */
template <int UNITS>
ZT_DEVICE bool zt_moved(const float *v, float inverse, const zt_packed<8> *before) {
    uint32_t far = 0;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const zt_packed<8> now = zt_code_unit(v + u * ZT_UNIT, inverse), old = zt_biased(before[u]);
        far |= zt_far(now.word[0], old.word[0]) | zt_far(now.word[1], old.word[1]);
    }
    return far != 0;
}

/* The largest |x| (bits; NaN is larger than all) of `lanes` lanes' values. */
template <int N> ZT_DEVICE uint32_t zt_top(const float *v, int lanes) {
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
    return most;
}

template <int UNITS>
ZT_KERNEL(ZT_THREADS, UNITS == 1 ? 5 : UNITS == 8 ? 2 : 3) zt_assess_kernel(ZT_ARGUMENTS zt_codes_arguments a) {
    const int lane = (int)threadIdx.x % ZT_WARP, lanes = UNITS == 1 ? a.codes.block / ZT_UNIT : ZT_WARP;
    const int bits = __ffs(lanes) - 1;
    const zt_place place = {0, 0, 0, lane & (lanes - 1), lanes};
    const int64_t step = zt_tile_step();
    for (int64_t tile = zt_first_tile(); tile < a.tiles; tile += step) {
        const int64_t begin = tile * ZT_WARP;
        zt_home mine = {nullptr, nullptr, nullptr, 0};
        uint32_t held = 0;
        if (begin + lane < a.blocks) {
            mine = zt_home_of(a, a.masters.member, begin + lane);
            held = zt_load<uint32_t>(mine.scale);
        }
#pragma unroll 1
        for (int from = lane >> bits; from < ZT_WARP; from += ZT_WARP >> bits) {
            const zt_home home = zt_told(mine, from);
            const uint32_t old = zt_shuffle(held, from, ZT_WARP);
            float v[UNITS * ZT_UNIT];
            zt_packed<8> before[UNITS] = {};
            zt_load_masters<UNITS>(home, a.codes.block, place, v);
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                if (home.codes) before[u] = zt_load_packed<8>(home.codes + zt_unit_offset(place, u));
            const float top = zt_bits<float>(zt_top<UNITS * ZT_UNIT>(v, lanes));
            const float scale = zt_codes_scale(top, zt_bits<float>(old));
            const uint32_t found = zt_ballot(zt_moved<UNITS>(v, zt_codes_inverse(scale), before));
            const bool moved = (found >> (lane - place.lane) & (uint32_t)((2ull << (lanes - 1)) - 1)) != 0;
            if (!home.codes || place.lane != 0) continue;
            zt_store<float>(a.scales + begin + from, scale);
            zt_store<uint8_t>(a.escaped + begin + from, moved || zt_bits<uint32_t>(scale) != old);
        }
    }
}

/* -- Codes -> message ---------------------------------------------------------------------------------------------- */

/* What 32 lanes emit: places from `begin` on, of which `many` are there; where the message has what becomes of them. */
struct zt_emission {
    int64_t begin, scales, to;
    int32_t many;
    bool escape;
};

/* How many of `each` hold n < 2^31: divisions of 64 bits by constants are slow too. */
ZT_DEVICE int64_t zt_many(int64_t n, uint32_t each) { return ((uint32_t)n + (each - 1)) / each; }

/* Tiles of blocks that do not escape, `before`, come first. */
ZT_DEVICE zt_emission zt_emission_of(const zt_codes_arguments &a, int64_t tile, int64_t before, int64_t escaped) {
    const int64_t stay = a.blocks - escaped, block = a.codes.block;
    const bool escape = tile >= before;
    const int64_t index = escape ? tile - before : tile, first = index * ZT_PLACED;
    const int64_t left = (escape ? escaped : stay) - first;
    const int64_t groups = zt_trits_offset(a.codes.block, a.blocks, escaped) + index * (ZT_PLACED / 5) * block;
    const int64_t whole = zt_trits_codes_offset(a.blocks, escaped) + first * block;
    return {escape ? stay + first : first, zt_trits_scales_offset(a.blocks) + first * 4, escape ? whole : groups,
            (int32_t)(left < ZT_PLACED ? left : ZT_PLACED), escape};
}

/* Of each byte: 1 + the sign of now - before. Halves of 512 + d have bit 9 where d >= 0; one less, where d > 0. */
ZT_DEVICE uint32_t zt_steps(uint32_t now, uint32_t before) {
    const uint32_t bit = 0x02000200u, one = 0x00010001u;
    const uint32_t even = zt_even(now) + bit - zt_even(before), odd = zt_odd(now) + bit - zt_odd(before);
    return (((even & bit) + ((even - one) & bit)) >> 9) + (((odd & bit) + ((odd - one) & bit)) >> 1);
}

/* A unit of one block: if it escapes, its codes are written whole; else they go one step towards their masters, which
 * may have been edited since they were assessed, and the digits of these steps are added up. */
ZT_DEVICE void zt_emit_unit(const zt_codes_arguments &a, zt_home home, float inverse, int unit, uint8_t *whole,
                            uint32_t power, uint2 *trits) {
    float v[ZT_UNIT];
    zt_load_masters<1>(home, a.codes.block, {0, 0, 0, unit, 0}, v);
    const zt_packed<8> before = zt_biased(zt_load_packed<8>(home.codes + unit * ZT_UNIT));
    zt_packed<8> now = zt_code_unit(v, inverse);
    if (whole) {
        zt_store_packed<8>(whole + unit * ZT_UNIT, zt_biased(now));
    } else {
        const uint2 digits = {zt_steps(now.word[0], before.word[0]), zt_steps(now.word[1], before.word[1])};
        now = {{before.word[0] + digits.x - 0x01010101u, before.word[1] + digits.y - 0x01010101u}};
        trits->x += digits.x * power, trits->y += digits.y * power;
    }
    zt_store_packed<8>(home.codes + unit * ZT_UNIT, zt_biased(now));
}

/* 32 lanes take 20 places of change.order, 32 units of each of a group's five blocks at a time. */
ZT_KERNEL(ZT_THREADS, 4) zt_emit_kernel(ZT_ARGUMENTS zt_codes_arguments a) {
    const int block = a.codes.block, units = block / ZT_UNIT;
    const int lane = (int)threadIdx.x % ZT_WARP, bits = __ffs(units) - 1;
    int64_t escaped = (int64_t)zt_load<uint64_t>(a.change.count);
    escaped = escaped < 0 ? 0 : escaped < a.blocks ? escaped : a.blocks;
    const int64_t stay = a.blocks - escaped, before = zt_many(stay, ZT_PLACED), step = zt_tile_step();
    if (zt_trits_offset(block, a.blocks, escaped) + zt_many(stay, 5) * block > a.nbytes) return;
    const int64_t tiles = before + zt_many(escaped, ZT_PLACED);
    for (int64_t tile = zt_first_tile(); tile < tiles; tile += step) {
        const zt_emission e = zt_emission_of(a, tile, before, escaped);
        zt_home mine = {nullptr, nullptr, nullptr, 0};
        float own = 0.0f;
        if (lane < e.many) {
            const int64_t i = (int64_t)zt_load<uint64_t>(a.change.order + e.begin + lane);
            const float scale = zt_load<float>(a.change.scales + i);
            mine = zt_home_of(a, a.masters.member, i);
            own = zt_codes_inverse(scale);
            if (e.escape) zt_store<float>(mine.scale, scale), zt_store<float>(a.message + e.scales + lane * 4, scale);
        }
#pragma unroll 1
        for (int i = lane; i < ZT_PLACED / 5 * units; i += ZT_WARP) {
            const int group = i >> bits, unit = i & (units - 1);
            uint2 trits = {0, 0};
            uint32_t power = 1;
#pragma unroll
            for (int k = 0; k < 5; k++, power *= 3) {
                const int place = group * 5 + k;
                const zt_home home = zt_told(mine, place);
                const float inverse = zt_bits<float>(zt_shuffle(zt_bits<uint32_t>(own), place, ZT_WARP));
                uint8_t *whole = e.escape ? a.message + e.to + (int64_t)place * block : nullptr;
                if (home.codes) zt_emit_unit(a, home, inverse, unit, whole, power, &trits);
            }
            if (e.escape || group * 5 >= e.many) continue;
            zt_store<uint2>(a.message + e.to + group * block + unit * ZT_UNIT, trits);
        }
    }
}

/* -- On the host --------------------------------------------------------------------------------------------------------- */

static int zt_take_masters(zt_masters masters, zt_codes_arguments *out) {
    if (masters.member < 0 || masters.member >= out->part.members || masters.columns < 0) return ZT_BAD_SIZE;
    if (masters.row_stride < 0 || zt_product(masters.row_stride, out->part.rows) > zt_most) return ZT_BAD_SIZE;
    if (out->blocks > 0 && masters.columns > 0 && !masters.data) return ZT_BAD_SIZE;
    out->masters = masters;
    return zt_is_odd((int64_t)(uintptr_t)masters.data, 4) ? ZT_BAD_ALIGNMENT : ZT_OK;
}

int zt_gpu_codes_assess(zt_masters masters, zt_codes codes, zt_part part, float *scales, uint8_t *escaped, void *stream) {
    zt_codes_arguments a = {};
    int status = zt_take_codes(codes, part, &a);
    if (status == ZT_OK) status = zt_take_masters(masters, &a);
    if (status != ZT_OK) return status;
    if (a.blocks > 0 && (!scales || !escaped)) return ZT_BAD_SIZE;
    a.scales = scales, a.escaped = escaped, a.tiles = zt_blocks_for(a.blocks, ZT_WARP);
    if (codes.block <= 256) return zt_launch_codes(zt_assess_kernel<1>, a, stream);
    if (codes.block == 512) return zt_launch_codes(zt_assess_kernel<2>, a, stream);
    return zt_launch_codes(codes.block == 1024 ? zt_assess_kernel<4> : zt_assess_kernel<8>, a, stream);
}

int zt_gpu_codes_emit(zt_masters masters, zt_codes codes, zt_part part, zt_change change, uint8_t *message,
                      int64_t nbytes, void *stream) {
    zt_codes_arguments a = {};
    int status = zt_take_codes(codes, part, &a);
    if (status == ZT_OK) status = zt_take_masters(masters, &a);
    if (status != ZT_OK) return status;
    if (a.blocks > 0 && (!change.scales || !change.order || !change.count || !message)) return ZT_BAD_SIZE;
    if (nbytes < zt_trits_nbytes(codes.block, a.blocks, 0)) return ZT_BAD_SIZE;
    if (zt_is_odd((int64_t)(uintptr_t)message, 16)) return ZT_BAD_ALIGNMENT;
    a.change = change, a.message = message, a.nbytes = nbytes, a.tiles = zt_blocks_for(a.blocks, ZT_PLACED);
    return zt_launch_codes(zt_emit_kernel, a, stream);
}
