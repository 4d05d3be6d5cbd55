/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The inner loops for processors with AVX2 and F16C; Note [One file, one instruction set] is in zt_cpu.h.
 */
#include "zt_cpu.h"
#include "zt_nf4.h"

#if ZT_X86

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,popcnt")
#endif

#define ZT_INLINE static inline __attribute__((always_inline))

namespace {

/* 8 lanes. `stream` stores past the caches, to addresses that are multiples of 32. */
struct V {
    using F = __m256;
    using I = __m256i;
    static constexpr int64_t kLanes = 8;
    static constexpr int kTile = 8;

    ZT_INLINE F set(float x) { return _mm256_set1_ps(x); }
    ZT_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
    ZT_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    ZT_INLINE I zeros() { return _mm256_setzero_si256(); }
    ZT_INLINE I round(F x) { return _mm256_cvtps_epi32(x); }

    template <int32_t D> ZT_INLINE F load(const uint8_t *p) {
        if (D == ZT_FP32) return _mm256_loadu_ps(reinterpret_cast<const float *>(p));
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        if (D == ZT_FP16) return _mm256_cvtph_ps(x);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
    }

    /* The first n < 8 lanes, the others 0. */
    template <int32_t D> ZT_INLINE F load_some(const uint8_t *p, int64_t n) {
        alignas(32) uint8_t whole[32] = {};
        memcpy(whole, p, static_cast<size_t>(n * (D == ZT_FP32 ? 4 : 2)));
        return load<D>(whole);
    }

