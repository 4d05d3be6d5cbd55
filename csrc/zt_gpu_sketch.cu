/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Count sketches on GPUs; zero_topo/quant/reference_sparse.py, Note [Count sketch], says what they are. Sums are made
 * in the reference's order: no result depends on the order in which threads run.
 */
#include "zt_gpu_memory.h"

#define ZT_SKETCH_GROUP 24 /* rows whose sums fit into shared memory at least twice, on any GPU */
#define ZT_SLICES (ZT_SKETCH_LANES / ZT_THREADS)

static_assert(ZT_SKETCH_LANES % ZT_THREADS == 0, "a slice of lanes is a thread block");

struct zt_sketch_arguments {
    const float *in;
    float *sketch, *x;
    const uint8_t *bits;
    int64_t members, n, rows, blocks, words;
    uint64_t seed;
    uint32_t *counts; /* [lane][row]: elements not yet known in this row */
    uint8_t *flags;   /* [lane][flag_bytes]: which elements are not yet known, a bit for each block */
    int64_t flag_bytes;
    int64_t *left;
};

/* -- Insertion ----------------------------------------------------------------------------------------------------- */

/* Up to ZT_SKETCH_GROUP rows of one third of the sketch. */
struct zt_row_group {
    int32_t third;
    int64_t first, past;
};

ZT_WIRE_FN int64_t zt_row_groups(int64_t rows, int third) {
    return (rows * (third + 1) / 3 - rows * third / 3 + ZT_SKETCH_GROUP - 1) / ZT_SKETCH_GROUP;
}

ZT_DEVICE zt_row_group zt_row_group_of(int64_t rows, int64_t group) {
    int third = 0;
    for (; group >= zt_row_groups(rows, third); third++) group -= zt_row_groups(rows, third);
    const int64_t first = rows * third / 3 + group * ZT_SKETCH_GROUP, end = rows * (third + 1) / 3;
    return {third, first, first + ZT_SKETCH_GROUP < end ? first + ZT_SKETCH_GROUP : end};
}

/* A thread block has some rows of 256 lanes, each thread a lane. The blocks are looked through, 256 at once, for those
 * that belong into one of the rows; each of these is added by all threads, in ascending order. */
ZT_KERNEL(ZT_THREADS) zt_sketch_insert_kernel(ZT_ARGUMENTS zt_sketch_arguments a) {
    __shared__ float sums[ZT_SKETCH_GROUP][ZT_THREADS];
    __shared__ uint32_t shared[ZT_THREADS / 32], found[ZT_THREADS];
    const int64_t tiles = (zt_row_groups(a.rows, 0) + zt_row_groups(a.rows, 1) + zt_row_groups(a.rows, 2)) * ZT_SLICES;
    const int t = threadIdx.x;
    const int64_t step = gridDim.x;
    for (int64_t all = blockIdx.x; all < a.members * tiles; all += step) {
        const int64_t member = all / tiles, tile = all - member * tiles;
        const float *in = a.in + member * a.n;
        float *sketch = a.sketch + member * a.rows * ZT_SKETCH_LANES;
        const zt_row_group group = zt_row_group_of(a.rows, tile / ZT_SLICES);
        const int64_t lane = tile % ZT_SLICES * ZT_THREADS + t;
        for (int r = 0; r < ZT_SKETCH_GROUP; r++) sums[r][t] = 0.0f;
        for (int64_t base = 0; base < a.blocks; base += ZT_THREADS) {
            uint32_t count;
            const int64_t row = zt_sketch_row(a.seed, base + t, group.third, a.rows);
            const bool hit = base + t < a.blocks && row >= group.first && row < group.past;
            const uint32_t at = zt_scan(hit, shared, &count); /* and all are done with `found` */
            const uint32_t minus = zt_sketch_sign(a.seed, base + t, group.third) < 0.0f;
            if (hit) found[at] = minus << 31 | (uint32_t)(row - group.first) << 8 | (uint32_t)t;
            __syncthreads();
            for (uint32_t i = 0; i < count; i += 4) {
                float values[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const uint32_t entry = i + k < count ? found[i + k] : 0;
                    const int64_t element = (base + (entry & 255)) * ZT_SKETCH_LANES + lane;
                    const bool exists = i + k < count && element < a.n;
                    values[k] = exists ? zt_bits<float>(zt_load<uint32_t>(in + element)) : 0.0f;
                }
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    if (i + k >= count) continue;
                    float &sum = sums[found[i + k] >> 8 & 0x7fffff][t];
                    sum = found[i + k] >> 31 ? zt_sub(sum, values[k]) : zt_add(sum, values[k]);
                }
            }
        }
        for (int64_t row = group.first; row < group.past; row++)
            sketch[row * ZT_SKETCH_LANES + lane] = sums[row - group.first][t];
    }
}

