// From attention scores to weights.

#pragma once

#include <cmath>
#include <cstdint>

#include "vectors.hpp"

namespace {

// s = softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118, section 2); nothing for softcap 0. Call it before
// masking: it would turn -inf into a finite score. n is rounded up to whole vectors.
inline void cap(float* s, int64_t n, float softcap) {
  if (softcap == 0) return;
  __m512 one = _mm512_set1_ps(1.0f), most = _mm512_set1_ps(softcap), by = _mm512_set1_ps(2.0f / softcap);
  for (int64_t i = 0; i < n; i += 16) {  // tanh x = 1 - 2 / (1 + exp 2x)
    __m512 e = _mm512_add_ps(one, exp16(_mm512_mul_ps(_mm512_loadu_ps(s + i), by)));
    _mm512_storeu_ps(s + i, _mm512_sub_ps(most, _mm512_div_ps(_mm512_add_ps(most, most), e)));
  }
}

// Softmax of n scores in place, without the division; returns the sum. Pads to whole vectors with weights of 0.
inline float weigh(float* s, int64_t n) {
  int64_t padded = (n + 15) / 16 * 16;
  for (int64_t i = n; i < padded; i++) s[i] = -INFINITY;
  __m512 top = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < padded; i += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(s + i));
  __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  for (int64_t i = 0; i < padded; i += 16) {
    __m512 x = _mm512_loadu_ps(s + i);
    __mmask16 there = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    __m512 e = _mm512_maskz_mov_ps(there, exp16(_mm512_sub_ps(x, most)));
    _mm512_storeu_ps(s + i, e);
    sum = _mm512_add_ps(sum, e);
  }
  return _mm512_reduce_add_ps(sum);
}

}  // namespace
