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
template <bool CLAMP> ZT_DEVICE zt_packed<8> zt_code_unit(const float *v, float inverse) {
    const uint32_t keep = inverse > 0.0f ? ~0u : 0;
    zt_packed<8> packed;
#pragma unroll
    for (int w = 0; w < 2; w++) {
        uint32_t sum = 0;
#pragma unroll
        for (int k = 3; k >= 0; k--) {
            float code = zt_mul(v[4 * w + k], inverse);
            if (CLAMP) code = fminf(fmaxf(code, -127.0f), 127.0f);
            sum = (sum << 8) + zt_bits<uint32_t>(zt_add(code, 12582912.0f + 128.0f));
        }
        packed.word[w] = ((sum - 0x8b400000u) & keep) | (0x80808080u & ~keep);
    }
    return packed;
}

ZT_DEVICE zt_packed<8> zt_biased(zt_packed<8> packed) {
    return {{packed.word[0] ^ 0x80808080u, packed.word[1] ^ 0x80808080u}};
}

/* The highest bits of four bytes -> the highest four bits; the others are not cleared. */
ZT_DEVICE uint32_t zt_gathered(uint32_t bytes) { return (bytes & zt_in_lane(0x80808080u)) * zt_in_lane(0x00204081u); }

/* Of four bytes which differ, in the highest bits. */
ZT_DEVICE uint32_t zt_differing(uint32_t both) {
    const uint32_t low = zt_in_lane(0x7f7f7f7fu);
    return ((both & low) + low) | both;
}

/* The codes of a unit that change, a bit each, and from bit 8 on those that decrease: which matters only where all change
 * by one. Then the lowest bit flips, and the next one too if it is borrowed from (before: even) or carried to (odd). */
ZT_DEVICE uint32_t zt_masks(zt_packed<8> now, zt_packed<8> before) {
    const uint32_t low = now.word[0] ^ before.word[0], high = now.word[1] ^ before.word[1];
    const uint32_t differ = zt_gathered(zt_differing(low)) >> 28 | (zt_gathered(zt_differing(high)) >> 24 & 0xf0u);
    const uint32_t first = low << 6 ^ before.word[0] << 7, second = high << 6 ^ before.word[1] << 7;
    const uint32_t less = zt_gathered(first) >> 28 | (zt_gathered(second) >> 24 & 0xf0u);
    return differ | (less & differ) << 8;
}

/* The largest |x| (bits; NaN is larger than all) of `lanes` lanes' values. */
template <int N> ZT_DEVICE float zt_top(const float *v, int lanes) {
    float most = 0.0f;
#pragma unroll
    for (int k = 0; k < N; k++) most = zt_larger(most, v[k]);
    for (int by = lanes / 2; by > 0; by /= 2)
        most = zt_larger(most, zt_bits<float>(zt_shuffle_xor(zt_bits<uint32_t>(most), by, lanes)));
    return most;
}

/* A block is shared by LANES lanes, or by as many as it has units. Their units lie side by side, so that of a tile of 16
 * units each lane has one, or two if only 8 share a block. What is summed up over a tile is its count of changes and, from
 * bit 8 on, how many units have a large one: two tiles in a word. */
