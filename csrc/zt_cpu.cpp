/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Block quantization on CPUs: checks the arguments, chooses the instruction set, and hands blocks to the inner loops as
 * Note [Runs and buffers] says.
 */
#include "zt_cpu.h"

#include "zt_cpu_pieces.h"

#if ZT_X86
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace zt {

namespace {

/* Larger numbers of elements are taken for nonsense; sums of sizes below cannot overflow. */
constexpr int64_t kMost = int64_t{1} << 56;
/* Results of at least this many bytes go past the caches: they would not stay there, and need not be read first. */
constexpr int64_t kStreamBytes = int64_t{4} << 20;

#if ZT_X86
bool has_avx2() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

int best_level() {
#if ZT_X86
    static const int best = has_avx512() ? ZT_AVX512 : has_avx2() ? ZT_AVX2 : ZT_SCALAR;
    return best;
#else
    return ZT_SCALAR;
#endif
}

int check_piece(const zt_piece &piece, int64_t *numel) {
    if (piece.dtype != ZT_FP32 && piece.dtype != ZT_FP16 && piece.dtype != ZT_BF16) return ZT_BAD_DTYPE;
    int64_t extent = 0;
    if (piece.rows < 0 || piece.columns < 0 || piece.limit < 0 || piece.limit > kMost) return ZT_BAD_SIZE;
    if (__builtin_mul_overflow(piece.rows, piece.columns, numel) || *numel > kMost) return ZT_BAD_SIZE;
    if (*numel == 0) return ZT_OK;
    if (piece.rows > 1) {
        if (piece.row_stride < piece.columns) return ZT_BAD_SIZE;
        if (__builtin_mul_overflow(piece.rows, piece.row_stride, &extent) || extent > kMost) return ZT_BAD_SIZE;
    }
    return piece.limit > 0 && !piece.data ? ZT_BAD_SIZE : ZT_OK;
}

int check_message(zt_wire_spec spec, int64_t numel, zt_message message) {
    const bool fits = message.nbytes == zt_wire_nbytes(spec, numel) && (message.data || message.nbytes == 0);
    return fits ? ZT_OK : ZT_BAD_SIZE;
}

int check_messages(zt_wire_spec spec, int64_t numel, const zt_message *messages, int32_t count) {
    if (count < 1 || !messages) return ZT_BAD_SIZE;
    for (int32_t i = 0; i < count; ++i)
        if (check_message(spec, numel, messages[i]) != ZT_OK) return ZT_BAD_SIZE;
    return ZT_OK;
}

int check_range(zt_wire_spec spec, int64_t numel, zt_range blocks) {
    const bool inside = 0 <= blocks.begin && blocks.begin <= blocks.end && blocks.end <= zt_wire_blocks(spec, numel);
    return inside ? ZT_OK : ZT_BAD_RANGE;
}

/* Returns from the calling function what is not ZT_OK. */
#define ZT_TRY(expression)                                \
    do {                                                  \
        const int status_of_try = (expression);           \
        if (status_of_try != ZT_OK) return status_of_try; \
    } while (0)

/* Zeros where no block lies: they cross the wire, and equal tensors have equal messages. */
void clear_padding(zt_wire_spec spec, int64_t numel, zt_message message) {
    const int64_t blocks = zt_wire_blocks(spec, numel);
    const int64_t scales = zt_wire_scales_offset(spec, numel), zero_points = zt_wire_zero_points_offset(spec, numel);
    const int64_t filled[] = {blocks * zt_wire_block_bytes(spec), scales + 4 * blocks, zero_points + 4 * blocks};
    const int64_t ends[] = {scales, zero_points, message.nbytes};
    for (int i = 0; i < (spec.symmetric ? 2 : 3); ++i)
        if (ends[i] > filled[i]) memset(message.data + filled[i], 0, static_cast<size_t>(ends[i] - filled[i]));
}

/* Where the planes of a message go on at a block. */
struct Layout {
    zt_wire_spec spec;
    int64_t scales, zero_points;
    Layout(zt_wire_spec s, int64_t numel)
        : spec(s), scales(zt_wire_scales_offset(s, numel)), zero_points(zt_wire_zero_points_offset(s, numel)) {}
    Planes at(zt_message message, int64_t block) const {
        uint8_t *zeros = spec.symmetric ? nullptr : message.data + zero_points + 4 * block;
        return {message.data + block * zt_wire_block_bytes(spec), message.data + scales + 4 * block, zeros};
    }
    Terms terms(const zt_message *messages, int32_t count, float factor) const {
        return {spec, messages, count, scales, zero_points, factor};
    }
};

/* Other threads see what went past the caches before whatever this one does next. */
void fence() {
#if ZT_X86
    _mm_sfence();
#endif
}

bool aligned(const void *data) { return reinterpret_cast<uintptr_t>(data) % 64 == 0; }

/* Note [Runs and buffers]
 *     Whole blocks of a run go between a message and memory directly; a block that straddles runs, by way of a buffer
 *     in the first cache. Past the caches only whole aligned lines can be written, so results for other addresses, and
 *     for short rows, are made in the buffer too and then copied. Lines that are written in part are fetched
 *     beforehand: until they have come, no later store is done.
 */
constexpr int64_t kBufferBytes = 16384;
constexpr int64_t kLongRow = 8192;

/* How many of the blocks to handle next, and whether directly. */
struct Step {
    int64_t blocks;
    bool direct;
};

Step next_step(const Cursor &cursor, int64_t size, int64_t left, bool stream) {
    const Run run = cursor.run();
    const int64_t whole = run.count / size < left ? run.count / size : left;
    const int64_t together = kBufferBytes / (size * 4) < left ? kBufferBytes / (size * 4) : left;
    if (!stream) {
        if (whole && run.elements.data) return {whole, true};
        return {cursor.row_length() >= size && run.elements.data ? 1 : together, false};
    }
    const bool is_long = cursor.row_length() * size_of(run.elements.dtype) >= kLongRow && aligned(run.elements.data);
    if (whole && run.elements.data && is_long) return {whole, true};
    return {is_long ? 1 : together, false};
}

void quantize(const Kernels &kernels, const Layout &layout, Cursor cursor, zt_message message, zt_range blocks) {
    const int64_t size = layout.spec.block_size;
    const bool stream = message.nbytes >= kStreamBytes && aligned(message.data);
    alignas(64) uint8_t buffer[kBufferBytes];
    for (int64_t block = blocks.begin; block < blocks.end;) {
        const Step step = next_step(cursor, size, blocks.end - block, false);
        Elements x = cursor.run().elements;
        if (step.direct) {
            cursor.advance(step.blocks * size);
        } else {
            x = {buffer, dtype_of_next(cursor, step.blocks * size)};
            gather(kernels, cursor, step.blocks * size, x);
        }
        kernels.quantize(layout.spec, x, step.blocks, layout.at(message, block), stream);
        block += step.blocks;
    }
    if (stream) fence();
}

void sum(const Kernels &kernels, const Terms &terms, Cursor cursor, zt_range blocks, Writing how) {
    const int64_t size = terms.spec.block_size;
    alignas(64) uint8_t buffer[kBufferBytes];
    for (int64_t block = blocks.begin; block < blocks.end;) {
        const Step step = next_step(cursor, size, blocks.end - block, how.stream);
        const zt_range now = {block, block + step.blocks};
        if (step.direct) {
            kernels.sum(terms, now, cursor.run().elements, how);
            cursor.advance(step.blocks * size);
        } else {
            const int64_t n = step.blocks * size;
            const Elements x = {buffer, dtype_of_next(cursor, n)};
            Cursor there = cursor;
            if (how.stream) prefetch_edges(cursor, 2 * n);
            if (how.accumulate) gather(kernels, there, n, x);
            kernels.sum(terms, now, x, {how.accumulate, false});
            scatter(kernels, cursor, n, x, how.stream);
        }
        block = now.end;
    }
    if (how.stream) fence();
}

}  // namespace

const Kernels *kernels(int32_t level) {
    if (level < ZT_BEST || level > best_level()) return nullptr;
#if ZT_X86
    const int chosen = level == ZT_BEST ? best_level() : level;
    return chosen == ZT_AVX512 ? &kAvx512 : chosen == ZT_AVX2 ? &kAvx2 : &kScalar;
#else
    return &kScalar;
#endif
}

int checked(const zt_piece *pieces, int32_t count, int64_t *numel) {
    *numel = 0;
    if (count < 0 || (count > 0 && !pieces)) return ZT_BAD_SIZE;
    for (int32_t i = 0; i < count; ++i) {
        int64_t of_piece = 0;
        ZT_TRY(check_piece(pieces[i], &of_piece));
        *numel += of_piece;
        if (*numel > kMost) return ZT_BAD_SIZE;
    }
    return ZT_OK;
}

}  // namespace zt

