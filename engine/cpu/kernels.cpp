// Kernels in bfloat16 for x86-64 with AVX-512 BF16, and what runs lists of them on several threads.
// Plain C interface, no dependency but OpenMP; engine/cpu/build.py compiles it, engine/cpu/program.py describes the operations.
//
// Sums are made in the same order whatever the number of rows or threads, so a row's result does not depend on what else
// is in the batch.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

using bf16 = uint16_t;

enum Code : int64_t { LINEAR = 0, RMS_NORM = 1, BINARY = 2, UNARY = 3, ATTEND = 4, PREFILL = 5, LINEAR_INT8 = 6 };
enum Binary : int64_t { ADD = 0, SUB = 1, MUL = 2 };
enum Unary : int64_t { COPY = 0, NEG = 1, SILU = 2 };

// One operation. Strides and sizes are in elements. What each field means is said beside the function that reads it.
struct Op {
  int64_t code;
  int64_t serial;      // small: one thread does it, the others go on to the next one that is not
  void* pointer[6];
  int64_t size[4];
  int64_t stride[3][4];
  int64_t number[10];
  double real[2];
};

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline bf16 narrow(float f) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return f == f ? bf16(rounded) : bf16(0x7fc0);
}

inline __m512 widen16(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

inline void narrow16(bf16* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }

// exp by 2^n * p(r), |r| <= ln2/2, p of degree 6; relative error under 2^-22. NaN stays NaN: it is the second operand.
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

// 2^x for x <= 0, a polynomial of degree 4: relative error under 2^-18, for what is rounded to bfloat16. 0 from -200 on.
inline __m512 power_of_two16(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
  __m512 n = _mm512_roundscale_ps(x, 0), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.0095701011f), r, _mm512_set1_ps(0.0559178591f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.2402474433f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6931217909f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.9999992847f));
  return _mm512_scalef_ps(p, n);
}

struct Share {
  int64_t begin, end;
};

inline Share share(int64_t items, int thread, int threads) {
  return {items * thread / threads, items * (thread + 1) / threads};
}

// ---- linear layers ---------------------------------------------------------------------------------------------
//
// Weights [N, K] are packed in panels of 48 outputs, the last one of 32 or 16: [N/48][K/2][48][2], so that one row
// of a panel is a few whole vectors, of pairs as the dot product instruction wants them, and a panel is read in one go.

constexpr int PANEL = 3;  // vectors of 16 outputs
constexpr int TILE = 8;   // rows
constexpr int64_t CHUNK = 256;  // rows whose inputs stay in the second level cache
constexpr int AHEAD = 2048;  // bytes that weights are fetched ahead

// What a tile fetches beside computing: the panel that it reads, further on; the next panel, all of it or one line of
// each three; or nothing. So memory is read while all tiles of a panel are computed, not only during the first.
enum Fetch { THIS, NEXT, NEXT_LINE, NOTHING };

template <Fetch FETCH, int VECTORS>
inline void fetch_lines(const void* weights, int64_t distance) {
  const char* p = (const char*)weights + distance;
  if (FETCH == NEXT_LINE) _mm_prefetch(p, _MM_HINT_T1);
  for (int v = 0; v < VECTORS; v++) {
    if (FETCH == THIS) _mm_prefetch(p + v * 64, _MM_HINT_T0);
    if (FETCH == NEXT) _mm_prefetch(p + v * 64, _MM_HINT_T1);
  }
}

template <auto V>
using Constant = std::integral_constant<decltype(V), V>;

// Calls compute(rows, fetch, first row, distance of what is fetched) until there are M rows, rows and fetch as constants.
template <int VECTORS, class Compute>
inline void tiles(int64_t M, int64_t panel_bytes, Compute compute) {
  Constant<TILE> whole;
  bool many = M > VECTORS * TILE;
  int64_t row = 0;
  for (; M - row >= TILE; row += TILE) {
    if (row == 0)
      compute(whole, Constant<THIS>{}, row, AHEAD);
    else if (many && row <= VECTORS * TILE)
      compute(whole, Constant<NEXT_LINE>{}, row, panel_bytes + (row / TILE - 1) * 64);
    else if (!many && row == TILE)
      compute(whole, Constant<NEXT>{}, row, panel_bytes);
    else
      compute(whole, Constant<NOTHING>{}, row, 0);
  }
  auto rest = [&](auto rows) {
    if (row == 0)
      compute(rows, Constant<THIS>{}, row, AHEAD);
    else
      compute(rows, Constant<NEXT>{}, row, panel_bytes);
  };
  switch (M - row) {
    case 1: return rest(Constant<1>{});
    case 2: return rest(Constant<2>{});
    case 3: return rest(Constant<3>{});
    case 4: return rest(Constant<4>{});
    case 5: return rest(Constant<5>{});
    case 6: return rest(Constant<6>{});
    case 7: return rest(Constant<7>{});
    default: return;
  }
}

