/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Elements, and units of eight neighbouring ones, in memory of any alignment.
 *
 * Note [Alignment]
 *     Rows whose length is no multiple of 8 begin at any multiple of an element's size. Loads go by aligned words of 16
 *     bytes all the same: those that hold the unit, one more than it has if it straddles them (otherwise the last one
 *     again, so that nothing is read that holds no wanted byte, and nothing branches). Selecting by the alignment's
 *     bits 3 and 2 and shifting by its bit 1 moves the unit to the front: 15 instructions for 8 values of 16 bits, 17
 *     for 8 of FP32, and one load, instead of 8 loads and their addresses. Stores go by the widest words that are
 *     aligned: 4 instead of 1 at the most for 16 bits, 5 instead of 2 for FP32.
 */
#ifndef ZT_GPU_MEMORY_H
#define ZT_GPU_MEMORY_H

#include "zt_gpu_portable.h"

#define ZT_UNIT 8
#define ZT_INFINITY 0x7f800000u /* bits of FP32; those of NaN are larger */

ZT_DEVICE constexpr int zt_bytes_of(int dtype) { return dtype == ZT_FP32 ? 4 : 2; }

ZT_DEVICE float zt_load_element(const char *from, int dtype) {
    if (dtype == ZT_FP32) return zt_bits<float>(zt_load<uint32_t>(from));
    const uint32_t bits = zt_load<uint16_t>(from);
    return dtype == ZT_BF16 ? zt_from_bf16(bits) : zt_from_fp16(bits);
}

ZT_DEVICE void zt_store_element(char *to, int dtype, float value) {
    if (dtype == ZT_FP32)
        zt_store<uint32_t>(to, zt_bits<uint32_t>(value));
    else if (dtype == ZT_BF16)
        zt_store<uint16_t>(to, (uint16_t)zt_to_bf16x2(value, 0.0f));
    else
        zt_store<uint16_t>(to, (uint16_t)zt_to_fp16x2(value, 0.0f));
}

/* Words of 32 bits in a unit. */
template <int DTYPE> constexpr int zt_words = DTYPE == ZT_FP32 ? ZT_UNIT : ZT_UNIT / 2;

template <int DTYPE> ZT_DEVICE void zt_from_words(const uint32_t *words, float *v) {
#pragma unroll
    for (int k = 0; k < ZT_UNIT; k++) {
        const uint32_t word = words[DTYPE == ZT_FP32 ? k : k / 2];
        if (DTYPE == ZT_FP32) v[k] = zt_bits<float>(word);
        if (DTYPE == ZT_BF16) v[k] = zt_bits<float>(k % 2 ? word & 0xffff0000u : word << 16);
        if (DTYPE == ZT_FP16) v[k] = zt_from_fp16(k % 2 ? word >> 16 : word & 0xffffu);
    }
}

template <int DTYPE> ZT_DEVICE void zt_to_words(const float *v, uint32_t *words) {
#pragma unroll
    for (int k = 0; k < ZT_UNIT; k++) {
        if (DTYPE == ZT_FP32) words[k] = zt_bits<uint32_t>(v[k]);
        if (DTYPE == ZT_FP16 && k % 2 == 0) words[k / 2] = zt_to_fp16x2(v[k], v[k + 1]);
        if (DTYPE == ZT_BF16 && k % 2 == 0) words[k / 2] = zt_to_bf16x2(v[k], v[k + 1]);
    }
}

ZT_DEVICE void zt_load_four(const char *from, uint32_t *words) {
    const uint4 four = zt_load<uint4>(from);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}

/* Drops the first `bytes` < 16, a multiple of an element's, of WORDS + 4 words. */
template <int DTYPE> ZT_DEVICE void zt_drop(uint32_t *words, int bytes) {
    const int many = zt_words<DTYPE>, last = DTYPE == ZT_FP32 ? many : many + 1; /* words that are still of use */
#pragma unroll
    for (int k = 0; k <= last; k++) words[k] = bytes & 8 ? words[k + 2] : words[k];
#pragma unroll
    for (int k = 0; k < last; k++) words[k] = bytes & 4 ? words[k + 1] : words[k];
#pragma unroll
    for (int k = 0; k < many && DTYPE != ZT_FP32; k++) words[k] = zt_funnel(words[k], words[k + 1], 8 * (bytes & 2));
}

/* The words of a unit that is aligned to 16 bytes, or to its elements; see Note [Alignment]. */
template <int DTYPE, bool ALIGNED> ZT_DEVICE void zt_load_words(const char *from, uint32_t *words) {
    const int many = zt_words<DTYPE>, bytes = ALIGNED ? 0 : (int)((uintptr_t)from & 15);
    uint32_t all[ZT_UNIT + 4];
#pragma unroll
    for (int k = 0; k < many; k += 4) zt_load_four(from - bytes + 4 * k, all + k);
    if (!ALIGNED) {
        zt_load_four(from - bytes + 4 * many - (bytes ? 0 : 16), all + many);
        zt_drop<DTYPE>(all, bytes);
    }
#pragma unroll
    for (int k = 0; k < many; k++) words[k] = all[k];
}

template <int DTYPE, bool ALIGNED> ZT_DEVICE void zt_load_unit(const char *from, float *v) {
    uint32_t words[zt_words<DTYPE>];
    zt_load_words<DTYPE, ALIGNED>(from, words);
    zt_from_words<DTYPE>(words, v);
}

/* MANY words to an address that is a multiple of 4, by pairs where they are aligned. */
template <int MANY> ZT_DEVICE void zt_store_words(char *to, const uint32_t *words) {
    const bool even = ((uintptr_t)to & 4) == 0;
    if (!even) zt_store<uint32_t>(to, words[0]);
    if (even == (MANY % 2 != 0)) zt_store<uint32_t>(to + 4 * (MANY - 1), words[MANY - 1]);
#pragma unroll
    for (int k = 0; k + 1 < MANY; k += 2) {
        if (even) zt_store<uint2>(to + 4 * k, uint2{words[k], words[k + 1]});
        if (!even && k + 2 < MANY) zt_store<uint2>(to + 4 * k + 4, uint2{words[k + 1], words[k + 2]});
    }
}

template <int DTYPE, bool ALIGNED> ZT_DEVICE void zt_store_unit(char *to, const float *v) {
    const int many = zt_words<DTYPE>;
    uint32_t words[ZT_UNIT];
    zt_to_words<DTYPE>(v, words);
    if (ALIGNED) {
#pragma unroll
        for (int k = 0; k < many; k += 4)
            zt_store<uint4>(to + 4 * k, uint4{words[k], words[k + 1], words[k + 2], words[k + 3]});
    } else if (DTYPE == ZT_FP32 || ((uintptr_t)to & 2) == 0) {
        zt_store_words<many>(to, words);
    } else { /* a half, three words, a half */
        zt_store<uint16_t>(to, (uint16_t)words[0]);
        zt_store<uint16_t>(to + 14, (uint16_t)(words[3] >> 16));
#pragma unroll
        for (int k = 0; k < 3; k++) words[k] = zt_funnel(words[k], words[k + 1], 16);
        zt_store_words<3>(to + 2, words);
    }
}

#endif /* ZT_GPU_MEMORY_H */
