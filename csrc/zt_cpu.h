/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * What the CPU files share. zt_cpu.cpp, zt_cpu_sparse.cpp and zt_cpu_codes.cpp check arguments and find where the
 * elements lie; the inner loops are in a table of functions for each instruction set, one file each (zt_cpu_scalar,
 * _avx2, _avx512).
 *
 * Note [One file, one instruction set]
 *     Every file is compiled with the same flags; a file raises the instruction set itself, by a pragma after its
 *     includes. Code that two such files instantiate lies in unnamed namespaces and uses no inline function of the
 *     standard library: the linker would keep one copy for all, perhaps one that this processor cannot run.
 */
#ifndef ZT_CPU_H
#define ZT_CPU_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "zt_kernels.h"

#if defined(__FAST_MATH__)
#error "zero_topo's kernels give the same bits everywhere: compile without -ffast-math, with -ffp-contract=off"
#endif

#if defined(ZT_X86) /* chosen by the compiler's flags */
#elif defined(__x86_64__) && defined(__GNUC__)
#define ZT_X86 1
#else
#define ZT_X86 0
#endif

namespace zt {

/* Adjacent elements in memory; the address need not be aligned. */
struct Elements {
    uint8_t *data;
    int32_t dtype;
};

/* Where the next block goes in each plane of a message. */
struct Planes {
    uint8_t *values;
    uint8_t *scales;
};

/* Messages of one format to one member, whose values are summed. */
struct Terms {
    zt_wire_spec spec;
    uint8_t *messages; /* that of source 0; the next one lies `step` bytes further */
    int64_t step;
    int32_t count;   /* the one left out is not counted */
    int32_t without; /* a source, -1 for none */
    int64_t scales;  /* where they begin in every message */
    float factor;
};

/* The message that is summed as number `source`. */
static inline uint8_t *source_of(const Terms &terms, int32_t source) {
    return terms.messages + (source + (terms.without >= 0 && source >= terms.without)) * terms.step;
}

/* How results are written: added to what is there, and past the caches (addresses are then multiples of 64). */
struct Writing {
    bool accumulate;
    bool stream;
};

/* Where compact_above puts what it finds. */
struct Picks {
    int64_t *indices;
    uint8_t *values;
    int64_t capacity;
};

/* What is written about the changes of a block: of each tile a count, and masks of what changes and of what decreases; 1
 * if it is sent whole, else 0, and the bytes of its changes. */
struct Steps {
    uint8_t *counts;
    uint8_t *masks;
    int64_t *size;
};

struct Sketch {
    uint64_t seed;
    int64_t rows;
    float *table;
};

/* The inner loops of one instruction set. All read and write exactly what they are told, no byte more. */
struct Kernels {
    /* Whole blocks of adjacent elements. */
    void (*quantize)(zt_wire_spec spec, Elements x, int64_t blocks, Planes out, bool stream);
    /* Whole blocks -> adjacent elements. */
    void (*sum)(const Terms &terms, zt_range blocks, Elements out, Writing how);
    void (*widen)(Elements x, int64_t n, uint8_t *out); /* to FP32 */
    void (*narrow)(const uint8_t *x, int64_t n, Elements out); /* from FP32 */
    void (*add)(Elements x, int64_t n, uint8_t *total); /* to FP32 */
    /* A copy past the caches. */
    void (*stream)(const uint8_t *x, int64_t bytes, uint8_t *out);
    /* n < 2^31 elements; compact's indices count from `first`. */
    int64_t (*count_above)(Elements x, int64_t n, float threshold);
    int64_t (*compact_above)(Elements x, zt_range elements, float threshold, Picks picks);
    void (*mask_pack)(const uint8_t *mask, int64_t n, uint8_t *bits);
    void (*mask_unpack)(const uint8_t *bits, int64_t n, uint8_t *mask);
    void (*sketch_insert)(const float *x, int64_t n, Sketch sketch, zt_range lanes);
    int64_t (*sketch_peel)(Sketch sketch, const uint8_t *bits, int64_t n, float *x, zt_range lanes, void *work);
    /* One block of n values. Its scale becomes the new one; its tiles' changes are counted and marked. */
    void (*assess)(const float *x, const int8_t *codes, int64_t n, float *scale, Steps out);
    /* Its codes become those of its values. */
    void (*recode)(const float *x, float inverse, int64_t n, int8_t *codes);
};

extern const Kernels kScalar;
#if ZT_X86
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

/* The table of an enum zt_level (ZT_BEST too), null if there is none. */
const Kernels *kernels(int32_t level);

}  // namespace zt

/* The functions of zt_kernels.h that take no level, with one, for tests. */
extern "C" {
int zt_cpu_mask_pack_at(const uint8_t *mask, int64_t n, uint8_t *bits, zt_range elements, int32_t level);
int zt_cpu_mask_unpack_at(const uint8_t *bits, int64_t n, uint8_t *mask, zt_range elements, int32_t level);
int zt_cpu_sketch_insert_at(const float *x, int64_t n, uint64_t seed, int64_t rows, float *sketch, zt_range lanes,
                            int32_t level);
int zt_cpu_sketch_peel_at(float *sketch, const uint8_t *bits, int64_t n, uint64_t seed, int64_t rows, float *x,
                          zt_range lanes, void *work, int64_t *left, int32_t level);
}

#endif /* ZT_CPU_H */