    template <int32_t D> ZT_INLINE void store(uint8_t *p, F x) {
        if (D == ZT_FP32) return _mm256_storeu_ps(reinterpret_cast<float *>(p), x);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), narrowed<D>(x));
    }

    template <int32_t D> ZT_INLINE void store_some(uint8_t *p, F x, int64_t n) {
        alignas(32) uint8_t whole[32];
        store<D>(whole, x);
        memcpy(p, whole, static_cast<size_t>(n * (D == ZT_FP32 ? 4 : 2)));
    }

    ZT_INLINE void stream_line(uint8_t *out, const uint8_t *x) {
        put(out, _mm256_loadu_si256(reinterpret_cast<const I *>(x)), true);
        put(out + 32, _mm256_loadu_si256(reinterpret_cast<const I *>(x + 32)), true);
    }

    /* a, then b; NAN says that a BF16 may have to be NaN. */
    template <int32_t D, bool NAN> ZT_INLINE void store_two(uint8_t *p, F a, F b, bool stream) {
        if (D == ZT_FP32) {
            put(p, _mm256_castps_si256(a), stream);
            put(p + 32, _mm256_castps_si256(b), stream);
        } else if (D == ZT_BF16) {
            const I mixed = _mm256_packus_epi32(rounded_to_bf16<NAN>(a), rounded_to_bf16<NAN>(b));
            put(p, _mm256_permute4x64_epi64(mixed, 0xd8), stream);
        } else {
            put(p, _mm256_inserti128_si256(_mm256_castsi128_si256(narrowed<D>(a)), narrowed<D>(b), 1), stream);
        }
    }

    /* 16 numbers of 16 bits, the lower and the upper bytes apart, in either half. */
    struct Table {
        I low, high;
    };

    template <int32_t D> ZT_INLINE Table table_of(F first, F second) {
        const __m128i separate = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        const __m128i a = _mm_shuffle_epi8(narrowed<D>(first), separate);
        const __m128i b = _mm_shuffle_epi8(narrowed<D>(second), separate);
        return {_mm256_broadcastsi128_si256(_mm_unpacklo_epi64(a, b)),
                _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(a, b))};
    }

    /* The 32 FP16 or BF16 that the nibbles of 16 bytes stand for. */
    ZT_INLINE void look_up(uint8_t *out, const uint8_t *values, Table table, bool stream) {
        const I pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(values)));
        const I index = _mm256_and_si256(_mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4)), _mm256_set1_epi8(15));
        const I low = _mm256_shuffle_epi8(table.low, index), high = _mm256_shuffle_epi8(table.high, index);
        const I a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
        put(out, _mm256_permute2x128_si256(a, b, 0x20), stream);
        put(out + 32, _mm256_permute2x128_si256(a, b, 0x31), stream);
    }

    template <int N> ZT_INLINE bool any_nan(const F *x) {
        F found = _mm256_cmp_ps(x[0], x[1], _CMP_UNORD_Q);
        for (int i = 2; i < N; i += 2) found = _mm256_or_ps(found, _mm256_cmp_ps(x[i], x[i + 1], _CMP_UNORD_Q));
        return _mm256_movemask_ps(found) != 0;
    }

    /* Larger of two as unsigned numbers of the elements' width. */
    template <int32_t D> ZT_INLINE I larger(I a, I b) {
        return D == ZT_FP32 ? _mm256_max_epu32(a, b) : _mm256_max_epu16(a, b);
    }

    /* Larger of `so_far` and the magnitudes of 32 bytes of elements. */
    template <int32_t D> ZT_INLINE I peak(I so_far, const uint8_t *p) {
        const I x = _mm256_loadu_si256(reinterpret_cast<const I *>(p));
        const I magnitude = D == ZT_FP32 ? _mm256_set1_epi32(0x7fffffff) : _mm256_set1_epi16(0x7fff);
        return larger<D>(so_far, _mm256_and_si256(x, magnitude));
    }

    /* Lane i of the result: the largest 32-bit number in a, b, c, d respectively (all < 2^31). */
    ZT_INLINE __m128i largest(I a, I b, I c, I d) {
        const I ab = _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        const I cd = _mm256_max_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        const I abcd = _mm256_max_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
        return _mm_max_epi32(_mm256_castsi256_si128(abcd), _mm256_extracti128_si256(abcd, 1));
    }

    /* 16-bit numbers -> the larger of each pair, in 32 bits. */
    ZT_INLINE I larger_halves(I x) {
        return _mm256_max_epi32(_mm256_srli_epi32(x, 16), _mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
    }

    /* 32 numbers -> 32 bytes. */
    ZT_INLINE void pack8(uint8_t *p, I a, I b, I c, I d, bool stream) { put(p, bytes(a, b, c, d), stream); }

    /* 32 numbers -> 16 bytes, the even ones in the low nibbles. */
    ZT_INLINE void pack4(uint8_t *p, I a, I b, I c, I d, bool stream) {
        const I low = _mm256_and_si256(bytes(a, b, c, d), _mm256_set1_epi8(0x0f));
        const I pairs = _mm256_maddubs_epi16(low, _mm256_set1_epi16(0x1001));
        const __m128i x = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        if (stream) return _mm_stream_si128(reinterpret_cast<__m128i *>(p), x);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), x);
    }

    /* Bit i is set unless |lane i| < bound. */
    ZT_INLINE uint32_t above(F x, F bound) {
        const F magnitude = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
        return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(magnitude, bound, _CMP_NLT_UQ)));
    }

    /* Writes the elements at p whose bits are set in `chosen`, as many as there is room for, and their indices. */
    template <int32_t D> ZT_INLINE void pick(const uint8_t *p, int64_t index, uint32_t chosen, zt::Picks to) {
        constexpr int64_t size = D == ZT_FP32 ? 4 : 2;
        for (int64_t n = 0; chosen && n < to.capacity; ++n, chosen &= chosen - 1) {
            const int64_t lane = __builtin_ctz(chosen);
            to.indices[n] = index + lane;
            memcpy(to.values + n * size, p + lane * size, size);
        }
    }

    /* Bit i is set if counts[i] == 1, of 16. */
    ZT_INLINE uint32_t ones(const uint32_t *counts) {
        const I one = _mm256_set1_epi32(1), *pair = reinterpret_cast<const I *>(counts);
        const I low = _mm256_cmpeq_epi32(_mm256_loadu_si256(pair), one);
        const I high = _mm256_cmpeq_epi32(_mm256_loadu_si256(pair + 1), one);
        return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(low)) |
                                     _mm256_movemask_ps(_mm256_castsi256_ps(high)) << 8);
    }

    /* 32 bytes <-> 32 bits. */
    static constexpr int64_t kMaskBytes = 32;
    ZT_INLINE void pack_mask(const uint8_t *mask, uint8_t *bits) {
        const I x = _mm256_loadu_si256(reinterpret_cast<const I *>(mask));
        const int word = ~_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256()));
        memcpy(bits, &word, 4);
    }
    ZT_INLINE void unpack_mask(const uint8_t *bits, uint8_t *mask) {
        int word;
        memcpy(&word, bits, 4);
        const I byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const I bit_of = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
        const I spread = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), byte_of), bit_of);
        const I x = _mm256_and_si256(_mm256_cmpeq_epi8(spread, bit_of), _mm256_set1_epi8(1));
        _mm256_storeu_si256(reinterpret_cast<I *>(mask), x);
    }

    ZT_INLINE void put(uint8_t *p, I x, bool stream) {
        if (stream) return _mm256_stream_si256(reinterpret_cast<I *>(p), x);
        _mm256_storeu_si256(reinterpret_cast<I *>(p), x);
    }

