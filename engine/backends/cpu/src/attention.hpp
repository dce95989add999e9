// Decode attention, over the pool's blocks.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
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

// Always inline: gcc takes a function that only prefetches for one without effect, and removes calls of it.
__attribute__((always_inline)) inline void fetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)p + i, _MM_HINT_T0);
}

constexpr int64_t RUN = 16;       // positions computed at a time, in one block
constexpr int64_t RUNS_AHEAD = 2;  // prefetch distance; measured: docs/performance.md

// The end of the run that begins at `position`.
inline int64_t run_end(const PoolView& kv, int64_t position, int64_t last) {
  return std::min({last, (position / kv.block_size + 1) * kv.block_size, position + RUN});
}

// Scores of G query heads that share a KV head, against the keys of a run. FIXED is the head's size where known at
// compile time; 0: any.
template <int G, int FIXED>
void score(const bf16* const* query, const bf16* key, int64_t count, int64_t head_dim, float scale, float* out,
           int64_t ld) {
  const int64_t D = FIXED ? FIXED : head_dim;
  const __m512 by = _mm512_set1_ps(scale);
  for (int g = 0; g < G; g++) {
    const bf16* q = query[g];
    __m512 sum[16];
    for (int p = 0; p < 16; p++) {
      const bf16* k = key + std::min<int64_t>(p, count - 1) * D;
      sum[p] = _mm512_setzero_ps();
      for (int64_t d = 0; d < D; d += 32)
        sum[p] = _mm512_dpbf16_ps(sum[p], (__m512bh)_mm512_loadu_si512(k + d), (__m512bh)_mm512_loadu_si512(q + d));
    }
    _mm512_mask_storeu_ps(out + g * ld, __mmask16((1u << count) - 1), _mm512_mul_ps(sums_of(sum), by));
  }
}

// Adds the values of a run, times their weights, to the outputs [G, D]: VECTORS * 16 elements at a time.
template <int G, int VECTORS>
void add_values(const float* weights, int64_t ld, const bf16* values, int64_t count, int64_t D, float* out) {
  for (int64_t d = 0; d < D; d += VECTORS * 16) {
    __m512 sum[G][VECTORS];
    for (int g = 0; g < G; g++)
      for (int v = 0; v < VECTORS; v++) sum[g][v] = _mm512_loadu_ps(out + g * D + d + v * 16);
    const bf16* value = values + d;
    for (int64_t p = 0; p < count; p++, value += D) {
      __m512 wide[VECTORS];
      for (int v = 0; v < VECTORS; v++) wide[v] = widen16(value + v * 16);
      for (int g = 0; g < G; g++) {
        __m512 w = _mm512_set1_ps(weights[g * ld + p]);
        for (int v = 0; v < VECTORS; v++) sum[g][v] = _mm512_fmadd_ps(w, wide[v], sum[g][v]);
      }
    }
    for (int g = 0; g < G; g++)
      for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(out + g * D + d + v * 16, sum[g][v]);
  }
}

template <int G>
void score_heads(const bf16* const* query, const bf16* key, int64_t count, int64_t D, float scale, float* out,
                 int64_t ld) {
  switch (D) {
    case 64: return score<G, 64>(query, key, count, D, scale, out, ld);
    case 128: return score<G, 128>(query, key, count, D, scale, out, ld);
    default: return score<G, 0>(query, key, count, D, scale, out, ld);
  }
}

template <int G>
void add_heads(const float* weights, int64_t ld, const bf16* values, int64_t count, int64_t D, float* out) {
  if (D % 64 == 0)
    add_values<G, 4>(weights, ld, values, count, D, out);
  else
    add_values<G, 2>(weights, ld, values, count, D, out);
}

// Queries [heads, D] as `score` takes them, valid until the thread's next call.
inline const bf16* const* queries_for(const bf16* first, int64_t stride, int64_t heads) {
  static thread_local std::vector<const bf16*> queries;
  queries.resize(heads);
  for (int64_t i = 0; i < heads; i++) queries[i] = first + i * stride;
  return queries.data();
}

// Calls work(G, g) for the query heads of a group, up to four at a time: those read each key and value once.
template <typename Work>
inline void in_fours(int64_t group, Work work) {
  int64_t g = 0;
  for (; group - g >= 4; g += 4) work(std::integral_constant<int, 4>(), g);
  if (group - g == 3) work(std::integral_constant<int, 3>(), g);
  if (group - g == 2) work(std::integral_constant<int, 2>(), g);
  if (group - g == 1) work(std::integral_constant<int, 1>(), g);
}

