/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * What the GPU kernels need that CUDA and HIP spell differently, once for each and once for the emulation on a CPU
 * (zt_gpu_emulation.h, for any other C++ compiler). No kernel asks which of the three it runs on.
 *
 * Lanes. Collectives work within aligned groups of `width` <= 32 lanes, on wavefronts of 32 and of 64 alike. Every lane
 * of the 32 reaches them together.
 *
 * Arithmetic. Each zt_add, zt_sub, zt_mul, zt_div is one FP32 rounding to nearest even, denormals kept, whatever the
 * compiler was told about contraction; with nvcc not even its fast-math makes a difference, elsewhere that is refused.
 */
#ifndef ZT_GPU_PORTABLE_H
#define ZT_GPU_PORTABLE_H

#include <string.h>

#if defined(__HIPCC__)
#include <hip/hip_runtime.h>
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include "zt_gpu_emulation.h"
#endif

#include "zt_kernels.h"

#if defined(__FAST_MATH__)
#error "zero_topo's kernels give the same bits everywhere: compile without fast-math"
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "zero_topo's kernels need an NVIDIA GPU of compute capability 8.0 or higher"
#endif

#if defined(__clang__)
#pragma clang fp contract(off)
#endif

#define ZT_METHOD __device__ __forceinline__
#define ZT_DEVICE static ZT_METHOD
#define ZT_THREADS 256 /* of every thread block but where said otherwise */

#if defined(__CUDACC__) && !defined(__HIPCC__)
#define ZT_KERNEL(...) static __global__ void __launch_bounds__(__VA_ARGS__)
#define ZT_ARGUMENTS const __grid_constant__ /* read where the driver put them, also with a computed index */
#else
#define ZT_KERNEL(...) static __global__ __launch_bounds__(__VA_ARGS__) void
#define ZT_ARGUMENTS const
#endif

/* Whether instructions have a kernel's arguments as operands. AMD's load them into scalar registers, of which few are left
 * and which add up at no cost. */
#if defined(__HIPCC__)
constexpr bool zt_arguments_are_operands = false;
#else
constexpr bool zt_arguments_are_operands = true;
#endif

/* Messages of four bits a value that a lane reads before it adds them up: as many as registers hold. */
#if defined(__HIPCC__)
constexpr int zt_messages_ahead = 4;
#else
constexpr int zt_messages_ahead = 8;
#endif

/* -- Launching ----------------------------------------------------------------------------------------------------- */

/* The status of a call of the runtime. Its error is cleared: it is reported here, so not again by whoever asks next. */
#if defined(__HIPCC__)
static inline int zt_status_of(hipError_t error) {
    if (error == hipSuccess) return ZT_OK;
    (void)hipGetLastError();
    return ZT_LAUNCH_FAILED + 256 * (int)error;
}
#elif defined(__CUDACC__)
static inline int zt_status_of(cudaError_t error) {
    if (error == cudaSuccess) return ZT_OK;
    (void)cudaGetLastError();
    return ZT_LAUNCH_FAILED + 256 * (int)error;
}
#endif

/* How many it takes when each does `each` of n. */
ZT_WIRE_FN int64_t zt_blocks_for(int64_t n, int64_t each) { return (n + each - 1) / each; }

/* Blocks in one launch; kernels walk on with the grid's stride, so that fewer do the same work. And tiles that are left
 * to share out when a thread block takes several at once. */
#if defined(__CUDACC__) || defined(__HIPCC__)
static inline int64_t zt_most_blocks(void) { return (int64_t)1 << 20; }
static inline int64_t zt_shared_tiles(void) { return (int64_t)1 << 12; }
#else
static inline int64_t zt_most_blocks(void) { return zt_emulation_machine().most_blocks; }
static inline int64_t zt_shared_tiles(void) { return zt_emulation_machine().shared_tiles; }
#endif

template <typename Arguments>
static int zt_launch(void (*kernel)(Arguments), int64_t blocks, int threads, Arguments arguments, void *stream) {
    if (blocks == 0) return ZT_OK;
    const unsigned grid = (unsigned)(blocks < zt_most_blocks() ? blocks : zt_most_blocks());
    void *list[] = {&arguments};
#if defined(__HIPCC__)
    return zt_status_of(hipLaunchKernel((const void *)kernel, dim3(grid), dim3(threads), list, 0, (hipStream_t)stream));
#elif defined(__CUDACC__)
    return zt_status_of(cudaLaunchKernel((const void *)kernel, dim3(grid), dim3(threads), list, 0, (cudaStream_t)stream));
#else
    (void)list, (void)stream;
    return zt_emulation_run([&] { kernel(arguments); }, grid, threads) ? ZT_OK : ZT_LAUNCH_FAILED;
#endif
}

