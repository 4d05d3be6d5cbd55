/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Messages of changes become codes on GPUs; zero_topo/quant/spec.py and zt_changes.h say what is in them.
 */
#include "zt_gpu_codes.h"

/* What a message has for a lane's block, one of 32. */
struct zt_sent {
    const uint8_t *from; /* null if nothing */
    bool whole;
};

/* A count that a tile may have. */
ZT_DEVICE int zt_count_at(const uint8_t *counts, int tile) {
    const int count = zt_load<uint8_t>(counts), more = zt_changes_number(count) - zt_changes_most(tile);
    return more > 0 ? count - more : count;
}

/* Block i, or none if there is no such block; scales of blocks sent whole are taken over. */
ZT_DEVICE zt_sent zt_sent_block(const zt_codes_arguments &a, const uint8_t *message, int64_t i, int lane, uint8_t *scale) {
    const int block = a.codes.block, tile = zt_changes_tile(block), tiles = block / tile;
    const uint8_t *counts = message + zt_changes_counts_offset(a.blocks) + i * tiles;
    const bool whole = i < a.blocks && zt_load<uint8_t>(counts) == ZT_CHANGES_WHOLE;
    uint32_t size = 0;
    for (int t = 0; t < tiles && i < a.blocks && !whole; t++)
        size += (uint32_t)zt_changes_bytes(tile, zt_count_at(counts + t, tile));
    uint32_t end = size;
    for (int by = 1; by < ZT_WARP; by *= 2) {
        const uint32_t other = zt_shuffle_up(end, by, ZT_WARP);
        if (lane >= by) end += other;
    }
    const uint32_t earlier = (uint32_t)__popc(zt_ballot(whole) & ((1u << lane) - 1));
    if (!whole && !size) return {nullptr, false};
    const uint8_t *before = message + i / ZT_CHANGES_CHUNK * 8 - 8;
    const bool first = i < ZT_CHANGES_CHUNK;
    const int64_t rank = (first ? 0 : (int64_t)zt_load<uint32_t>(before)) + earlier;
    const int64_t bytes = (first ? 0 : (int64_t)zt_load<uint32_t>(before + 4)) + end - size;
    const int64_t all = zt_load<uint32_t>(message + (zt_changes_chunks(a.blocks) - 1) * 8);
    const int64_t from = whole ? zt_changes_codes_offset(block, a.blocks, all) + rank * block
                               : zt_changes_offset(block, a.blocks, all) + bytes;
    if (from + (whole ? block : (int64_t)size) > a.nbytes) return {nullptr, false};
    const uint8_t *sent = message + zt_changes_scales_offset(block, a.blocks) + rank * 4;
    if (whole) zt_store<uint32_t>(scale, zt_load<uint32_t>(sent));
    return {message + from, whole};
}

/* Applies an encoded tile with so many changes to its codes. */
ZT_DEVICE void zt_apply_tile(const uint8_t *from, int tile, int count, uint8_t *codes, int lane) {
    const int number = zt_changes_number(count);
    const bool large = zt_changes_large(count);
    if (zt_changes_listed(tile, count)) {
        for (int k = lane; k < number; k += ZT_WARP) {
            const uint32_t entry = zt_load<uint8_t>(from + k);
            uint8_t *code = codes + (entry & (uint32_t)(tile - 1));
            const uint32_t stepped = zt_load<uint8_t>(code) + 1 - 2 * (entry >> 7);
            zt_store<uint8_t>(code, large ? zt_load<uint8_t>(from + number + k) : (uint8_t)stepped);
        }
        return;
    }
    const uint8_t *values = from + tile / 8;
    uint32_t left = zt_four_of(from, tile, lane), more = 0, less = 0;
    for (int rank = (int)zt_before_lane(left, lane); left && rank < number; left &= left - 1, rank++) {
        if (large) {
            zt_store<uint8_t>(codes + 4 * lane + __ffs((int)left) - 1, zt_load<uint8_t>(values + rank));
            continue;
        }
        const uint32_t minus = zt_load<uint8_t>(values + rank / 8) >> rank % 8 & 1u;
        more |= (left & -left) * (minus ^ 1), less |= (left & -left) * minus;
    }
    zt_step(codes, lane, more, less);
}

/* 32 lanes take 32 blocks of a member. */
ZT_KERNEL(ZT_THREADS, 4) zt_apply_kernel(ZT_ARGUMENTS zt_codes_arguments a) {
    const int lane = (int)threadIdx.x % ZT_WARP, block = a.codes.block, tile = zt_changes_tile(block);
    const int64_t of_member = zt_blocks_for(a.blocks, ZT_WARP), step = zt_tile_step();
    for (int64_t index = zt_first_tile(); index < a.tiles; index += step) {
        const int64_t kept = zt_quotient(index, of_member), begin = (index - kept * of_member) * ZT_WARP, i = begin + lane;
        const int32_t member = (int32_t)(kept + (kept >= a.skip));
        const uint8_t *message = zt_message_at(a.messages, member);
        zt_home mine = {nullptr, nullptr, nullptr, 0};
        if (i < a.blocks) mine = zt_home_of(a, member, i);
        const zt_sent own = zt_sent_block(a, message, i, lane, mine.scale);
        const uint32_t wholes = zt_ballot(own.whole);
#pragma unroll 1
        for (uint32_t left = zt_ballot(own.from != nullptr); left; left &= left - 1) {
            const int from = __ffs((int)left) - 1;
            uint8_t *codes = (uint8_t *)(uintptr_t)zt_shuffle_wide((uintptr_t)mine.codes, from);
            const uint8_t *source = (const uint8_t *)(uintptr_t)zt_shuffle_wide((uintptr_t)own.from, from);
            if (wholes >> from & 1) {
                for (int at = lane * 16; at < block; at += ZT_WARP * 16)
                    zt_store<uint4>(codes + at, zt_load<uint4>(source + at));
                continue;
            }
            const uint8_t *counts = message + zt_changes_counts_offset(a.blocks) + (begin + from) * (block / tile);
            for (int t = 0; t < block / tile; t++) {
                const int count = zt_count_at(counts + t, tile);
                if (count) zt_apply_tile(source, tile, count, codes + t * tile, lane);
                source += zt_changes_bytes(tile, count);
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
    if (messages.nbytes < zt_changes_scales_offset(codes.block, a.blocks)) return ZT_BAD_SIZE;
    status = zt_take_table(messages, 16, &a.messages);
    if (status != ZT_OK) return status;
    const bool left = messages.without_member >= 0;
    a.skip = left ? messages.without_member : INT32_MAX, a.nbytes = messages.nbytes;
    a.tiles = (part.members - left) * zt_blocks_for(a.blocks, ZT_WARP);
    return zt_launch_codes(zt_apply_kernel, a, stream);
}