// Attention of one row for the query heads of KV heads begin..end - 1, over positions first..last - 1: scores, softmax,
// weighted sum. All heads' pieces of a block are read one after the other, as they lie in memory, and those RUNS_AHEAD
// runs later are fetched meanwhile, values after the last keys: one layer's KV of consecutive blocks is far apart, so
// the hardware prefetcher does not predict it.
void attend_row(const Op& op, const PoolView& kv, const int32_t* table, int64_t row, int64_t begin, int64_t end,
                int64_t first, int64_t last, bf16* out) {
  static thread_local std::vector<float> workspace;
  const int64_t group = op.number[2], D = kv.head_dim, heads = (end - begin) * group, query_head = op.stride[0][0];
  const int64_t ld = (last - first + 15) / 16 * 16, run = std::min(RUN, kv.block_size), ahead = RUNS_AHEAD * run;
  if (int64_t(workspace.size()) < heads * (ld + D + 1)) workspace.resize(heads * (ld + D + 1));
  float *scores = workspace.data(), *outputs = scores + heads * ld, *sums = outputs + heads * D;
  const bf16* first_query = (const bf16*)op.pointer[0] + begin * group * query_head + row * op.stride[0][1];
  const bf16* const* query = queries_for(first_query, query_head, heads);
  auto fetch_run = [&](bf16* base, int64_t h, int64_t position) __attribute__((always_inline)) {
    if (position >= last) return;
    fetch(kv.at(base, table, h, position), run * D * 2);
  };
  for (int64_t position = first; position < first + ahead; position += run)
    for (int64_t h = begin; h < end; h++) fetch_run(kv.keys, h, position);
  for (int64_t position = first, stop; position < last; position = stop) {
    stop = run_end(kv, position, last);
    const int64_t next = position + ahead;
    for (int64_t h = begin; h < end; h++) {
      if (next < last)
        fetch_run(kv.keys, h, next);
      else
        fetch_run(kv.values, h, first + next - last);
      const bf16* key = kv.key(table, h, position);
      in_fours(group, [&](auto G, int64_t g) {
        const int64_t head = (h - begin) * group + g;
        score_heads<G>(query + head, key, stop - position, D, float(op.real[0]),
                       scores + head * ld + position - first, ld);
      });
    }
  }
  cap(scores, heads * ld, float(op.real[1]));
  for (int64_t i = 0; i < heads; i++) sums[i] = weigh(scores + i * ld, last - first);
  std::fill(outputs, outputs + heads * D, 0.0f);
  for (int64_t position = first, stop; position < last; position = stop) {
    stop = run_end(kv, position, last);
    for (int64_t h = begin; h < end; h++) {
      fetch_run(kv.values, h, position + ahead);
      const bf16* value = kv.at(kv.values, table, h, position);
      in_fours(group, [&](auto G, int64_t g) {
        const int64_t head = (h - begin) * group + g;
        const float* weights = scores + head * ld + position - first;
        add_heads<G>(weights, ld, value, stop - position, D, outputs + head * D);
      });
    }
  }
  for (int64_t i = 0; i < heads; i++) {
    const __m512 by = _mm512_set1_ps(1.0f / sums[i]);
    for (int64_t d = 0; d < D; d += 16)
      narrow16(out + i * D + d, _mm512_mul_ps(_mm512_loadu_ps(outputs + i * D + d), by));
  }
}

// Writes each sequence's new KV into its block, then attends over all of its positions, or the last `window`. Threads
// divide (row, KV head) items; a thread computes those of one row together. Fields:
// pointer: query [heads, rows, D], key, value [kv_heads, rows, D], out [rows, heads, D], pool of the layer, Step;
// stride[0..2]: of query, key, value (head, row); real: scale, softcap or 0;
// number: rows, kv_heads, query heads per KV head, D, block_size, window or 0, then strides of the pool: from keys to
// values, of a block, of a head.
void attend(const Op& op, int thread, int threads) {
  const Step& step = *(const Step*)op.pointer[5];
  bf16* out = (bf16*)op.pointer[3];
  int64_t rows = op.number[0], kv_heads = op.number[1], group = op.number[2], D = op.number[3], window = op.number[5];
  const PoolView kv = pool_of(op);
  Share mine = share(rows * kv_heads, thread, threads);
  for (int64_t item = mine.begin, next; item < mine.end; item = next) {
    int64_t row = item / kv_heads, begin = item % kv_heads, length = step.lengths[row];
    next = std::min(mine.end, (row + 1) * kv_heads);
    int64_t end = begin + next - item, first = window && length > window ? length - window : 0;
    bf16* result = out + item * group * D;
    if (length == 0) {
      std::memset(result, 0, (end - begin) * group * D * 2);
      continue;
    }
    const int32_t* table = step.tables + row * step.columns;
    for (int64_t h = begin; h < end; h++) {
      const bf16* key = (const bf16*)op.pointer[1] + h * op.stride[1][0] + row * op.stride[1][1];
      const bf16* value = (const bf16*)op.pointer[2] + h * op.stride[2][0] + row * op.stride[2][1];
      write_kv(kv, table, h, length - 1, key, value);
    }
    attend_row(op, kv, table, row, begin, end, first, length, result);
  }
}

}  // namespace