static inline int zt_clear(void *data, int64_t nbytes, void *stream) {
#if defined(__HIPCC__)
    return zt_status_of(hipMemsetAsync(data, 0, (size_t)nbytes, (hipStream_t)stream));
#elif defined(__CUDACC__)
    return zt_status_of(cudaMemsetAsync(data, 0, (size_t)nbytes, (cudaStream_t)stream));
#else
    (void)stream;
    memset(data, 0, (size_t)nbytes);
    return ZT_OK;
#endif
}

/* -- Collectives of aligned groups of `width` lanes, a power of two up to 32 --------------------------------------- */

#if defined(__HIPCC__)
ZT_DEVICE uint32_t zt_shuffle(uint32_t value, int lane, int width) { return __shfl((int)value, lane, width); }
ZT_DEVICE uint32_t zt_shuffle_xor(uint32_t value, int mask, int width) { return __shfl_xor((int)value, mask, width); }
ZT_DEVICE uint32_t zt_shuffle_up(uint32_t value, int by, int width) { return __shfl_up((int)value, by, width); }
/* One bit for each of this lane's 32. */
ZT_DEVICE uint32_t zt_ballot(int predicate) { return (uint32_t)(__ballot(predicate) >> (__lane_id() & 32)); }
#elif defined(__CUDACC__)
#define ZT_ALL_LANES 0xffffffffu
ZT_DEVICE uint32_t zt_shuffle(uint32_t value, int lane, int width) {
    return __shfl_sync(ZT_ALL_LANES, value, lane, width);
}
ZT_DEVICE uint32_t zt_shuffle_xor(uint32_t value, int mask, int width) {
    return __shfl_xor_sync(ZT_ALL_LANES, value, mask, width);
}
ZT_DEVICE uint32_t zt_shuffle_up(uint32_t value, int by, int width) {
    return __shfl_up_sync(ZT_ALL_LANES, value, (unsigned)by, width);
}
ZT_DEVICE uint32_t zt_ballot(int predicate) { return __ballot_sync(ZT_ALL_LANES, predicate); }
#endif

/* The sum of the values of the threads before this one; *total is that of all. `shared` has a place for each 32. */
ZT_DEVICE uint32_t zt_scan(uint32_t value, uint32_t *shared, uint32_t *total) {
    const int lane = threadIdx.x & 31, group = threadIdx.x >> 5;
    uint32_t sum = value;
    for (int by = 1; by < 32; by *= 2) {
        const uint32_t other = zt_shuffle_up(sum, by, 32);
        if (lane >= by) sum += other;
    }
    if (lane == 31) shared[group] = sum;
    __syncthreads();
    uint32_t before = 0, all = 0;
    for (int g = 0; g < ZT_THREADS / 32; g++) {
        if (g < group) before += shared[g];
        all += shared[g];
    }
    __syncthreads(); /* the next call may write */
    *total = all;
    return before + sum - value;
}

/* -- Arithmetic ---------------------------------------------------------------------------------------------------- */

