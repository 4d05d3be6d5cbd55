/* Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
 *
 * AgedAdamW's update (zero_topo/sync/optimizers.py) on CPUs, in one pass. Operations and their order are those of torch,
 * where lerp and addcmul fuse a product and a sum. Mostly few elements arrive, and the others only age and decay.
 */
#include <cmath>

#include "zt_cpu_checks.h"

using namespace zt;

namespace {

constexpr int64_t kTogether = 64;

/* One element that arrives after `steps` steps. */
void update(const zt_aged &a, int64_t i, int steps) {
    const float *const factors = a.table + steps;
    const float g = a.g[i], change = g - a.mean[i];
    const float mean = a.weight < 0.5f ? std::fma(a.weight, change, a.mean[i]) : std::fma(a.weight - 1.0f, change, g);
    a.square[i] = std::fma(factors[ZT_AGES] * g, g, a.square[i] * factors[0]);
    const float norm = std::sqrt(a.square[i]) / a.correction + a.eps;
    /* A sum of several steps moves the weight at once by all that is in the momentum. */
    a.p[i] += (steps > 1 ? a.whole : a.rate) * mean / norm;
    a.mean[i] = steps > 1 ? 0.0f : mean;
}

}  // namespace

extern "C" int zt_cpu_aged_adamw(zt_aged a, zt_range elements) {
    if (a.n < 0 || a.n > kMost || (a.n > 0 && (!a.p || !a.g || !a.mean || !a.square || !a.age || !a.table)))
        return ZT_BAD_SIZE;
    if (!inside(elements, a.n)) return ZT_BAD_RANGE;
    for (int64_t first = elements.begin; first < elements.end; first += kTogether) {
        const int64_t n = elements.end - first < kTogether ? elements.end - first : kTogether;
        uint8_t arrived[kTogether] = {}, steps[kTogether];
        for (int64_t i = 0; i < n; ++i) {
            arrived[i] = a.g[first + i] != 0.0f; /* NaN arrives */
            steps[i] = a.age[first + i];
            a.age[first + i] = static_cast<uint8_t>(arrived[i] ? 0 : steps[i] < 255 ? steps[i] + 1 : 255);
            a.p[first + i] *= a.decay;
        }
        for (int64_t byte = 0; byte < n; byte += 8) {
            uint64_t left;
            memcpy(&left, arrived + byte, 8);
            for (; left; left &= left - 1) {
                const int64_t i = byte + __builtin_ctzll(left) / 8;
                update(a, first + i, steps[i] + 1);
            }
        }
    }
    return ZT_OK;
}