// `ROWS` rows of x against `VECTORS` * 16 columns; `out` takes the sums of a row and a vector of columns.
template <int ROWS, int VECTORS, Fetch FETCH, class Out>
inline void tile(const bf16* x, int64_t ldx, const bf16* w, int64_t K, int64_t distance, Out out) {
  __m512 sum[ROWS][VECTORS];
  for (int v = 0; v < VECTORS; v++)
    for (int m = 0; m < ROWS; m++) sum[m][v] = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 2, w += VECTORS * 32) {
    fetch_lines<FETCH, VECTORS>(w, distance);
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

template <int VECTORS>
void panel(const bf16* x, int64_t M, int64_t ldx, const bf16* w, int64_t K, const bf16* bias, bf16* y, int64_t ldy) {
  tiles<VECTORS>(M, VECTORS * 32 * K, [&](auto rows, auto fetch, int64_t row, int64_t distance) {
    tile<rows, VECTORS, fetch>(x + row * ldx, ldx, w, K, distance, [&](int m, int v, __m512 sum) {
      if (bias) sum = _mm512_add_ps(sum, widen16(bias + v * 16));
      narrow16(y + (row + m) * ldy + v * 16, sum);
    });
  });
}

// pointer: x [M, K], packed weights, bias [N] or null, y [M, N]; number: M, ldx, N, K, ldy.
void linear(const Op& op, int thread, int threads) {
  const bf16 *x = (const bf16*)op.pointer[0], *w = (const bf16*)op.pointer[1], *bias = (const bf16*)op.pointer[2];
  bf16* y = (bf16*)op.pointer[3];
  int64_t M = op.number[0], ldx = op.number[1], N = op.number[2], K = op.number[3], ldy = op.number[4];
  int64_t width = PANEL * 16;
  Share mine = share((N + width - 1) / width, thread, threads);
  for (int64_t row = 0; row < M; row += CHUNK) {
    int64_t rows = std::min(CHUNK, M - row);
    for (int64_t p = mine.begin; p < mine.end; p++) {
      int64_t column = p * width;
      const bf16 *in = x + row * ldx, *weights = w + column * K, *b = bias ? bias + column : nullptr;
      bf16* out = y + row * ldy + column;
      switch (std::min(width, N - column) / 16) {
        case 3: panel<3>(in, rows, ldx, weights, K, b, out, ldy); break;
        case 2: panel<2>(in, rows, ldx, weights, K, b, out, ldy); break;
        default: panel<1>(in, rows, ldx, weights, K, b, out, ldy); break;
      }
    }
  }
}

// ---- linear layers in int8 ---------------------------------------------------------------------------------------
//
// Weights [N, K] lie in panels as above, in fours: [N/48][K/4][48][4]. Each row of the input is divided by its own largest
// magnitude and shifted to unsigned, as the instruction wants it; what the shift adds is known for each output before.

// A row of K numbers in 1..255, 128 for 0; returns what one step is worth, NaN where one is not a number.
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

// sum plus the products of four unsigned and four signed bytes. Not the intrinsic: gcc 12 keeps its sums on the stack, at
// half the speed.
inline Int16 dot(Int16 sum, Int16 unsigned_bytes, Int16 signed_bytes) {
  asm inline("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
  return sum;
}

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

template <int VECTORS>
void panel_int8(const uint8_t* x, const float* steps, int64_t M, const int8_t* w, int64_t K, const float* scales,
                const int32_t* shifts, const bf16* bias, bf16* y, int64_t ldy) {
  tiles<VECTORS>(M, VECTORS * 16 * K, [&](auto rows, auto fetch, int64_t row, int64_t distance) {
    tile_int8<rows, VECTORS, fetch>(x + row * K, w, K, distance, [&](int m, int v, __m512i sum) {
      __m512 by = _mm512_mul_ps(_mm512_set1_ps(steps[row + m]), _mm512_loadu_ps(scales + v * 16));
      sum = _mm512_sub_epi32(sum, _mm512_loadu_si512(shifts + v * 16));
      __m512 result = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), by);
      if (bias) result = _mm512_add_ps(result, widen16(bias + v * 16));
      narrow16(y + (row + m) * ldy + v * 16, result);
    });
  });
}

