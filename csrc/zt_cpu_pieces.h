/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Walking through the elements of pieces, a run of adjacent ones at a time.
 */
#ifndef ZT_CPU_PIECES_H
#define ZT_CPU_PIECES_H

#include "zt_cpu.h"

namespace zt {

/* Values of valid pieces together, -1 if one is not valid (that is found by `checked`) or they are too many. */
int checked(const zt_piece *pieces, int32_t count, int64_t *numel);

inline int64_t size_of(int32_t dtype) { return dtype == ZT_FP32 ? 4 : 2; }

/* Elements that follow one another in the message: adjacent ones in memory, or (data null) some that do not exist. */
struct Run {
    Elements elements;
    int64_t count;
};

/* A place in the concatenated pieces. Finding the first one looks at every piece, going on at the next run only. */
class Cursor {
public:
    Cursor(const zt_piece *pieces, int32_t count, int64_t element) : next_(pieces), end_(pieces + count) {
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
        const int64_t first = row_ * next_->row_stride + column_, in_row = columns_ - column_;
        const int64_t present = next_->limit - first;
        if (present <= 0) return {{nullptr, next_->dtype}, in_row};
        uint8_t *data = static_cast<uint8_t *>(next_->data) + first * size_of(next_->dtype);
        return {{data, next_->dtype}, present < in_row ? present : in_row};
    }

    /* Elements in the row that this is in; rows without gaps are one. */
    int64_t row_length() const { return columns_; }

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
            if (rows_ == 0 || columns_ == 0) continue;
            if (rows_ == 1 || next_->row_stride == columns_) {
                columns_ *= rows_;
                rows_ = 1;
            }
            return;
        }
    }

    const zt_piece *next_;
    const zt_piece *end_;
    int64_t rows_ = 0, columns_ = 0, row_ = 0, column_ = 0;
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

/* The next n elements, copied as they are or as FP32; zeros where none exist or the pieces end. */
inline void gather(const Kernels &kernels, Cursor &cursor, int64_t n, Elements out) {
    const int64_t size = size_of(out.dtype);
    while (n > 0) {
        const Run run = cursor.run();
        const int64_t now = run.count == 0 || run.count > n ? n : run.count;
        if (!run.elements.data)
            memset(out.data, 0, static_cast<size_t>(now * size));
        else if (run.elements.dtype == out.dtype)
            memcpy(out.data, run.elements.data, static_cast<size_t>(now * size));
        else
            kernels.widen(run.elements, now, out.data);
        if (run.count) cursor.advance(now);
        out.data += now * size;
        n -= now;
    }
}

/* Into the next n elements, as they are or rounded from FP32; those that do not exist are left out. */
inline void scatter(const Kernels &kernels, Cursor &cursor, int64_t n, Elements x, bool stream) {
    const int64_t size = size_of(x.dtype);
    while (n > 0 && !cursor.at_end()) {
        const Run run = cursor.run();
        const int64_t now = run.count > n ? n : run.count;
        if (run.elements.data && run.elements.dtype != x.dtype)
            kernels.narrow(x.data, now, run.elements);
        else if (run.elements.data && stream)
            kernels.stream(x.data, now * size, run.elements.data);
        else if (run.elements.data)
            memcpy(run.elements.data, x.data, static_cast<size_t>(now * size));
        cursor.advance(now);
        x.data += now * size;
        n -= now;
    }
}

}  // namespace zt

#endif /* ZT_CPU_PIECES_H */
