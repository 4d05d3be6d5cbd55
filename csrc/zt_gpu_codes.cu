/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Masters become INT8 codes on GPUs, and a message says what changed; zero_topo/quant/ops.py, Note [Codes], and
 * zt_changes.h say how.
 */
#include "zt_gpu_codes.h"

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

/* Of each byte: 1 + the sign of now - before. Halves of 512 + d have bit 9 where d >= 0; one less, where d > 0. */
ZT_DEVICE uint32_t zt_signs(uint32_t now, uint32_t before) {
    const uint32_t bit = 0x02000200u, one = 0x00010001u;
    const uint32_t even = zt_even(now) + bit - zt_even(before), odd = zt_odd(now) + bit - zt_odd(before);
    return (((even & bit) + ((even - one) & bit)) >> 9) + (((odd & bit) + ((odd - one) & bit)) >> 1);
}

/* The lowest bits of four bytes -> four bits. */
ZT_DEVICE uint32_t zt_gathered(uint32_t bytes) { return (bytes & 0x01010101u) * 0x01020408u >> 24; }

/* The codes of a unit that change, a bit each, and from bit 8 on those that decrease. */
ZT_DEVICE uint32_t zt_masks(zt_packed<8> now, zt_packed<8> before) {
    const uint32_t low = zt_signs(now.word[0], before.word[0]), high = zt_signs(now.word[1], before.word[1]);
    const uint32_t kept = zt_gathered(low) | zt_gathered(high) << 4;
    const uint32_t more = zt_gathered(low >> 1) | zt_gathered(high >> 1) << 4;
    return (~kept & 255) | (~(kept | more) & 255) << 8;
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
    const int bits = __ffs(lanes) - 1, group = zt_changes_tile(a.codes.block) / ZT_UNIT; /* lanes of a tile */
    const zt_place place = {0, 0, 0, lane & (lanes - 1), lanes};
    const int64_t step = zt_tile_step();
    for (int64_t tile = zt_first_tile(); tile < a.tiles; tile += step) {
        const int64_t begin = tile * ZT_WARP;
        zt_home mine = {nullptr, nullptr, nullptr, 0};
        uint32_t stored = 0;
        if (begin + lane < a.blocks) {
            mine = zt_home_of(a, a.masters.member, begin + lane);
            stored = zt_load<uint32_t>(mine.scale);
        }
#pragma unroll 1
        for (int from = lane >> bits; from < ZT_WARP; from += ZT_WARP >> bits) {
            const zt_home home = zt_home_of_lane(mine, from);
            const uint32_t old = zt_shuffle(stored, from, ZT_WARP);
            float v[UNITS * ZT_UNIT];
            zt_packed<8> before[UNITS] = {};
            zt_load_masters<UNITS>(home, a.codes.block, place, v);
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                if (home.codes) before[u] = zt_load_packed<8>(home.codes + zt_unit_offset(place, u));
            const float top = zt_bits<float>(zt_top<UNITS * ZT_UNIT>(v, lanes));
            const float scale = zt_codes_scale(top, zt_bits<float>(old));
            const float inverse = zt_codes_inverse(scale);
            const int values = group * ZT_UNIT;
            const int64_t block = begin + from;
            bool many = false;
            uint32_t size = 0, counts[UNITS];
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const zt_packed<8> now = zt_code_unit(v + u * ZT_UNIT, inverse), was = zt_biased(before[u]);
                const uint32_t masks = zt_masks(now, was);
                const bool far = zt_far(now.word[0], was.word[0]) | zt_far(now.word[1], was.word[1]);
                uint32_t count = (uint32_t)__popc(masks & 255) + ((uint32_t)far << 16);
                for (int by = group / 2; by > 0; by /= 2) count += zt_shuffle_xor(count, by, group);
                many |= (int)(count & 0xffff) > zt_changes_most(values);
                counts[u] = (count & 0xffff) + (count >> 16 ? ZT_CHANGES_LARGE : 0);
                const int unit = zt_unit_of(place, u), tile = unit / group, inside = unit % group;
                if (inside == 0) size += (uint32_t)zt_changes_bytes(values, (int)counts[u]);
                if (!home.codes) continue;
                uint8_t *to = a.steps + block * (a.codes.block / 4) + tile * 2 * group + inside;
                zt_store<uint8_t>(to, (uint8_t)masks), zt_store<uint8_t>(to + group, (uint8_t)(masks >> 8));
            }
            const uint32_t full = zt_ballot(many) >> (lane - place.lane) & (uint32_t)((2ull << (lanes - 1)) - 1);
            const bool whole = full || zt_bits<uint32_t>(scale) != old;
            for (int by = lanes / 2; by > 0; by /= 2) size += zt_shuffle_xor(size, by, lanes);
            if (!home.codes) continue;
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const int unit = zt_unit_of(place, u);
                uint8_t *to = a.counts + block * (a.codes.block / values) + unit / group;
                if (unit % group == 0) zt_store<uint8_t>(to, whole ? ZT_CHANGES_WHOLE : (uint8_t)counts[u]);
            }
            if (place.lane) continue;
            zt_store<float>(a.scales + block, scale);
            zt_store<uint64_t>(a.sizes + 2 * block, whole), zt_store<uint64_t>(a.sizes + 2 * block + 1, whole ? 0 : size);
        }
    }
}