// pointer: x [M, K], packed weights, scales [N] float and then shifts [N] int32, bias [N] or null, y [M, N], room for
// the quantized x [M, K] and then M floats; number: M, ldx, N, K, ldy. K is a multiple of 16.
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
  int64_t width = PANEL * 16;
  Share mine = share((N + width - 1) / width, thread, threads);
  for (int64_t row = 0; row < M; row += CHUNK) {
    int64_t count = std::min(CHUNK, M - row);
    for (int64_t p = mine.begin; p < mine.end; p++) {
      int64_t c = p * width;
      const bf16* b = bias ? bias + c : nullptr;
      bf16* out = y + row * ldy + c;
      const uint8_t* in = levels + row * K;
      switch (std::min(width, N - c) / 16) {
        case 3: panel_int8<3>(in, steps + row, count, w + c * K, K, scales + c, shifts + c, b, out, ldy); break;
        case 2: panel_int8<2>(in, steps + row, count, w + c * K, K, scales + c, shifts + c, b, out, ldy); break;
        default: panel_int8<1>(in, steps + row, count, w + c * K, K, scales + c, shifts + c, b, out, ldy); break;
      }
    }
  }
}

// ---- norms and elementwise ---------------------------------------------------------------------------------------

// pointer: x, weight [H], y; number: rows, H, kind; real: epsilon. Rows lie one after the other.
// Kind 0 rounds before it multiplies by the weight (Llama), kind 1 multiplies by 1 + weight and rounds then (Gemma).
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
                     // Where exp16 ends its result would be too small to outweigh p.
                     __mmask16 beyond = _mm512_cmp_ps_mask(p, _mm512_set1_ps(-88.0f), _CMP_LT_OQ);
                     e = _mm512_mask_mov_ps(e, beyond, _mm512_set1_ps(INFINITY));
                     return _mm512_div_ps(p, _mm512_add_ps(one, e));
                   },
                   [](float p, float) { return p / (1.0f + std::exp(-p)); });
  }
}

// pointer: y, a, b; size, stride: of y, a, b (b's are a's for unary ones); number: which.
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

// ---- attention ---------------------------------------------------------------------------------------------------

// What a step tells its attention; lies in memory that stays. `tables` [rows, columns].
struct Step {
  // Tokens of each sequence, the new one included; 0: a row that is padding. Of a chunk: of its sequence, and its own.
  const int64_t* lengths;
  const int32_t* tables;
  int64_t columns;
};

// Of one layer. Strides within the pool; one position's head_dim values lie together, positions of a head too.
struct Place {
  bf16 *keys, *values;
  int64_t block, head, block_size, head_dim;
  const bf16* key(const int32_t* table, int64_t h, int64_t position) const { return at(keys, table, h, position); }
  bf16* at(bf16* base, const int32_t* table, int64_t h, int64_t position) const {
    return base + table[position / block_size] * block + h * head + position % block_size * head_dim;
  }
};

// Sums of 16 vectors, one a lane: a tree of shuffles costs a quarter of 16 sums one by one.
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