private:
    template <int32_t D> ZT_INLINE __m128i narrowed(F x) {
        if (D == ZT_FP16) return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const I halves = rounded_to_bf16<true>(x);
        return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    }

    /* The BF16 is in the lower half of each lane; a NaN becomes 0x7fc0 if NAN. */
    template <bool NAN> ZT_INLINE I rounded_to_bf16(F x) {
        const I bits = _mm256_castps_si256(x);
        const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const I up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        if (!NAN) return _mm256_srli_epi32(up, 16);
        const I nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        return _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan), 16);
    }

    ZT_INLINE I bytes(I a, I b, I c, I d) {
        const I mixed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
};

/* A quantized number's value. */
struct Scaled {
    static constexpr int64_t kScaleBytes = 4;
    static constexpr int kGroup = 1; /* vectors that are decoded at once */
    V::F scale;

    bool finite() const {
        const float one = _mm256_cvtss_f32(scale);
        return one - one == 0.0f;
    }
    ZT_INLINE void in_order(V::F *) {}

    inline __attribute__((always_inline)) V::F value(V::I q) const { return V::mul(_mm256_cvtepi32_ps(q), scale); }
};

struct Bytes : Scaled {
    static constexpr int kBits = 8;
    ZT_INLINE Bytes of(float scale) { return {{V::set(scale)}}; }

    /* The 8 values at p. */
    inline __attribute__((always_inline)) void at(const uint8_t *p, V::F *x) const {
        *x = value(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
    }
};

struct Nibbles : Scaled {
    static constexpr int kBits = 4;
    ZT_INLINE Nibbles of(float scale) { return {{V::set(scale)}}; }

    template <int32_t D> V::Table halves() const {
        const V::F first = value(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        return V::table_of<D>(first, value(_mm256_setr_epi32(-8, -7, -6, -5, -4, -3, -2, -1)));
    }

    /* The 8 values at p. */
    inline __attribute__((always_inline)) void at(const uint8_t *p, V::F *x) const {
        int32_t word;
        memcpy(&word, p, 4);
        const V::I shifts = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
        *x = value(_mm256_srai_epi32(_mm256_sllv_epi32(_mm256_set1_epi32(word), shifts), 28));
    }
};

alignas(32) constexpr float kLevels[16] = {ZT_NF4_LEVELS};
constexpr zt_nf4_cells kCells;
constexpr zt_nf4_steps kSteps;
static_assert(kSteps.fits, "a cell with more than two bounds");
alignas(16) constexpr zt_nf4_products kProducts;

/* Nibbles that select a level of NF4. Note [Cells] in zt_nf4.h. */
struct Levels {
    static constexpr int kBits = 4, kGroup = 4;
    static constexpr int64_t kScaleBytes = 1;
    V::I parts[3]; /* bytes 1 to 3 of what the 16 nibbles stand for, in either half */

    ZT_INLINE Levels of_byte(uint8_t byte) {
        return {{twice(kProducts.of[byte][0]), twice(kProducts.of[byte][1]), twice(kProducts.of[byte][2])}};
    }
    bool finite() const { return false; }

    template <int32_t D> ZT_INLINE V::Table halves(float scale) {
        const V::F unit = V::set(scale);
        return V::table_of<D>(V::mul(_mm256_load_ps(kLevels), unit), V::mul(_mm256_load_ps(kLevels + 8), unit));
    }

