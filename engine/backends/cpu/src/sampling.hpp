// Argmax of logits.

#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.hpp"

namespace {

// The index of the first largest of n values; -1 if that value is not finite or any value is NaN.
int64_t argmax(const bf16* x, int64_t n) {
  __m512 top = _mm512_set1_ps(-INFINITY);
  __mmask16 odd = 0;
  int64_t whole = n / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) {
    __m512 v = widen16(x + i);
    odd |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    top = _mm512_max_ps(top, v);
  }
  float most = _mm512_reduce_max_ps(top);
  for (int64_t i = whole; i < n; i++) {
    if (std::isnan(widen(x[i]))) return -1;
    most = std::max(most, widen(x[i]));
  }
  if (odd || !std::isfinite(most)) return -1;
  __m512 wanted = _mm512_set1_ps(most);
  for (int64_t i = 0; i < whole; i += 16)
    if (__mmask16 here = _mm512_cmp_ps_mask(widen16(x + i), wanted, _CMP_EQ_OQ)) return i + __builtin_ctz(here);
  for (int64_t i = whole;; i++)
    if (widen(x[i]) == most) return i;
}

}  // namespace