// D is fixed at compile time for the usual sizes of a head; 0: any.
template <int G, int FIXED>
void scores(const bf16* query, int64_t query_head, const Place& place, const int32_t* table, int64_t h, int64_t first,
            int64_t last, float scale, float* out, int64_t ld) {
  const int64_t D = FIXED ? FIXED : place.head_dim;
  const __m512 by = _mm512_set1_ps(scale);
  for (int64_t position = first; position < last;) {
    const bf16* key = place.key(table, h, position);
    int64_t stop = std::min(last, (position / place.block_size + 1) * place.block_size);
    int64_t count = std::min<int64_t>(16, stop - position);
    // A layer's part of a block lies far from that of the next one: the processor does not find it by itself.
    if (position + 2 * count < last) fetch(place.key(table, h, position + 2 * count), count * D * 2);
    fetch(place.at(place.values, table, h, position), count * D * 2);
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

// s = softcap * tanh(s / softcap), before anything is masked: it would make what is -inf count. 0: none. Whole vectors.
inline void cap(float* s, int64_t n, float softcap) {
  if (softcap == 0) return;
  __m512 one = _mm512_set1_ps(1.0f), most = _mm512_set1_ps(softcap), by = _mm512_set1_ps(2.0f / softcap);
  for (int64_t i = 0; i < n; i += 16) {  // tanh x = 1 - 2 / (1 + exp 2x)
    __m512 e = _mm512_add_ps(one, exp16(_mm512_mul_ps(_mm512_loadu_ps(s + i), by)));
    _mm512_storeu_ps(s + i, _mm512_sub_ps(most, _mm512_div_ps(_mm512_add_ps(most, most), e)));
  }
}

// Softmax without the division; returns the sum. `n` is padded to whole vectors by what exp makes 0.
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

template <int G, int VECTORS>
void weighted(const float* weights, int64_t ld, const float* sums, const Place& place, const int32_t* table, int64_t h,
              int64_t first, int64_t last, bf16* out, int64_t out_head) {
  int64_t D = place.head_dim;
  for (int64_t d = 0; d < D; d += VECTORS * 16) {
    __m512 sum[G][VECTORS];
    for (int g = 0; g < G; g++)
      for (int v = 0; v < VECTORS; v++) sum[g][v] = _mm512_setzero_ps();
    for (int64_t position = first; position < last;) {
      const bf16* value = place.at(place.values, table, h, position) + d;
      int64_t stop = std::min(last, (position / place.block_size + 1) * place.block_size);
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

template <int G>
void heads(const bf16* query, int64_t query_head, const Place& place, const int32_t* table, int64_t h, int64_t first,
           int64_t last, const Op& op, std::vector<float>& room, bf16* out) {
  int64_t ld = (last - first + 15) / 16 * 16, D = place.head_dim;
  if (int64_t(room.size()) < G * ld) room.resize(G * ld);
  float sums[G], scale = float(op.real[0]);
  switch (D) {
    case 64: scores<G, 64>(query, query_head, place, table, h, first, last, scale, room.data(), ld); break;
    case 128: scores<G, 128>(query, query_head, place, table, h, first, last, scale, room.data(), ld); break;
    default: scores<G, 0>(query, query_head, place, table, h, first, last, scale, room.data(), ld); break;
  }
  cap(room.data(), G * ld, float(op.real[1]));
  for (int g = 0; g < G; g++) sums[g] = weigh(room.data() + g * ld, last - first);
  if (D % 64 == 0)
    weighted<G, 4>(room.data(), ld, sums, place, table, h, first, last, out, D);
  else
    weighted<G, 2>(room.data(), ld, sums, place, table, h, first, last, out, D);
}

// Writes the new token's KV of each sequence into its block and attends over all of its positions, or the last `window`.
// pointer: query [heads, rows, D], key, value [kv_heads, rows, D], out [rows, heads, D], pool of the layer, Step;
// stride[0..2]: of query, key, value (head, row); real: scale, soft cap or 0;
// number: rows, kv_heads, heads a KV head, D, block_size, window or 0; pool strides: keys to values, block, head.
void attend(const Op& op, int thread, int threads) {
  const Step& step = *(const Step*)op.pointer[5];
  bf16 *out = (bf16*)op.pointer[3], *pool = (bf16*)op.pointer[4];
  int64_t rows = op.number[0], kv_heads = op.number[1], group = op.number[2], D = op.number[3], window = op.number[5];
  Place place{pool, pool + op.number[6], op.number[7], op.number[8], op.number[4], D};
  static thread_local std::vector<float> room;
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
      int64_t bytes = std::min<int64_t>(16, place.block_size) * D * 2;
      fetch(place.key(table, h + 1, 0), bytes);
      if (length > place.block_size) fetch(place.key(table, h + 1, place.block_size), bytes);
    }
    std::memcpy(place.at(place.keys, table, h, length - 1), key, D * 2);
    std::memcpy(place.at(place.values, table, h, length - 1), value, D * 2);
    int64_t first = window && length > window ? length - window : 0;
    const bf16* query = (const bf16*)op.pointer[0] + h * group * op.stride[0][0] + row * op.stride[0][1];
    for (int64_t g = 0; g < group;) {
      const bf16* q = query + g * op.stride[0][0];
      bf16* o = result + g * D;
      int64_t left = group - g;
      if (left >= 4)
        heads<4>(q, op.stride[0][0], place, table, h, first, length, op, room, o), g += 4;
      else if (left == 3)
        heads<3>(q, op.stride[0][0], place, table, h, first, length, op, room, o), g += 3;
      else if (left == 2)
        heads<2>(q, op.stride[0][0], place, table, h, first, length, op, room, o), g += 2;
      else
        heads<1>(q, op.stride[0][0], place, table, h, first, length, op, room, o), g += 1;
    }
  }
}

// ---- attention of prompts ------------------------------------------------------------------------------------------
//
// Keys and values of one head at a time are packed as weights are, keys as a layer from head_dim to positions and values
// as one from positions to head_dim; then every tile of queries takes two products with a softmax between them.

constexpr int64_t KEYS = PANEL * 16;  // of one panel
constexpr int VALUES = 32;            // columns of one panel of values

struct Chunk {
  Place place;
  const int32_t* table;
  int64_t total;  // positions with KV, the chunk's included
  int64_t panels() const { return (total + KEYS - 1) / KEYS; }
  int64_t padded() const { return panels() * KEYS; }
};

// 16 rows of 16 numbers of 32 bits become 16 columns.
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
    __m512i even = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88), odd = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
    __m512i even2 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
    __m512i odd2 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
    v[j] = _mm512_shuffle_i32x4(even, even2, 0x88);
    v[4 + j] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
    v[8 + j] = _mm512_shuffle_i32x4(even, even2, 0xdd);
    v[12 + j] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
  }
}

