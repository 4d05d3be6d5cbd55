/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Masks, threshold selection and count sketches on CPUs: checks the arguments and chooses the instruction set.
 */
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "zt_cpu_checks.h"

using namespace zt;

namespace {

int64_t size_of_element(int32_t dtype) { return dtype == ZT_FP32 ? 4 : 2; }

bool valid_dtype(int32_t dtype) { return dtype == ZT_FP32 || dtype == ZT_FP16 || dtype == ZT_BF16; }

/* Elements of a mask, of which one call takes whole bytes. */
int check_mask(const void *mask, int64_t n, const void *bits, zt_range elements) {
    if (n < 0 || (n > 0 && (!mask || !bits))) return ZT_BAD_SIZE;
    const bool whole = elements.begin % 8 == 0 && (elements.end % 8 == 0 || elements.end == n);
    return inside(elements, n) && whole ? ZT_OK : ZT_BAD_RANGE;
}

int check_selection(const void *x, int32_t dtype, zt_range elements, const int64_t *found, const Kernels *chosen) {
    if (!valid_dtype(dtype)) return ZT_BAD_DTYPE;
    if (!inside(elements, INT64_MAX / 8)) return ZT_BAD_RANGE;
    if (!found || (elements.end > elements.begin && !x)) return ZT_BAD_SIZE;
    return chosen ? ZT_OK : ZT_BAD_LEVEL;
}

int check_sketch(const void *x, int64_t n, const void *table, int64_t rows, zt_range lanes) {
    const bool sizes = n >= 0 && n <= int64_t{1} << 40 && rows >= 3 && rows < int64_t{1} << 31;
    if (!sizes || !table || (n > 0 && !x)) return ZT_BAD_SIZE;
    return inside(lanes, ZT_SKETCH_LANES) ? ZT_OK : ZT_BAD_RANGE;
}

/* Note [The k-th largest]
 *     Magnitudes compare as the integers of their bits. A histogram of their upper bits says in which bin the k-th
 *     largest lies, and a selection among the few of that bin, which it is: twice through a row that stays in the
 *     first cache, where a selection among all would move them.
 *
 * Note [A guess]
 *     Of a long row a sample says what magnitude somewhat more than k elements reach. One vectorised pass takes those
 *     out, in order, and the k largest are among them; only where they are too few after all, or too many, is the row
 *     itself gone through. The sample is of the same places in every call, scattered, so that no period hides. For a
 *     short row, the guess is a little less than the k-th largest of the row before: rows of one gradient are alike.
 */
constexpr int kLowBits = 20;
constexpr int64_t kSample = 2048;
constexpr float kAlike = 0.9f; /* of normal values and 5%, 1.5 times as many reach that share of the k-th largest */
constexpr int64_t kFew = 1024;  /* elements of which a selection among all is faster than a histogram */

uint32_t magnitude(const float *x) {
    uint32_t bits;
    memcpy(&bits, x, 4);
    return bits & 0x7fffffff;
}

struct Guess {
    float threshold;
    int64_t most; /* that are likely to reach it; 0: no guess */
};

Guess guess(const float *x, int64_t n, int64_t k, std::vector<uint32_t> &sample) {
    const int64_t stride = n / kSample;
    if (stride < 16 || k > n / 8) return {0, 0};
    sample.resize(kSample);
    for (int64_t i = 0; i < kSample; ++i)
        sample[static_cast<size_t>(i)] = magnitude(x + i * stride + (i * 2654435761 >> 12) % stride);
    const auto surely = [](double count) { return static_cast<int64_t>(count + 4 * std::sqrt(count) + 4); };
    const int64_t rank = surely(static_cast<double>(k) / static_cast<double>(stride));
    std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<uint32_t>());
    float threshold;
    memcpy(&threshold, &sample[static_cast<size_t>(rank)], 4);
    return {threshold, stride * surely(static_cast<double>(rank))};
}

/* The k-th largest of n magnitudes, and how many of those that equal it are among the k. */
uint32_t kth_largest(const float *x, int64_t n, int64_t k, std::vector<uint32_t> &bin, int64_t *equal) {
    bin.clear();
    if (n <= kFew) {
        for (int64_t i = 0; i < n; ++i) bin.push_back(magnitude(x + i));
    } else {
        uint32_t counts[1 << (31 - kLowBits)] = {};
        for (int64_t i = 0; i < n; ++i) ++counts[magnitude(x + i) >> kLowBits];
        uint32_t upper = (1 << (31 - kLowBits)) - 1;
        while (counts[upper] < k) k -= counts[upper--];
        for (int64_t i = 0; i < n; ++i)
            if (magnitude(x + i) >> kLowBits == upper) bin.push_back(magnitude(x + i));
    }
    std::nth_element(bin.begin(), bin.begin() + (k - 1), bin.end(), std::greater<uint32_t>());
    const uint32_t kth = bin[static_cast<size_t>(k - 1)];
    *equal = k - std::count_if(bin.begin(), bin.end(), [&](uint32_t other) { return other > kth; });
    return kth;
}

