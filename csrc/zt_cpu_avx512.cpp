/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The inner loops for processors with AVX-512 (F, BW, VL, DQ); Note [One file, one instruction set] is in zt_cpu.h.
 */
#include "zt_cpu.h"
#include "zt_nf4.h"

#if ZT_X86

/* GCC 12's own intrinsics begin with a register whose content does not matter (its bug 105593). */
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c,popcnt,bmi"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c,popcnt,bmi")
#endif

#define ZT_INLINE static inline __attribute__((always_inline))

namespace {

/* 16 lanes. `stream` stores past the caches, to addresses that are multiples of 64. */
struct V {
    using F = __m512;
    using I = __m512i;
    static constexpr int64_t kLanes = 16;
    static constexpr int kTile = 8;

    ZT_INLINE F set(float x) { return _mm512_set1_ps(x); }
    ZT_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
    ZT_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    ZT_INLINE I zeros() { return _mm512_setzero_si512(); }
    ZT_INLINE I round(F x) { return _mm512_cvtps_epi32(x); }

    template <int32_t D> ZT_INLINE F load(const uint8_t *p) {
        if (D == ZT_FP32) return _mm512_loadu_ps(p);
        return widened<D>(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }

    /* The first n < 16 lanes, the others 0. */
    template <int32_t D> ZT_INLINE F load_some(const uint8_t *p, int64_t n) {
        const __mmask16 first = static_cast<__mmask16>((1u << n) - 1);
        if (D == ZT_FP32) return _mm512_maskz_loadu_ps(first, p);
        return widened<D>(_mm256_maskz_loadu_epi16(first, p));
    }

    template <int32_t D> ZT_INLINE void store(uint8_t *p, F x) {
        if (D == ZT_FP32) return _mm512_storeu_ps(p, x);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), narrowed<D>(x));
    }

    template <int32_t D> ZT_INLINE void store_some(uint8_t *p, F x, int64_t n) {
        const __mmask16 first = static_cast<__mmask16>((1u << n) - 1);
        if (D == ZT_FP32) return _mm512_mask_storeu_ps(p, first, x);
        _mm256_mask_storeu_epi16(p, first, narrowed<D>(x));
    }

    ZT_INLINE void stream_line(uint8_t *out, const uint8_t *x) { put(out, _mm512_loadu_si512(x), true); }

    /* a, then b; NAN says that a BF16 may have to be NaN. */
    template <int32_t D, bool NAN> ZT_INLINE void store_two(uint8_t *p, F a, F b, bool stream) {
        if (D == ZT_FP32) {
            put(p, _mm512_castps_si512(a), stream);
            put(p + 64, _mm512_castps_si512(b), stream);
        } else if (D == ZT_BF16 && !NAN) {
            put(p, rounded_to_bf16(_mm512_castps_si512(a), _mm512_castps_si512(b)), stream);
        } else {
            put(p, _mm512_inserti64x4(_mm512_castsi256_si512(narrowed<D>(a)), narrowed<D>(b), 1), stream);
        }
    }