/* -- Peeling ------------------------------------------------------------------------------------------------------- */

/* The flags of 32 blocks of a lane. */
ZT_DEVICE uint32_t zt_load_flags(const zt_sketch_arguments &a, int64_t lane, int64_t word) {
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (word * 4 + k < a.flag_bytes) bits |= (uint32_t)a.flags[lane * a.flag_bytes + word * 4 + k] << (8 * k);
    return bits;
}

ZT_DEVICE void zt_store_flags(const zt_sketch_arguments &a, int64_t lane, int64_t word, uint32_t bits) {
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (word * 4 + k < a.flag_bytes) a.flags[lane * a.flag_bytes + word * 4 + k] = (uint8_t)(bits >> (8 * k));
}

/* x = 0, flags = the bits by lanes, and counts, which begin at 0. A thread has 32 blocks of one lane. */
ZT_KERNEL(ZT_THREADS) zt_peel_begin_kernel(ZT_ARGUMENTS zt_sketch_arguments a) {
    const int64_t all = a.words * ZT_SKETCH_LANES;
    for (int64_t i = (int64_t)blockIdx.x * ZT_THREADS + threadIdx.x; i < all; i += (int64_t)gridDim.x * ZT_THREADS) {
        const int64_t lane = i % ZT_SKETCH_LANES, word = i / ZT_SKETCH_LANES;
        uint32_t flags = 0;
        for (int k = 0; k < 32; k++) {
            const int64_t block = word * 32 + k, element = block * ZT_SKETCH_LANES + lane;
            if (element >= a.n) break;
            a.x[element] = 0.0f;
            if (!(a.bits[element / 8] >> (element % 8) & 1)) continue;
            flags |= 1u << k;
            for (int j = 0; j < 3; j++)
                (void)atomicAdd(&a.counts[lane * a.rows + zt_sketch_row(a.seed, block, j, a.rows)], 1u);
        }
        zt_store_flags(a, lane, word, flags);
    }
}

/* The three places of an element in its lane's column of the sketch. */
struct zt_places {
    int64_t row[3];
    float sign[3];
};

ZT_DEVICE zt_places zt_places_of(const zt_sketch_arguments &a, int64_t block) {
    zt_places places;
#pragma unroll
    for (int j = 0; j < 3; j++) {
        places.row[j] = zt_sketch_row(a.seed, block, j, a.rows);
        places.sign[j] = zt_sketch_sign(a.seed, block, j);
    }
    return places;
}

/* Visits the 32 blocks of a word in ascending order, a thread each; returns those that became known. Blocks that are
 * not alone now but come to be by a later one's being known wait for the next pass, as in the reference. */
ZT_DEVICE uint32_t zt_peel_word(const zt_sketch_arguments &a, int64_t lane, int64_t word, uint32_t unknown) {
    const int t = threadIdx.x;
    const int64_t block = word * 32 + t;
    const zt_places places = zt_places_of(a, block);
    uint32_t *counts = a.counts + lane * a.rows, solved = 0;
    for (uint32_t later = ~0u;;) {
        float value = 0.0f;
        int chosen = 3;
#pragma unroll
        for (int j = 2; j >= 0; j--)
            if ((unknown & later) >> t & 1 && counts[places.row[j]] == 1) chosen = j;
        const uint32_t alone = zt_ballot(chosen < 3);
        if (!alone) return solved;
        const int first = __ffs((int)alone) - 1;
        if (t == first) {
#pragma unroll
            for (int j = 0; j < 3; j++)
                if (j == chosen) value = zt_mul(places.sign[j], a.sketch[places.row[j] * ZT_SKETCH_LANES + lane]);
            a.x[block * ZT_SKETCH_LANES + lane] = value;
#pragma unroll
            for (int j = 0; j < 3; j++) {
                float &sum = a.sketch[places.row[j] * ZT_SKETCH_LANES + lane];
                if (j != chosen) sum = zt_sub(sum, zt_mul(places.sign[j], value));
                counts[places.row[j]]--;
            }
        }
        solved |= 1u << first;
        later = first == 31 ? 0 : ~0u << (first + 1);
        __syncthreads();
    }
}