/* The k largest of n, in order: where they are, by their places if these are given. Returns the k-th largest. */
uint32_t take_largest(const float *x, int64_t n, int64_t k, const int64_t *places, std::vector<uint32_t> &bin,
                  int64_t *out) {
    int64_t equal = 0;
    const uint32_t kth = kth_largest(x, n, k, bin, &equal);
    const int64_t *end = out + k;
    for (int64_t i = 0; out < end; ++i) {
        const uint32_t size = magnitude(x + i);
        const bool same = size == kth && equal > 0;
        *out = places ? places[i] : i;
        out += size > kth || same;
        equal -= same;
    }
    return kth;
}

/* What a row like the one before suggests, of which kth is the k-th largest; no guess if k is a large share. */
Guess guess_alike(uint32_t kth, int64_t n, int64_t k) {
    float threshold;
    memcpy(&threshold, &kth, 4);
    return {threshold * kAlike, k <= n / 8 ? 4 * k : 0};
}

}  // namespace

int zt_cpu_mask_pack_at(const uint8_t *mask, int64_t n, uint8_t *bits, zt_range elements, int32_t level) {
    const int status = check_mask(mask, n, bits, elements);
    if (status != ZT_OK) return status;
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    const int64_t count = elements.end - elements.begin;
    if (count) chosen->mask_pack(mask + elements.begin, count, bits + elements.begin / 8);
    return ZT_OK;
}

int zt_cpu_mask_unpack_at(const uint8_t *bits, int64_t n, uint8_t *mask, zt_range elements, int32_t level) {
    const int status = check_mask(mask, n, bits, elements);
    if (status != ZT_OK) return status;
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    const int64_t count = elements.end - elements.begin;
    if (count) chosen->mask_unpack(bits + elements.begin / 8, count, mask + elements.begin);
    return ZT_OK;
}

int zt_cpu_sketch_insert_at(const float *x, int64_t n, uint64_t seed, int64_t rows, float *sketch, zt_range lanes,
                            int32_t level) {
    const int status = check_sketch(x, n, sketch, rows, lanes);
    if (status != ZT_OK) return status;
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    chosen->sketch_insert(x, n, {seed, rows, sketch}, lanes);
    return ZT_OK;
}

int zt_cpu_sketch_peel_at(float *sketch, const uint8_t *bits, int64_t n, uint64_t seed, int64_t rows, float *x,
                          zt_range lanes, void *work, int64_t *left, int32_t level) {
    const int status = check_sketch(x, n, sketch, rows, lanes);
    if (status != ZT_OK) return status;
    if (!work || !left || (n > 0 && !bits)) return ZT_BAD_SIZE;
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    *left = chosen->sketch_peel({seed, rows, sketch}, bits, n, x, lanes, work);
    return ZT_OK;
}

extern "C" int zt_cpu_mask_pack(const uint8_t *mask, int64_t n, uint8_t *bits, zt_range elements) {
    return zt_cpu_mask_pack_at(mask, n, bits, elements, ZT_BEST);
}

extern "C" int zt_cpu_mask_unpack(const uint8_t *bits, int64_t n, uint8_t *mask, zt_range elements) {
    return zt_cpu_mask_unpack_at(bits, n, mask, elements, ZT_BEST);
}

extern "C" int zt_cpu_count_above(const void *x, int32_t dtype, float threshold, zt_range elements, int64_t *found,
                                  int32_t level) {
    const Kernels *chosen = kernels(level);
    const int status = check_selection(x, dtype, elements, found, chosen);
    if (status != ZT_OK) return status;
    const int64_t count = elements.end - elements.begin;
    uint8_t *data = static_cast<uint8_t *>(const_cast<void *>(x));
    *found = count ? chosen->count_above({data + elements.begin * size_of_element(dtype), dtype}, count, threshold) : 0;
    return ZT_OK;
}

extern "C" int zt_cpu_compact_above(const void *x, int32_t dtype, float threshold, zt_range elements, int64_t capacity,
                                    int64_t *indices, void *values, int64_t *found, int32_t level) {
    const Kernels *chosen = kernels(level);
    const int status = check_selection(x, dtype, elements, found, chosen);
    if (status != ZT_OK) return status;
    if (capacity < 0 || (capacity > 0 && (!indices || !values))) return ZT_BAD_SIZE;
    uint8_t *data = static_cast<uint8_t *>(const_cast<void *>(x));
    const Picks picks = {indices, static_cast<uint8_t *>(values), capacity};
    *found = elements.end > elements.begin ? chosen->compact_above({data, dtype}, elements, threshold, picks) : 0;
    return ZT_OK;
}

