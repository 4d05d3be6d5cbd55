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

/* The next n elements as FP32, zeros where none exist or the pieces end. */
inline void gather(const Kernels &kernels, Cursor &cursor, int64_t n, float *out) {
    while (n > 0) {
        const Run run = cursor.run();
        const int64_t now = run.count == 0 || run.count > n ? n : run.count;
        if (run.elements.data)
            kernels.widen(run.elements, now, out);
        else
            memset(out, 0, static_cast<size_t>(4 * now));
        if (run.count) cursor.advance(now);
        out += now;
        n -= now;
    }
}

/* FP32 -> the next n elements, rounded to their dtypes; those that do not exist are left out. */
inline void scatter(const Kernels &kernels, Cursor &cursor, int64_t n, const float *x) {
    while (n > 0 && !cursor.at_end()) {
        const Run run = cursor.run();
        const int64_t now = run.count > n ? n : run.count;
        if (run.elements.data) kernels.narrow(x, now, run.elements);
        cursor.advance(now);
        x += now;
        n -= now;
    }
}

}  // namespace zt

#endif /* ZT_CPU_PIECES_H */
