// Decode attention, over the pool's blocks.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kv.hpp"
#include "op.hpp"
#include "softmax.hpp"
#include "vectors.hpp"

namespace {

// The horizontal sums of 16 vectors, one per lane. A tree of shuffles costs a quarter of 16 separate reductions.
inline __m512 sums_of(const __m512 v[16]) {
  __m512 fours[4];
  for (int i = 0; i < 4; i++) {
    const __m512* p = v + 4 * i;
    __m512 x = _mm512_add_ps(_mm512_unpacklo_ps(p[0], p[1]), _mm512_unpackhi_ps(p[0], p[1]));
    __m512 y = _mm512_add_ps(_mm512_unpacklo_ps(p[2], p[3]), _mm512_unpackhi_ps(p[2], p[3]));
    __m512d a = _mm512_castps_pd(x), b = _mm512_castps_pd(y);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x44),
                             _mm512_shuffle_f32x4(fours[0], fours[1], 0xee));
  __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x44),
                              _mm512_shuffle_f32x4(fours[2], fours[3], 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

inline void fetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)p + i, _MM_HINT_T0);
}

// Scores of G query heads that share a KV head, against keys first..last - 1; row g is written to out + g * ld.
// FIXED is the head's size where known at compile time; 0: any.
template <int G, int FIXED>
void scores(const bf16* query, int64_t query_head, const PoolView& kv, const int32_t* table, int64_t h, int64_t first,
            int64_t last, float scale, float* out, int64_t ld) {
  const int64_t D = FIXED ? FIXED : kv.head_dim;
  const __m512 by = _mm512_set1_ps(scale);
  for (int64_t position = first; position < last;) {
    const bf16* key = kv.key(table, h, position);
    int64_t stop = std::min(last, (position / kv.block_size + 1) * kv.block_size);
    int64_t count = std::min<int64_t>(16, stop - position);
    // One layer's KV of consecutive blocks is far apart, so the hardware prefetcher does not predict it.
    if (position + 2 * count < last) fetch(kv.key(table, h, position + 2 * count), count * D * 2);
    fetch(kv.at(kv.values, table, h, position), count * D * 2);
    for (int g = 0; g < G; g++) {
      const bf16* q = query + g * query_head;
      __m512 sum[16];
      for (int p = 0; p < 16; p++) {
        const bf16* k = key + std::min<int64_t>(p, count - 1) * D;
        sum[p] = _mm512_setzero_ps();
        for (int64_t d = 0; d < D; d += 32)
          sum[p] = _mm512_dpbf16_ps(sum[p], (__m512bh)_mm512_loadu_si512(k + d), (__m512bh)_mm512_loadu_si512(q + d));
      }
      _mm512_mask_storeu_ps(out + g * ld + position - first, __mmask16((1u << count) - 1),
                            _mm512_mul_ps(sums_of(sum), by));
    }
    position += count;
  }
}

// The weighted sum of values, divided by the sums of weights: G heads, VECTORS * 16 elements at a time.
template <int G, int VECTORS>
void weighted(const float* weights, int64_t ld, const float* sums, const PoolView& kv, const int32_t* table, int64_t h,
              int64_t first, int64_t last, bf16* out, int64_t out_head) {
  int64_t D = kv.head_dim;
  for (int64_t d = 0; d < D; d += VECTORS * 16) {
    __m512 sum[G][VECTORS];
    for (int g = 0; g < G; g++)
      for (int v = 0; v < VECTORS; v++) sum[g][v] = _mm512_setzero_ps();
    for (int64_t position = first; position < last;) {
      const bf16* value = kv.at(kv.values, table, h, position) + d;
      int64_t stop = std::min(last, (position / kv.block_size + 1) * kv.block_size);
      for (; position < stop; position++, value += D) {
        __m512 wide[VECTORS];
        for (int v = 0; v < VECTORS; v++) wide[v] = widen16(value + v * 16);
        for (int g = 0; g < G; g++) {
          __m512 w = _mm512_set1_ps(weights[g * ld + position - first]);
          for (int v = 0; v < VECTORS; v++) sum[g][v] = _mm512_fmadd_ps(w, wide[v], sum[g][v]);
        }
      }
    }
    for (int g = 0; g < G; g++)
      for (int v = 0; v < VECTORS; v++)
        narrow16(out + g * out_head + d + v * 16, _mm512_mul_ps(sum[g][v], _mm512_set1_ps(1.0f / sums[g])));
  }
}

