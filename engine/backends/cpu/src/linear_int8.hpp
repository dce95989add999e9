// Linear layers in int8.
//
// Weights [N, K] are in panels (panels.hpp) of fours: [N/48][K/4][48][4]. Each row of the input is scaled by its
// largest magnitude and shifted to unsigned, as the instruction (VNNI's vpdpbusd) requires. What the shift adds to each
// output's sum is a constant of the weights, subtracted afterwards.

#pragma once

#include <algorithm>
#include <cmath>

#include "amx.hpp"
#include "op.hpp"
#include "panels.hpp"
#include "vectors.hpp"

namespace {

// Quantizes a row of K numbers to 1..255, 0 becoming 128. Returns the scale of one step; NaN if the row is not finite.
inline float quantize(const bf16* x, int64_t K, uint8_t* to) {
  __m512 most = _mm512_setzero_ps();
  __mmask16 odd = 0;
  for (int64_t k = 0; k < K; k += 16) {
    __m512 v = widen16(x + k);
    odd |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    most = _mm512_max_ps(most, _mm512_abs_ps(v));
  }
  float top = std::max(_mm512_reduce_max_ps(most), 1e-30f);
  __m512 by = _mm512_set1_ps(127.0f / top);
  for (int64_t k = 0; k < K; k += 16) {
    __m512i levels = _mm512_cvtps_epi32(_mm512_mul_ps(widen16(x + k), by));
    levels = _mm512_add_epi32(levels, _mm512_set1_epi32(128));
    _mm_storeu_si128((__m128i*)(to + k), _mm512_cvtepi32_epi8(levels));
  }
  return odd || std::isinf(top) ? NAN : top / 127.0f;
}

typedef int32_t Int16 __attribute__((vector_size(64)));

// In each lane, sum plus the products of four unsigned and four signed bytes. In assembly, because with the intrinsic
// gcc 12 keeps the sums on the stack, at half the speed.
inline Int16 dot(Int16 sum, Int16 unsigned_bytes, Int16 signed_bytes) {
  asm inline("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
  return sum;
}

// As `tile` in linear.hpp.
template <int ROWS, int VECTORS, Fetch FETCH, class Out>
inline void tile_int8(const uint8_t* x, const int8_t* w, int64_t K, int64_t distance, Out out) {
  Int16 sum[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) sum[m][v] = Int16{};
  for (int64_t k = 0; k < K; k += 4, w += VECTORS * 64) {
    fetch_lines<FETCH, VECTORS>(w, distance);
    Int16 weight[VECTORS];
    for (int v = 0; v < VECTORS; v++) weight[v] = (Int16)_mm512_loadu_si512(w + v * 64);
    for (int m = 0; m < ROWS; m++) {
      int32_t four;
      std::memcpy(&four, x + m * K + k, 4);
      Int16 input = (Int16)_mm512_set1_epi32(four);
      for (int v = 0; v < VECTORS; v++) sum[m][v] = dot(sum[m][v], input, weight[v]);
    }
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) out(m, v, (__m512i)sum[m][v]);
}

// M quantized rows, with a scale in `steps` each, times one panel; see `panel` in linear.hpp.
template <int VECTORS>
void panel_int8(const uint8_t* x, const float* steps, int64_t M, const int8_t* w, int64_t K, const float* scales,
                const int32_t* shifts, const bf16* bias, bf16* y, int64_t ldy) {
  auto out = [&](int64_t m, int v, __m512i sum) {
    __m512 by = _mm512_mul_ps(_mm512_set1_ps(steps[m]), _mm512_loadu_ps(scales + v * 16));
    sum = _mm512_sub_epi32(sum, _mm512_loadu_si512(shifts + v * 16));
    __m512 result = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), by);
    if (bias) result = _mm512_add_ps(result, widen16(bias + v * 16));
    narrow16(y + m * ldy + v * 16, result);
  };
  int64_t done = 0;
#ifdef SPLITSERVE_AMX
  // Sums of integers are the same in any order, so that AMX may take whole blocks of rows and leave the rest.
  if (K % 64 == 0) {
    done = M / ROWS * ROWS;
    panel_amx<uint8_t, VECTORS>(done, [&](int64_t m) { return Rows{x + m * K, K, 64}; }, w, K, out);
  }
#endif
  tiles<VECTORS>(M - done, VECTORS * 16 * K, [&](auto rows, auto fetch, int64_t row, int64_t distance) {
    tile_int8<rows, VECTORS, fetch>(x + (done + row) * K, w, K, distance,
                                    [&](int m, int v, __m512i sum) { out(done + row + m, v, sum); });
  });
}

// y = x W^T + bias with int8 weights. Fields:
// pointer: x [M, K], packed weights, scales [N] float followed by shifts [N] int32, bias [N] or null, y [M, N],
// workspace (the quantized x [M, K] uint8, then M floats); number: M, ldx, N, K, ldy. K is a multiple of 16.
void linear_int8(const Op& op, int thread, int threads) {
  const bf16 *x = (const bf16*)op.pointer[0], *bias = (const bf16*)op.pointer[3];
  const int8_t* w = (const int8_t*)op.pointer[1];
  bf16* y = (bf16*)op.pointer[4];
  int64_t M = op.number[0], ldx = op.number[1], N = op.number[2], K = op.number[3], ldy = op.number[4];
  const float* scales = (const float*)op.pointer[2];
  const int32_t* shifts = (const int32_t*)(scales + N);
  uint8_t* levels = (uint8_t*)op.pointer[5];
  float* steps = (float*)(levels + M * K);
  Share rows = share(M, thread, threads);
  for (int64_t m = rows.begin; m < rows.end; m++) steps[m] = quantize(x + m * ldx, K, levels + m * K);
#pragma omp barrier
#ifdef SPLITSERVE_AMX
  TileRegisters registers;
#endif
  panels(M, N, thread, threads, [&](auto vectors, int64_t row, int64_t count, int64_t c) {
    panel_int8<vectors>(levels + row * K, steps + row, count, w + c * K, K, scales + c, shifts + c, bias ? bias + c : nullptr,
                        y + row * ldy + c, ldy);
  });
}

}  // namespace