    /* The 32 FP16 or BF16 that the nibbles of 16 bytes stand for; the table holds each twice. */
    ZT_INLINE void look_up(uint8_t *out, const uint8_t *values, I table, bool stream) {
        const I pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(values)));
        put(out, _mm512_permutexvar_epi16(_mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12)), table), stream);
    }

    template <int N> ZT_INLINE bool any_nan(const F *x) {
        uint32_t found = 0;
        for (int i = 0; i < N; i += 2) found |= _mm512_cmp_ps_mask(x[i], x[i + 1], _CMP_UNORD_Q);
        return found;
    }

    /* Larger of two as unsigned numbers of the elements' width. */
    template <int32_t D> ZT_INLINE I larger(I a, I b) {
        return D == ZT_FP32 ? _mm512_max_epu32(a, b) : _mm512_max_epu16(a, b);
    }

    /* Larger of `so_far` and the magnitudes of 64 bytes of elements. */
    template <int32_t D> ZT_INLINE I peak(I so_far, const uint8_t *p) {
        const I x = _mm512_loadu_si512(p);
        const I magnitude = D == ZT_FP32 ? _mm512_set1_epi32(0x7fffffff) : _mm512_set1_epi16(0x7fff);
        return larger<D>(so_far, _mm512_and_si512(x, magnitude));
    }

    /* Lane i of the result: the largest 32-bit number in a, b, c, d respectively (all < 2^31). */
    ZT_INLINE __m128i largest(I a, I b, I c, I d) {
        const I ab = _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        const I cd = _mm512_max_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        const I abcd = _mm512_max_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        const __m256i y = _mm256_max_epi32(_mm512_castsi512_si256(abcd), _mm512_extracti64x4_epi64(abcd, 1));
        return _mm_max_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    }

    /* 16-bit numbers -> the larger of each pair, in 32 bits. */
    ZT_INLINE I larger_halves(I x) {
        return _mm512_max_epi32(_mm512_srli_epi32(x, 16), _mm512_and_si512(x, _mm512_set1_epi32(0xffff)));
    }

    /* 64 numbers -> 64 bytes. */
    ZT_INLINE void pack8(uint8_t *p, I a, I b, I c, I d, bool stream) { put(p, bytes(a, b, c, d), stream); }

    /* 64 numbers -> 32 bytes, the even ones in the low nibbles. */
    ZT_INLINE void pack4(uint8_t *p, I a, I b, I c, I d, bool stream) {
        put_nibbles(p, _mm512_and_si512(bytes(a, b, c, d), _mm512_set1_epi8(0x0f)), stream);
    }

    /* 64 bytes below 16 -> 32 bytes. */
    ZT_INLINE void put_nibbles(uint8_t *p, I low, bool stream) {
        const __m256i x = _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(low, _mm512_set1_epi16(0x1001)));
        if (stream) return _mm256_stream_si256(reinterpret_cast<__m256i *>(p), x);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), x);
    }

    /* Bit i is set unless |lane i| < bound. */
    ZT_INLINE uint32_t above(F x, F bound) {
        return _mm512_cmp_ps_mask(_mm512_abs_ps(x), bound, _CMP_NLT_UQ);
    }

    /* Writes the elements at p whose bits are set in `chosen`, as many as there is room for, and their indices. */
    template <int32_t D> ZT_INLINE void pick(const uint8_t *p, int64_t index, uint32_t chosen, zt::Picks to) {
        const int64_t found = __builtin_popcount(chosen), n = found < to.capacity ? found : to.capacity;
        const __mmask16 first = static_cast<__mmask16>((1u << n) - 1), from = static_cast<__mmask16>(chosen);
        const I lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const I places = _mm512_maskz_compress_epi32(from, lanes), base = _mm512_set1_epi64(index);
        const I low = _mm512_add_epi64(base, _mm512_cvtepu32_epi64(_mm512_castsi512_si256(places)));
        _mm512_mask_storeu_epi64(to.indices, static_cast<__mmask8>(first), low);
        if (n > 8) {
            const I high = _mm512_add_epi64(base, _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(places, 1)));
            _mm512_mask_storeu_epi64(to.indices + 8, static_cast<__mmask8>(first >> 8), high);
        }
        if (D == ZT_FP32) {
            const I x = _mm512_maskz_loadu_epi32(from, p);
            return _mm512_mask_storeu_epi32(to.values, first, _mm512_maskz_compress_epi32(from, x));
        }
        const I x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(from, p));
        _mm256_mask_storeu_epi16(to.values, first, _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(from, x)));
    }

    /* Bit i is set if counts[i] == 1, of 16. */
    ZT_INLINE uint32_t ones(const uint32_t *counts) {
        return _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(counts), _mm512_set1_epi32(1));
    }

    /* 64 bytes <-> 64 bits. */
    static constexpr int64_t kMaskBytes = 64;
    ZT_INLINE void pack_mask(const uint8_t *mask, uint8_t *bits) {
        const I x = _mm512_loadu_si512(mask);
        const uint64_t word = _mm512_test_epi8_mask(x, x);
        memcpy(bits, &word, 8);
    }
    ZT_INLINE void unpack_mask(const uint8_t *bits, uint8_t *mask) {
        uint64_t word;
        memcpy(&word, bits, 8);
        _mm512_storeu_si512(mask, _mm512_maskz_set1_epi8(word, 1));
    }

    template <int32_t D> ZT_INLINE __m256i narrowed(F x) {
        if (D == ZT_FP16) return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const I bits = _mm512_castps_si512(x), zero = _mm512_setzero_si512();
        const __m256i rounded = _mm512_castsi512_si256(rounded_to_bf16(bits, zero));
        const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        return _mm256_mask_mov_epi16(rounded, nan, _mm256_set1_epi16(0x7fc0));
    }

    /* Bytes in the order in which two steps of packing leave them -> in order. */
    ZT_INLINE I in_order(I mixed) {
        return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), mixed);
    }

private:
    ZT_INLINE void put(uint8_t *p, I x, bool stream) {
        if (stream) return _mm512_stream_si512(reinterpret_cast<I *>(p), x);
        _mm512_storeu_si512(p, x);
    }

    template <int32_t D> ZT_INLINE F widened(__m256i x) {
        if (D == ZT_FP16) return _mm512_cvtph_ps(x);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
    }

    /* 32 numbers, none of them NaN. The upper halves, and 1 more where the lower half is above 0x8000, or is that and
     * the upper half is odd. */
    ZT_INLINE I rounded_to_bf16(I a, I b) {
        const I even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                        22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const I one = _mm512_set1_epi16(1);
        const I low = _mm512_permutex2var_epi16(a, even, b);
        const I high = _mm512_permutex2var_epi16(a, _mm512_or_si512(even, one), b);
        const I sticky = _mm512_ternarylogic_epi32(low, high, one, 0xf8); /* low | (high & one) */
        return _mm512_add_epi16(high, _mm512_min_epu16(_mm512_subs_epu16(sticky, _mm512_set1_epi16(-0x8000)), one));
    }

    ZT_INLINE I bytes(I a, I b, I c, I d) {
        return in_order(_mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d)));
    }
};