    /* The 32 values at p: elements 0 and 16, 4 and 20, 8 and 24, 12 and 28 begin the halves of the vectors. */
    inline __attribute__((always_inline)) void at(const uint8_t *p, V::F *x) const {
        const V::I pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        const V::I index = _mm256_and_si256(_mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4)), _mm256_set1_epi8(15));
        const V::I low = _mm256_shuffle_epi8(parts[0], index), middle = _mm256_shuffle_epi8(parts[1], index);
        const V::I high = _mm256_shuffle_epi8(parts[2], index);
        const V::I a = _mm256_unpacklo_epi8(V::zeros(), low), b = _mm256_unpacklo_epi8(middle, high);
        const V::I c = _mm256_unpackhi_epi8(V::zeros(), low), d = _mm256_unpackhi_epi8(middle, high);
        x[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(a, b));
        x[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(a, b));
        x[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(c, d));
        x[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(c, d));
    }

    ZT_INLINE void in_order(V::F *x) {
        const V::F a = x[0], b = x[1], c = x[2], d = x[3];
        x[0] = _mm256_permute2f128_ps(a, b, 0x20);
        x[1] = _mm256_permute2f128_ps(c, d, 0x20);
        x[2] = _mm256_permute2f128_ps(a, b, 0x31);
        x[3] = _mm256_permute2f128_ps(c, d, 0x31);
    }

    /* Of four blocks what elements are multiplied with; of BF16 twice the bits of kFirst scales, and from bit 16 on the
     * mantissa of the scale. */
    template <int32_t D> ZT_INLINE __m128 inverse(__m128 scale) {
        if (D != ZT_BF16) return _mm_div_ps(_mm_set1_ps(-0x1p23f), scale);
        const __m128i first = _mm_castps_si128(_mm_mul_ps(scale, _mm_set1_ps(zt_nf4_steps::kFirst)));
        const __m128i begin = _mm_slli_epi32(_mm_srli_epi32(first, 16), 1);
        const __m128i mantissa = _mm_srli_epi32(_mm_slli_epi32(_mm_castps_si128(scale), 9), 30);
        return _mm_castsi128_ps(_mm_or_si128(begin, _mm_slli_epi32(mantissa, 16)));
    }

    /* What BF16 are encoded with; Note [Steps of BF16] in zt_nf4.h. */
    struct Steps {
        V::I begin, first, bound[2];
    };

    template <int32_t D> ZT_INLINE auto encoder(float inverse) {
        if constexpr (D == ZT_BF16) {
            uint32_t bits;
            memcpy(&bits, &inverse, 4);
            const auto &cells = kSteps.of[bits >> 16 & 3];
            return Steps{_mm256_set1_epi16(static_cast<int16_t>(bits)), twice(cells.first),
                         {twice(cells.bound[0]), twice(cells.bound[1])}};
        } else {
            return V::set(inverse);
        }
    }

    /* 64 elements -> 32 bytes. */
    template <int32_t D> ZT_INLINE void put(const uint8_t *x, const Steps &steps, uint8_t *out, bool stream) {
        const V::I weights = _mm256_set1_epi32(0x100001);
        const V::I low = _mm256_madd_epi16(places(x, x + 32, steps), weights);
        const V::I high = _mm256_madd_epi16(places(x + 64, x + 96, steps), weights);
        const V::I pairs = _mm256_xor_si256(_mm256_packus_epi32(low, high), _mm256_set1_epi8(-0x78));
        const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        const V::I mixed = _mm256_shuffle_epi8(pairs, _mm256_broadcastsi128_si256(order));
        V::put(out, _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)), stream);
    }

    /* 64 elements -> 32 bytes. Elements of even and of odd places are kept apart until they are nibbles. */
    template <int32_t D> ZT_INLINE void put(const uint8_t *x, V::F unit, uint8_t *out, bool stream) {
        V::I even[2], odd[2];
        for (int i = 0; i < 2; ++i) {
            V::F evens[2], odds[2];
            split<D>(x, 2 * i, evens, odds);
            split<D>(x, 2 * i + 1, evens + 1, odds + 1);
            even[i] = fixed(V::mul(evens[0], unit), V::mul(evens[1], unit));
            odd[i] = fixed(V::mul(odds[0], unit), V::mul(odds[1], unit));
        }
        const V::I low = _mm256_and_si256(_mm256_srli_epi16(codes(even[0], even[1]), 4), _mm256_set1_epi8(0x0f));
        const V::I high = _mm256_and_si256(codes(odd[0], odd[1]), _mm256_set1_epi8(-0x10));
        const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
        const V::I mixed = _mm256_permute4x64_epi64(_mm256_or_si256(low, high), 0xd8);
        V::put(out, _mm256_shuffle_epi8(mixed, _mm256_broadcastsi128_si256(order)), stream);
    }

