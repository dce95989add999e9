// Prefill attention.
//
// For one KV head at a time, keys and values are packed like the weights of two linear layers: keys from head_dim to
// positions, values from positions to head_dim. Then each tile of queries takes two products with a softmax between.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "amx.hpp"
#include "kv.hpp"
#include "linear.hpp"
#include "op.hpp"
#include "softmax.hpp"
#include "vectors.hpp"

namespace {

constexpr int64_t KEYS = PANEL * 16;             // positions in a panel of keys
constexpr int64_t SPAN = AMX ? 2 * KEYS : KEYS;  // positions in a whole number of panels and of INPUTS
constexpr int VALUES = 32;                       // elements of head_dim in a panel of values
constexpr int QUERIES = AMX ? ROWS : TILE;       // in a tile

struct Chunk {
  PoolView kv;
  const int32_t* table;
  int64_t total;  // positions with KV, the chunk's included
  int64_t panels() const { return (total + SPAN - 1) / SPAN * (SPAN / KEYS); }
  int64_t padded() const { return panels() * KEYS; }
};

// QUERIES rows of x times one panel of VECTORS * 16 outputs, as `tile` in linear.hpp.
template <int VECTORS, class Out>
inline void tile_of_queries(const bf16* x, int64_t ldx, const bf16* w, int64_t K, Out out) {
#ifdef SPLITSERVE_AMX
  Rows rows{x, ldx * 2, 64};
  multiply<1, VECTORS>(rows, rows, QUERIES, w, 2 * K, out);
#else
  tile<QUERIES, VECTORS, false>(x, ldx, w, K, out);
#endif
}

// Transposes 16 x 16 numbers of 32 bits in place.
inline void transpose(__m512i v[16]) {
  __m512i pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int half = 0; half < 2; half++) {
      fours[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + 2 + half]);
      fours[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + 2 + half]);
    }
  // fours[4 * i + j]: in each quarter q column 4 * q + j of rows 4 * i to 4 * i + 3.
  for (int j = 0; j < 4; j++) {
    __m512i even = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
    __m512i odd = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
    __m512i later_even = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
    __m512i later_odd = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
    v[j] = _mm512_shuffle_i32x4(even, later_even, 0x88);
    v[4 + j] = _mm512_shuffle_i32x4(odd, later_odd, 0x88);
    v[8 + j] = _mm512_shuffle_i32x4(even, later_even, 0xdd);
    v[12 + j] = _mm512_shuffle_i32x4(odd, later_odd, 0xdd);
  }
}

// Packs panel p of keys, in pairs of head_dim elements; positions beyond the sequence are 0.
void pack_keys(const Chunk& c, int64_t h, int64_t p, bf16* packed) {
  int64_t D = c.kv.head_dim;
  for (int64_t j = 0; j < KEYS; j += 16) {
    const bf16* keys[16];
    for (int64_t i = 0; i < 16; i++) {
      int64_t position = p * KEYS + j + i;
      keys[i] = position < c.total ? c.kv.key(c.table, h, position) : nullptr;
    }
    for (int64_t d = 0; d < D; d += 32) {
      __m512i v[16];
      for (int i = 0; i < 16; i++) v[i] = keys[i] ? _mm512_loadu_si512(keys[i] + d) : _mm512_setzero_si512();
      transpose(v);
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(packed + p * KEYS * D + (d + 2 * i) * KEYS + j * 2, v[i]);
    }
  }
}

// Packs the values of the same positions, in pairs of positions.
void pack_values(const Chunk& c, int64_t h, int64_t p, bf16* packed) {
  int64_t D = c.kv.head_dim, padded = c.padded();
  auto load = [&](int64_t position, int64_t d) {
    if (position >= c.total) return _mm512_setzero_si512();
    return _mm512_loadu_si512(c.kv.at(c.kv.values, c.table, h, position) + d);
  };
  uint16_t order[32];  // 0, 32, 1, 33, ...
  for (int i = 0; i < 32; i++) order[i] = i / 2 + i % 2 * 32;
  __m512i low = _mm512_loadu_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t position = p * KEYS; position < (p + 1) * KEYS; position += 2)
    for (int64_t d = 0; d < D; d += VALUES) {
      __m512i even = load(position, d), odd = load(position + 1, d);
      bf16* to = packed + d * padded + position * VALUES;
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(even, high, odd));
    }
}

// Softmax of n scores without the division, rounded into `weights`; returns the sum before rounding. n is a multiple of
// KEYS.
inline float weigh_rounded(const float* s, int64_t n, bf16* weights) {
  const __m512 by = _mm512_set1_ps(1.44269504f);
  __m512 top[PANEL], sum[PANEL];
  for (int v = 0; v < PANEL; v++) top[v] = _mm512_set1_ps(-INFINITY), sum[v] = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += KEYS)
    for (int v = 0; v < PANEL; v++) top[v] = _mm512_max_ps(top[v], _mm512_loadu_ps(s + i + v * 16));
  float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(top[0], top[1]), top[2]));
  __m512 off = _mm512_set1_ps(most * 1.44269504f);
  for (int64_t i = 0; i < n; i += KEYS)
    for (int v = 0; v < PANEL; v++) {
      __m512 e = power_of_two16(_mm512_fmsub_ps(_mm512_loadu_ps(s + i + v * 16), by, off));
      sum[v] = _mm512_add_ps(sum[v], e);
      narrow16(weights + i + v * 16, e);
    }
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), sum[2]));
}

