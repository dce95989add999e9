// Norms and elementwise operations.

#pragma once

#include <cmath>

#include "op.hpp"
#include "vectors.hpp"

namespace {

// Root mean square norm (arXiv:1910.07467). Fields:
// pointer: x, weight [H], y; number: rows, H, kind; real: epsilon. Rows are contiguous.
// Kind 0 rounds the normed value, then multiplies by the weight (Llama); kind 1 multiplies by 1 + weight, then rounds
// (Gemma).
void rms_norm(const Op& op, int thread, int threads) {
  const bf16 *x = (const bf16*)op.pointer[0], *weight = (const bf16*)op.pointer[1];
  bf16* y = (bf16*)op.pointer[2];
  int64_t H = op.number[1];
  Share mine = share(op.number[0], thread, threads);
  for (int64_t row = mine.begin; row < mine.end; row++) {
    const bf16* in = x + row * H;
    bf16* out = y + row * H;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t h = 0; h < H; h += 16) {
      __m512 v = widen16(in + h);
      squares = _mm512_fmadd_ps(v, v, squares);
    }
    float mean = _mm512_reduce_add_ps(squares) / float(H);
    __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + float(op.real[0])));
    for (int64_t h = 0; h < H; h += 16) {
      __m512 v = _mm512_mul_ps(widen16(in + h), scale), w = widen16(weight + h);
      if (op.number[2] == 0) {
        bf16 rounded[16];
        narrow16(rounded, v);
        narrow16(out + h, _mm512_mul_ps(w, widen16(rounded)));
      } else {
        narrow16(out + h, _mm512_mul_ps(v, _mm512_add_ps(w, _mm512_set1_ps(1.0f))));
      }
    }
  }
}

// One row of n elements: by vectors where all strides are 1, else one by one.
template <class F16, class F>
inline void along(bf16* y, const bf16* a, const bf16* b, const int64_t stride[3], int64_t n, F16 vector, F scalar) {
  int64_t i = 0;
  if (stride[0] == 1 && stride[1] == 1 && stride[2] == 1)
    for (; i + 16 <= n; i += 16) narrow16(y + i, vector(widen16(a + i), widen16(b + i)));
  for (; i < n; i++) y[i * stride[0]] = narrow(scalar(widen(a[i * stride[1]]), widen(b[i * stride[2]])));
}

inline void along(const Op& op, bf16* y, const bf16* a, const bf16* b, const int64_t s[3]) {
  int64_t n = op.size[3];
  if (op.code == BINARY) {
    switch (op.number[0]) {
      case ADD:
        return along(y, a, b, s, n, [](__m512 p, __m512 q) { return _mm512_add_ps(p, q); },
                     [](float p, float q) { return p + q; });
      case SUB:
        return along(y, a, b, s, n, [](__m512 p, __m512 q) { return _mm512_sub_ps(p, q); },
                     [](float p, float q) { return p - q; });
      default:
        return along(y, a, b, s, n, [](__m512 p, __m512 q) { return _mm512_mul_ps(p, q); },
                     [](float p, float q) { return p * q; });
    }
  }
  switch (op.number[0]) {
    case COPY:
      for (int64_t i = 0; i < n; i++) y[i * s[0]] = a[i * s[1]];
      return;
    case NEG:
      for (int64_t i = 0; i < n; i++) y[i * s[0]] = a[i * s[1]] ^ 0x8000;
      return;
    default:
      return along(y, a, a, s, n,
                   [](__m512 p, __m512) {
                     __m512 one = _mm512_set1_ps(1.0f);
                     __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), p));
                     // exp16 is clamped; beyond it, silu(p) must be p / inf.
                     __mmask16 beyond = _mm512_cmp_ps_mask(p, _mm512_set1_ps(-88.0f), _CMP_LT_OQ);
                     e = _mm512_mask_mov_ps(e, beyond, _mm512_set1_ps(INFINITY));
                     return _mm512_div_ps(p, _mm512_add_ps(one, e));
                   },
                   [](float p, float) { return p / (1.0f + std::exp(-p)); });
  }
}

// Elementwise functions of up to four dimensions; the first three are divided among the threads. Fields:
// pointer: y, a, b; size; stride: of y, a, b (unary: b is a); number: which Binary or Unary function.
void elementwise(const Op& op, int thread, int threads) {
  int64_t rows = op.size[0] * op.size[1] * op.size[2];
  Share mine = share(rows, thread, threads);
  const int64_t last[3] = {op.stride[0][3], op.stride[1][3], op.stride[2][3]};
  for (int64_t row = mine.begin; row < mine.end; row++) {
    int64_t k = row % op.size[2], j = row / op.size[2] % op.size[1], i = row / op.size[2] / op.size[1];
    int64_t at[3];
    for (int t = 0; t < 3; t++) at[t] = i * op.stride[t][0] + j * op.stride[t][1] + k * op.stride[t][2];
    along(op, (bf16*)op.pointer[0] + at[0], (const bf16*)op.pointer[1] + at[1], (const bf16*)op.pointer[2] + at[2], last);
  }
}

}  // namespace