/* -- Codes -> message ---------------------------------------------------------------------------------------------- */

/* All codes of a block become those of its masters, and are written. */
ZT_DEVICE void zt_emit_whole(const zt_codes_arguments &a, zt_home home, float inverse, int lane, uint8_t *to) {
    for (int unit = lane; unit < a.codes.block / ZT_UNIT; unit += ZT_WARP) {
        float v[ZT_UNIT];
        zt_load_masters<1>(home, a.codes.block, {0, 0, 0, unit, 0}, v);
        const zt_packed<8> now = zt_biased(zt_code_unit(v, inverse));
        zt_store_packed<8>(home.codes + unit * ZT_UNIT, now);
        zt_store_packed<8>(to + unit * ZT_UNIT, now);
    }
}

/* The signs of a tile's changes, of which `before` are those of earlier lanes: a bit each. */
ZT_DEVICE void zt_emit_signs(uint32_t changed, uint32_t less, uint32_t before, int lane, int count, uint8_t *to) {
    uint32_t signs = 0, own = 0;
    for (; changed; changed &= changed - 1) signs |= (less >> (__ffs((int)changed) - 1) & 1) << own++;
#pragma unroll 1
    for (int first = 0; first < count; first += 32) {
        const int shift = (int)before - first;
        uint32_t word = shift >= 32 || shift <= -32 ? 0 : shift >= 0 ? signs << shift : signs >> -shift;
        for (int by = ZT_WARP / 2; by > 0; by /= 2) word |= zt_shuffle_xor(word, by, ZT_WARP);
        if (lane < 4 && first + 8 * lane < count) zt_store<uint8_t>(to + first / 8 + lane, (uint8_t)(word >> 8 * lane));
    }
}

/* The new code of one value of a block. */
ZT_DEVICE uint8_t zt_code_at(zt_home home, int index, float inverse) {
    if (index >= home.present || !(inverse > 0.0f)) return 0;
    const float code = zt_mul(zt_load<float>(home.values + 4 * index), inverse);
    return (uint8_t)zt_bits<uint32_t>(zt_add(fminf(fmaxf(code, -127.0f), 127.0f), 12582912.0f));
}

/* The steps of a tile are applied and encoded; of one with large changes, only the positions are. */
ZT_DEVICE void zt_emit_tile(const uint8_t *steps, int tile, int count, uint8_t *codes, int lane, uint8_t *to) {
    const int masked = tile / 8, number = zt_changes_number(count);
    const uint32_t stepped = zt_changes_large(count) ? 0 : ~0u; /* no flag: those of 64 lanes are in short supply */
    const uint32_t changed = zt_four_of(steps, tile, lane), before = zt_before_lane(changed, lane);
    const uint32_t less = zt_four_of(steps + masked, tile, lane) & changed & stepped;
    if (zt_changes_listed(tile, count)) {
        int rank = (int)before;
        for (uint32_t left = changed; left && rank < number; left &= left - 1, rank++) {
            const int k = __ffs((int)left) - 1;
            zt_store<uint8_t>(to + rank, (uint8_t)((uint32_t)(4 * lane + k) | (less >> k & 1) << 7));
        }
    } else {
        if (lane < masked) zt_store<uint8_t>(to + lane, zt_load<uint8_t>(steps + lane));
        zt_emit_signs(changed, less, before, lane, (int)((uint32_t)count & stepped), to + masked);
    }
    zt_step(codes, lane, changed & ~less & stepped, less);
}

/* The codes that change in a tile with large changes become those of its masters, from `first` on, and are written. */
ZT_DEVICE void zt_emit_new(const uint8_t *steps, int tile, int number, zt_home home, float inverse, int first, int lane,
                           uint8_t *to) {
    uint32_t left = zt_four_of(steps, tile, lane);
#pragma unroll 1
    for (int rank = (int)zt_before_lane(left, lane); left && rank < number; left &= left - 1, rank++) {
        const int at = first + 4 * lane + __ffs((int)left) - 1;
        const uint8_t code = zt_code_at(home, at, inverse);
        zt_store<uint8_t>(to + rank, code), zt_store<uint8_t>(home.codes + at, code);
    }
}

