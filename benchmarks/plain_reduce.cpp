// Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
//
// The sum of INT4 shards as one writes it first: for each value convert, multiply, add. Once in plain C, a block at a
// time so that the sums stay in cache, for the compiler to vectorize (-O3 -march=native); once in vectors by hand, the
// sums in registers while the sources go by. The bits are those of our kernels: FP32 sums in source order, no fused
// multiply-add (-ffp-contract=off).

#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int kBytes = 16;  // of one source at a time: 32 values, two vectors of 16 sums
typedef int32_t Ints __attribute__((vector_size(4 * kBytes)));
typedef float Floats __attribute__((vector_size(4 * kBytes)));

Ints widen(const uint8_t* packed) {
  Ints wide;
#ifdef __AVX512F__
  __m512i words = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
  std::memcpy(&wide, &words, sizeof wide);
#else
  for (int i = 0; i < kBytes; ++i) wide[i] = static_cast<int8_t>(packed[i]);
#endif
  return wide;
}

struct Job {
  const uint8_t* const* messages;
  int64_t sources, numel, block_size, scales_at;

  float scale(int64_t source, int64_t block) const {
    float x;
    std::memcpy(&x, messages[source] + scales_at + 4 * block, 4);
    return x;
  }
};

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}

template <typename Store>
void in_c(const Job& job, Store store) {
  float even[1024], odd[1024];  // of a block of 2048, the largest
  const int64_t half = job.block_size / 2;
  for (int64_t block = 0; block < job.numel / job.block_size; ++block) {
    std::memset(even, 0, sizeof even);
    std::memset(odd, 0, sizeof odd);
    for (int64_t source = 0; source < job.sources; ++source) {
      const uint8_t* values = job.messages[source] + block * half;
      const float scale = job.scale(source, block);
      for (int64_t i = 0; i < half; ++i) {
        even[i] += static_cast<float>(static_cast<int8_t>(values[i] << 4) >> 4) * scale;
        odd[i] += static_cast<float>(static_cast<int8_t>(values[i]) >> 4) * scale;
      }
    }
    for (int64_t i = 0; i < half; ++i) {
      store(2 * (block * half + i), even[i]);
      store(2 * (block * half + i) + 1, odd[i]);
    }
  }
}

template <typename Store>
void in_vectors(const Job& job, Store store) {
  const Ints low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const int64_t bytes = job.block_size / 2;
  for (int64_t block = 0; block < job.numel / job.block_size; ++block) {
    for (int64_t at = block * bytes; at < (block + 1) * bytes; at += kBytes) {
      Floats even = {}, odd = {};
      for (int64_t source = 0; source < job.sources; ++source) {
        const float scale = job.scale(source, block);
        const Ints wide = widen(job.messages[source] + at);
        even += __builtin_convertvector((wide << 28) >> 28, Floats) * scale;
        odd += __builtin_convertvector(wide >> 4, Floats) * scale;
      }
      store(2 * at, __builtin_shuffle(even, odd, low));
      store(2 * at + kBytes, __builtin_shuffle(even, odd, low + 8));
    }
  }
}

}  // namespace

extern "C" void plain_fp32(Job job, float* out) {
  in_c(job, [out](int64_t i, float x) { out[i] = x; });
}

extern "C" void plain_bf16(Job job, uint16_t* out) {
  in_c(job, [out](int64_t i, float x) { out[i] = to_bf16(x); });
}

extern "C" void vectors_fp32(Job job, float* out) {
  in_vectors(job, [out](int64_t i, Floats sums) { std::memcpy(out + i, &sums, sizeof sums); });
}

extern "C" void vectors_bf16(Job job, uint16_t* out) {
  typedef uint32_t Words __attribute__((vector_size(4 * kBytes)));
  typedef uint16_t Halves __attribute__((vector_size(2 * kBytes)));
  in_vectors(job, [out](int64_t i, Floats sums) {
    Words bits;
    std::memcpy(&bits, &sums, sizeof bits);
    const Halves rounded = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
    std::memcpy(out + i, &rounded, sizeof rounded);
  });
}