ZT_DEVICE float zt_median(float a, float b, float c) {
    if (a != a || b != b || c != c) return zt_bits<float>(0x7fc00000u);
    const float low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

/* The median of an element's three places. */
ZT_DEVICE void zt_guess(const zt_sketch_arguments &a, int64_t lane, int64_t block) {
    const zt_places places = zt_places_of(a, block);
    float guess[3];
#pragma unroll
    for (int j = 0; j < 3; j++)
        guess[j] = zt_mul(places.sign[j], a.sketch[places.row[j] * ZT_SKETCH_LANES + lane]);
    a.x[block * ZT_SKETCH_LANES + lane] = zt_median(guess[0], guess[1], guess[2]);
}

/* One lane of the sketch for each thread block of 32, who share its words, 32 at a time, and then a word's blocks. */
ZT_KERNEL(32) zt_peel_kernel(ZT_ARGUMENTS zt_sketch_arguments a) {
    const int t = threadIdx.x;
    for (int64_t lane = blockIdx.x; lane < ZT_SKETCH_LANES; lane += gridDim.x) {
        unsigned long long left = 0;
        for (bool again = true, last = false; again || !last;) {
            last = !again; /* nothing was found in the pass before: guess what is left */
            again = false;
            for (int64_t base = 0; base < a.words; base += 32) {
                const uint32_t before = zt_load_flags(a, lane, base + t);
                uint32_t mine = before;
                for (uint32_t busy = zt_ballot(mine != 0); busy; busy &= busy - 1) {
                    const int i = __ffs((int)busy) - 1;
                    const uint32_t unknown = zt_shuffle(mine, i, 32);
                    if (last) {
                        left += __popc(unknown);
                        if (unknown >> t & 1) zt_guess(a, lane, (base + i) * 32 + t);
                    } else {
                        const uint32_t solved = zt_peel_word(a, lane, base + i, unknown);
                        if (t == i) mine &= ~solved;
                        again = again || solved != 0;
                    }
                }
                if (mine != before) zt_store_flags(a, lane, base + t, mine);
            }
        }
        if (t == 0 && left) (void)atomicAdd((unsigned long long *)a.left, left);
    }
}

/* -- On the host --------------------------------------------------------------------------------------------------- */

static int zt_sketch_size_is_bad(int64_t n, int64_t rows) { return n < 0 || rows < 3 || rows > 0x7fffffff; }

int zt_gpu_sketch_insert(const float *x, int64_t members, int64_t n, uint64_t seed, int64_t rows, float *sketch,
                         void *stream) {
    int64_t all = 0;
    if (zt_sketch_size_is_bad(n, rows) || members < 0 || __builtin_mul_overflow(members, rows + n, &all))
        return ZT_BAD_SIZE;
    if (!sketch || (n > 0 && !x)) return ZT_BAD_SIZE;
    if (members == 0) return ZT_OK;
    zt_sketch_arguments a = {};
    a.in = x, a.sketch = sketch, a.members = members, a.n = n, a.rows = rows, a.seed = seed;
    a.blocks = zt_blocks_for(n, ZT_SKETCH_LANES);
    const int64_t groups = zt_row_groups(rows, 0) + zt_row_groups(rows, 1) + zt_row_groups(rows, 2);
    return zt_launch(zt_sketch_insert_kernel, members * groups * ZT_SLICES, ZT_THREADS, a, stream);
}

int zt_gpu_sketch_peel(float *sketch, const uint8_t *bits, int64_t n, uint64_t seed, int64_t rows, float *x, void *work,
                       int64_t *left, void *stream) {
    if (zt_sketch_size_is_bad(n, rows) || !sketch || !work || !left || (n > 0 && (!bits || !x))) return ZT_BAD_SIZE;
    if (n == 0) return ZT_OK;
    zt_sketch_arguments a = {};
    a.sketch = sketch, a.bits = bits, a.x = x, a.n = n, a.rows = rows, a.seed = seed, a.left = left;
    a.blocks = zt_blocks_for(n, ZT_SKETCH_LANES);
    a.words = zt_blocks_for(a.blocks, 32);
    a.counts = (uint32_t *)work;
    a.flags = (uint8_t *)(a.counts + rows * ZT_SKETCH_LANES);
    a.flag_bytes = zt_blocks_for(a.blocks, 8); /* at most the byte for each block that zt_gpu_sketch_work counts */
    int status = zt_clear(a.counts, rows * ZT_SKETCH_LANES * (int64_t)sizeof *a.counts, stream);
    const int64_t begin_blocks = zt_blocks_for(a.words * ZT_SKETCH_LANES, ZT_THREADS);
    if (status == ZT_OK) status = zt_launch(zt_peel_begin_kernel, begin_blocks, ZT_THREADS, a, stream);
    return status != ZT_OK ? status : zt_launch(zt_peel_kernel, ZT_SKETCH_LANES, 32, a, stream);
}