// One panel of keys; positions there are none of are 0.
void pack_keys(const Chunk& c, int64_t h, int64_t p, bf16* packed) {
  int64_t D = c.place.head_dim;
  for (int64_t j = 0; j < KEYS; j += 16) {
    const bf16* keys[16];
    for (int64_t i = 0; i < 16; i++) {
      int64_t position = p * KEYS + j + i;
      keys[i] = position < c.total ? c.place.key(c.table, h, position) : nullptr;
    }
    for (int64_t d = 0; d < D; d += 32) {
      __m512i v[16];
      for (int i = 0; i < 16; i++) v[i] = keys[i] ? _mm512_loadu_si512(keys[i] + d) : _mm512_setzero_si512();
      transpose(v);
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(packed + p * KEYS * D + (d + 2 * i) * KEYS + j * 2, v[i]);
    }
  }
}

// As many values: of two positions each in turns.
void pack_values(const Chunk& c, int64_t h, int64_t p, bf16* packed) {
  int64_t D = c.place.head_dim, padded = c.padded();
  auto load = [&](int64_t position, int64_t d) {
    if (position >= c.total) return _mm512_setzero_si512();
    return _mm512_loadu_si512(c.place.at(c.place.values, c.table, h, position) + d);
  };
  __m512i low = _mm512_setzero_si512(), step = _mm512_set1_epi32(0x00200000);  // 0, 32, 1, 33, ...
  low = _mm512_add_epi32(step, _mm512_mullo_epi32(_mm512_set1_epi32(0x00010001), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
  __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t position = p * KEYS; position < (p + 1) * KEYS; position += 2)
    for (int64_t d = 0; d < D; d += VALUES) {
      __m512i even = load(position, d), odd = load(position + 1, d);
      bf16* to = packed + d * padded + position * VALUES;
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(even, high, odd));
    }
}

// Softmax of n scores without the division, rounded into `weights`; returns the sum of what was rounded. n is a multiple
// of KEYS.
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

// Of a tile's scores [TILE, ld]; row r sees positions [from[r], to[r]) of [low, high).
inline void weigh_tile(float* s, int64_t ld, const int64_t* from, const int64_t* to, int64_t low, int64_t high,
                       float softcap, bf16* weights, float* sums) {
  for (int r = 0; r < TILE; r++) {
    float* row = s + r * ld;
    cap(row, high - low, softcap);
    std::fill(row, row + (from[r] - low), -INFINITY);
    std::fill(row + (to[r] - low), row + (high - low), -INFINITY);
    sums[r] = weigh_rounded(row, high - low, weights + r * ld);
  }
}

