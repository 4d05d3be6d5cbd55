/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Codes and the messages of their changes on CPUs: checks the arguments, chooses the instruction set, and finds where
 * each block lies.
 */
#include "zt_cpu_checks.h"

using namespace zt;

namespace {

constexpr int64_t kMostBlock = 2048;

/* A block of a part, of a row and a block column. */
struct Place {
    int64_t codes, scale;    /* bytes of what is stored */
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
        const int64_t *const param = codes_.params + 6 * codes_.param_of[column_];
        const int64_t here = column_ - param[3], inside = here * codes_.block, left = param[5] - inside;
        const int64_t index = (member_ + row_ * part_.members) * param[2] + here;
        return {param[0] + index * codes_.block, param[1] + index * 4, param[4] + inside,
                left < 0 ? 0 : left < codes_.block ? left : codes_.block};
    }

    /* Whether all rows of the column that it is at are stored, and its masters are there. */
    bool known(const zt_masters *masters) const {
        const int32_t number = codes_.param_of[column_];
        if (number < 0 || number >= codes_.count) return false;
        const int64_t *const param = codes_.params + 6 * number;
        for (int i = 0; i < 6; ++i)
            if (param[i] < 0 || param[i] > kMost) return false;
        const int64_t rows = part_.rows * part_.members, blocks = param[2];
        if (column_ < param[3] || column_ - param[3] >= blocks || !fits(rows, blocks)) return false;
        if (!fits(rows * blocks, codes_.block) || param[0] + rows * blocks * codes_.block > param[1]) return false;
        if (param[1] + rows * blocks * 4 > codes_.nbytes) return false;
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
    if (!zt_changes_valid(codes.block)) return ZT_BAD_SPEC;
    if (codes.nbytes < 0 || codes.nbytes > kMost || codes.columns < 0 || codes.count < 0) return ZT_BAD_SIZE;
    if (part.begin < 0 || part.begin > part.end || part.end > codes.columns) return ZT_BAD_SIZE;
    if (part.rows < 0 || part.members < 1 || !fits(part.rows, part.members)) return ZT_BAD_SIZE;
    if (!fits(part.rows * part.members, part.end - part.begin)) return ZT_BAD_SIZE;
    return blocks_of(part) == 0 || (codes.stored && codes.params && codes.param_of) ? ZT_OK : ZT_BAD_SIZE;
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

/* Blocks sent whole and bytes of changes. */
struct Ends {
    int64_t whole, bytes;
    bool operator==(Ends other) const { return whole == other.whole && bytes == other.bytes; }
};

/* Where the parts of a message begin. */
struct Layout {
    int32_t tile;
    int64_t tiles, counts, scales, codes, changes, nbytes;
    Layout(int32_t block, int64_t n, Ends all)
        : tile(zt_changes_tile(block)), tiles(block / tile), counts(zt_changes_counts_offset(n)),
          scales(zt_changes_scales_offset(block, n)), codes(zt_changes_codes_offset(block, n, all.whole)),
          changes(zt_changes_offset(block, n, all.whole)), nbytes(zt_changes_nbytes(block, n, all.whole, all.bytes)) {}
};

/* Adds a block, given its tiles' counts; false if they are none. */
bool add_block(const uint8_t *counts, const Layout &layout, Ends *ends) {
    if (*counts == ZT_CHANGES_WHOLE) return ++ends->whole, true;
    for (int64_t t = 0; t < layout.tiles; ++t) {
        if (zt_changes_number(counts[t]) > zt_changes_most(layout.tile)) return false;
        ends->bytes += zt_changes_bytes(layout.tile, counts[t]);
    }
    return true;
}

int8_t change_of(uint32_t less) { return less ? -1 : 1; }

/* Applies the steps of a tile to its codes and encodes them; in one with large changes, codes become the fresh ones. */
void pack_tile(const uint8_t *steps, int32_t tile, int32_t count, const int8_t *fresh, int8_t *codes, uint8_t *out) {
    const int32_t masked = tile / 8, number = zt_changes_number(count);
    const bool list = zt_changes_listed(tile, count), large = zt_changes_large(count);
    uint8_t *const values = out + (list ? number : masked);
    if (!list) {
        memcpy(out, steps, static_cast<size_t>(masked));
        memset(values, 0, static_cast<size_t>(zt_changes_values(count)));
    }
    int32_t rank = 0;
    for (int32_t word = 0; word < tile; word += 64) {
        const auto less = read<uint64_t>(steps + masked + word / 8);
        for (auto left = read<uint64_t>(steps + word / 8); left && rank < number; left &= left - 1, ++rank) {
            const int bit = __builtin_ctzll(left);
            const auto minus = large ? 0 : static_cast<uint32_t>(less >> bit & 1);
            int8_t *const code = codes + word + bit;
            *code = static_cast<int8_t>(large ? fresh[word + bit] : *code + change_of(minus));
            if (list) out[rank] = static_cast<uint8_t>(static_cast<uint32_t>(word + bit) | minus << 7);
            if (large)
                values[rank] = static_cast<uint8_t>(*code);
            else if (!list)
                values[rank / 8] = static_cast<uint8_t>(values[rank / 8] | minus << rank % 8);
        }
    }
}

/* Applies an encoded tile to its codes. */
void unpack_tile(const uint8_t *in, int32_t tile, int32_t count, int8_t *codes) {
    const int32_t number = zt_changes_number(count);
    const bool large = zt_changes_large(count);
    if (zt_changes_listed(tile, count)) {
        for (int32_t rank = 0; rank < number; ++rank) {
            int8_t *const code = codes + (in[rank] & (tile - 1));
            *code = static_cast<int8_t>(large ? static_cast<int8_t>(in[number + rank]) : *code + change_of(in[rank] >> 7));
        }
        return;
    }
    const uint8_t *const values = in + tile / 8;
    int32_t rank = 0;
    for (int32_t word = 0; word < tile; word += 64)
        for (auto left = read<uint64_t>(in + word / 8); left && rank < number; left &= left - 1, ++rank) {
            int8_t *const code = codes + word + __builtin_ctzll(left);
            const int8_t stepped = static_cast<int8_t>(*code + change_of(values[rank / 8] >> rank % 8 & 1));
            *code = large ? static_cast<int8_t>(values[rank]) : stepped;
        }
}

/* Makes a member's message of its masters. */
struct Writer {
    const Kernels &kernels;
    const zt_masters &masters;
    const zt_codes &codes;
    const zt_change &change;
    const int64_t blocks;
    const Layout layout;
    uint8_t *const message;

    Ends before(int64_t block) const {
        return block ? Ends{change.ends[2 * block - 2], change.ends[2 * block - 1]} : Ends{0, 0};
    }

    bool valid(int64_t block, Ends all) const {
        const Ends begin = before(block);
        Ends end = begin;
        return begin.whole >= 0 && begin.bytes >= 0 && begin.bytes <= all.bytes && begin.whole <= all.whole &&
               add_block(change.counts + block * layout.tiles, layout, &end) && end.whole <= all.whole &&
               end.bytes <= all.bytes;
    }

    void write(int64_t block, const Walk &walk) {
        const Place place = walk.place();
        auto *const stored = reinterpret_cast<int8_t *>(codes.stored + place.codes);
        const uint8_t *const counts = change.counts + block * layout.tiles;
        Ends at = before(block);
        memcpy(message + layout.counts + block * layout.tiles, counts, static_cast<size_t>(layout.tiles));
        if ((block + 1) % ZT_CHANGES_CHUNK == 0 || block + 1 == blocks) {
            const Ends end = before(block + 1);
            const uint32_t entry[2] = {static_cast<uint32_t>(end.whole), static_cast<uint32_t>(end.bytes)};
            memcpy(message + block / ZT_CHANGES_CHUNK * 8, entry, 8);
        }
        const float scale = change.scales[block];
        alignas(64) float buffer[kMostBlock];
        if (*counts == ZT_CHANGES_WHOLE) {
            kernels.recode(values(masters, walk, place, codes.block, buffer), zt_codes_inverse(scale), codes.block, stored);
            memcpy(codes.stored + place.scale, &scale, 4);
            memcpy(message + layout.scales + 4 * at.whole, &scale, 4);
            memcpy(message + layout.codes + at.whole * codes.block, stored, static_cast<size_t>(codes.block));
            return;
        }
        const uint8_t *const steps = change.steps + block * (codes.block / 4);
        for (int64_t t = 0; t < layout.tiles; ++t) {
            if (!counts[t]) continue;
            alignas(64) int8_t fresh[ZT_CHANGES_TILE];
            if (zt_changes_large(counts[t]))
                kernels.recode(values(masters, walk, place, codes.block, buffer) + t * layout.tile, zt_codes_inverse(scale),
                               layout.tile, fresh);
            pack_tile(steps + t * (layout.tile / 4), layout.tile, counts[t], fresh, stored + t * layout.tile,
                      message + layout.changes + at.bytes);
            at.bytes += zt_changes_bytes(layout.tile, counts[t]);
        }
    }
};

/* What a message has up to the end of a chunk; -1 is the one before the first. */
Ends ends_of(const uint8_t *message, int64_t chunk) {
    if (chunk < 0) return {0, 0};
    return {read<uint32_t>(message + 8 * chunk), read<uint32_t>(message + 8 * chunk + 4)};
}

/* That a message has all that it should, and that ends and counts of the chunks of a range agree. */
int check_message(const uint8_t *message, int64_t nbytes, int32_t block, int64_t blocks, zt_range own) {
    if (nbytes < zt_changes_scales_offset(block, blocks)) return ZT_BAD_SIZE;
    const Ends all = ends_of(message, zt_changes_chunks(blocks) - 1);
    const Layout layout(block, blocks, all);
    if (all.whole > blocks || nbytes < layout.nbytes) return ZT_BAD_SIZE;
    for (int64_t chunk = own.begin / ZT_CHANGES_CHUNK; chunk * ZT_CHANGES_CHUNK < own.end; ++chunk) {
        const int64_t first = chunk * ZT_CHANGES_CHUNK, past = first + ZT_CHANGES_CHUNK;
        Ends ends = ends_of(message, chunk - 1);
        for (int64_t i = first; i < (past < blocks ? past : blocks); ++i)
            if (!add_block(message + layout.counts + i * layout.tiles, layout, &ends)) return ZT_BAD_SIZE;
        if (!(ends == ends_of(message, chunk)) || ends.whole > all.whole || ends.bytes > all.bytes) return ZT_BAD_SIZE;
    }
    return ZT_OK;
}

/* What a message has of some blocks becomes codes and scales. */
void apply(const uint8_t *message, const zt_codes &codes, Walk walk, int64_t blocks, zt_range own) {
    const Layout layout(codes.block, blocks, ends_of(message, zt_changes_chunks(blocks) - 1));
    const int64_t first = own.begin - own.begin % ZT_CHANGES_CHUNK;
    Ends at = ends_of(message, first / ZT_CHANGES_CHUNK - 1);
    for (int64_t block = first; block < own.end; ++block) {
        const uint8_t *const counts = message + layout.counts + block * layout.tiles;
        const Ends begin = at;
        add_block(counts, layout, &at);
        if (block < own.begin || begin == at) continue;
        walk.to(block);
        const Place place = walk.place();
        uint8_t *const stored = codes.stored + place.codes;
        if (*counts == ZT_CHANGES_WHOLE) {
            memcpy(stored, message + layout.codes + begin.whole * codes.block, static_cast<size_t>(codes.block));
            memcpy(codes.stored + place.scale, message + layout.scales + 4 * begin.whole, 4);
            continue;
        }
        const uint8_t *in = message + layout.changes + begin.bytes;
        for (int64_t t = 0; t < layout.tiles; ++t) {
            unpack_tile(in, layout.tile, counts[t], reinterpret_cast<int8_t *>(stored) + t * layout.tile);
            in += zt_changes_bytes(layout.tile, counts[t]);
        }
    }
}

}  // namespace

extern "C" int zt_cpu_codes_assess(zt_masters masters, zt_codes codes, zt_part part, float *scales, uint8_t *counts,
                                   uint8_t *steps, int64_t *sizes, zt_range blocks, int32_t level) {
    ZT_TRY(check_masters(masters, codes, part));
    if (!inside(blocks, blocks_of(part))) return ZT_BAD_RANGE;
    if (blocks.begin < blocks.end && (!scales || !counts || !steps || !sizes)) return ZT_BAD_SIZE;
    Walk walk(codes, part, masters.member);
    ZT_TRY(check_columns(walk, part.end - part.begin, blocks, &masters));
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    const int64_t tiles = codes.block / zt_changes_tile(codes.block);
    alignas(64) float buffer[kMostBlock];
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        walk.to(block);
        const Place place = walk.place();
        const float *const x = values(masters, walk, place, codes.block, buffer);
        const auto *const stored = reinterpret_cast<const int8_t *>(codes.stored + place.codes);
        memcpy(scales + block, codes.stored + place.scale, 4);
        const Steps out = {counts + block * tiles, steps + block * (codes.block / 4), sizes + 2 * block};
        chosen->assess(x, stored, codes.block, scales + block, out);
    }
    return ZT_OK;
}

