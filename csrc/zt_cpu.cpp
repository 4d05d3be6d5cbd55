/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * Block quantization on CPUs: checks the arguments, chooses the instruction set, and hands blocks to the inner loops as
 * Note [Runs and buffers] says.
 */
#include "zt_cpu_casts.h"
#include "zt_cpu_checks.h"

#if ZT_X86
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace zt {

namespace {

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

int limit = ZT_AVX512;

int best_level() {
#if ZT_X86
    static const int best = has_avx512() ? ZT_AVX512 : has_avx2() ? ZT_AVX2 : ZT_SCALAR;
    return best < limit ? best : limit;
#else
    return ZT_SCALAR;
#endif
}

/* Zeros where no block lies: they cross the wire, and equal tensors have equal messages. */
void clear_padding(zt_wire_spec spec, int64_t numel, uint8_t *message) {
    const int64_t blocks = zt_wire_blocks(spec, numel);
    const int64_t scales = zt_wire_scales_offset(spec, numel);
    const int64_t filled[] = {blocks * zt_wire_block_bytes(spec), scales + zt_wire_scale_bytes(spec) * blocks};
    const int64_t ends[] = {scales, zt_wire_nbytes(spec, numel)};
    for (int i = 0; i < 2; ++i)
        if (ends[i] > filled[i]) memset(message + filled[i], 0, static_cast<size_t>(ends[i] - filled[i]));
}

/* Where the planes of a message go on at a block. */
struct Layout {
    zt_wire_spec spec;
    int64_t scales;
    Layout(zt_wire_spec s, int64_t numel) : spec(s), scales(zt_wire_scales_offset(s, numel)) {}
    Planes at(uint8_t *message, int64_t block) const {
        return {message + block * zt_wire_block_bytes(spec), message + scales + zt_wire_scale_bytes(spec) * block};
    }
};

Terms terms_of(const Layout &layout, const zt_messages &messages, int64_t member, float factor) {
    const int32_t count = messages.sources - (messages.without_source >= 0);
    return {layout.spec, message_of(messages, member), messages.source_step, count, messages.without_source,
            layout.scales, factor};
}

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

void quantize(const Kernels &kernels, const Layout &layout, Cursor cursor, uint8_t *message, zt_range blocks,
              bool stream) {
    const int64_t size = layout.spec.block_size;
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
}

/* Sums -> a message of `numel` values. */
void requantize(const Kernels &kernels, const Terms &terms, const Layout &layout, uint8_t *message, zt_range blocks,
                int64_t numel) {
    const int64_t size = layout.spec.block_size, together = kBuffered / size;
    alignas(64) uint8_t buffer[kBufferBytes];
    const Elements buffered = {buffer, ZT_FP32};
    for (int64_t block = blocks.begin; block < blocks.end; block += together) {
        const int64_t end = block + together < blocks.end ? block + together : blocks.end;
        kernels.sum(terms, {block, end}, buffered, {false, false});
        /* What the padding of the last block stands for is zero, not what its scale makes of zero. */
        const int64_t present = numel - block * size, room = (end - block) * size;
        if (present < room) memset(buffer + 4 * present, 0, static_cast<size_t>(4 * (room - present)));
        kernels.quantize(layout.spec, buffered, end - block, layout.at(message, block), false);
    }
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

}  // namespace zt

using namespace zt;

extern "C" int zt_cpu_best_level(void) { return best_level(); }

extern "C" void zt_cpu_limit(int level) { limit = level == ZT_BEST ? ZT_AVX512 : level; }

extern "C" int zt_cpu_quantize(zt_wire_spec spec, const zt_piece *pieces, int32_t count, zt_messages messages,
                               zt_range blocks, int32_t level) {
    int64_t numel = 0;
    if (!zt_wire_valid(spec)) return ZT_BAD_SPEC;
    ZT_TRY(check_pieces(pieces, count, messages.members, &numel));
    ZT_TRY(check_written(spec, numel, messages));
    ZT_TRY(check_range(spec, numel, messages.members, blocks));
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    const Layout layout(spec, numel);
    const bool large = messages.nbytes * messages.members >= kStreamBytes;
    for_members(zt_wire_blocks(spec, numel), messages, blocks, [&](int64_t member, zt_range own) {
        uint8_t *const message = message_of(messages, member);
        const Cursor cursor(pieces, count, member, own.begin * spec.block_size);
        if (zt_wire_is_cast(spec)) {
            const Elements out = {message + own.begin * (spec.bits / 8), spec.dtype};
            return encode_casts(*chosen, cursor, own.end - own.begin, out, large);
        }
        if (own.begin == 0) clear_padding(spec, numel, message);
        quantize(*chosen, layout, cursor, message, own, large && aligned(message));
    });
    if (large) fence();
    return ZT_OK;
}

extern "C" int zt_cpu_dequantize_reduce(zt_wire_spec spec, zt_messages messages, const zt_piece *pieces, int32_t count,
                                        zt_reduce reduce, zt_range blocks, int32_t level) {
    int64_t numel = 0;
    if (!zt_wire_valid(spec) || (reduce.accumulate != 0 && reduce.accumulate != 1)) return ZT_BAD_SPEC;
    ZT_TRY(check_pieces(pieces, count, messages.members, &numel));
    ZT_TRY(check_messages(spec, numel, messages));
    ZT_TRY(check_range(spec, numel, messages.members, blocks));
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    const Layout layout(spec, numel);
    const Writing how = {reduce.accumulate != 0, 2 * numel * messages.members >= kStreamBytes};
    for_members(zt_wire_blocks(spec, numel), messages, blocks, [&](int64_t member, zt_range own) {
        const Terms terms = terms_of(layout, messages, member, reduce.factor);
        const Cursor cursor(pieces, count, member, own.begin * spec.block_size);
        (zt_wire_is_cast(spec) ? sum_casts : sum)(*chosen, terms, cursor, own, how);
    });
    if (how.stream) fence();
    return ZT_OK;
}

extern "C" int zt_cpu_requantize(zt_wire_spec from, zt_messages messages, zt_wire_spec to, zt_messages out,
                                 int64_t numel, zt_reduce reduce, zt_range blocks, int32_t level) {
    if (!zt_wire_valid(from) || !zt_wire_valid(to) || from.block_size != to.block_size) return ZT_BAD_SPEC;
    if (from.dtype != to.dtype || reduce.accumulate != 0) return ZT_BAD_SPEC;
    if (numel < 0 || numel > kMost || messages.members != out.members) return ZT_BAD_SIZE;
    ZT_TRY(check_messages(from, numel, messages));
    ZT_TRY(check_written(to, numel, out));
    ZT_TRY(check_range(to, numel, out.members, blocks));
    const Kernels *chosen = kernels(level);
    if (!chosen) return ZT_BAD_LEVEL;
    const Layout layout(to, numel), source(from, numel);
    for_members(zt_wire_blocks(to, numel), out, blocks, [&](int64_t member, zt_range own) {
        const Terms terms = terms_of(source, messages, member, reduce.factor);
        uint8_t *const message = message_of(out, member);
        if (zt_wire_is_cast(to)) {
            const zt_piece whole = {message, 1, numel, numel, numel, 0, numel, to.dtype};
            return sum_casts(*chosen, terms, Cursor(&whole, 1, 0, own.begin), own, {false, false});
        }
        if (own.begin == 0) clear_padding(to, numel, message);
        requantize(*chosen, terms, layout, message, own, numel);
    });
    return ZT_OK;
}
