/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * The C interface of the kernels. Needs neither torch nor Python; every backend behind it gives the bits of
 * zero_topo/quant/reference.py.
 *
 * Members. One call serves all ranks of a group, each with a message of its own: the operations below are those of one
 * member, repeated.
 *
 * Pieces. What a message holds is a list of pieces, concatenated. A piece is a matrix whose columns are adjacent and
 * whose rows are `row_stride` elements apart, taken in row-major order: a nested shard of one parameter, read from or
 * written to where it lies, so that no pass over memory interleaves it. A member's piece lies `member_stride` elements
 * after that of the member before. Of each row only the first `present` columns exist, and nothing at or beyond
 * `data + limit`: what does not exist reads as zero and is never written (rows filled up to whole blocks, and the padding
 * of the last shards).
 *
 * Threads. The CPU functions work on a range of wire blocks (or elements, or lanes), so that the caller may split the
 * work among threads of its own; any split gives the same bits. Blocks are counted through all members: those of member m
 * begin at m * zt_wire_blocks. The call whose range has a member's first block also writes what belongs to no block of its
 * message: the padding of the planes, as zeros. Casts have no blocks: their ranges are in values.
 */
#ifndef ZT_KERNELS_H
#define ZT_KERNELS_H

#include "zt_changes.h"
#include "zt_wire.h"

