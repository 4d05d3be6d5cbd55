/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * A GPU for tests: the kernels' source, compiled by an ordinary C++17 compiler, runs on the CPU thread by thread.
 *
 * Each thread of a thread block is a fiber, run until it waits (barrier, shuffle, ballot) or ends; 32 lanes run as far
 * ahead of the others as they may, so that a missing barrier shows. What is emulated are the rules: a collective goes
 * on when all 32 lanes (64 for wider ones) wait at the same line of source with the same arguments, a barrier when the
 * whole thread block does; anything else ends the launch with zt_emulation_error. Wave size (32 or 64) and the order in
 * which fibers run are settings, so that tests see code that depends on either; vector accesses must be aligned.
 * Not emulated: memory ordering, lanes that run at once (a race shows only if an order of fibers makes it matter),
 * speed, a compiler's registers. One launch at a time.
 */
#ifndef ZT_GPU_EMULATION_H
#define ZT_GPU_EMULATION_H

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static /* thread blocks run one after another */
#define __launch_bounds__(...)

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct zt_emulation_index {
    unsigned x;
};

#define ZT_EMULATION_STACK ((size_t)1 << 16)

enum zt_emulation_kind { ZT_RUNNING, ZT_DONE, ZT_BARRIER, ZT_BALLOT, ZT_SHUFFLE, ZT_SHUFFLE_XOR, ZT_SHUFFLE_UP };

/* What a fiber waits at. Lanes meet when these are equal (a plain shuffle's source may differ among them). */
struct zt_emulation_wait {
    zt_emulation_kind kind;
    int line, width, argument;
    bool operator==(const zt_emulation_wait &o) const {
        return kind == o.kind && line == o.line && width == o.width && (kind == ZT_SHUFFLE || argument == o.argument);
    }
};

struct zt_emulation_fiber {
    jmp_buf resume;
    bool started;
    zt_emulation_wait wait;
    uint32_t value;
    uint64_t result;
};

struct zt_emulation_state {
    int wave = 32;
    bool descending = false;              /* the highest thread first */
    int64_t most_blocks = (int64_t)1 << 20;
    int64_t first_block = 0;              /* thread blocks below it are left out: tests of huge messages */
    int64_t shared_tiles = (int64_t)1 << 12; /* zt_shared_tiles */
    char error[160] = "";
    zt_emulation_index block = {0}, grid = {0};
    int thread = 0, threads = 0;
    std::vector<zt_emulation_fiber> fibers; /* kept from launch to launch, with their stacks */
    char *stacks = nullptr;
    std::function<void()> body;
    jmp_buf scheduler;
};

inline zt_emulation_state &zt_emulation_machine() {
    static zt_emulation_state machine;
    return machine;
}

#define threadIdx (zt_emulation_index{(unsigned)zt_emulation_machine().thread})
#define blockIdx (zt_emulation_machine().block)
#define gridDim (zt_emulation_machine().grid)

inline int zt_emulation_lane() { return zt_emulation_machine().thread % zt_emulation_machine().wave; }

inline void zt_emulation_fail(const char *what, int line) {
    zt_emulation_state &m = zt_emulation_machine();
    if (m.error[0]) return;
    snprintf(m.error, sizeof m.error, "block %u thread %d line %d: %s", m.block.x, m.thread, line, what);
}

/* From a fiber to the scheduler and, when what it waits for has come, back. */
inline __attribute__((noinline)) void zt_emulation_yield(zt_emulation_wait wait) {
    zt_emulation_state &m = zt_emulation_machine();
    zt_emulation_fiber &fiber = m.fibers[(size_t)m.thread];
    fiber.wait = wait;
    if (!_setjmp(fiber.resume)) _longjmp(m.scheduler, 1);
}

inline void zt_emulation_main() {
    for (;;) { /* once for each thread block */
        zt_emulation_machine().body();
        zt_emulation_yield({ZT_DONE, 0, 0, 0});
    }
}

