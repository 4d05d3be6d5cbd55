/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The wire format of block-quantized tensors, for C, C++, CUDA and HIP. Needs neither torch nor Python.
 *
 * One message carries values and scales, so one collective moves both:
 *
 *     [values: ceil(n / B) blocks of B, tail zero-padded; padded to 128 bytes]
 *     [scales: fp32, in NF4 one byte, one per block; padded to 128 bytes]
 *
 * Values that are cast instead are floats side by side, and nothing else.
 *
 * INT4 packs two values a byte: the low nibble is the even element, two's complement.
 * zero_topo/quant/spec.py is the same arithmetic in Python; tests/kernels/test_wire_header.py holds the two equal.
 * All sizes are 64-bit, in elements or bytes, and never negative.
 */
#ifndef ZT_WIRE_H
#define ZT_WIRE_H

#include <stdint.h>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define ZT_WIRE_FN static __host__ __device__ inline __attribute__((always_inline))
#else
#define ZT_WIRE_FN static inline
#endif

#define ZT_WIRE_ALIGNMENT ((int64_t)128)
#define ZT_WIRE_SCALE_BYTES ((int64_t)4) /* but in NF4 */

enum zt_dtype { ZT_FP32 = 0, ZT_FP16 = 1, ZT_BF16 = 2 };
enum zt_levels { ZT_EVEN = 0, ZT_NF4 = 1 };

/* How values travel. Quantized: bits is 8 or 4, block_size one of 64, 128, 256, 512, 1024, 2048; in NF4 4 and 64. Or
 * cast to floats of `dtype`, without scales or padding: block_size is 1, bits 32 or 16. */
typedef struct zt_wire_spec {
    int32_t bits;
    int32_t block_size;
    int32_t dtype; /* one of zt_dtype; one of zt_levels if quantized */
} zt_wire_spec;

/* 1 if values are cast, 0 if they are quantized. */
ZT_WIRE_FN int zt_wire_is_cast(zt_wire_spec spec) { return spec.block_size == 1; }

/* 1 if quantized values are levels of NF4, else 0. */
ZT_WIRE_FN int zt_wire_is_nf4(zt_wire_spec spec) { return spec.block_size != 1 && spec.dtype == ZT_NF4; }

/* 1 if the specification is one that the format knows, else 0. */
ZT_WIRE_FN int zt_wire_valid(zt_wire_spec spec) {
    const int32_t b = spec.block_size;
    if (zt_wire_is_cast(spec))
        return spec.dtype >= ZT_FP32 && spec.dtype <= ZT_BF16 && spec.bits == (spec.dtype == ZT_FP32 ? 32 : 16);
    const int power_of_two = b > 0 && (b & (b - 1)) == 0;
    if (zt_wire_is_nf4(spec)) return spec.bits == 4 && b == 64;
    return (spec.bits == 8 || spec.bits == 4) && power_of_two && b >= 64 && b <= 2048 && spec.dtype == ZT_EVEN;
}

/* nbytes rounded up to the alignment of every plane. */
ZT_WIRE_FN int64_t zt_wire_padded(int64_t nbytes) {
    return (nbytes + ZT_WIRE_ALIGNMENT - 1) / ZT_WIRE_ALIGNMENT * ZT_WIRE_ALIGNMENT;
}

/* Blocks that hold numel values. */
ZT_WIRE_FN int64_t zt_wire_blocks(zt_wire_spec spec, int64_t numel) {
    return numel / spec.block_size + (numel % spec.block_size != 0);
}

/* Bytes of one block's values. */
ZT_WIRE_FN int64_t zt_wire_block_bytes(zt_wire_spec spec) { return (int64_t)spec.block_size * spec.bits / 8; }

/* Bytes of one block's scale. */
ZT_WIRE_FN int64_t zt_wire_scale_bytes(zt_wire_spec spec) {
    return zt_wire_is_nf4(spec) ? 1 : ZT_WIRE_SCALE_BYTES;
}

/* Byte at which the scales begin; the values begin at 0. */
ZT_WIRE_FN int64_t zt_wire_scales_offset(zt_wire_spec spec, int64_t numel) {
    return zt_wire_padded(zt_wire_blocks(spec, numel) * zt_wire_block_bytes(spec));
}

/* Bytes of one message of numel values; 0 for none. */
ZT_WIRE_FN int64_t zt_wire_nbytes(zt_wire_spec spec, int64_t numel) {
    if (zt_wire_is_cast(spec)) return numel * (spec.bits / 8);
    return zt_wire_scales_offset(spec, numel) + zt_wire_padded(zt_wire_blocks(spec, numel) * zt_wire_scale_bytes(spec));
}

#endif /* ZT_WIRE_H */