/* 32 lanes take 32 blocks. Nothing is written if the message has no room for all blocks' changes. */
ZT_KERNEL(ZT_THREADS, 4) zt_emit_kernel(ZT_ARGUMENTS zt_codes_arguments a) {
    const int block = a.codes.block, tile = zt_changes_tile(block), tiles = block / tile;
    const int lane = (int)threadIdx.x % ZT_WARP;
    const int64_t *last = a.change.ends + 2 * a.blocks - 2, step = zt_tile_step();
    const int64_t all = (int64_t)zt_load<uint64_t>(last), bytes = (int64_t)zt_load<uint64_t>(last + 1);
    if (all < 0 || all > a.blocks || bytes < 0 || bytes > a.nbytes) return;
    const int64_t codes_at = zt_changes_codes_offset(block, a.blocks, all), changes_at = codes_at + all * block;
    if (changes_at + bytes > a.nbytes) return;
    for (int64_t begin = zt_first_tile() * ZT_WARP; begin < a.blocks; begin += step * ZT_WARP) {
        const int64_t i = begin + lane;
        zt_home mine = {nullptr, nullptr, nullptr, 0};
        float own = 0.0f;
        int64_t to = 0;
        bool whole = false;
        if (i < a.blocks) {
            const float scale = zt_load<float>(a.change.scales + i);
            const int64_t *before = a.change.ends + 2 * i - 2;
            mine = zt_home_of(a, a.masters.member, i);
            own = zt_codes_inverse(scale);
            whole = zt_load<uint8_t>(a.change.counts + i * tiles) == ZT_CHANGES_WHOLE;
            const int64_t at = i ? (int64_t)zt_load<uint64_t>(before + !whole) : 0;
            to = whole ? codes_at + at * block : changes_at + at;
            uint8_t *sent = a.message + zt_changes_scales_offset(block, a.blocks) + at * 4;
            if (whole) zt_store<float>(mine.scale, scale), zt_store<float>(sent, scale);
        }
        const uint32_t wholes = zt_ballot(whole);
#pragma unroll 1
        for (int from = 0; from < ZT_WARP && begin + from < a.blocks; from++) {
            const zt_home home = zt_home_of_lane(mine, from);
            const float inverse = zt_bits<float>(zt_shuffle(zt_bits<uint32_t>(own), from, ZT_WARP));
            uint8_t *out = a.message + zt_shuffle_wide((uint64_t)to, from);
            if (wholes >> from & 1) {
                zt_emit_whole(a, home, inverse, lane, out);
                continue;
            }
            const uint8_t *counts = a.change.counts + (begin + from) * tiles;
            const uint8_t *steps = a.change.steps + (begin + from) * (block / 4);
            uint8_t *next = out;
            bool large = false;
            for (int t = 0; t < tiles; t++) {
                const int count = zt_load<uint8_t>(counts + t);
                if (count) zt_emit_tile(steps + t * (tile / 4), tile, count, home.codes + t * tile, lane, next);
                next += zt_changes_bytes(tile, count);
                large |= zt_changes_large(count);
            }
            for (int t = 0; large && t < tiles; t++) {
                const int count = zt_load<uint8_t>(counts + t), number = zt_changes_number(count);
                out += zt_changes_bytes(tile, count);
                if (zt_changes_large(count))
                    zt_emit_new(steps + t * (tile / 4), tile, number, home, inverse, t * tile, lane, out - number);
            }
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

int zt_gpu_codes_assess(zt_masters masters, zt_codes codes, zt_part part, float *scales, uint8_t *counts, uint8_t *steps,
                        int64_t *sizes, void *stream) {
    zt_codes_arguments a = {};
    int status = zt_take_codes(codes, part, &a);
    if (status == ZT_OK) status = zt_take_masters(masters, &a);
    if (status != ZT_OK) return status;
    if (a.blocks > 0 && (!scales || !counts || !steps || !sizes)) return ZT_BAD_SIZE;
    a.scales = scales, a.counts = counts, a.steps = steps, a.sizes = sizes;
    a.tiles = zt_blocks_for(a.blocks, ZT_WARP);
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
    const bool given = change.scales && change.counts && change.steps && change.ends && message;
    if (a.blocks > 0 && !given) return ZT_BAD_SIZE;
    if (nbytes < zt_changes_nbytes(codes.block, a.blocks, 0, 0)) return ZT_BAD_SIZE;
    if (zt_is_odd((int64_t)(uintptr_t)message, 16)) return ZT_BAD_ALIGNMENT;
    a.change = change, a.message = message, a.nbytes = nbytes, a.tiles = zt_blocks_for(a.blocks, ZT_WARP);
    return zt_launch_codes(zt_emit_kernel, a, stream);
}