inline __attribute__((noinline)) void zt_emulation_resume(int thread) {
    zt_emulation_state &m = zt_emulation_machine();
    zt_emulation_fiber &fiber = m.fibers[(size_t)thread];
    m.thread = thread;
    fiber.wait.kind = ZT_RUNNING;
    if (_setjmp(m.scheduler)) return;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    static ucontext_t context, nowhere;
    getcontext(&context);
    context.uc_stack.ss_sp = m.stacks + ZT_EMULATION_STACK * (size_t)thread;
    context.uc_stack.ss_size = ZT_EMULATION_STACK;
    context.uc_link = nullptr;
    makecontext(&context, zt_emulation_main, 0);
    swapcontext(&nowhere, &context);
}

/* Whether threads [first, first + count) wait at one and the same place. */
inline bool zt_emulation_met(int first, int count) {
    const std::vector<zt_emulation_fiber> &fibers = zt_emulation_machine().fibers;
    if (first + count > zt_emulation_machine().threads) return false;
    for (int i = 1; i < count; i++)
        if (!(fibers[(size_t)(first + i)].wait == fibers[(size_t)first].wait)) return false;
    return true;
}

/* Gives the lanes [first, first + count), who have met, what they asked for. */
inline void zt_emulation_exchange(int first, int count) {
    zt_emulation_fiber *lanes = &zt_emulation_machine().fibers[(size_t)first];
    uint64_t ballot = 0;
    for (int i = 0; i < count; i++) ballot |= (uint64_t)(lanes[i].value != 0) << i;
    for (int i = 0; i < count; i++) {
        const zt_emulation_wait &wait = lanes[i].wait;
        const int base = i & ~(wait.width - 1), within = i & (wait.width - 1), other = within ^ wait.argument;
        int from = i;
        if (wait.kind == ZT_SHUFFLE) from = base + (wait.argument & (wait.width - 1));
        if (wait.kind == ZT_SHUFFLE_XOR && other < wait.width) from = base + other;
        if (wait.kind == ZT_SHUFFLE_UP && within >= wait.argument) from = i - wait.argument;
        lanes[i].result = lanes[from].value;
        /* The other half of a wave of 64 is elsewhere: its bits are nobody's to use. */
        const int shift = first % zt_emulation_machine().wave;
        if (wait.kind == ZT_BALLOT) lanes[i].result = ballot << shift | (shift ? 0xffffffffull : 0xffffffffull << 32);
    }
    for (int i = 0; i < count; i++) lanes[i].wait.kind = ZT_RUNNING;
}

/* Lets `count` lanes go on if they wait at the same collective, and it is one of as many lanes. */
inline bool zt_emulation_release(int first, int count) {
    const zt_emulation_wait &wait = zt_emulation_machine().fibers[(size_t)first].wait;
    if (wait.kind < ZT_BALLOT || (wait.width > 32) != (count > 32) || !zt_emulation_met(first, count)) return false;
    zt_emulation_exchange(first, count);
    return true;
}

/* Lets everybody go on if all wait at the same barrier, or wide groups; false if nobody may. */
inline bool zt_emulation_release_all() {
    zt_emulation_state &m = zt_emulation_machine();
    const bool barrier = m.fibers[0].wait.kind == ZT_BARRIER && zt_emulation_met(0, m.threads);
    for (int i = 0; barrier && i < m.threads; i++) m.fibers[(size_t)i].wait.kind = ZT_RUNNING;
    bool released = barrier;
    for (int first = 0; !barrier && first + 64 <= m.threads; first += 64) released |= zt_emulation_release(first, 64);
    return released;
}

/* Runs 32 lanes until they wait for others: as far ahead of these as the rules allow. */
inline void zt_emulation_advance(int first) {
    zt_emulation_state &m = zt_emulation_machine();
    do {
        for (int i = 0; i < 32; i++) {
            const int thread = first + (m.descending ? 31 - i : i);
            if (m.fibers[(size_t)thread].wait.kind == ZT_RUNNING) zt_emulation_resume(thread);
        }
    } while (zt_emulation_release(first, 32));
}

