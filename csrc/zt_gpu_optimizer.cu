/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * AgedAdamW's update (zero_topo/sync/optimizers.py) in one pass: 29 bytes an element are read and written. Operations
 * and their order are those of torch on CPUs, where lerp and addcmul fuse a product and a sum.
 */
#include "zt_gpu_memory.h"

#define ZT_AGED_EACH 4    /* elements of a thread whose loads are under way at once */
#define ZT_AGED_ROUNDS 4  /* of a thread block, which loads the table once */
#define ZT_AGED_TILE (ZT_THREADS * ZT_AGED_EACH)

ZT_DEVICE float zt_load_float(const float *from) { return zt_bits<float>(zt_load<uint32_t>(from)); }
ZT_DEVICE void zt_store_float(float *to, float value) { zt_store<uint32_t>(to, zt_bits<uint32_t>(value)); }

/* One element that arrives after `steps` steps; factors are those of the table for as many. */
ZT_DEVICE void zt_aged_update(const zt_aged &a, const float *factors, int steps, float g, float *p, float *mean,
                              float *square) {
    const float change = zt_sub(g, *mean);
    const float new_mean = a.weight < 0.5f ? zt_fma(a.weight, change, *mean)
                                           : zt_fma(zt_sub(a.weight, 1.0f), change, g);
    *square = zt_fma(zt_mul(factors[ZT_AGES], g), g, zt_mul(*square, factors[0]));
    const float norm = zt_add(zt_div(zt_sqrt(*square), a.correction), a.eps);
    *p = zt_add(*p, zt_div(zt_mul(steps > 1 ? a.whole : a.rate, new_mean), norm));
    *mean = steps > 1 ? 0.0f : new_mean;
}

ZT_KERNEL(ZT_THREADS) zt_aged_adamw_kernel(ZT_ARGUMENTS zt_aged a) {
    __shared__ float table[2 * ZT_AGES];
    for (int i = threadIdx.x; i < 2 * ZT_AGES; i += ZT_THREADS) table[i] = zt_load_float(a.table + i);
    __syncthreads();
    const int64_t step = (int64_t)gridDim.x * ZT_AGED_ROUNDS * ZT_AGED_TILE;
    for (int64_t first = (int64_t)blockIdx.x * ZT_AGED_ROUNDS * ZT_AGED_TILE; first < a.n; first += step) {
        for (int round = 0; round < ZT_AGED_ROUNDS; round++) {
            const int64_t begin = first + round * ZT_AGED_TILE + threadIdx.x;
            float p[ZT_AGED_EACH], g[ZT_AGED_EACH], mean[ZT_AGED_EACH], square[ZT_AGED_EACH];
            int age[ZT_AGED_EACH];
#pragma unroll
            for (int k = 0; k < ZT_AGED_EACH; k++) {
                const int64_t i = begin + k * ZT_THREADS;
                if (i >= a.n) continue;
                p[k] = zt_load_float(a.p + i), g[k] = zt_load_float(a.g + i), age[k] = zt_load<uint8_t>(a.age + i);
                mean[k] = zt_load_float(a.mean + i), square[k] = zt_load_float(a.square + i);
            }
#pragma unroll
            for (int k = 0; k < ZT_AGED_EACH; k++) {
                const int64_t i = begin + k * ZT_THREADS;
                if (i >= a.n) continue;
                const bool arrived = g[k] != 0.0f; /* NaN arrives */
                p[k] = zt_mul(p[k], a.decay);
                if (arrived) {
                    zt_aged_update(a, table + age[k] + 1, age[k] + 1, g[k], p + k, mean + k, square + k);
                    zt_store_float(a.mean + i, mean[k]);
                    zt_store_float(a.square + i, square[k]);
                }
                zt_store_float(a.p + i, p[k]);
                zt_store<uint8_t>(a.age + i, (uint8_t)(arrived ? 0 : age[k] < 255 ? age[k] + 1 : 255));
            }
        }
    }
}

const char *zt_gpu_runtime_text(int status) {
#if defined(__HIPCC__)
    return status > 255 ? hipGetErrorString((hipError_t)(status >> 8)) : "";
#elif defined(__CUDACC__)
    return status > 255 ? cudaGetErrorString((cudaError_t)(status >> 8)) : "";
#else
    (void)status;
    return "";
#endif
}

int zt_gpu_aged_adamw(zt_aged a, void *stream) {
    if (a.n < 0 || (a.n > 0 && (!a.p || !a.g || !a.mean || !a.square || !a.age || !a.table))) return ZT_BAD_SIZE;
    if (a.n == 0) return ZT_OK;
    return zt_launch(zt_aged_adamw_kernel, zt_blocks_for(a.n, ZT_AGED_ROUNDS * ZT_AGED_TILE), ZT_THREADS, a, stream);
}
