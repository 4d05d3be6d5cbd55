/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Walking through the elements of pieces, a run of adjacent ones at a time.
 */
#ifndef ZT_CPU_PIECES_H
#define ZT_CPU_PIECES_H

#include "zt_cpu.h"

namespace zt {

/* What is handled by way of a buffer: as FP32 it fills half of the smallest first cache. */
constexpr int64_t kBuffered = 4096, kBufferBytes = 4 * kBuffered;
/* Bytes of a row from which on its lines are worth being written whole. */
constexpr int64_t kLongRow = 8192;

inline int64_t size_of(int32_t dtype) { return dtype == ZT_FP32 ? 4 : 2; }

/* Elements that follow one another in the message: adjacent ones in memory, or (data null) some that do not exist. */
struct Run {
    Elements elements;
    int64_t count;
};

/* A place in the concatenated pieces of a member. Finding the first one looks at every piece, going on at the next run
 * only. */
class Cursor {
public:
    Cursor(const zt_piece *pieces, int32_t count, int64_t member, int64_t element)
        : next_(pieces), end_(pieces + count), member_(member) {
        open();
        while (next_ != end_ && element >= rows_ * columns_) {
            element -= rows_ * columns_;
            ++next_;
            open();
        }
        if (next_ == end_) return;
        row_ = element / columns_;
        column_ = element % columns_;
    }

    bool at_end() const { return next_ == end_; }

    /* The elements from here on, all of one kind; at least one, unless this is the end. */
    Run run() const {
        if (at_end()) return {{nullptr, ZT_FP32}, 0};
        if (column_ >= present_) return {{nullptr, next_->dtype}, columns_ - column_};
        const int64_t first = member_ * next_->member_stride + row_ * next_->row_stride + column_;
        const int64_t in_row = present_ - column_, exist = next_->limit - first;
        if (exist <= 0) return {{nullptr, next_->dtype}, in_row};
        uint8_t *data = static_cast<uint8_t *>(next_->data) + first * size_of(next_->dtype);
        return {{data, next_->dtype}, exist < in_row ? exist : in_row};
    }

    /* Elements that exist in the row that this is in; rows without gaps are one. */
    int64_t row_length() const { return present_; }

    /* Goes on by n elements, which is at most the length of the run. */
    void advance(int64_t n) {
        column_ += n;
        if (column_ < columns_) return;
        column_ = 0;
        if (++row_ < rows_) return;
        ++next_;
        open();
    }

private:
    /* Begins the next piece that has elements; rows without gaps are one row. */
    void open() {
        row_ = column_ = 0;
        for (; next_ != end_; ++next_) {
            rows_ = next_->rows;
            columns_ = next_->columns;
            present_ = next_->present;
            if (rows_ == 0 || columns_ == 0) continue;
            if (rows_ == 1 || (next_->row_stride == columns_ && present_ == columns_)) {
                columns_ *= rows_;
                present_ *= rows_;
                rows_ = 1;
            }
            return;
        }
    }

    const zt_piece *next_;
    const zt_piece *end_;
    int64_t member_;
    int64_t rows_ = 0, columns_ = 0, present_ = 0, row_ = 0, column_ = 0;
};

/* The dtype of the next n elements if all that exist have the same, else FP32. */
inline int32_t dtype_of_next(Cursor cursor, int64_t n) {
    int32_t found = -1;
    while (n > 0 && !cursor.at_end()) {
        const Run run = cursor.run();
        const int64_t now = run.count > n ? n : run.count;
        if (run.elements.data) {
            if (found >= 0 && found != run.elements.dtype) return ZT_FP32;
            found = run.elements.dtype;
        }
        cursor.advance(now);
        n -= now;
    }
    return found < 0 ? ZT_FP32 : found;
}

/* Fetches the lines that runs among the next n elements share with others. */
inline void prefetch_edges(Cursor cursor, int64_t n) {
    while (n > 0 && !cursor.at_end()) {
        const Run run = cursor.run();
        const int64_t now = run.count > n ? n : run.count;
        if (run.elements.data) {
            __builtin_prefetch(run.elements.data, 1);
            __builtin_prefetch(run.elements.data + now * size_of(run.elements.dtype) - 1, 1);
        }
        cursor.advance(now);
        n -= now;
    }
}

/* n <= kBuffered elements as floats of another type. */
inline void convert(const Kernels &kernels, Elements x, int64_t n, Elements out, bool stream) {
    alignas(64) uint8_t wide[kBufferBytes], half[kBufferBytes / 2];
    if (x.dtype != out.dtype && x.dtype != ZT_FP32) {
        uint8_t *const to = out.dtype == ZT_FP32 && !stream ? out.data : wide;
        kernels.widen(x, n, to);
        x = {to, ZT_FP32};
    }
    if (x.dtype != out.dtype) {
        const Elements to = {stream ? half : out.data, out.dtype};
        kernels.narrow(x.data, n, to);
        x = to;
    }
    if (x.data == out.data) return;
    if (stream)
        kernels.stream(x.data, n * size_of(x.dtype), out.data);
    else
        memcpy(out.data, x.data, static_cast<size_t>(n * size_of(x.dtype)));
}

/* The next n <= kBuffered elements, copied as they are or as FP32; zeros where none exist or the pieces end. */
inline void gather(const Kernels &kernels, Cursor &cursor, int64_t n, Elements out) {
    const int64_t size = size_of(out.dtype);
    while (n > 0) {
        const Run run = cursor.run();
        const int64_t now = run.count == 0 || run.count > n ? n : run.count;
        if (run.elements.data)
            convert(kernels, run.elements, now, out, false);
        else
            memset(out.data, 0, static_cast<size_t>(now * size));
        if (run.count) cursor.advance(now);
        out.data += now * size;
        n -= now;
    }
}

/* Into the next n <= kBuffered elements, as they are or rounded; those that do not exist are left out. */
inline void scatter(const Kernels &kernels, Cursor &cursor, int64_t n, Elements x, bool stream) {
    const int64_t size = size_of(x.dtype);
    while (n > 0 && !cursor.at_end()) {
        const Run run = cursor.run();
        const int64_t now = run.count > n ? n : run.count;
        if (run.elements.data) convert(kernels, x, now, run.elements, stream);
        cursor.advance(now);
        x.data += now * size;
        n -= now;
    }
}

}  // namespace zt

#endif /* ZT_CPU_PIECES_H */