/* One thread block; false if its threads did not meet. */
inline bool zt_emulation_block() {
    zt_emulation_state &m = zt_emulation_machine();
    for (int i = 0; i < m.threads; i++) m.fibers[(size_t)i].wait.kind = ZT_RUNNING;
    do {
        for (int first = 0; first < m.threads; first += 32)
            zt_emulation_advance(m.descending ? m.threads - 32 - first : first);
    } while (zt_emulation_release_all());
    for (m.thread = 0; m.thread < m.threads; m.thread++) {
        const zt_emulation_wait &wait = m.fibers[(size_t)m.thread].wait;
        if (wait.kind != ZT_DONE) zt_emulation_fail("not every lane came here", wait.line);
    }
    return !m.error[0];
}

inline bool zt_emulation_run(std::function<void()> body, unsigned grid, int threads) {
    zt_emulation_state &m = zt_emulation_machine();
    const int most = 1024, flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!m.stacks) {
        void *stacks = mmap(nullptr, ZT_EMULATION_STACK * most, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (stacks == MAP_FAILED) return false;
        m.stacks = (char *)stacks;
        m.fibers.assign(most, zt_emulation_fiber());
    }
    m.error[0] = 0;
    m.body = body;
    m.grid.x = grid;
    m.threads = threads;
    bool good = threads <= most && threads % 32 == 0;
    for (int64_t block = m.first_block; good && block < (int64_t)grid; block++) {
        m.block.x = (unsigned)block;
        good = zt_emulation_block();
    }
    if (!good) m.fibers.assign(most, zt_emulation_fiber()); /* whoever still waits does so in vain */
    return good;
}

/* -- What kernels call --------------------------------------------------------------------------------------------- */

inline uint64_t zt_emulation_meet(zt_emulation_wait wait, uint32_t value) {
    zt_emulation_state &m = zt_emulation_machine();
    if (wait.width > m.wave || wait.width & (wait.width - 1)) zt_emulation_fail("no such group of lanes", wait.line);
    const int thread = m.thread;
    m.fibers[(size_t)thread].value = value;
    zt_emulation_yield(wait);
    return m.fibers[(size_t)thread].result;
}

inline uint32_t zt_shuffle(uint32_t value, int lane, int width, int line = __builtin_LINE()) {
    return (uint32_t)zt_emulation_meet({ZT_SHUFFLE, line, width, lane}, value);
}
inline uint32_t zt_shuffle_xor(uint32_t value, int mask, int width, int line = __builtin_LINE()) {
    return (uint32_t)zt_emulation_meet({ZT_SHUFFLE_XOR, line, width, mask}, value);
}
inline uint32_t zt_shuffle_up(uint32_t value, int by, int width, int line = __builtin_LINE()) {
    return (uint32_t)zt_emulation_meet({ZT_SHUFFLE_UP, line, width, by}, value);
}
inline uint32_t zt_ballot(int predicate, int line = __builtin_LINE()) {
    return (uint32_t)(zt_emulation_meet({ZT_BALLOT, line, 32, 0}, predicate != 0) >> (zt_emulation_lane() & 32));
}
inline void __syncthreads(int line = __builtin_LINE()) { zt_emulation_yield({ZT_BARRIER, line, 1, 0}); }

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }

inline unsigned atomicAdd(unsigned *to, unsigned value) {
    const unsigned before = *to;
    *to += value;
    return before;
}
inline unsigned long long atomicAdd(unsigned long long *to, unsigned long long value) {
    const unsigned long long before = *to;
    *to += value;
    return before;
}

template <typename T> inline T *zt_emulation_aligned(T *p, size_t nbytes, int line = __builtin_LINE()) {
    if ((uintptr_t)p % nbytes) zt_emulation_fail("a misaligned access", line);
    return p;
}

/* -- What tests call ----------------------------------------------------------------------------------------------- */

extern "C" {
__attribute__((used)) inline void zt_emulation_configure(int wave, int descending, int64_t most_blocks,
                                                         int64_t first_block, int64_t shared_tiles) {
    zt_emulation_state &m = zt_emulation_machine();
    m.wave = wave;
    m.descending = descending != 0;
    m.most_blocks = most_blocks;
    m.first_block = first_block;
    m.shared_tiles = shared_tiles;
}
/* Why the last launch failed, or an empty string. */
__attribute__((used)) inline const char *zt_emulation_error(void) { return zt_emulation_machine().error; }
}

#endif /* ZT_GPU_EMULATION_H */