extern "C" int zt_cpu_row_largest(const float *x, int64_t columns, int64_t k, int64_t *indices, zt_range rows) {
    if (columns < 1 || columns > kMost || k < 1 || k > columns) return ZT_BAD_SIZE;
    if (!inside(rows, kMost / columns)) return ZT_BAD_RANGE;
    if (rows.end > rows.begin && (!x || !indices)) return ZT_BAD_SIZE;
    std::vector<uint32_t> bin;
    std::vector<int64_t> places;
    std::vector<float> values;
    uint32_t kth = 0;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        const float *own = x + row * columns;
        Guess above = guess(own, columns, k, bin);
        if (!above.most && row > rows.begin) above = guess_alike(kth, columns, k);
        places.resize(static_cast<size_t>(above.most));
        values.resize(static_cast<size_t>(above.most));
        const Picks picks = {places.data(), reinterpret_cast<uint8_t *>(values.data()), above.most};
        const Elements elements = {reinterpret_cast<uint8_t *>(const_cast<float *>(own)), ZT_FP32};
        int64_t found = 0;
        if (above.most) found = kernels(ZT_BEST)->compact_above(elements, {0, columns}, above.threshold, picks);
        const bool right = k <= found && found <= above.most;
        kth = right ? take_largest(values.data(), found, k, places.data(), bin, indices + row * k)
                    : take_largest(own, columns, k, nullptr, bin, indices + row * k);
    }
    return ZT_OK;
}

namespace {

/* Where the parts of a packet begin: bits, but for the scales, which begin at a byte. */
struct Packet {
    int64_t high_bits; /* of one block */
    int64_t lows;
    int64_t signs;
    int64_t scales;
    int64_t bytes;

    Packet(zt_ternary form, int64_t blocks)
        : high_bits(form.picks + (form.block >> form.low)),
          lows(blocks * high_bits),
          signs(lows + blocks * form.picks * form.low),
          scales((signs + blocks * form.picks + 7) / 8),
          bytes(scales + blocks * size_of_element(form.dtype)) {}
};

int check_ternary(zt_ternary form, int64_t blocks, int64_t bytes, zt_range rows) {
    if (!valid_dtype(form.dtype)) return ZT_BAD_DTYPE;
    if (form.block < 1 || form.block > 1 << 15 || form.picks < 1 || form.picks > form.block) return ZT_BAD_SIZE;
    if (form.low < 0 || form.low > 14 || blocks < 1 || blocks > kMost / form.block) return ZT_BAD_SIZE;
    if (bytes != Packet(form, blocks).bytes) return ZT_BAD_SIZE;
    return inside(rows, kMost / blocks / form.block) ? ZT_OK : ZT_BAD_RANGE;
}

/* Sets bits from number `at` on, which are 0; other parts of the packet share the first and the last byte. */
struct Bits {
    uint8_t *next;
    uint32_t waiting;
    int32_t count;

