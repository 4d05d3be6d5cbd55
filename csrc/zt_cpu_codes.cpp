/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Codes and the messages of their changes on CPUs: checks the arguments, chooses the instruction set, and finds where
 * each block lies.
 */
#include "zt_cpu_checks.h"

using namespace zt;

namespace {

constexpr int64_t kMostBlock = 2048;
constexpr uint8_t kPowers[ZT_TRITS_GROUP] = {1, 3, 9, 27, 81};

/* A block of a part, of a row and a block column. */
struct Place {
    int64_t codes, scale;    /* bytes of what is held */
    int64_t column, present; /* its first column in the table of masters, and how many it has */
};

/* Goes from block to block of one member's part. */
class Walk {
  public:
    Walk(const zt_codes &codes, const zt_part &part, int64_t member) : codes_(codes), part_(part), member_(member) {}

    void to(int64_t block) {
        const int64_t columns = part_.end - part_.begin;
        if (block == block_ + 1 && column_ + 1 < part_.end) {
            ++column_;
        } else {
            row_ = block / columns;
            column_ = part_.begin + block % columns;
        }
        block_ = block;
    }

    int64_t row() const { return row_; }

    Place place() const {
        const int64_t *const slot = codes_.slots + 6 * codes_.slot_of[column_];
        const int64_t here = column_ - slot[3], inside = here * codes_.block, left = slot[5] - inside;
        const int64_t index = (member_ + row_ * part_.members) * slot[2] + here;
        return {slot[0] + index * codes_.block, slot[1] + index * 4, slot[4] + inside,
                left < 0 ? 0 : left < codes_.block ? left : codes_.block};
    }

    /* Whether all rows of the column that it is at are held, and its masters are there. */
    bool known(const zt_masters *masters) const {
        const int32_t number = codes_.slot_of[column_];
        if (number < 0 || number >= codes_.count) return false;
        const int64_t *const slot = codes_.slots + 6 * number;
        for (int i = 0; i < 6; ++i)
            if (slot[i] < 0 || slot[i] > kMost) return false;
        const int64_t rows = part_.rows * part_.members, blocks = slot[2];
        if (column_ < slot[3] || column_ - slot[3] >= blocks || !fits(rows, blocks)) return false;
        if (!fits(rows * blocks, codes_.block) || slot[0] + rows * blocks * codes_.block > slot[1]) return false;
        if (slot[1] + rows * blocks * 4 > codes_.nbytes) return false;
        const Place at = place();
        return !masters || at.present == 0 ||
               (at.column >= masters->first && at.column - masters->first + at.present <= masters->columns);
    }