using namespace zt;

extern "C" int zt_cpu_best_level(void) { return best_level(); }

extern "C" int zt_cpu_quantize(zt_wire_spec spec, const zt_piece *pieces, int32_t count, zt_message message,
                               zt_range blocks, int32_t level) {
    int64_t numel = 0;
    if (!zt_wire_valid(spec)) return ZT_BAD_SPEC;
    ZT_TRY(checked(pieces, count, &numel));
    ZT_TRY(check_message(spec, numel, message));
    ZT_TRY(check_range(spec, numel, blocks));
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    if (blocks.begin == 0) clear_padding(spec, numel, message);
    quantize(*chosen, Layout(spec, numel), Cursor(pieces, count, blocks.begin * spec.block_size), message, blocks);
    return ZT_OK;
}

extern "C" int zt_cpu_dequantize(zt_wire_spec spec, zt_message message, const zt_piece *pieces, int32_t count,
                                 zt_range blocks, int32_t level) {
    return zt_cpu_dequantize_reduce(spec, &message, 1, pieces, count, {1.0f, 0}, blocks, level);
}

extern "C" int zt_cpu_dequantize_reduce(zt_wire_spec spec, const zt_message *messages, int32_t sources,
                                        const zt_piece *pieces, int32_t count, zt_reduce reduce, zt_range blocks,
                                        int32_t level) {
    int64_t numel = 0;
    if (!zt_wire_valid(spec) || (reduce.accumulate != 0 && reduce.accumulate != 1)) return ZT_BAD_SPEC;
    ZT_TRY(checked(pieces, count, &numel));
    ZT_TRY(check_messages(spec, numel, messages, sources));
    ZT_TRY(check_range(spec, numel, blocks));
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    const Terms terms = Layout(spec, numel).terms(messages, sources, reduce.factor);
    const Writing how = {reduce.accumulate != 0, 2 * numel >= kStreamBytes};
    sum(*chosen, terms, Cursor(pieces, count, blocks.begin * spec.block_size), blocks, how);
    return ZT_OK;
}