private:
    /* Steps of 16 BF16. */
    ZT_INLINE V::I steps_of(V::I x, V::I begin) {
        return _mm256_sign_epi16(_mm256_subs_epu16(_mm256_slli_epi16(x, 1), begin), x);
    }

    /* The places among the levels of 16 BF16 at x and 16 at y, in turns. */
    ZT_INLINE V::I places(const uint8_t *x, const uint8_t *y, const Steps &steps) {
        const V::I second = _mm256_set1_epi16(-0x100);
        const V::I a = steps_of(_mm256_loadu_si256(reinterpret_cast<const V::I *>(x)), steps.begin);
        const V::I b = steps_of(_mm256_loadu_si256(reinterpret_cast<const V::I *>(y)), steps.begin);
        const V::I cells = _mm256_blendv_epi8(_mm256_srli_epi16(a, 8), b, second);
        const V::I cell = _mm256_and_si256(cells, _mm256_set1_epi8(0x0f));
        const V::I within = _mm256_blendv_epi8(a, _mm256_slli_epi16(b, 8), second);
        const V::I place = _mm256_xor_si256(within, _mm256_set1_epi8(-0x80));
        const V::I rises = _mm256_cmpgt_epi8(place, _mm256_shuffle_epi8(steps.bound[0], cell));
        const V::I again = _mm256_cmpgt_epi8(place, _mm256_shuffle_epi8(steps.bound[1], cell));
        return _mm256_sub_epi8(_mm256_sub_epi8(_mm256_shuffle_epi8(steps.first, cell), rises), again);
    }

    /* The elements of even and of odd places of 16 out of 64, eight of either half. */
    template <int32_t D> ZT_INLINE void split(const uint8_t *x, int part, V::F *even, V::F *odd) {
        constexpr int64_t eight = D == ZT_FP32 ? 32 : 16;
        const V::F a = V::load<D>(x + part * eight), b = V::load<D>(x + (part + 4) * eight);
        *even = _mm256_shuffle_ps(a, b, 0x88);
        *odd = _mm256_shuffle_ps(a, b, 0xdd);
    }

    /* 256 x, rounded down to an even number and saturated: of a and b in turns. From 2^25 on, which x = 4 is, floats are
     * integers, so that the conversion is exact; nearer to 0 there is no bound. */
    ZT_INLINE V::I fixed(V::F a, V::F b) {
        const V::I high = _mm256_blend_epi16(_mm256_srli_epi32(V::round(a), 16), V::round(b), 0xaa);
        return _mm256_adds_epi16(high, high);
    }

    /* Codes in the upper nibbles of bytes, of a and b in turns; the lower nibbles are anything. */
    ZT_INLINE V::I codes(V::I a, V::I b) {
        const V::I second = _mm256_set1_epi16(-0x100);
        const V::I cell = _mm256_blendv_epi8(_mm256_srai_epi16(a, 11), _mm256_srai_epi16(b, 3), second);
        const V::I place = _mm256_blendv_epi8(_mm256_srli_epi16(a, 7), _mm256_slli_epi16(b, 1), second);
        /* A shuffle gives 0 where the highest bit of the index is set. */
        const V::I upper = _mm256_shuffle_epi8(twice(kCells.start), cell);
        const V::I lower = _mm256_shuffle_epi8(twice(kCells.start + 16), _mm256_xor_si256(cell, _mm256_set1_epi8(-0x80)));
        return _mm256_sub_epi8(_mm256_or_si256(upper, lower), place);
    }

    ZT_INLINE V::I twice(const void *p) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    }
};

}  // namespace

#include "zt_cpu_simd.h"

const zt::Kernels zt::kAvx2 = kTable;

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif /* ZT_X86 */
