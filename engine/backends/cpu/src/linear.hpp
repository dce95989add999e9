// Linear layers in bfloat16; see panels.hpp.

#pragma once

#include <cstring>
#include <vector>

#include "amx.hpp"
#include "op.hpp"
#include "panels.hpp"
#include "vectors.hpp"

namespace {

// ROWS rows of x times VECTORS * 16 outputs; calls out(row, vector, sums) for each vector of 16 sums.
template <int ROWS, int VECTORS, bool PREFETCH, class Out>
inline void tile(const bf16* x, int64_t ldx, const bf16* w, int64_t K, Out out) {
  __m512 sum[ROWS][VECTORS];
  for (int v = 0; v < VECTORS; v++)
    for (int m = 0; m < ROWS; m++) sum[m][v] = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 2, w += VECTORS * 32) {
    for (int v = 0; PREFETCH && v < VECTORS; v++) _mm_prefetch((const char*)w + AHEAD + v * 64, _MM_HINT_T0);
    __m512bh weight[VECTORS];
    for (int v = 0; v < VECTORS; v++) weight[v] = (__m512bh)_mm512_loadu_si512(w + v * 32);
    for (int m = 0; m < ROWS; m++) {
      int32_t pair;
      std::memcpy(&pair, x + m * ldx + k, 4);
      __m512bh input = (__m512bh)_mm512_set1_epi32(pair);
      for (int v = 0; v < VECTORS; v++) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], weight[v], input);
    }
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) out(m, v, sum[m][v]);
}

// M rows of x times one panel of VECTORS * 16 outputs.
template <int VECTORS>
void panel(const bf16* x, int64_t M, int64_t ldx, const bf16* w, int64_t K, const bf16* bias, bf16* y, int64_t ldy) {
  tiles(M, [&](auto rows, auto prefetch, int64_t row) {
    tile<rows, VECTORS, prefetch>(x + row * ldx, ldx, w, K, [&](int m, int v, __m512 sum) {
      if (bias) sum = _mm512_add_ps(sum, widen16(bias + v * 16));
      narrow16(y + (row + m) * ldy + v * 16, sum);
    });
  });
}

// y = x W^T + bias. Fields:
// pointer: x [M, K], packed weights, bias [N] or null, y [M, N]; number: M, ldx, N, K, ldy.
void linear(const Op& op, int thread, int threads, std::vector<bf16>& shared) {
#ifdef SPLITSERVE_AMX
  if (op.number[3] % INPUTS == 0) return linear_amx(op, thread, threads, shared);
#endif
  const bf16 *x = (const bf16*)op.pointer[0], *w = (const bf16*)op.pointer[1], *bias = (const bf16*)op.pointer[2];
  bf16* y = (bf16*)op.pointer[3];
  int64_t M = op.number[0], ldx = op.number[1], N = op.number[2], K = op.number[3], ldy = op.number[4];
  panels(M, N, thread, threads, [&](auto vectors, int64_t row, int64_t rows, int64_t column) {
    panel<vectors>(x + row * ldx, rows, ldx, w + column * K, K, bias ? bias + column : nullptr, y + row * ldy + column, ldy);
  });
}

}  // namespace