// Weights of a tile's scores [QUERIES, ld] over positions [low, high); row r sees positions [from[r], to[r]).
inline void weigh_tile(float* s, int64_t ld, const int64_t* from, const int64_t* to, int64_t low, int64_t high,
                       float softcap, bf16* weights, float* sums) {
  for (int r = 0; r < QUERIES; r++) {
    float* row = s + r * ld;
    cap(row, high - low, softcap);
    std::fill(row, row + (from[r] - low), -INFINITY);
    std::fill(row + (to[r] - low), row + (high - low), -INFINITY);
    sums[r] = weigh_rounded(row, high - low, weights + r * ld);
  }
}

// Writes the new tokens' KV of one sequence into its blocks, then attends over all of its positions, or the last
// `window`. Threads divide the new tokens, then the panels, then (query head, tile) items, with barriers between.
// Fields:
// pointer: query [heads, rows, D], key, value [kv_heads, rows, D], out [rows, heads, D], pool of the layer, Step
// (of one sequence; its new tokens may be fewer than rows, the rest is padding); other fields as for `attend`.
void prefill(const Op& op, int thread, int threads, std::vector<bf16>& shared) {
  const Step& step = *(const Step*)op.pointer[5];
  int64_t rows = op.number[0], kv_heads = op.number[1], group = op.number[2], D = op.number[3], window = op.number[5];
  int64_t total = step.lengths[0], tokens = step.lengths[1], before = total - tokens;
  bf16* out = (bf16*)op.pointer[3];
  if (thread == 0) std::memset(out + tokens * kv_heads * group * D, 0, (rows - tokens) * kv_heads * group * D * 2);
  const Chunk c{pool_of(op), step.tables, total};
  Share new_tokens = share(tokens, thread, threads);
  for (int64_t h = 0; h < kv_heads; h++)
    for (int64_t t = new_tokens.begin; t < new_tokens.end; t++) {
      const bf16* key = (const bf16*)op.pointer[1] + h * op.stride[1][0] + t * op.stride[1][1];
      const bf16* value = (const bf16*)op.pointer[2] + h * op.stride[2][0] + t * op.stride[2][1];
      write_kv(c.kv, c.table, h, before + t, key, value);
    }
  const int64_t room = 2 * c.padded() * D;
  if (thread == 0 && int64_t(shared.size()) < room) shared.resize(room);
#pragma omp barrier
  bf16 *packed = shared.data(), *packed_values = packed + c.padded() * D;
  static thread_local std::vector<float> workspace;
  static thread_local std::vector<bf16> weights;
  int64_t ld = c.padded();
  if (int64_t(workspace.size()) < QUERIES * ld) workspace.resize(QUERIES * ld), weights.resize(QUERIES * ld);
  std::vector<bf16> queries(QUERIES * D);
  int64_t first_panel = window && before + 1 > window ? (before + 1 - window) / SPAN * (SPAN / KEYS) : 0;
  int64_t tiles = (tokens + QUERIES - 1) / QUERIES;
#ifdef SPLITSERVE_AMX
  TileRegisters registers;
#endif
  for (int64_t h = 0; h < kv_heads; h++) {
    for (int64_t p = first_panel + thread; p < c.panels(); p += threads) {
      pack_keys(c, h, p, packed);
      pack_values(c, h, p, packed_values);
    }
#pragma omp barrier
    for (int64_t item = thread; item < group * tiles; item += threads) {
      int64_t head = h * group + item % group, token = item / group * QUERIES;
      int64_t count = std::min<int64_t>(QUERIES, tokens - token), from[QUERIES], to[QUERIES];
      const bf16* query = (const bf16*)op.pointer[0] + head * op.stride[0][0];
      for (int r = 0; r < QUERIES; r++) {
        int64_t t = token + std::min<int64_t>(r, count - 1);
        std::memcpy(&queries[r * D], query + t * op.stride[0][1], D * 2);
        to[r] = before + t + 1;
        from[r] = window && to[r] > window ? to[r] - window : 0;
      }
      int64_t low = from[0] / SPAN * SPAN, high = (to[QUERIES - 1] + SPAN - 1) / SPAN * SPAN;
      __m512 by = _mm512_set1_ps(float(op.real[0]));
      for (int64_t k = low; k < high; k += KEYS) {
        float* s = workspace.data() + (k - low);
        tile_of_queries<PANEL>(queries.data(), D, packed + k * D, D, [&](int m, int v, __m512 sum) {
          _mm512_storeu_ps(s + m * ld + v * 16, _mm512_mul_ps(sum, by));
        });
      }
      float sums[QUERIES];
      weigh_tile(workspace.data(), ld, from, to, low, high, float(op.real[1]), weights.data(), sums);
      for (int64_t d = 0; d < D; d += VALUES) {
        const bf16* w = packed_values + d * c.padded() + low * VALUES;
        bf16* o = out + (token * kv_heads * group + head) * D + d;
        tile_of_queries<VALUES / 16>(weights.data(), ld, w, high - low, [&](int m, int v, __m512 sum) {
          if (m < count)
            narrow16(o + m * kv_heads * group * D + v * 16, _mm512_mul_ps(sum, _mm512_set1_ps(1.0f / sums[m])));
        });
      }
    }
#pragma omp barrier
  }
}

}  // namespace
