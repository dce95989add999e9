// Conversions between bfloat16 and float32, and functions of 16 numbers at a time.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline bf16 narrow(float f) {  // rounds to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return f == f ? bf16(rounded) : bf16(0x7fc0);
}

inline __m512 widen16(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

inline void narrow16(bf16* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }

// e^x as 2^n * p(r), |r| <= ln2/2, p of degree 6; relative error under 2^-22. x is clamped to -87..88; max and min
// return their second operand for NaN, so NaN stays NaN.
inline __m512 exp16(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
  x = _mm512_min_ps(_mm512_set1_ps(88.0f), x);
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// 2^x for x <= 0 by a polynomial of degree 4; relative error under 2^-18, enough for results in bfloat16. 0 below -200.
inline __m512 power_of_two16(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
  __m512 n = _mm512_roundscale_ps(x, 0), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.0095701011f), r, _mm512_set1_ps(0.0559178591f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.2402474433f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6931217909f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.9999992847f));
  return _mm512_scalef_ps(p, n);
}

}  // namespace