struct Bytes {
    static constexpr int kBits = 8, kGroup = 1; /* vectors that are decoded at once */
    static constexpr int64_t kScaleBytes = 4;
    V::F scale;

    ZT_INLINE Bytes of(float scale) { return {V::set(scale)}; }
    bool finite() const {
        const float one = _mm512_cvtss_f32(scale);
        return one - one == 0.0f;
    }
    ZT_INLINE void in_order(V::F *) {}

    /* The 16 values at p. */
    inline __attribute__((always_inline)) void at(const uint8_t *p, V::F *x) const {
        const V::I q = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        *x = V::mul(_mm512_cvtepi32_ps(q), scale);
    }
};

/* What each of the 16 nibbles stands for is computed once and looked up: one permutation for a conversion and a
 * product. */
struct Nibbles {
    static constexpr int kBits = 4, kGroup = 1;
    static constexpr int64_t kScaleBytes = 4;
    V::F table;


    template <int32_t D> V::I halves() const {
        const __m256i once = V::narrowed<D>(table);
        return _mm512_inserti64x4(_mm512_castsi256_si512(once), once, 1);
    }
    bool finite() const { return false; }

    ZT_INLINE Nibbles of(float scale) {
        return {V::mul(_mm512_set_ps(-1, -2, -3, -4, -5, -6, -7, -8, 7, 6, 5, 4, 3, 2, 1, 0), V::set(scale))};
    }

    /* The 16 values at p: even lanes hold the first eight, odd lanes the others. */
    inline __attribute__((always_inline)) void at(const uint8_t *p, V::F *x) const {
        int64_t word;
        memcpy(&word, p, 8);
        const V::I shifts = _mm512_set_epi32(28, 28, 24, 24, 20, 20, 16, 16, 12, 12, 8, 8, 4, 4, 0, 0);
        *x = _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi64(word), shifts), table);
    }

    ZT_INLINE void in_order(V::F *x) {
        *x = _mm512_permutexvar_ps(_mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0), *x);
    }
};

alignas(64) constexpr float kLevels[16] = {ZT_NF4_LEVELS};
constexpr zt_nf4_cells kCells;

/* Nibbles that select a level of NF4. Note [Cells] in zt_nf4.h. */
struct Levels : Nibbles {
    static constexpr int64_t kScaleBytes = 1;

    ZT_INLINE Levels of(float scale) { return {{V::mul(_mm512_load_ps(kLevels), V::set(scale))}}; }
    ZT_INLINE Levels of_byte(uint8_t byte) { return of(_mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(zt_nf4_scale(byte)))))); }
    template <int32_t D> ZT_INLINE V::I halves(float scale) { return of(scale).Nibbles::halves<D>(); }

    /* What elements are multiplied with. */
    template <int32_t D> ZT_INLINE __m128 inverse(__m128 scale) { return _mm_div_ps(_mm_set1_ps(-256.0f), scale); }
    template <int32_t D> ZT_INLINE V::F encoder(float inverse) { return V::set(inverse); }

    /* 64 elements -> 32 bytes. */
    template <int32_t D>
    ZT_INLINE void put(const uint8_t *x, V::F unit, uint8_t *out, bool stream) {
        constexpr int64_t stride = D == ZT_FP32 ? 64 : 32;
        const V::I low = _mm512_packs_epi32(floor<D>(x, unit), floor<D>(x + stride, unit));
        const V::I high = _mm512_packs_epi32(floor<D>(x + 2 * stride, unit), floor<D>(x + 3 * stride, unit));
        V::put_nibbles(out, V::in_order(_mm512_packus_epi16(codes(low), codes(high))), stream);
    }

private:
    template <int32_t D> ZT_INLINE V::I floor(const uint8_t *x, V::F unit) {
        return _mm512_cvt_roundps_epi32(V::mul(V::load<D>(x), unit), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    }

    ZT_INLINE V::I codes(V::I n) {
        const V::I cells = _mm512_loadu_si512(kCells.wide);
        const V::I first = _mm512_permutexvar_epi16(_mm512_srli_epi16(n, 11), cells);
        return _mm512_srli_epi16(_mm512_sub_epi16(first, n), 12);
    }
};

}  // namespace

#include "zt_cpu_simd.h"

const zt::Kernels zt::kAvx512 = kTable;

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif /* ZT_X86 */