    Bits(uint8_t *bits, int64_t at) : next(bits + at / 8), waiting(0), count(static_cast<int32_t>(at % 8)) {}
    void append(uint32_t value, int32_t length) {
        waiting |= value << count;
        for (count += length; count >= 8; count -= 8, waiting >>= 8) *next++ |= static_cast<uint8_t>(waiting);
    }
    void end() {
        if (waiting) *next |= static_cast<uint8_t>(waiting);
    }
};

/* At least 57 bits of a packet from number `at` on; bits after its end are 0. */
uint64_t get(const uint8_t *packet, int64_t bytes, int64_t at) {
    uint64_t value = 0;
    const int64_t left = bytes - at / 8;
    if (left >= 8)
        memcpy(&value, packet + at / 8, 8); /* one load: a size that is not constant is a call */
    else
        memcpy(&value, packet + at / 8, static_cast<size_t>(left));
    return value >> at % 8;
}

/* The elements that are not zero in the order of their positions; a zero repeats the one before it, or the first. */
int64_t encode_block(zt_ternary form, const float *x, const int64_t *indices, int64_t number, const Packet &packet,
                     uint8_t *out) {
    double sum = 0;
    int64_t count = 0, first = form.block;
    for (int32_t j = 0; j < form.picks; ++j) {
        const float value = x[indices[j]];
        sum += std::fabs(value);
        count += value != 0;
        if (value != 0 && indices[j] < first) first = indices[j];
    }
    int64_t place = first % form.block;
    Bits lows(out, packet.lows + number * form.picks * form.low), signs(out, packet.signs + number * form.picks);
    for (int32_t j = 0; j < form.picks; ++j) {
        if (x[indices[j]] != 0) place = indices[j];
        const int64_t one = number * packet.high_bits + (place >> form.low) + j;
        out[one / 8] |= static_cast<uint8_t>(1u << one % 8);
        lows.append(place & ((1u << form.low) - 1), form.low);
        signs.append(x[place] < 0, 1);
    }
    lows.end();
    signs.end();
    const auto scale = static_cast<float>(sum / static_cast<double>(count ? count : 1));
    uint8_t *end = out + packet.scales + number * size_of_element(form.dtype);
    if (form.dtype == ZT_FP32)
        memcpy(end, &scale, 4);
    else
        kernels(ZT_BEST)->narrow(reinterpret_cast<const uint8_t *>(&scale), 1, {end, form.dtype});
    return count;
}

void decode_block(zt_ternary form, const uint8_t *in, int64_t number, const Packet &packet, int64_t begin,
                  int64_t *indices, float *values) {
    float scale;
    uint8_t *at = const_cast<uint8_t *>(in) + packet.scales + number * size_of_element(form.dtype);
    if (form.dtype == ZT_FP32)
        memcpy(&scale, at, 4);
    else
        kernels(ZT_BEST)->widen({at, form.dtype}, 1, reinterpret_cast<uint8_t *>(&scale));
    const int64_t ones = number * packet.high_bits, ones_end = ones + packet.high_bits;
    const int64_t signs = packet.signs + number * form.picks, mask = (1 << form.low) - 1;
    int64_t one = ones, low = packet.lows + number * form.picks * form.low, before = -1;
    for (int32_t j = 0; j < form.picks; ++j, ++one, low += form.low) {
        while (one < ones_end) {
            const uint64_t ahead = get(in, packet.bytes, one);
            one = std::min(one + (ahead ? __builtin_ctzll(ahead) : 57), ones_end);
            if (ahead) break;
        }
        const int64_t place = (one - ones - j) << form.low | (get(in, packet.bytes, low) & mask);
        const bool negative = in[(signs + j) / 8] >> (signs + j) % 8 & 1;
        indices[j] = begin + place;
        values[j] = place == before ? 0 : negative ? -scale : scale;
        before = place;
    }
}

}  // namespace

extern "C" int zt_cpu_ternary_encode(zt_ternary form, const float *x, const int64_t *indices, int64_t blocks,
                                     uint8_t *packets, int64_t bytes, zt_range rows, int64_t *count) {
    const int status = check_ternary(form, blocks, bytes, rows);
    if (status != ZT_OK) return status;
    if (!count || (rows.end > rows.begin && (!x || !indices || !packets))) return ZT_BAD_SIZE;
    const Packet packet(form, blocks);
    *count = 0;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        memset(packets + row * bytes, 0, static_cast<size_t>(packet.scales));
        for (int64_t number = 0; number < blocks; ++number) {
            const int64_t block = row * blocks + number;
            *count += encode_block(form, x + block * form.block, indices + block * form.picks, number, packet,
                                   packets + row * bytes);
        }
    }
    return ZT_OK;
}

extern "C" int zt_cpu_ternary_decode(zt_ternary form, const uint8_t *packets, int64_t bytes, const int64_t *begins,
                                     int64_t blocks, int64_t *indices, float *values, zt_range rows) {
    const int status = check_ternary(form, blocks, bytes, rows);
    if (status != ZT_OK) return status;
    if (rows.end > rows.begin && (!packets || !begins || !indices || !values)) return ZT_BAD_SIZE;
    const Packet packet(form, blocks);
    for (int64_t row = rows.begin; row < rows.end; ++row)
        for (int64_t number = 0; number < blocks; ++number) {
            const int64_t block = row * blocks + number;
            decode_block(form, packets + row * bytes, number, packet, begins[block], indices + block * form.picks,
                         values + block * form.picks);
        }
    return ZT_OK;
}

extern "C" int zt_cpu_sketch_insert(const float *x, int64_t n, uint64_t seed, int64_t rows, float *sketch,
                                    zt_range lanes) {
    return zt_cpu_sketch_insert_at(x, n, seed, rows, sketch, lanes, ZT_BEST);
}

extern "C" int zt_cpu_sketch_peel(float *sketch, const uint8_t *bits, int64_t n, uint64_t seed, int64_t rows, float *x,
                                  zt_range lanes, void *work, int64_t *left) {
    return zt_cpu_sketch_peel_at(sketch, bits, n, seed, rows, x, lanes, work, left, ZT_BEST);
}