// Writes the KV of new tokens of one sequence into its blocks and attends over all of its positions, or the last `window`.
// pointer: query [heads, rows, D], key, value [kv_heads, rows, D], out [rows, heads, D], pool of the layer, Step
// (of one sequence, whose new tokens may be fewer than rows); the other fields as those of `attend`.
void prefill(const Op& op, int thread, int threads, std::vector<bf16>& shared) {
  const Step& step = *(const Step*)op.pointer[5];
  int64_t rows = op.number[0], kv_heads = op.number[1], group = op.number[2], D = op.number[3], window = op.number[5];
  int64_t total = step.lengths[0], tokens = step.lengths[1], before = total - tokens;
  bf16 *out = (bf16*)op.pointer[3], *pool = (bf16*)op.pointer[4];
  if (thread == 0) std::memset(out + tokens * kv_heads * group * D, 0, (rows - tokens) * kv_heads * group * D * 2);
  Chunk c{{pool, pool + op.number[6], op.number[7], op.number[8], op.number[4], D}, step.tables, total};
  Share new_tokens = share(tokens, thread, threads);
  for (int64_t h = 0; h < kv_heads; h++)
    for (int64_t t = new_tokens.begin; t < new_tokens.end; t++) {
      const bf16* key = (const bf16*)op.pointer[1] + h * op.stride[1][0] + t * op.stride[1][1];
      const bf16* value = (const bf16*)op.pointer[2] + h * op.stride[2][0] + t * op.stride[2][1];
      std::memcpy(c.place.at(c.place.keys, c.table, h, before + t), key, D * 2);
      std::memcpy(c.place.at(c.place.values, c.table, h, before + t), value, D * 2);
    }
  if (thread == 0 && int64_t(shared.size()) < 2 * c.padded() * D) shared.resize(2 * c.padded() * D);
#pragma omp barrier
  bf16 *packed = shared.data(), *packed_values = packed + c.padded() * D;
  static thread_local std::vector<float> room;
  static thread_local std::vector<bf16> weights;
  int64_t ld = c.padded();
  if (int64_t(room.size()) < TILE * ld) room.resize(TILE * ld), weights.resize(TILE * ld);
  std::vector<bf16> queries(TILE * D);
  int64_t first_panel = window && before + 1 > window ? (before + 1 - window) / KEYS : 0;
  int64_t tiles = (tokens + TILE - 1) / TILE;
  for (int64_t h = 0; h < kv_heads; h++) {
    for (int64_t p = first_panel + thread; p < c.panels(); p += threads) {
      pack_keys(c, h, p, packed);
      pack_values(c, h, p, packed_values);
    }
#pragma omp barrier
    for (int64_t item = thread; item < group * tiles; item += threads) {
      int64_t head = h * group + item % group, token = item / group * TILE;
      int64_t count = std::min<int64_t>(TILE, tokens - token), from[TILE], to[TILE];
      const bf16* query = (const bf16*)op.pointer[0] + head * op.stride[0][0];
      for (int r = 0; r < TILE; r++) {
        int64_t t = token + std::min<int64_t>(r, count - 1);
        std::memcpy(&queries[r * D], query + t * op.stride[0][1], D * 2);
        to[r] = before + t + 1;
        from[r] = window && to[r] > window ? to[r] - window : 0;
      }
      int64_t low = from[0] / KEYS * KEYS, high = (to[TILE - 1] + KEYS - 1) / KEYS * KEYS;
      __m512 by = _mm512_set1_ps(float(op.real[0]));
      for (int64_t k = low; k < high; k += KEYS) {
        float* s = room.data() + (k - low);
        tile<TILE, PANEL, NOTHING>(queries.data(), D, packed + k * D, D, 0, [&](int m, int v, __m512 sum) {
          _mm512_storeu_ps(s + m * ld + v * 16, _mm512_mul_ps(sum, by));
        });
      }
      float sums[TILE];
      weigh_tile(room.data(), ld, from, to, low, high, float(op.real[1]), weights.data(), sums);
      for (int64_t d = 0; d < D; d += VALUES) {
        const bf16* w = packed_values + d * c.padded() + low * VALUES;
        bf16* o = out + (token * kv_heads * group + head) * D + d;
        tile<TILE, VALUES / 16, NOTHING>(weights.data(), ld, w, high - low, 0, [&](int m, int v, __m512 sum) {
          if (m < count)
            narrow16(o + m * kv_heads * group * D + v * 16, _mm512_mul_ps(sum, _mm512_set1_ps(1.0f / sums[m])));
        });
      }
    }
#pragma omp barrier
  }
}