#ifdef __cplusplus
extern "C" {
#endif

/* CPU instruction sets; ZT_BEST is the best that this processor has. */
enum zt_level { ZT_BEST = -1, ZT_SCALAR = 0, ZT_AVX2 = 1, ZT_AVX512 = 2 };

/* What a function returns: ZT_OK, or why it did nothing. zt_error_text has a sentence for each. */
enum zt_status {
    ZT_OK = 0,
    ZT_BAD_SPEC = 1,    /* bits or block size that the wire format does not know */
    ZT_BAD_DTYPE = 2,   /* a dtype that is none of zt_dtype */
    ZT_BAD_SIZE = 3,    /* a message whose bytes are not zt_wire_nbytes of its values, or negative sizes */
    ZT_BAD_RANGE = 4,   /* a range that leaves the work */
    ZT_BAD_LEVEL = 5,   /* instructions that this processor or this build lacks */
    ZT_NO_TABLE = 6,    /* over ZT_GPU_PIECES pieces without a table (GPU only) */
    ZT_BAD_ALIGNMENT = 7, /* a message not at a multiple of 16 bytes, or of a value's size if cast (GPU only) */
    ZT_LAUNCH_FAILED = 8  /* the GPU refused the launch: ZT_LAUNCH_FAILED + 256 * the runtime's error, if it gave one */
};

typedef struct zt_piece {
    void *data;         /* the first element */
    int64_t rows;
    int64_t columns;       /* values of a row */
    int64_t present;       /* of which exist */
    int64_t row_stride;    /* elements from one row to the next, at least `present` */
    int64_t member_stride; /* elements from one member's first element to the next one's */
    int64_t limit;         /* elements from data on that exist */
    int32_t dtype;         /* one of zt_dtype */
} zt_piece;

/* A table of messages of one size. That of source s to member m begins at
 * data + s * source_step + m / inner * outer_step + m % inner * inner_step. */
typedef struct zt_messages {
    uint8_t *data;
    int64_t nbytes; /* of each */
    int32_t sources, members, inner;
    int32_t without_source, without_member; /* left out: not summed; neither read nor written. -1: none */
    int64_t source_step, outer_step, inner_step;
} zt_messages;

typedef struct zt_range {
    int64_t begin;
    int64_t end;
} zt_range;

/* INT8 codes and block scales of parameters; Note [Codes] in zero_topo/quant/ops.py. */
typedef struct zt_codes {
    uint8_t *stored;         /* of each parameter an INT8 message of all its rows, filled up to whole blocks */
    int64_t nbytes;          /* of stored */
    const int64_t *params;   /* six numbers each: bytes at which its codes and scales begin, blocks of a row, its first
                               block column, its first column in the table of masters, its columns */
    const int32_t *param_of; /* of each block column */
    int64_t columns;         /* block columns */
    int32_t count;           /* parameters */
    int32_t block;           /* values of a block */
} zt_codes;

/* Blocks of which one message speaks, row by row: block columns begin to end of `rows` rows. Row r of member m is row
 * m + r * members of the shard. */
typedef struct zt_part {
    int64_t begin, end;
    int64_t rows, members;
} zt_part;

/* One member's masters: its rows; column 0 is the one that the parameters number `first`. */
typedef struct zt_masters {
    const float *data;
    int64_t row_stride, columns; /* values from one row to the next, and of one */
    int64_t first, member;
} zt_masters;

/* What is to become of the blocks of a part. */
typedef struct zt_change {
    const float *scales;
    const uint8_t *counts; /* of each tile the codes that change, more by ZT_CHANGES_LARGE if one changes by more than 1,
                              or ZT_CHANGES_WHOLE */
    const uint8_t *steps;  /* of each tile a mask of the codes that change, then one of those that decrease */
    const int64_t *ends;   /* two numbers per block: blocks sent whole and bytes of changes up to its end */
} zt_change;

/* AgedAdamW's update of n FP32 elements; Note [Ages] in zero_topo/sync/optimizers.py. */
#define ZT_AGES 257
typedef struct zt_aged {
    float *p;
    const float *g;
    float *mean, *square;
    uint8_t *age;
    int64_t n;
    const float *table; /* two rows of ZT_AGES factors, by steps since the last arrival: aged_adamw in quant/ops.py */
    float decay, correction, eps, rate, whole, weight;
} zt_aged;

/* What becomes of a sum of messages. In this order, each step one FP32 rounding: total = sum in message order;
 * total *= factor unless factor == 1; total = out + total if accumulate; round to the dtype of out. */
typedef struct zt_reduce {
    float factor;
    int32_t accumulate; /* 0 or 1 */
} zt_reduce;

const char *zt_error_text(int status);

/* -- CPU: every range is in wire blocks ------------------------------------------------------------------------- */

/* The best level of this processor, up to the limit. */
int zt_cpu_best_level(void);
/* Limits it; ZT_BEST lifts the limit. For tests: no other call may run meanwhile. */
void zt_cpu_limit(int level);

/* pieces -> messages (of one source). */
int zt_cpu_quantize(zt_wire_spec spec, const zt_piece *pieces, int32_t count, zt_messages messages, zt_range blocks,
                    int32_t level);

/* messages -> their sum over the sources -> pieces: FP32 accumulator, in order, one rounding per product and per sum (no
 * FMA). */
int zt_cpu_dequantize_reduce(zt_wire_spec spec, zt_messages messages, const zt_piece *pieces, int32_t count,
                             zt_reduce reduce, zt_range blocks, int32_t level);

/* messages -> their sum over the sources (times factor) -> messages of `numel` values. Both specs have one block size,
 * bits may differ; or both are the same cast. The zero padding of the last block stays zero. reduce.accumulate must be
 * 0. */
int zt_cpu_requantize(zt_wire_spec from, zt_messages messages, zt_wire_spec to, zt_messages out, int64_t numel,
                      zt_reduce reduce, zt_range blocks, int32_t level);

/* -- CPU, sparse modes: every range is in elements (multiples of 8 but for the last end) or lanes ---------------- */

/* n bytes of 0 or 1 -> ceil(n / 8) bytes, element i is bit i % 8 of byte i / 8; unused bits are 0. And back. */
int zt_cpu_mask_pack(const uint8_t *mask, int64_t n, uint8_t *bits, zt_range elements);
int zt_cpu_mask_unpack(const uint8_t *bits, int64_t n, uint8_t *mask, zt_range elements);

/* How many |x[i]| >= threshold in the range; NaN is above all. */
int zt_cpu_count_above(const void *x, int32_t dtype, float threshold, zt_range elements, int64_t *found, int32_t level);

/* The same elements in ascending order: their indices i (of x, not of the range) and values (dtype of x), at most
 * `capacity` of them; *found is how many there are, written or not. */
int zt_cpu_compact_above(const void *x, int32_t dtype, float threshold, zt_range elements, int64_t capacity,
                         int64_t *indices, void *values, int64_t *found, int32_t level);

/* Of each row of FP32 [rows, columns] in the range the k largest magnitudes, NaN above all, the first of equal ones:
 * their columns in ascending order, [rows, k]. */
int zt_cpu_row_largest(const float *x, int64_t columns, int64_t k, int64_t *indices, zt_range rows);

/* Signs of chosen elements of blocks, with one scale for each block. */
typedef struct zt_ternary {
    int32_t block; /* elements, at most 2^15 */
    int32_t picks; /* chosen of each */
    int32_t low;   /* low bits of a position that are sent unchanged, fewer than 15 */
    int32_t dtype; /* of the scale */
} zt_ternary;

/* Rows of `blocks` blocks, FP32 x [rows, blocks, block] and the ascending positions [rows, blocks, picks] -> packets of
 * `bytes` each, as ops.ternary_encode describes them; *count gets the number of elements that are not zero, which are
 * sent. The scale is the mean of their magnitudes, summed in FP64. */
int zt_cpu_ternary_encode(zt_ternary form, const float *x, const int64_t *indices, int64_t blocks, uint8_t *packets,
                          int64_t bytes, zt_range rows, int64_t *count);
/* Back: begins [rows, blocks] is added to the positions in each block; indices and values [rows, blocks, picks]. */
int zt_cpu_ternary_decode(zt_ternary form, const uint8_t *packets, int64_t bytes, const int64_t *begins, int64_t blocks,
                          int64_t *indices, float *values, zt_range rows);

/* A count sketch of n FP32 elements: blocks of ZT_SKETCH_LANES elements, `rows` >= 3 rows of as many lanes. Block b
 * goes into rows zt_sketch_row(seed, b, j, rows), j = 0, 1, 2, one in each third of the rows, each time with
 * zt_sketch_sign; its lane stays. Sums are FP32, blocks in ascending order. */
#define ZT_SKETCH_LANES 1024
int zt_cpu_sketch_insert(const float *x, int64_t n, uint64_t seed, int64_t rows, float *sketch, zt_range lanes);

/* The inverse, given which elements are non-zero (packed bits, as zt_cpu_mask_pack), per lane:
 * repeat { for b ascending: if element (b, lane) is set and unresolved, and for some j (the lowest) it is the only
 * unresolved one of its row: x = sign * sketch[row_j]; subtract sign * x from its two other rows; resolved }
 * until a pass resolves none; then each element left gets the median of its three sign * sketch[row], ascending b,
 * and is counted in *left (added up by the caller over ranges). Elements not set are 0. The sketch is used up.
 * x holds n elements; work holds zt_sketch_work(n, rows) bytes for each concurrent call. */
int zt_cpu_sketch_peel(float *sketch, const uint8_t *bits, int64_t n, uint64_t seed, int64_t rows, float *x,
                       zt_range lanes, void *work, int64_t *left);

/* Of 16 lanes: sums and counts of each row, values of each block. Of each block: places and a list entry. Alignment. */
ZT_WIRE_FN int64_t zt_sketch_work(int64_t n, int64_t rows) {
    return 64 + rows * 128 + (n + ZT_SKETCH_LANES - 1) / ZT_SKETCH_LANES * (64 + 12 + 8);
}

/* The finalizer of MurmurHash3 (64 bits). */
ZT_WIRE_FN uint64_t zt_mix(uint64_t z) {
    z = (z ^ (z >> 33)) * 0xff51afd7ed558ccdULL;
    z = (z ^ (z >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return z ^ (z >> 33);
}

ZT_WIRE_FN uint64_t zt_sketch_hash(uint64_t seed, int64_t block, int32_t j) {
    return zt_mix(seed + 0x9e3779b97f4a7c15ULL * (uint64_t)(3 * block + j + 1));
}

/* In [rows * j / 3, rows * (j + 1) / 3); rows < 2^31. */
ZT_WIRE_FN int64_t zt_sketch_row(uint64_t seed, int64_t block, int32_t j, int64_t rows) {
    const int64_t first = rows * j / 3, past = rows * (j + 1) / 3;
    return first + (int64_t)(((zt_sketch_hash(seed, block, j) & 0xffffffffULL) * (uint64_t)(past - first)) >> 32);
}

/* +1 or -1, by the hash's top bit. */
ZT_WIRE_FN float zt_sketch_sign(uint64_t seed, int64_t block, int32_t j) {
    return zt_sketch_hash(seed, block, j) >> 63 ? -1.0f : 1.0f;
}

/* AgedAdamW's update of a range of elements. */
int zt_cpu_aged_adamw(zt_aged aged, zt_range elements);

/* -- CPU, codes: ranges are in blocks of a part --------------------------------------------------------------------- */

/* Each block's new scale, the counts and steps of its change, and two sizes: 1 if it is sent whole, else 0, and the bytes
 * of its changes. Changes nothing else. */
int zt_cpu_codes_assess(zt_masters masters, zt_codes codes, zt_part part, float *scales, uint8_t *counts,
                        uint8_t *steps, int64_t *sizes, zt_range blocks, int32_t level);

/* Codes and scales change as `change` says; those of blocks sent whole, and those that change in tiles with large changes,
 * become the masters'. The
 * message (`nbytes`, perhaps more than it needs) is written. */
int zt_cpu_codes_emit(zt_masters masters, zt_codes codes, zt_part part, zt_change change, uint8_t *message,
                      int64_t nbytes, zt_range blocks, int32_t level);

/* Codes and scales of each member but the one left out become what its message (of one source) says. Blocks are counted
 * through all members. A message that contradicts itself within the range is ZT_BAD_SIZE, before anything changes. */
int zt_cpu_codes_apply(zt_messages messages, zt_codes codes, zt_part part, zt_range blocks, int32_t level);

/* -- GPU: the same operations on device memory; arrays of pieces and messages are in host memory ------------------ */
/* `stream` is a cudaStream_t or hipStream_t. Quantized messages begin at multiples of 16 bytes; casts and pieces
 * anywhere. Up to ZT_GPU_PIECES pieces travel with the launch; of more, `table` is device memory that holds what
 * zt_gpu_table wrote, zt_gpu_table_bytes of it. */
#define ZT_GPU_PIECES 64

/* Bytes of a table of so many pieces; 0 if none is needed. */
int64_t zt_gpu_table_bytes(int32_t count);
/* Writes it, in host memory. */
int zt_gpu_table(const zt_piece *pieces, int32_t count, void *host);

int zt_gpu_quantize(zt_wire_spec spec, const zt_piece *pieces, int32_t count, const void *table, zt_messages messages,
                    void *stream);
int zt_gpu_dequantize_reduce(zt_wire_spec spec, zt_messages messages, const zt_piece *pieces, int32_t count,
                             const void *table, zt_reduce reduce, void *stream);
int zt_gpu_requantize(zt_wire_spec from, zt_messages messages, zt_wire_spec to, zt_messages out, int64_t numel,
                      zt_reduce reduce, void *stream);
int zt_gpu_mask_pack(const uint8_t *mask, int64_t n, uint8_t *bits, void *stream);
int zt_gpu_mask_unpack(const uint8_t *bits, int64_t n, uint8_t *mask, void *stream);

/* partial holds zt_gpu_partials(n) int64 of device memory: the count of each consecutive chunk of ZT_GPU_CHUNK
 * elements; the caller sums them (count) or scans them exclusively (compact). */
#define ZT_GPU_CHUNK 8192
ZT_WIRE_FN int64_t zt_gpu_partials(int64_t n) { return (n + ZT_GPU_CHUNK - 1) / ZT_GPU_CHUNK; }
int zt_gpu_count_above(const void *x, int32_t dtype, int64_t n, float threshold, int64_t *partial, void *stream);

/* offsets: where each chunk's first pick goes, the exclusive scan of zt_gpu_count_above's partials. */
int zt_gpu_compact_above(const void *x, int32_t dtype, int64_t n, float threshold, const int64_t *offsets,
                         int64_t capacity, int64_t *indices, void *values, void *stream);
/* Of each member's n elements, which follow one another, as its sketches do. */
int zt_gpu_sketch_insert(const float *x, int64_t members, int64_t n, uint64_t seed, int64_t rows, float *sketch,
                         void *stream);
/* work: zt_gpu_sketch_work(n, rows) bytes of device memory; left: one int64 of device memory, added to. */
ZT_WIRE_FN int64_t zt_gpu_sketch_work(int64_t n, int64_t rows) {
    return (rows * 4 + (n + ZT_SKETCH_LANES - 1) / ZT_SKETCH_LANES) * ZT_SKETCH_LANES;
}
int zt_gpu_sketch_peel(float *sketch, const uint8_t *bits, int64_t n, uint64_t seed, int64_t rows, float *x, void *work,
                       int64_t *left, void *stream);
/* What the runtime says of a status of ZT_LAUNCH_FAILED; empty if it said nothing. */
const char *zt_gpu_runtime_text(int status);
int zt_gpu_aged_adamw(zt_aged aged, void *stream); /* all of it in device memory */
/* The tables of codes and of what changes are in device memory too. Whatever a message says, nothing outside it, and of
 * the codes nothing but the part, is read or written. */
int zt_gpu_codes_assess(zt_masters masters, zt_codes codes, zt_part part, float *scales, uint8_t *counts, uint8_t *steps,
                        int64_t *sizes, void *stream);
int zt_gpu_codes_emit(zt_masters masters, zt_codes codes, zt_part part, zt_change change, uint8_t *message,
                      int64_t nbytes, void *stream);
int zt_gpu_codes_apply(zt_messages messages, zt_codes codes, zt_part part, void *stream);

#ifdef __cplusplus
}
#endif

#endif /* ZT_KERNELS_H */