template <int LANES, int UNITS>
ZT_KERNEL(ZT_THREADS, UNITS == 1 ? 5 : UNITS == 8 ? 2 : 3) zt_assess_kernel(ZT_ARGUMENTS zt_codes_arguments a) {
    const int lane = (int)threadIdx.x % ZT_WARP, lanes = LANES ? LANES : a.codes.block / ZT_UNIT;
    const int bits = __ffs(lanes) - 1, group = lanes < 16 ? lanes : 16; /* lanes of a tile */
    const int masked = LANES ? 16 : lanes;                              /* bytes of a mask */
    constexpr int many = LANES == 8 ? 2 : 1, tiles = UNITS / many;      /* a lane's units of a tile; its tiles */
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
        for (int first = 0; first < ZT_WARP; first += ZT_WARP >> bits) { /* the same for all lanes, as they shuffle */
            const int from = first + (lane >> bits);
            const zt_home home = zt_home_of_lane(mine, from);
            const uint32_t old = zt_shuffle(stored, from, ZT_WARP);
            float v[UNITS * ZT_UNIT];
            zt_packed<8> before[UNITS] = {};
            zt_load_masters<UNITS>(home, a.codes.block, place, v);
            if (home.codes) {
#pragma unroll
                for (int u = 0; u < UNITS; u++) before[u] = zt_load_packed<8>(home.codes + zt_unit_offset(place, u));
            }
            const float top = zt_top<UNITS * ZT_UNIT>(v, lanes);
            const float scale = zt_codes_scale(top, zt_bits<float>(old));
            float inverse = zt_codes_inverse(scale);
            if (!(zt_mul(top, inverse) < 127.5f)) { /* a scale that was not made here; else no product is that large */
#pragma unroll
                for (int k = 0; k < UNITS * ZT_UNIT; k++) v[k] = fminf(fmaxf(zt_mul(v[k], inverse), -127.0f), 127.0f);
                inverse = inverse > 0.0f ? 1.0f : 0.0f;
            }
            const int values = a.codes.block < ZT_CHANGES_TILE ? a.codes.block : ZT_CHANGES_TILE;
            const int64_t block = begin + from;
            uint32_t masks[UNITS], sums[(tiles + 1) / 2] = {};
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const zt_packed<8> now = zt_code_unit<false>(v + u * ZT_UNIT, inverse), was = zt_biased(before[u]);
                masks[u] = zt_masks(now, was);
                const uint32_t count = (uint32_t)__popc(masks[u] & 255);
                const uint32_t apart = zt_apart(now.word[0], was.word[0], zt_apart(now.word[1], was.word[1], 0));
                sums[u / many / 2] += (count + (apart != count ? 256 : 0)) << u / many % 2 * 16;
            }
            if (home.codes) {
                uint8_t *const steps = a.steps + block * (a.codes.block / 4);
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    const int unit = zt_unit_of(place, u);
                    uint8_t *to = steps + (unit & -16) * 2 + unit % 16;
                    zt_store<uint8_t>(to, (uint8_t)masks[u]), zt_store<uint8_t>(to + masked, (uint8_t)(masks[u] >> 8));
                }
            }
#pragma unroll
            for (int w = 0; w < (tiles + 1) / 2; w++)
                for (int by = group / 2; by > 0; by /= 2) sums[w] += zt_shuffle_xor(sums[w], by, group);
            uint32_t counts[tiles], size = 0, whole = zt_bits<uint32_t>(scale) != old;
#pragma unroll
            for (int t = 0; t < tiles; t++) {
                const uint32_t sum = sums[t / 2] >> t % 2 * 16 & 0xffff;
                whole |= (int)(sum & 255) > zt_changes_most(values);
                counts[t] = (sum & 255) + (sum >> 8 ? ZT_CHANGES_LARGE : 0);
                size += (uint32_t)zt_changes_bytes(values, (int)counts[t]);
            }
            if (LANES == 32) { /* two tiles side by side */
                whole |= zt_shuffle_xor(whole, 16, ZT_WARP);
                size += zt_shuffle_xor(size, 16, ZT_WARP);
            }
            if (!home.codes || place.lane % 16) continue;
#pragma unroll
            for (int t = 0; t < tiles; t++) {
                uint8_t *to = a.counts + block * (a.codes.block / values) + zt_unit_of(place, t * many) / 16;
                zt_store<uint8_t>(to, whole ? ZT_CHANGES_WHOLE : (uint8_t)counts[t]);
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
        const zt_packed<8> now = zt_biased(zt_code_unit<true>(v, inverse));
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

/* Ends and counts of a message. */
ZT_DEVICE void zt_emit_planes(const zt_codes_arguments &a, int tiles) {
    uint8_t *counts = a.message + zt_changes_counts_offset(a.blocks);
    for (int64_t i = zt_first_tile() * ZT_WARP + threadIdx.x % ZT_WARP; i < a.blocks; i += zt_tile_step() * ZT_WARP) {
        for (int t = 0; t < tiles; t++)
            zt_store<uint8_t>(counts + i * tiles + t, zt_load<uint8_t>(a.change.counts + i * tiles + t));
        if ((i + 1) % ZT_CHANGES_CHUNK && i + 1 != a.blocks) continue;
        const uint64_t whole = zt_load<uint64_t>(a.change.ends + 2 * i), bytes = zt_load<uint64_t>(a.change.ends + 2 * i + 1);
        zt_store<uint2>(a.message + i / ZT_CHANGES_CHUNK * 8, uint2{(uint32_t)whole, (uint32_t)bytes});
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
    zt_emit_planes(a, tiles);
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
    if (codes.block < 256) return zt_launch_codes(zt_assess_kernel<0, 1>, a, stream);
    if (codes.block == 256) return zt_launch_codes(zt_assess_kernel<8, 4>, a, stream);
    if (codes.block == 512) return zt_launch_codes(zt_assess_kernel<16, 4>, a, stream);
    return zt_launch_codes(codes.block == 1024 ? zt_assess_kernel<32, 4> : zt_assess_kernel<32, 8>, a, stream);
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
