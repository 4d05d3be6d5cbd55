/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Casts: values that travel as floats, from and to pieces.
 */
#ifndef ZT_CPU_CASTS_H
#define ZT_CPU_CASTS_H

#include "zt_cpu_pieces.h"

namespace zt {

/* So many at a time: memory has nothing to do while they are converted from one buffer to another. */
constexpr int64_t kCast = 1024;

/* How many of the next `left` values to handle now: past the caches whole lines are written, from `out` on. */
inline int64_t next_values(Elements out, int64_t left, bool stream) {
    const int64_t before_line = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out.data) % 64) / size_of(out.dtype);
    const int64_t most = stream && before_line ? before_line : kCast;
    return most < left ? most : left;
}

/* The next n values -> a message at `out`. */
inline void encode_casts(const Kernels &kernels, Cursor cursor, int64_t n, Elements out, bool stream) {
    alignas(64) uint8_t buffer[4 * kCast];
    while (n > 0) {
        const int64_t now = next_values(out, n, stream);
        const Run run = cursor.run();
        Elements x = run.elements;
        if (x.data && run.count >= now) {
            cursor.advance(now);
        } else {
            x = {buffer, dtype_of_next(cursor, now)};
            if (!stream && x.dtype == out.dtype) x.data = out.data;
            gather(kernels, cursor, now, x);
        }
        convert(kernels, x, now, out, stream);
        out.data += now * size_of(out.dtype);
        n -= now;
    }
}

/* The sum of n values of each message, of which the first is number i. */
inline void add_up(const Kernels &kernels, const Terms &terms, int64_t i, int64_t n, float *total) {
    auto *const out = reinterpret_cast<uint8_t *>(total);
    for (int32_t s = 0; s < terms.count; ++s) {
        const Elements x = {source_of(terms, s) + i * (terms.spec.bits / 8), terms.spec.dtype};
        if (s == 0)
            convert(kernels, x, n, {out, ZT_FP32}, false);
        else
            kernels.add(x, n, out);
    }
    if (terms.factor != 1.0f)
        for (int64_t k = 0; k < n; ++k) total[k] *= terms.factor;
}

/* The messages' values in this range, summed -> elements. */
inline void sum_casts(const Kernels &kernels, const Terms &terms, Cursor cursor, zt_range values, Writing how) {
    alignas(64) float total[kCast];
    alignas(64) uint8_t stored[4 * kCast];
    const bool single = terms.count == 1 && terms.factor == 1.0f && !how.accumulate;
    for (int64_t i = values.begin; i < values.end;) {
        const Elements there = cursor.run().elements;
        const bool is_long = cursor.row_length() * size_of(there.dtype) >= kLongRow && there.data;
        const int64_t now = next_values(there, values.end - i, how.stream && is_long);
        Elements x = {source_of(terms, 0) + i * (terms.spec.bits / 8), terms.spec.dtype};
        if (!single) {
            add_up(kernels, terms, i, now, total);
            x = {reinterpret_cast<uint8_t *>(total), ZT_FP32};
        }
        if (how.accumulate) {
            Cursor from = cursor;
            gather(kernels, from, now, {stored, ZT_FP32});
            kernels.add({stored, ZT_FP32}, now, x.data);
        }
        if (how.stream && !is_long) prefetch_edges(cursor, 2 * now);
        scatter(kernels, cursor, now, x, how.stream);
        i += now;
    }
}

}  // namespace zt

#endif /* ZT_CPU_CASTS_H */