  private:
    const zt_codes codes_;
    const zt_part part_;
    const int64_t member_;
    int64_t block_ = -2, row_ = 0, column_ = 0;
};

int64_t blocks_of(const zt_part &part) { return part.rows * (part.end - part.begin); }

int check_part(const zt_codes &codes, const zt_part &part) {
    if (!zt_trits_valid(codes.block)) return ZT_BAD_SPEC;
    if (codes.nbytes < 0 || codes.nbytes > kMost || codes.columns < 0 || codes.count < 0) return ZT_BAD_SIZE;
    if (part.begin < 0 || part.begin > part.end || part.end > codes.columns) return ZT_BAD_SIZE;
    if (part.rows < 0 || part.members < 1 || !fits(part.rows, part.members)) return ZT_BAD_SIZE;
    if (!fits(part.rows * part.members, part.end - part.begin)) return ZT_BAD_SIZE;
    return blocks_of(part) == 0 || (codes.held && codes.slots && codes.slot_of) ? ZT_OK : ZT_BAD_SIZE;
}

int check_masters(const zt_masters &masters, const zt_codes &codes, const zt_part &part) {
    ZT_TRY(check_part(codes, part));
    if (masters.member < 0 || masters.member >= part.members) return ZT_BAD_SIZE;
    if (masters.columns < 0 || masters.columns > kMost) return ZT_BAD_SIZE;
    if (masters.first < 0 || masters.first > kMost) return ZT_BAD_SIZE;
    const bool apart = masters.row_stride >= masters.columns && fits(part.rows, masters.row_stride);
    if (part.rows > 1 && !apart) return ZT_BAD_SIZE;
    return masters.data || blocks_of(part) == 0 ? ZT_OK : ZT_BAD_SIZE;
}

/* The columns of so many blocks from one on. */
int check_columns(Walk walk, int64_t columns, zt_range blocks, const zt_masters *masters) {
    const int64_t end = blocks.end - blocks.begin < columns ? blocks.end : blocks.begin + columns;
    for (int64_t block = blocks.begin; block < end; ++block) {
        walk.to(block);
        if (!walk.known(masters)) return ZT_BAD_SIZE;
    }
    return ZT_OK;
}

bool inside(zt_range range, int64_t n) { return 0 <= range.begin && range.begin <= range.end && range.end <= n; }

template <class T> T read(const uint8_t *p) {
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* A block's masters, where they are or, if some do not exist, in the buffer with zeros for those. */
const float *values(const zt_masters &masters, const Walk &walk, const Place &place, int32_t block, float *buffer) {
    const float *const x = masters.data + walk.row() * masters.row_stride + place.column - masters.first;
    if (place.present == block) return x;
    memset(buffer, 0, sizeof(float) * static_cast<size_t>(block));
    if (place.present) memcpy(buffer, x, sizeof(float) * static_cast<size_t>(place.present));
    return buffer;
}

/* Where the parts of a message begin. */
struct Layout {
    int64_t blocks, escaped, scales, codes, trits, nbytes;
    Layout(int32_t block, int64_t n, int64_t e)
        : blocks(n), escaped(e), scales(zt_trits_scales_offset(n)), codes(zt_trits_codes_offset(n, e)),
          trits(zt_trits_offset(block, n, e)), nbytes(zt_trits_nbytes(block, n, e)) {}
};

/* Makes a member's message of its masters. */
struct Writer {
    const Kernels &kernels;
    const zt_masters &masters;
    const zt_codes &codes;
    const zt_change &change;
    const Layout layout;
    uint8_t *const message;
    Walk walk;

    struct Found {
        const float *x;
        float scale;
        int8_t *codes;
    };

    Found at(int64_t place, float *buffer) {
        const int64_t block = change.order[place];
        walk.to(block);
        const Place found = walk.place();
        memcpy(codes.held + found.scale, change.scales + block, 4);
        return {values(masters, walk, found, codes.block, buffer), change.scales[block],
                reinterpret_cast<int8_t *>(codes.held + found.codes)};
    }

    /* The group that begins at a place. */
    void group(int64_t place) {
        alignas(64) float buffers[ZT_TRITS_GROUP][kMostBlock];
        Found found[ZT_TRITS_GROUP];
        const int64_t left = layout.blocks - layout.escaped - place;
        const int64_t count = left < ZT_TRITS_GROUP ? left : ZT_TRITS_GROUP;
        for (int64_t k = 0; k < count; ++k) found[k] = at(place + k, buffers[k]);
        uint8_t *const trits = message + layout.trits + place / ZT_TRITS_GROUP * codes.block;
        memset(trits, 0, static_cast<size_t>(codes.block));
        for (int64_t k = 0; k < count; ++k) {
            const float inverse = zt_codes_inverse(found[k].scale);
            kernels.advance(found[k].x, inverse, codes.block, kPowers[k], found[k].codes, trits);
        }
    }

    void whole(int64_t place) {
        alignas(64) float buffer[kMostBlock];
        const int64_t number = place - (layout.blocks - layout.escaped);
        const Found found = at(place, buffer);
        kernels.recode(found.x, zt_codes_inverse(found.scale), codes.block, found.codes);
        memcpy(message + layout.scales + 4 * number, &found.scale, 4);
        memcpy(message + layout.codes + number * codes.block, found.codes, static_cast<size_t>(codes.block));
    }
};

/* Which blocks of a chunk escape: bit i is block 64 chunk + i. */
uint64_t mask_of(const uint8_t *message, int64_t blocks, int64_t chunk) {
    const int64_t here = blocks - chunk * ZT_TRITS_CHUNK;
    uint64_t mask = 0;
    for (int i = 0; i < 8; ++i)
        mask |= static_cast<uint64_t>(message[ZT_TRITS_MASK + 8 * chunk + i]) << (8 * i);
    return here < ZT_TRITS_CHUNK ? mask & ((uint64_t{1} << here) - 1) : mask;
}

int64_t before_of(const uint8_t *message, int64_t blocks, int64_t chunk) {
    return read<uint32_t>(message + zt_trits_before_offset(blocks) + 4 * chunk);
}

/* That a message has all it says, and what it says of the chunks of a range fits together. */
int check_message(const uint8_t *message, int64_t nbytes, int32_t block, int64_t blocks, zt_range own) {
    if (nbytes < zt_trits_nbytes(block, blocks, 0)) return ZT_BAD_SIZE;
    const int64_t escaped = read<uint32_t>(message), last = zt_trits_chunks(blocks) - 1;
    if (escaped > blocks || nbytes < zt_trits_nbytes(block, blocks, escaped)) return ZT_BAD_SIZE;
    for (int64_t chunk = own.begin / ZT_TRITS_CHUNK; chunk * ZT_TRITS_CHUNK < own.end; ++chunk) {
        const int64_t past = chunk == last ? blocks : (chunk + 1) * ZT_TRITS_CHUNK;
        const int64_t before = before_of(message, blocks, chunk);
        const int64_t after = before + __builtin_popcountll(mask_of(message, blocks, chunk));
        if (before > chunk * ZT_TRITS_CHUNK || after > escaped || past - after > blocks - escaped) return ZT_BAD_SIZE;
        if (after != (chunk == last ? escaped : before_of(message, blocks, chunk + 1))) return ZT_BAD_SIZE;
    }
    return ZT_OK;
}

/* What a message says of some blocks becomes codes and scales. */
void apply(const Kernels &kernels, const uint8_t *message, const zt_codes &codes, Walk walk, int64_t blocks,
           zt_range own) {
    const Layout layout(codes.block, blocks, read<uint32_t>(message));
    const auto size = static_cast<size_t>(codes.block);
    alignas(64) int8_t others[ZT_TRITS_GROUP][kMostBlock]; /* in place of blocks that are not in the range */
    int8_t *group[ZT_TRITS_GROUP];
    for (int k = 0; k < ZT_TRITS_GROUP; ++k) memset(group[k] = others[k], 0, size);
    const uint8_t *trits = nullptr; /* of the group, if one is begun */
    uint64_t mask = 0;
    int64_t escaped = 0;
    for (int64_t block = own.begin; block < own.end; ++block) {
        const int64_t bit = block % ZT_TRITS_CHUNK;
        if (bit == 0 || block == own.begin) {
            mask = mask_of(message, blocks, block / ZT_TRITS_CHUNK);
            const uint64_t earlier = mask & ((uint64_t{1} << bit) - 1);
            escaped = before_of(message, blocks, block / ZT_TRITS_CHUNK) + __builtin_popcountll(earlier);
        }
        walk.to(block);
        const Place place = walk.place();
        uint8_t *const target = codes.held + place.codes;
        if (mask >> bit & 1) {
            memcpy(target, message + layout.codes + escaped * codes.block, size);
            memcpy(codes.held + place.scale, message + layout.scales + 4 * escaped, 4);
            ++escaped;
            continue;
        }
        const int64_t number = block - escaped, digit = number % ZT_TRITS_GROUP;
        trits = message + layout.trits + number / ZT_TRITS_GROUP * codes.block;
        group[digit] = reinterpret_cast<int8_t *>(target);
        if (digit < ZT_TRITS_GROUP - 1) continue;
        kernels.decode(trits, codes.block, group);
        trits = nullptr;
        for (int k = 0; k < ZT_TRITS_GROUP; ++k) group[k] = others[k];
    }
    if (trits) kernels.decode(trits, codes.block, group);
}

}  // namespace

extern "C" int zt_cpu_codes_assess(zt_masters masters, zt_codes codes, zt_part part, float *scales, uint8_t *escaped,
                                   zt_range blocks, int32_t level) {
    ZT_TRY(check_masters(masters, codes, part));
    if (!inside(blocks, blocks_of(part))) return ZT_BAD_RANGE;
    if (blocks.begin < blocks.end && (!scales || !escaped)) return ZT_BAD_SIZE;
    Walk walk(codes, part, masters.member);
    ZT_TRY(check_columns(walk, part.end - part.begin, blocks, &masters));
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    alignas(64) float buffer[kMostBlock];
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        walk.to(block);
        const Place place = walk.place();
        const float *const x = values(masters, walk, place, codes.block, buffer);
        const auto *const held = reinterpret_cast<const int8_t *>(codes.held + place.codes);
        memcpy(scales + block, codes.held + place.scale, 4);
        escaped[block] = chosen->assess(x, held, codes.block, scales + block);
    }
    return ZT_OK;
}

