/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Messages of trits become codes on GPUs; zero_topo/quant/spec.py and zt_trits.h say what is in them.
 */
#include "zt_gpu_codes.h"

#define ZT_NOTHING 0u
#define ZT_WHOLE 1u /* a block that escaped */

/* How to find b / 3^k of a byte by a product below 2^16: its factor, and by how much to shift it. */
ZT_DEVICE uint32_t zt_third(int k) {
    const uint32_t factor = k == 0 ? 1 : k == 1 ? 171 : k == 2 ? 57 : k == 3 ? 19 : k == 4 ? 203 : 135;
    return factor | (k == 0 ? 0u : k <= 3 ? 9u : k == 4 ? 14u : 15u) << 8;
}

/* How a lane's block becomes what its message says, and from which byte on; nothing if that is not in the message. */
struct zt_decoding {
    uint32_t how;
    uint8_t *from;
};

ZT_DEVICE zt_decoding zt_decoding_of(const zt_codes_arguments &a, uint8_t *message, int64_t i, uint8_t *held_scale) {
    const int64_t n = a.blocks, block = a.codes.block, word = i / ZT_WARP, chunk = i / ZT_TRITS_CHUNK;
    const uint32_t says = zt_load<uint32_t>(message), bits = zt_load<uint32_t>(message + ZT_TRITS_MASK + word * 4);
    const int64_t escaped = says < n ? says : n;
    int64_t before = zt_load<uint32_t>(message + zt_trits_before_offset(n) + chunk * 4);
    before += __popc(bits & ((1u << i % ZT_WARP) - 1));
    if (word % 2) before += __popc(zt_load<uint32_t>(message + ZT_TRITS_MASK + word * 4 - 4));
    const bool whole = bits >> i % ZT_WARP & 1;
    const int64_t rank = whole ? before : i - before;
    if (rank < 0 || rank >= n) return {ZT_NOTHING, nullptr};
    const uint32_t group = (uint32_t)rank / (uint32_t)ZT_TRITS_GROUP; /* of 32 bits: all are below 2^31 */
    const int64_t offset = whole ? zt_trits_codes_offset(n, escaped) + rank * block
                                 : zt_trits_offset(a.codes.block, n, escaped) + group * block;
    if (offset + block > a.nbytes) return {ZT_NOTHING, nullptr};
    if (whole) zt_store<uint32_t>(held_scale, zt_load<uint32_t>(message + zt_trits_scales_offset(n) + rank * 4));
    const int k = (int)((uint32_t)rank - group * (uint32_t)ZT_TRITS_GROUP);
    return {whole ? ZT_WHOLE : zt_third(k) | zt_third(k + 1) << 12, message + offset};
}

/* Of two bytes, as zt_third says. */
ZT_DEVICE uint32_t zt_thirds(uint32_t halves, uint32_t third) {
    const uint32_t shift = third >> 8 & 15;
    return halves * (third & 255) >> shift & (0xffffu >> shift) * 0x00010001u;
}

/* Digit k is b / 3^k - 3 * (b / 3^(k+1)). */
ZT_DEVICE uint32_t zt_digits(uint32_t halves, uint32_t how) {
    return zt_thirds(halves, how) - 3 * zt_thirds(halves, how >> 12);
}

/* Four codes, each changed by a digit less one. */
ZT_DEVICE uint32_t zt_changed(uint32_t codes, uint32_t trits, uint32_t how) {
    return zt_joined(zt_even(codes) + zt_digits(zt_even(trits), how) + ZT_HALVES,
                     zt_odd(codes) + zt_digits(zt_odd(trits), how) + ZT_HALVES);
}

/* 32 lanes take 32 blocks of a member, 512 bytes at a time. */
ZT_KERNEL(ZT_THREADS, 4) zt_apply_kernel(ZT_ARGUMENTS zt_codes_arguments a) {
    const int lane = (int)threadIdx.x % ZT_WARP, words = a.codes.block / 16, bits = __ffs(words) - 1;
    const int64_t of_member = zt_blocks_for(a.blocks, ZT_WARP), step = zt_tile_step();
    for (int64_t tile = zt_first_tile(); tile < a.tiles; tile += step) {
        const int64_t kept = zt_quotient(tile, of_member), i = (tile - kept * of_member) * ZT_WARP + lane;
        const int32_t member = (int32_t)(kept + (kept >= a.skip));
        zt_home mine = {nullptr, nullptr, nullptr, 0};
        zt_decoding own = {ZT_NOTHING, nullptr};
        if (i < a.blocks) {
            mine = zt_home_of(a, member, i);
            own = zt_decoding_of(a, zt_message_at(a.messages, member), i, mine.scale);
        }
#pragma unroll 1
        for (int s = 0; s < words; s += 2) { /* two at a time, so that more loads are under way */
            uint8_t *codes[2];
            uint32_t how[2];
            uint4 now[2], held[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int word = (s + j) * ZT_WARP + lane, from = word >> bits, at = (word & (words - 1)) * 16;
                codes[j] = (uint8_t *)(uintptr_t)zt_shuffle_wide((uintptr_t)mine.codes, from) + at;
                const uint8_t *source = (const uint8_t *)(uintptr_t)zt_shuffle_wide((uintptr_t)own.from, from) + at;
                how[j] = zt_shuffle(own.how, from, ZT_WARP);
                if (how[j] != ZT_NOTHING) now[j] = zt_load<uint4>(source);
                if (how[j] > ZT_WHOLE) held[j] = zt_load<uint4>(codes[j]);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (how[j] > ZT_WHOLE)
                    now[j] = {zt_changed(held[j].x, now[j].x, how[j]), zt_changed(held[j].y, now[j].y, how[j]),
                              zt_changed(held[j].z, now[j].z, how[j]), zt_changed(held[j].w, now[j].w, how[j])};
                if (how[j] != ZT_NOTHING) zt_store<uint4>(codes[j], now[j]);
            }
        }
    }
}

/* -- On the host --------------------------------------------------------------------------------------------------------- */

int zt_gpu_codes_apply(zt_messages messages, zt_codes codes, zt_part part, void *stream) {
    zt_codes_arguments a = {};
    int status = zt_take_codes(codes, part, &a);
    if (status != ZT_OK) return status;
    if (messages.sources != 1 || messages.members != part.members) return ZT_BAD_SIZE;
    if (messages.nbytes < zt_trits_scales_offset(a.blocks)) return ZT_BAD_SIZE;
    status = zt_take_table(messages, 16, &a.messages);
    if (status != ZT_OK) return status;
    const bool left = messages.without_member >= 0;
    a.skip = left ? messages.without_member : INT32_MAX, a.nbytes = messages.nbytes;
    a.tiles = (part.members - left) * zt_blocks_for(a.blocks, ZT_WARP);
    return zt_launch_codes(zt_apply_kernel, a, stream);
}
