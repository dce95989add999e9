// KV in int8: a code for each element and a bfloat16 scale for each vector; decision 52.

#pragma once

#include <algorithm>
#include <cstring>

#include "kv.hpp"
#include "op.hpp"
#include "vectors.hpp"

namespace {

constexpr bf16 NOT_A_NUMBER = 0x7fc0, SMALLEST_SCALE = 0x0080;  // 2^-126: its reciprocal is finite

// Bits of the largest magnitude of n bfloat16 numbers, n a multiple of 32. Above 0x7f7f it is not finite.
inline bf16 largest(const bf16* x, int64_t n) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 32)
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
  most = _mm512_max_epu16(most, _mm512_srli_epi32(most, 16));
  return bf16(_mm512_reduce_max_epu32(_mm512_and_si512(most, _mm512_set1_epi32(0xffff))));
}

// A vector of D elements as codes from -127 to 127 times a scale. One that is not finite gets the scale NaN.
inline void narrow_vector(const bf16* x, int64_t D, int8_t* codes, bf16* scale) {
  bf16 most = largest(x, D);
  if (most > 0x7f7f) {
    std::memset(codes, 0, D);
    *scale = NOT_A_NUMBER;
    return;
  }
  *scale = std::max(narrow(widen(most) / 127.0f), SMALLEST_SCALE);
  const __m512 by = _mm512_set1_ps(1.0f / widen(*scale));
  for (int64_t d = 0; d < D; d += 16) {
    __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(widen16(x + d), by));
    code = _mm512_max_epi32(_mm512_set1_epi32(-127), _mm512_min_epi32(_mm512_set1_epi32(127), code));
    _mm_storeu_si128((__m128i*)(codes + d), _mm512_cvtepi32_epi8(code));
  }
}

inline void write_kv(const PoolView<int8_t>& kv, const int32_t* table, int64_t h, int64_t position, const bf16* key,
                     const bf16* value) {
  auto write = [&](int8_t* base, const bf16* x) {
    narrow_vector(x, kv.head_dim, kv.at(base, table, h, position), kv.scale(base, table, h, position));
  };
  write(kv.keys, key);
  write(kv.values, value);
}

// Scales of the next `count` positions of a block, at most 16.
inline __m512 scales16(const bf16* scales, int64_t count) {
  __m256i bits = _mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), scales);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// A query head in 15 bits, as two int8 vectors: scale * (128 * high + low), each padded with zeros to whole vectors.
// Its rounding is far below that of the keys, and the products are exact in int32.
struct NarrowQuery {
  const int8_t *high, *low;
  int32_t offset;  // 128 times the sum of the elements
  float scale;
};

inline int64_t padded_query(int64_t D) { return (D + 63) / 64 * 64; }

// `codes` has room for 2 * padded_query(D).
inline NarrowQuery narrow_query(const bf16* x, int64_t D, int8_t* codes) {
  int64_t padded = padded_query(D);
  NarrowQuery q{codes, codes + padded, 0, 0};
  std::memset(codes, 0, 2 * padded);
  bf16 most = largest(x, D);
  q.scale = most > 0x7f7f ? widen(NOT_A_NUMBER) : std::max(widen(most) / 16256.0f, widen(SMALLEST_SCALE));
  if (most > 0x7f7f) return q;
  const __m512 by = _mm512_set1_ps(1.0f / q.scale);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t d = 0; d < D; d += 16) {
    __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(widen16(x + d), by));
    __m512i high = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(64)), 7);
    sum = _mm512_add_epi32(sum, code);
    _mm_storeu_si128((__m128i*)(codes + d), _mm512_cvtepi32_epi8(high));
    __m512i low = _mm512_sub_epi32(code, _mm512_slli_epi32(high, 7));
    _mm_storeu_si128((__m128i*)(codes + padded + d), _mm512_cvtepi32_epi8(low));
  }
  q.offset = 128 * _mm512_reduce_add_epi32(sum);
  return q;
}

// The horizontal sums of 16 vectors, one per lane, as `sums_of`.
inline __m512i int_sums_of(const __m512i v[16]) {
  __m512i fours[4];
  for (int i = 0; i < 4; i++) {
    const __m512i* p = v + 4 * i;
    __m512i x = _mm512_add_epi32(_mm512_unpacklo_epi32(p[0], p[1]), _mm512_unpackhi_epi32(p[0], p[1]));
    __m512i y = _mm512_add_epi32(_mm512_unpacklo_epi32(p[2], p[3]), _mm512_unpackhi_epi32(p[2], p[3]));
    fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
  }
  __m512i low = _mm512_add_epi32(_mm512_shuffle_i32x4(fours[0], fours[1], 0x44),
                                 _mm512_shuffle_i32x4(fours[0], fours[1], 0xee));
  __m512i high = _mm512_add_epi32(_mm512_shuffle_i32x4(fours[2], fours[3], 0x44),
                                  _mm512_shuffle_i32x4(fours[2], fours[3], 0xee));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xdd));
}

// Scores as the `score` for bfloat16. The instruction multiplies unsigned by signed numbers: keys get 128 added, which
// the query's offset takes off again.
template <int G, int FIXED>
void score(const NarrowQuery* query, const int8_t* key, const bf16* scales, int64_t count, int64_t head_dim,
           float scale, float* out, int64_t ld) {
  const int64_t D = FIXED ? FIXED : head_dim;
  const __m512 key_scales = scales16(scales, count);
  const __m512i flip = _mm512_set1_epi8(char(0x80));
  for (int g = 0; g < G; g++) {
    const NarrowQuery& q = query[g];
    __m512i sum[16];
    for (int p = 0; p < 16; p++) {
      const int8_t* k = key + std::min<int64_t>(p, count - 1) * D;
      auto load = [&](int64_t d) {
        __mmask64 there = D - d < 64 ? (__mmask64(1) << (D - d)) - 1 : ~__mmask64(0);
        return _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, k + d), flip);
      };
      sum[p] = _mm512_setzero_si512();
      for (int64_t d = 0; d < D; d += 64)
        sum[p] = _mm512_dpbusd_epi32(sum[p], load(d), _mm512_loadu_si512(q.high + d));
      sum[p] = _mm512_slli_epi32(sum[p], 7);
      for (int64_t d = 0; d < D; d += 64)
        sum[p] = _mm512_dpbusd_epi32(sum[p], load(d), _mm512_loadu_si512(q.low + d));
    }
    __m512 product = _mm512_cvtepi32_ps(_mm512_sub_epi32(int_sums_of(sum), _mm512_set1_epi32(q.offset)));
    product = _mm512_mul_ps(_mm512_mul_ps(product, _mm512_set1_ps(q.scale * scale)), key_scales);
    _mm512_mask_storeu_ps(out + g * ld, __mmask16((1u << count) - 1), product);
  }
}

}  // namespace