// Attention of one row for G query heads of one KV head: scores, softmax, weighted sum. `workspace` holds the scores.
template <int G>
void heads(const bf16* query, int64_t query_head, const PoolView& kv, const int32_t* table, int64_t h, int64_t first,
           int64_t last, const Op& op, std::vector<float>& workspace, bf16* out) {
  int64_t ld = (last - first + 15) / 16 * 16, D = kv.head_dim;
  if (int64_t(workspace.size()) < G * ld) workspace.resize(G * ld);
  float sums[G], scale = float(op.real[0]);
  switch (D) {
    case 64: scores<G, 64>(query, query_head, kv, table, h, first, last, scale, workspace.data(), ld); break;
    case 128: scores<G, 128>(query, query_head, kv, table, h, first, last, scale, workspace.data(), ld); break;
    default: scores<G, 0>(query, query_head, kv, table, h, first, last, scale, workspace.data(), ld); break;
  }
  cap(workspace.data(), G * ld, float(op.real[1]));
  for (int g = 0; g < G; g++) sums[g] = weigh(workspace.data() + g * ld, last - first);
  if (D % 64 == 0)
    weighted<G, 4>(workspace.data(), ld, sums, kv, table, h, first, last, out, D);
  else
    weighted<G, 2>(workspace.data(), ld, sums, kv, table, h, first, last, out, D);
}

// Writes each sequence's new KV into its block, then attends over all of its positions, or the last `window`. Threads
// divide (row, KV head) items. Fields:
// pointer: query [heads, rows, D], key, value [kv_heads, rows, D], out [rows, heads, D], pool of the layer, Step;
// stride[0..2]: of query, key, value (head, row); real: scale, softcap or 0;
// number: rows, kv_heads, query heads per KV head, D, block_size, window or 0, then strides of the pool: from keys to
// values, of a block, of a head.
void attend(const Op& op, int thread, int threads) {
  const Step& step = *(const Step*)op.pointer[5];
  bf16 *out = (bf16*)op.pointer[3], *pool = (bf16*)op.pointer[4];
  int64_t rows = op.number[0], kv_heads = op.number[1], group = op.number[2], D = op.number[3], window = op.number[5];
  PoolView kv{pool, pool + op.number[6], op.number[7], op.number[8], op.number[4], D};
  static thread_local std::vector<float> workspace;
  Share mine = share(rows * kv_heads, thread, threads);
  for (int64_t item = mine.begin; item < mine.end; item++) {
    int64_t row = item / kv_heads, h = item % kv_heads, length = step.lengths[row];
    bf16* result = out + (row * kv_heads + h) * group * D;
    if (length == 0) {
      std::memset(result, 0, group * D * 2);
      continue;
    }
    const int32_t* table = step.tables + row * step.columns;
    const bf16* key = (const bf16*)op.pointer[1] + h * op.stride[1][0] + row * op.stride[1][1];
    const bf16* value = (const bf16*)op.pointer[2] + h * op.stride[2][0] + row * op.stride[2][1];
    if (h + 1 < kv_heads) {
      int64_t bytes = std::min<int64_t>(16, kv.block_size) * D * 2;
      fetch(kv.key(table, h + 1, 0), bytes);
      if (length > kv.block_size) fetch(kv.key(table, h + 1, kv.block_size), bytes);
    }
    std::memcpy(kv.at(kv.keys, table, h, length - 1), key, D * 2);
    std::memcpy(kv.at(kv.values, table, h, length - 1), value, D * 2);
    int64_t first = window && length > window ? length - window : 0;
    const bf16* query = (const bf16*)op.pointer[0] + h * group * op.stride[0][0] + row * op.stride[0][1];
    for (int64_t g = 0; g < group;) {
      const bf16* q = query + g * op.stride[0][0];
      bf16* o = result + g * D;
      int64_t left = group - g;
      if (left >= 4)
        heads<4>(q, op.stride[0][0], kv, table, h, first, length, op, workspace, o), g += 4;
      else if (left == 3)
        heads<3>(q, op.stride[0][0], kv, table, h, first, length, op, workspace, o), g += 3;
      else if (left == 2)
        heads<2>(q, op.stride[0][0], kv, table, h, first, length, op, workspace, o), g += 2;
      else
        heads<1>(q, op.stride[0][0], kv, table, h, first, length, op, workspace, o), g += 1;
    }
  }
}

}  // namespace