extern "C" int zt_cpu_codes_emit(zt_masters masters, zt_codes codes, zt_part part, zt_change change, uint8_t *message,
                                 int64_t nbytes, zt_range blocks, int32_t level) {
    ZT_TRY(check_masters(masters, codes, part));
    const int64_t n = blocks_of(part);
    if (!inside(blocks, n)) return ZT_BAD_RANGE;
    if (blocks.begin == blocks.end) return ZT_OK;
    if (!change.scales || !change.counts || !change.steps || !change.ends || !message) return ZT_BAD_SIZE;
    const Ends all = {change.ends[2 * n - 2], change.ends[2 * n - 1]};
    if (all.whole < 0 || all.whole > n || all.bytes < 0 || all.bytes > kMost) return ZT_BAD_SIZE;
    Walk walk(codes, part, masters.member);
    ZT_TRY(check_columns(walk, part.end - part.begin, blocks, &masters));
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    Writer writer = {*chosen, masters, codes, change, n, Layout(codes.block, n, all), message};
    if (nbytes < writer.layout.nbytes) return ZT_BAD_SIZE;
    for (int64_t block = blocks.begin; block < blocks.end; ++block)
        if (!writer.valid(block, all)) return ZT_BAD_SIZE;
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        walk.to(block);
        writer.write(block, walk);
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
    if (!kernels(level)) return ZT_BAD_LEVEL;
    for_members(all, messages, blocks, [&](int64_t member, zt_range own) {
        apply(message_of(messages, member), codes, Walk(codes, part, member), all, own);
    });
    return ZT_OK;
}