extern "C" int zt_cpu_requantize(zt_wire_spec from, const zt_message *messages, int32_t sources, zt_wire_spec to,
                                 zt_message message, int64_t numel, zt_reduce reduce, zt_range blocks, int32_t level) {
    if (!zt_wire_valid(from) || !zt_wire_valid(to) || from.block_size != to.block_size) return ZT_BAD_SPEC;
    if (from.symmetric != to.symmetric || reduce.accumulate != 0) return ZT_BAD_SPEC;
    if (numel < 0 || numel > kMost) return ZT_BAD_SIZE;
    ZT_TRY(check_messages(from, numel, messages, sources));
    ZT_TRY(check_message(to, numel, message));
    ZT_TRY(check_range(to, numel, blocks));
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    if (blocks.begin == 0) clear_padding(to, numel, message);
    const Terms terms = Layout(from, numel).terms(messages, sources, reduce.factor);
    const Layout layout(to, numel);
    const int64_t size = to.block_size, together = kBufferBytes / (4 * size);
    alignas(64) uint8_t buffer[kBufferBytes];
    const Elements buffered = {buffer, ZT_FP32};
    for (int64_t block = blocks.begin; block < blocks.end; block += together) {
        const int64_t end = block + together < blocks.end ? block + together : blocks.end;
        chosen->sum(terms, {block, end}, buffered, {false, false});
        /* What the padding of the last block stands for is zero, not what its scale makes of zero. */
        const int64_t present = numel - block * size, room = (end - block) * size;
        if (present < room) memset(buffer + 4 * present, 0, static_cast<size_t>(4 * (room - present)));
        chosen->quantize(to, buffered, end - block, layout.at(message, block), false);
    }
    return ZT_OK;
}