// ---- sampling ----------------------------------------------------------------------------------------------------

// The first of the largest of n values; -1 where that is not finite or one is not a number.
int64_t likeliest(const bf16* x, int64_t n) {
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

// ---- running -----------------------------------------------------------------------------------------------------

void perform(const Op& op, int thread, int threads, std::vector<bf16>& shared) {
  switch (op.code) {
    case LINEAR: return linear(op, thread, threads);
    case RMS_NORM: return rms_norm(op, thread, threads);
    case ATTEND: return attend(op, thread, threads);
    case PREFILL: return prefill(op, thread, threads, shared);
    case LINEAR_INT8: return linear_int8(op, thread, threads);
    default: return elementwise(op, thread, threads);
  }
}

// Every thread goes through the whole list; they meet only around an operation that is everybody's.
void play(const Op* ops, int64_t count, int thread, int threads, std::vector<bf16>& shared) {
  bool together = false;  // whether the last operation was everybody's
  for (int64_t i = 0; i < count; i++) {
    if (!ops[i].serial || together) {
#pragma omp barrier
    }
    together = !ops[i].serial;
    if (together)
      perform(ops[i], thread, threads, shared);
    else if (thread == 0)
      perform(ops[i], 0, 1, shared);
  }
}

void run(const Op* ops, int64_t count, int threads) {
  static thread_local std::vector<bf16> memory;  // of who calls, for all threads
  std::vector<bf16>& shared = memory;
  if (threads == 1 || (count == 1 && ops->serial)) {
    for (int64_t i = 0; i < count; i++) perform(ops[i], 0, 1, shared);
    return;
  }
  // OpenMP's threads, because torch's operations before and after use them too: others would fight them for the cores.
#pragma omp parallel num_threads(threads)
  play(ops, count, omp_get_thread_num(), omp_get_num_threads(), shared);
}

}  // namespace

extern "C" {

int64_t splitserve_op_bytes() { return sizeof(Op); }

void splitserve_run(const void* ops, int64_t count, int threads) { run((const Op*)ops, count, threads); }

// `weights` [N, row_bytes], bfloat16 or int8, N a multiple of 16; `packed` as above, as large.
void splitserve_pack(const char* weights, int64_t N, int64_t row_bytes, char* packed) {
  for (int64_t column = 0; column < N; column += PANEL * 16) {
    int64_t width = std::min<int64_t>(PANEL * 16, N - column);
    for (int64_t at = 0; at < row_bytes; at += 4)
      for (int64_t n = 0; n < width; n++, packed += 4) std::memcpy(packed, weights + (column + n) * row_bytes + at, 4);
  }
}

// `places` [rows]; `x` [rows, n], rows `ldx` apart.
void splitserve_likeliest(int threads, const uint16_t* x, int64_t rows, int64_t n, int64_t ldx, int64_t* places) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int64_t row = 0; row < rows; row++) places[row] = likeliest(x + row * ldx, n);
}

// y = x W^T + bias, in one call; see `linear`.
void splitserve_linear(int threads, const void* x, const void* packed, const void* bias, void* y, int64_t M, int64_t ldx,
                       int64_t N, int64_t K) {
  Op op{};
  op.code = LINEAR;
  op.pointer[0] = (void*)x, op.pointer[1] = (void*)packed, op.pointer[2] = (void*)bias, op.pointer[3] = y;
  op.number[0] = M, op.number[1] = ldx, op.number[2] = N, op.number[3] = K, op.number[4] = N;
  run(&op, 1, threads);
}

void splitserve_rms_norm(int threads, const void* x, const void* weight, void* y, int64_t rows, int64_t H, int64_t kind,
                         double epsilon) {
  Op op{};
  op.code = RMS_NORM;
  op.serial = rows < 16;
  op.pointer[0] = (void*)x, op.pointer[1] = (void*)weight, op.pointer[2] = y;
  op.number[0] = rows, op.number[1] = H, op.number[2] = kind;
  op.real[0] = epsilon;
  run(&op, 1, threads);
}
}
