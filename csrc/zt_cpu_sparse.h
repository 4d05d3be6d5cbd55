/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The inner loops of bit masks and count sketches, for the compiler to vectorise; included once by the file of each
 * instruction set, which defines V::ones. Note [One file, one instruction set] is in zt_cpu.h.
 */
#ifndef ZT_CPU_SPARSE_H
#define ZT_CPU_SPARSE_H

#include "zt_cpu.h"

namespace {

/* n bytes -> bits, a byte at a time. */
void pack_rest(const uint8_t *mask, int64_t n, uint8_t *bits) {
    for (int64_t i = 0; i < n; i += 8) {
        uint32_t byte = 0;
        for (int64_t k = 0; k < 8 && i + k < n; ++k) byte |= static_cast<uint32_t>(mask[i + k] != 0) << k;
        bits[i / 8] = static_cast<uint8_t>(byte);
    }
}

void unpack_rest(const uint8_t *bits, int64_t n, uint8_t *mask) {
    for (int64_t i = 0; i < n; ++i) mask[i] = bits[i / 8] >> (i % 8) & 1;
}

/* Three rows of a block, with the sign in the top bit. */
struct Places {
    uint32_t place[3];
    ZT_INLINE Places of(const zt::Sketch &sketch, int64_t block) {
        Places p;
        for (int32_t j = 0; j < 3; ++j) {
            const uint32_t negative = zt_sketch_sign(sketch.seed, block, j) < 0;
            p.place[j] = static_cast<uint32_t>(zt_sketch_row(sketch.seed, block, j, sketch.rows)) | negative << 31;
        }
        return p;
    }
};

ZT_INLINE int64_t row_of(uint32_t place) { return place & 0x7fffffff; }
ZT_INLINE float signed_by(uint32_t place, float x) { return place >> 31 ? -x : x; }

/* sum += x or sum -= x, n lanes of one row. */
ZT_INLINE void add_signed(float *__restrict sum, const float *__restrict x, int64_t n, bool negative) {
    if (negative)
        for (int64_t i = 0; i < n; ++i) sum[i] -= x[i];
    else
        for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

/* Lanes go together as long as their part of the sketch stays in the second cache, but not too few for prefetching. */
constexpr int64_t kSketchBytes = 512 << 10;

void insert_lanes(const float *x, int64_t n, zt::Sketch sketch, zt_range lanes) {
    const int64_t width = lanes.end - lanes.begin;
    for (int64_t row = 0; row < sketch.rows; ++row)
        memset(sketch.table + row * ZT_SKETCH_LANES + lanes.begin, 0, static_cast<size_t>(4 * width));
    for (int64_t block = 0, first = lanes.begin; first < n; ++block, first += ZT_SKETCH_LANES) {
        const int64_t here = n - first < width ? n - first : width;
        const Places places = Places::of(sketch, block);
        for (int64_t i = 0; i < here; i += 16) __builtin_prefetch(x + first + 2 * ZT_SKETCH_LANES + i);
        for (const uint32_t place : places.place)
            add_signed(sketch.table + row_of(place) * ZT_SKETCH_LANES + lanes.begin, x + first, here, place >> 31);
    }
}

void sketch_insert(const float *x, int64_t n, zt::Sketch sketch, zt_range lanes) {
    int64_t width = ZT_SKETCH_LANES;
    while (width > 64 && sketch.rows * width * 4 > kSketchBytes) width /= 2;
    for (int64_t lane = lanes.begin; lane < lanes.end; lane += width)
        insert_lanes(x, n, sketch, {lane, lane + width < lanes.end ? lane + width : lanes.end});
}

/* Note [Peeling sixteen lanes]
 *     Lanes are independent, so sixteen that share cache lines go together. Their columns of the sketch are copied
 *     side by side (4096 bytes apart they would all compete for few sets of the cache), and so are the values found.
 *     Only blocks with something unresolved are visited again.
 */
constexpr int64_t kTogether = 16;

struct Visit {
    uint32_t block;
    uint32_t unresolved; /* one bit a lane */
};

struct Peeling {
    float *sums;      /* [rows][16] */
    uint32_t *counts; /* [rows][16] */
    Places *places;   /* [blocks] */
    float *found;     /* [blocks][16] */
    Visit *visits;    /* [blocks]: those with something unresolved, ascending */
    int64_t pending;  /* how many of them */
};

Peeling peeling_in(void *work, int64_t rows, int64_t blocks) {
    uint8_t *at = static_cast<uint8_t *>(work);
    at += (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64;
    Peeling p = {};
    p.sums = reinterpret_cast<float *>(at);
    p.counts = reinterpret_cast<uint32_t *>(at + rows * kTogether * 4);
    p.found = p.sums + rows * kTogether * 2;
    p.places = reinterpret_cast<Places *>(p.found + blocks * kTogether);
    p.visits = reinterpret_cast<Visit *>(p.places + blocks);
    return p;
}

/* What is set among the lanes that begin at element `first`, of which `here` exist. */
ZT_INLINE uint32_t set_lanes(const uint8_t *bits, int64_t first, int64_t here) {
    uint32_t set = bits[first / 8];
    if (here > 8) set |= static_cast<uint32_t>(bits[first / 8 + 1]) << 8;
    return set & ((1u << here) - 1);
}

/* The lanes [group, group + 16), of which those in `wanted` count. */
void start_peeling(Peeling &p, const zt::Sketch &sketch, const uint8_t *bits, int64_t n, int64_t group,
                   uint32_t wanted) {
    for (int64_t row = 0; row < sketch.rows; ++row)
        memcpy(p.sums + row * kTogether, sketch.table + row * ZT_SKETCH_LANES + group, 4 * kTogether);
    memset(p.counts, 0, static_cast<size_t>(4 * kTogether * sketch.rows));
    p.pending = 0;
    for (int64_t block = 0, first = group; first < n; ++block, first += ZT_SKETCH_LANES) {
        const int64_t here = n - first < kTogether ? n - first : kTogether;
        const uint32_t set = set_lanes(bits, first, here) & wanted;
        memset(p.found + block * kTogether, 0, 4 * kTogether);
        if (!set) continue;
        p.visits[p.pending++] = {static_cast<uint32_t>(block), set};
        for (const uint32_t place : p.places[block].place) {
            uint32_t *counts = p.counts + row_of(place) * kTogether;
            for (int64_t lane = 0; lane < kTogether; ++lane) counts[lane] += set >> lane & 1;
        }
    }
}

/* One block of one pass; returns the lanes that it resolved. */
ZT_INLINE uint32_t resolve(Peeling &p, Visit visit) {
    const Places &places = p.places[visit.block];
    float *sums[3];
    uint32_t *counts[3], alone[3];
    for (int j = 0; j < 3; ++j) {
        sums[j] = p.sums + row_of(places.place[j]) * kTogether;
        counts[j] = p.counts + row_of(places.place[j]) * kTogether;
        alone[j] = V::ones(counts[j]) & visit.unresolved;
    }
    const uint32_t resolved = alone[0] | alone[1] | alone[2];
    for (uint32_t rest = resolved; rest; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        const int chosen = alone[0] >> lane & 1 ? 0 : alone[1] >> lane & 1 ? 1 : 2;
        const float x = signed_by(places.place[chosen], sums[chosen][lane]);
        for (int j = 0; j < 3; ++j) {
            if (j != chosen) sums[j][lane] -= signed_by(places.place[j], x);
            --counts[j][lane];
        }
        p.found[visit.block * kTogether + lane] = x;
    }
    return resolved;
}

/* One pass; whether it resolved anything. */
bool pass(Peeling &p) {
    int64_t kept = 0;
    bool any = false;
    for (int64_t i = 0; i < p.pending; ++i) {
        Visit visit = p.visits[i];
        const uint32_t resolved = resolve(p, visit);
        any |= resolved != 0;
        visit.unresolved &= ~resolved;
        if (visit.unresolved) p.visits[kept++] = visit;
    }
    p.pending = kept;
    return any;
}

ZT_INLINE float median(float a, float b, float c) {
    if (a != a || b != b || c != c) return a + b + c;
    const float low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

/* What no pass reaches; returns how many. */
int64_t guess(const Peeling &p) {
    int64_t left = 0;
    for (int64_t i = 0; i < p.pending; ++i) {
        const Visit visit = p.visits[i];
        const Places &places = p.places[visit.block];
        for (uint32_t rest = visit.unresolved; rest; rest &= rest - 1, ++left) {
            const int lane = __builtin_ctz(rest);
            float three[3];
            for (int j = 0; j < 3; ++j)
                three[j] = signed_by(places.place[j], p.sums[row_of(places.place[j]) * kTogether + lane]);
            p.found[visit.block * kTogether + lane] = median(three[0], three[1], three[2]);
        }
    }
    return left;
}

/* In one sweep: memory far apart, written as values are found, would hold up every later store. */
void write_found(const Peeling &p, int64_t n, float *x, int64_t group, uint32_t wanted) {
    const float *found = p.found;
    for (int64_t first = group; first < n; first += ZT_SKETCH_LANES, found += kTogether) {
        if (wanted == 0xffff && n - first >= kTogether) {
            memcpy(x + first, found, 4 * kTogether);
            continue;
        }
        for (int64_t lane = 0; lane < kTogether && first + lane < n; ++lane)
            if (wanted >> lane & 1) x[first + lane] = found[lane];
    }
}

int64_t sketch_peel(zt::Sketch sketch, const uint8_t *bits, int64_t n, float *x, zt_range lanes, void *work) {
    const int64_t blocks = (n + ZT_SKETCH_LANES - 1) / ZT_SKETCH_LANES;
    Peeling p = peeling_in(work, sketch.rows, blocks);
    for (int64_t block = 0; block < blocks; ++block) p.places[block] = Places::of(sketch, block);
    int64_t left = 0;
    for (int64_t group = lanes.begin / kTogether * kTogether; group < lanes.end; group += kTogether) {
        uint32_t wanted = 0xffff;
        if (group < lanes.begin) wanted &= 0xffffu << (lanes.begin - group);
        if (group + kTogether > lanes.end) wanted &= (1u << (lanes.end - group)) - 1;
        start_peeling(p, sketch, bits, n, group, wanted);
        while (pass(p)) {
        }
        left += guess(p);
        write_found(p, n, x, group, wanted);
    }
    return left;
}

}  // namespace

#endif /* ZT_CPU_SPARSE_H */
