// Products by AMX, the tile multipliers of Intel's server processors since Sapphire Rapids, which has only one vector
// unit for bfloat16. Only in libraries that are built for them (AMX); see build.py.
//
// Eight tile registers of 16 rows of 64 bytes: 0 to 2 are the sums of 16 rows and up to 48 outputs, 3 to 5 those of 16
// more rows, 6 has 64 bytes of inputs of 16 rows, 7 the weights for them of 16 outputs, in fours of bytes as panels.hpp
// has them.
// https://www.intel.com/content/www/us/en/docs/intrinsics-guide (AMX)

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "op.hpp"
#include "panels.hpp"
#include "vectors.hpp"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && !defined(SPLITSERVE_NO_AMX)
#define SPLITSERVE_AMX 1
#endif

namespace {

#ifdef SPLITSERVE_AMX
constexpr bool AMX = true;
#else
constexpr bool AMX = false;
#endif
constexpr int64_t ROWS = 16;    // of a tile register
constexpr int64_t INPUTS = 32;  // that one multiplication takes

// 16 rows of an input: bytes between rows, and from one step of inputs to the next.
struct Rows {
  const void* first;
  int64_t stride, step;
};

#ifdef SPLITSERVE_AMX

// What the instruction for it reads. A constant, because gcc 12 takes the instruction to read eight bytes only, and may
// write the others of a local variable after it.
struct alignas(64) TileLayout {
  uint8_t palette = 1, begin = 0, unused[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS};
};
constinit const TileLayout LAYOUT;
static_assert(sizeof(TileLayout) == 64);

// The tile registers, while this lives. What a thread leaves in them the system saves at each switch.
struct TileRegisters {
  TileRegisters() { _tile_loadconfig(&LAYOUT); }
  ~TileRegisters() { _tile_release(); }
};

// 16 rows, or 16 and 16 more, times one panel of VECTORS * 16 outputs; calls out(row, vector, sums) for each vector.
// `row_bytes` of a row of inputs, a multiple of 64. Rows beyond `count` are computed and not given out. The processor
// itself streams a panel well that it reads in such large steps (measured on Granite Rapids).
template <int BLOCKS, int VECTORS, class Out>
inline void multiply(Rows x, Rows more, int64_t count, const void* weights, int64_t row_bytes, Out out) {
  constexpr int64_t line = VECTORS * 64;  // bytes of four bytes of inputs
  _tile_zero(0);
  if constexpr (VECTORS > 1) _tile_zero(1);
  if constexpr (VECTORS > 2) _tile_zero(2);
  if constexpr (BLOCKS > 1) {
    _tile_zero(3);
    if constexpr (VECTORS > 1) _tile_zero(4);
    if constexpr (VECTORS > 2) _tile_zero(5);
  }
  asm volatile("" ::: "memory");  // gcc does not know that loading tiles reads memory
  const char *a = (const char*)x.first, *b = (const char*)more.first, *w = (const char*)weights;
  for (int64_t at = 0; at < row_bytes; at += 64, a += x.step, b += more.step, w += line * ROWS) {
    _tile_loadd(7, w, line);
    _tile_loadd(6, a, x.stride);
    _tile_dpbf16ps(0, 6, 7);
    if constexpr (BLOCKS > 1) {
      _tile_loadd(6, b, more.stride);
      _tile_dpbf16ps(3, 6, 7);
    }
    if constexpr (VECTORS > 1) {
      _tile_loadd(7, w + 64, line);
      if constexpr (BLOCKS > 1) {  // the rows of the last product are still there
        _tile_dpbf16ps(4, 6, 7);
        _tile_loadd(6, a, x.stride);
      }
      _tile_dpbf16ps(1, 6, 7);
    }
    if constexpr (VECTORS > 2) {
      _tile_loadd(7, w + 128, line);
      _tile_dpbf16ps(2, 6, 7);
      if constexpr (BLOCKS > 1) {
        _tile_loadd(6, b, more.stride);
        _tile_dpbf16ps(5, 6, 7);
      }
    }
  }
  alignas(64) float sums[BLOCKS * VECTORS][ROWS][16];
  _tile_stored(0, sums[0], 64);
  if constexpr (VECTORS > 1) _tile_stored(1, sums[1], 64);
  if constexpr (VECTORS > 2) _tile_stored(2, sums[2], 64);
  if constexpr (BLOCKS > 1) {
    _tile_stored(3, sums[VECTORS], 64);
    if constexpr (VECTORS > 1) _tile_stored(4, sums[VECTORS + 1], 64);
    if constexpr (VECTORS > 2) _tile_stored(5, sums[VECTORS + 2], 64);
  }
  for (int64_t row = 0; row < count; row++)
    for (int v = 0; v < VECTORS; v++) {
      const float* sum = sums[row / ROWS * VECTORS + v][row % ROWS];
      out(row, v, _mm512_load_ps(sum));
    }
}

// 16 rows, of which `count` are there, as `multiply` loads them fastest: 32 inputs of each after one another.
inline void pack_rows(const bf16* x, int64_t count, int64_t ldx, int64_t K, bf16* packed) {
  for (int64_t row = 0; row < ROWS; row++)
    for (int64_t k = 0; k < K; k += INPUTS) {
      __m512i v = row < count ? _mm512_loadu_si512(x + row * ldx + k) : _mm512_setzero_si512();
      _mm512_storeu_si512(packed + k * ROWS + row * INPUTS, v);
    }
}

// M rows times one panel of VECTORS * 16 outputs, 32 at a time; `rows` gives the 16 from one on, all of which can be
// read.
template <int VECTORS, class From, class Out>
inline void panel_amx(int64_t M, From rows, const void* w, int64_t row_bytes, Out out) {
  for (int64_t row = 0; row < M; row += 2 * ROWS) {
    int64_t count = std::min(M - row, 2 * ROWS);
    Rows x = rows(row), more = rows(row + ROWS);
    auto later = [&](int64_t m, int v, __m512 sum) { out(row + m, v, sum); };
    if (count <= ROWS)
      multiply<1, VECTORS>(x, more, count, w, row_bytes, later);
    else
      multiply<2, VECTORS>(x, more, count, w, row_bytes, later);
  }
}

// The layer of `linear`, for K that is a multiple of INPUTS. Few rows each thread packs for itself, without waiting.
inline void linear_amx(const Op& op, int thread, int threads, std::vector<bf16>& shared) {
  const bf16 *x = (const bf16*)op.pointer[0], *w = (const bf16*)op.pointer[1], *bias = (const bf16*)op.pointer[2];
  bf16* y = (bf16*)op.pointer[3];
  int64_t M = op.number[0], ldx = op.number[1], N = op.number[2], K = op.number[3], ldy = op.number[4];
  static thread_local std::vector<bf16> own;
  bool together = threads > 1 && M > 4 * ROWS;
  std::vector<bf16>& memory = together ? shared : own;
  int64_t room = std::min(CHUNK, (M + ROWS - 1) / ROWS * ROWS) * K + 32;  // 32: to begin at a line
  if ((!together || thread == 0) && int64_t(memory.size()) < room) memory.resize(room);
  TileRegisters registers;
  for (int64_t row = 0; row < M; row += CHUNK) {
    int64_t rows = std::min(CHUNK, M - row), blocks = (rows + ROWS - 1) / ROWS;
    Share mine = together ? share(blocks, thread, threads) : Share{0, blocks};
    if (together) {
#pragma omp barrier
    }
    bf16* packed = (bf16*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    for (int64_t b = mine.begin; b < mine.end; b++)
      pack_rows(x + (row + b * ROWS) * ldx, std::min(ROWS, rows - b * ROWS), ldx, K, packed + b * ROWS * K);
    if (together) {
#pragma omp barrier
    }
    auto block = [&](int64_t m) { return Rows{packed + m * K, 64, ROWS * 64}; };
    panels(rows, N, thread, threads, [&](auto vectors, int64_t, int64_t, int64_t column) {
      panel_amx<vectors>(rows, block, w + column * K, 2 * K, [&](int64_t m, int v, __m512 sum) {
        int64_t to = column + v * 16;
        if (bias) sum = _mm512_add_ps(sum, widen16(bias + to));
        narrow16(y + (row + m) * ldy + to, sum);
      });
    });
  }
}

#endif

}  // namespace