extern "C" int zt_cpu_codes_emit(zt_masters masters, zt_codes codes, zt_part part, zt_change change, uint8_t *message,
                                 int64_t nbytes, zt_range places, int32_t level) {
    ZT_TRY(check_masters(masters, codes, part));
    const int64_t blocks = blocks_of(part);
    if (!inside(places, blocks)) return ZT_BAD_RANGE;
    if (blocks && (!change.scales || !change.order || !change.count || !message)) return ZT_BAD_SIZE;
    const int64_t escaped = blocks ? *change.count : 0;
    if (escaped < 0 || escaped > blocks) return ZT_BAD_SIZE;
    const Layout layout(codes.block, blocks, escaped);
    if (nbytes < layout.nbytes) return ZT_BAD_SIZE;
    const int64_t most = places.end + ZT_TRITS_GROUP - 1 < blocks ? places.end + ZT_TRITS_GROUP - 1 : blocks;
    Walk walk(codes, part, masters.member);
    for (int64_t place = places.begin; place < (places.begin < places.end ? most : places.begin); ++place) {
        if (change.order[place] < 0 || change.order[place] >= blocks) return ZT_BAD_SIZE;
        walk.to(change.order[place]);
        if (!walk.known(&masters)) return ZT_BAD_SIZE;
    }
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    Writer writer = {*chosen, masters, codes, change, layout, message, Walk(codes, part, masters.member)};
    for (int64_t place = places.begin; place < places.end; ++place) {
        if (place >= blocks - escaped)
            writer.whole(place);
        else if (place % ZT_TRITS_GROUP == 0)
            writer.group(place);
    }
    return ZT_OK;
}

extern "C" int zt_cpu_codes_apply(zt_messages messages, zt_codes codes, zt_part part, zt_range blocks, int32_t level) {
    ZT_TRY(check_part(codes, part));
    const int64_t all = blocks_of(part);
    if (messages.sources != 1 || messages.members != part.members) return ZT_BAD_SIZE;
    ZT_TRY(check_table(messages, all));
    if (!inside(blocks, all * part.members)) return ZT_BAD_RANGE;
    int status = ZT_OK;
    for_members(all, messages, blocks, [&](int64_t member, zt_range own) {
        if (status == ZT_OK) status = check_columns(Walk(codes, part, member), part.end - part.begin, own, nullptr);
        if (status == ZT_OK)
            status = check_message(message_of(messages, member), messages.nbytes, codes.block, all, own);
    });
    ZT_TRY(status);
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    for_members(all, messages, blocks, [&](int64_t member, zt_range own) {
        apply(*chosen, message_of(messages, member), codes, Walk(codes, part, member), all, own);
    });
    return ZT_OK;
}