#if defined(__CUDA_ARCH__)
/* Not the intrinsics: nvcc's -ftz=true would make those flush denormals. */
#define ZT_ARITHMETIC(name, instruction)                                                                               \
    ZT_DEVICE float name(float a, float b) {                                                                           \
        float out;                                                                                                     \
        asm(instruction ".rn.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));                                           \
        return out;                                                                                                    \
    }
ZT_ARITHMETIC(zt_add, "add")
ZT_ARITHMETIC(zt_sub, "sub")
ZT_ARITHMETIC(zt_mul, "mul")
ZT_ARITHMETIC(zt_div, "div")
ZT_DEVICE float zt_sqrt(float x) {
    float out;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
#else
ZT_DEVICE float zt_add(float a, float b) { return a + b; }
ZT_DEVICE float zt_sub(float a, float b) { return a - b; }
ZT_DEVICE float zt_mul(float a, float b) { return a * b; }
ZT_DEVICE float zt_div(float a, float b) { return a / b; }
ZT_DEVICE float zt_sqrt(float x) { return __builtin_sqrtf(x); }
#endif
ZT_DEVICE float zt_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

/* The bits of `word` in `mask`, those of `flip` among them inverted, and the bits of `rest`, which are not in `mask`.
 * In one instruction: nvcc has to be told; AMD's, which has no such xor, shares the inversion among a word's masks. */
ZT_DEVICE uint32_t zt_masked(uint32_t word, uint32_t mask, uint32_t flip, uint32_t rest) {
#if defined(__CUDA_ARCH__)
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(out) : "r"(word), "r"(mask), "r"((flip & mask) ^ rest));
    return out;
#else
    return ((word ^ flip) & mask) | rest;
#endif
}

/* A constant, on AMD's GPUs in a vector register: there are few scalar ones. */
template <typename T> ZT_DEVICE T zt_in_lane(T constant) {
#if defined(__HIP_DEVICE_COMPILE__)
    asm("" : "+v"(constant));
#endif
    return constant;
}

/* A value that stays in its registers: nvcc would rather compute it again wherever it is used. */
ZT_DEVICE int32_t zt_kept(int32_t value) {
#if defined(__CUDA_ARCH__)
    asm("" : "+r"(value));
#endif
    return value;
}
ZT_DEVICE int64_t zt_kept(int64_t value) {
#if defined(__CUDA_ARCH__)
    asm("" : "+l"(value));
#endif
    return value;
}

/* Of the eight bytes of two words those with the numbers in the four lower nibbles of `which`, 0 to 7. */
ZT_DEVICE uint32_t zt_bytes(uint32_t low, uint32_t high, uint32_t which) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(low, high, which);
#else
    uint32_t each = (which | which << 8) & 0x00ff00ffu; /* nibbles -> bytes */
    each = (each | each << 4) & 0x0f0f0f0fu;
#if defined(__HIP_DEVICE_COMPILE__)
    return __builtin_amdgcn_perm(high, low, each);
#else
    const uint64_t both = (uint64_t)high << 32 | low;
    uint32_t out = 0;
    for (int shift = 0; shift < 32; shift += 8) out |= (uint32_t)(both >> (each >> shift & 7) * 8 & 255) << shift;
    return out;
#endif
#endif
}

/* The word that begins at bit `shift` < 32 of two. */
ZT_DEVICE uint32_t zt_funnel(uint32_t low, uint32_t high, int shift) {
#if defined(__CUDA_ARCH__)
    return __funnelshift_r(low, high, (unsigned)shift);
#else
    return (uint32_t)(((uint64_t)high << 32 | low) >> shift);
#endif
}

template <typename To, typename From> ZT_WIRE_FN To zt_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "another type of the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

/* The least integer that is not below x, |x| < 2^21, in the low bits. */
ZT_DEVICE uint32_t zt_ceil_bits(float x) {
#if defined(__CUDA_ARCH__)
    return zt_bits<uint32_t>(__fadd_ru(x, 12582912.0f));
#else
    return zt_bits<uint32_t>(zt_add(__builtin_ceilf(x), 12582912.0f));
#endif
}

/* -- Sixteen-bit floats, two in a word: the first in the low half -------------------------------------------------- */

ZT_DEVICE float zt_from_bf16(uint32_t bits) { return zt_bits<float>(bits << 16); }

#if defined(__CUDACC__) && !defined(__HIPCC__)
ZT_DEVICE float zt_from_fp16(uint32_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}
ZT_DEVICE uint32_t zt_to_fp16x2(float first, float second) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
ZT_DEVICE uint32_t zt_to_bf16x2(float first, float second) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
#else
ZT_DEVICE float zt_from_fp16(uint32_t bits) { return (float)zt_bits<_Float16>((uint16_t)bits); }
ZT_DEVICE uint32_t zt_to_fp16x2(float first, float second) {
    return zt_bits<uint16_t>((_Float16)first) | (uint32_t)zt_bits<uint16_t>((_Float16)second) << 16;
}
ZT_DEVICE uint32_t zt_to_bf16(float value) {
    const uint32_t bits = zt_bits<uint32_t>(value);
    return value != value ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
ZT_DEVICE uint32_t zt_to_bf16x2(float first, float second) { return zt_to_bf16(first) | zt_to_bf16(second) << 16; }
#endif

/* The larger ones of two pairs of such floats, of which none is negative. A NaN is larger than any number. */
template <int DTYPE> ZT_DEVICE uint32_t zt_larger_two(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t larger;
    if (DTYPE == ZT_BF16)
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    else
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#elif defined(__HIP_DEVICE_COMPILE__)
    typedef uint16_t two __attribute__((ext_vector_type(2)));
    return zt_bits<uint32_t>(__builtin_elementwise_max(zt_bits<two>(a), zt_bits<two>(b)));
#else
    const uint32_t low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
    const uint32_t high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
    return high << 16 | low;
#endif
}

/* The larger of two sizes of numbers. A NaN is larger than any. */
ZT_DEVICE float zt_larger(float a, float b) {
#if defined(__CUDA_ARCH__)
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
    return larger;
#else
    const uint32_t left = zt_bits<uint32_t>(a) & 0x7fffffffu, right = zt_bits<uint32_t>(b) & 0x7fffffffu;
    return zt_bits<float>(left > right ? left : right);
#endif
}

/* `sum` and how far each of four bytes is from that of another word. */
ZT_DEVICE uint32_t zt_apart(uint32_t a, uint32_t b, uint32_t sum) {
#if defined(__CUDA_ARCH__)
    asm("vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(sum));
#elif defined(__HIP_DEVICE_COMPILE__)
    sum = __builtin_amdgcn_sad_u8(a, b, sum);
#else
    for (int shift = 0; shift < 32; shift += 8) {
        const int apart = (int)(a >> shift & 255) - (int)(b >> shift & 255);
        sum += (uint32_t)(apart < 0 ? -apart : apart);
    }
#endif
    return sum;
}

/* -- Device memory. Everything is read once or twice: loads ask not to stay in the caches -------------------------- */

#if defined(__CUDACC__) && !defined(__HIPCC__)
template <typename T> ZT_DEVICE T zt_load(const void *from) { return __ldcs((const T *)from); }
template <typename T> ZT_DEVICE void zt_store(void *to, T value) { __stwb((T *)to, value); }
#elif defined(__HIPCC__)
/* Through pointers to global memory, which only built-in types have: generic ones would take slower instructions. */
#define ZT_GLOBAL __attribute__((address_space(1)))
typedef uint32_t zt_native2 __attribute__((ext_vector_type(2)));
typedef uint32_t zt_native4 __attribute__((ext_vector_type(4)));
template <typename T> ZT_DEVICE T zt_load(const void *from) { return *(const ZT_GLOBAL T *)from; }
template <> __device__ __forceinline__ uint2 zt_load(const void *from) {
    const zt_native2 v = *(const ZT_GLOBAL zt_native2 *)from;
    return make_uint2(v.x, v.y);
}
template <> __device__ __forceinline__ uint4 zt_load(const void *from) {
    const zt_native4 v = *(const ZT_GLOBAL zt_native4 *)from;
    return make_uint4(v.x, v.y, v.z, v.w);
}
template <typename T> ZT_DEVICE void zt_store(void *to, T value) { *(ZT_GLOBAL T *)to = value; }
template <> __device__ __forceinline__ void zt_store(void *to, uint2 v) {
    *(ZT_GLOBAL zt_native2 *)to = zt_native2{v.x, v.y};
}
template <> __device__ __forceinline__ void zt_store(void *to, uint4 v) {
    *(ZT_GLOBAL zt_native4 *)to = zt_native4{v.x, v.y, v.z, v.w};
}
#else
template <typename T> ZT_DEVICE T zt_load(const void *from) {
    T value;
    memcpy(&value, zt_emulation_aligned(from, sizeof value), sizeof value);
    return value;
}
template <typename T> ZT_DEVICE void zt_store(void *to, T value) {
    memcpy(zt_emulation_aligned(to, sizeof value), &value, sizeof value);
}
#endif

/* Eight bytes that many lanes read, so that the caches should keep them. */
template <typename T> ZT_DEVICE T zt_fetch(const T *from) {
    static_assert(sizeof(T) == 8, "eight bytes");
#if defined(__CUDACC__) && !defined(__HIPCC__)
    return zt_bits<T>(__ldg((const uint2 *)from));
#else
    return zt_bits<T>(zt_load<uint2>(from));
#endif
}

ZT_DEVICE int zt_aligned16(const void *p) { return ((uintptr_t)p & 15) == 0; }

#endif /* ZT_GPU_PORTABLE_H */
