// Matrix products in panels and tiles.
//
// Weights [N, K] are packed in panels of 48 outputs, the last one of 48, 32 or 16: [N/48][K/2][48][2]. So one step of K
// reads a few whole vectors, holding pairs of inputs as the dot product instruction takes them, and a panel is read
// sequentially. A tile is up to TILE rows of the input times one panel; its sums stay in registers.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "op.hpp"

namespace {

constexpr int PANEL = 3;        // vectors of 16 outputs in a panel
constexpr int TILE = 8;         // rows of a tile
constexpr int64_t CHUNK = 256;  // rows whose inputs stay in the second level cache
constexpr int AHEAD = 2048;     // prefetch distance in bytes

template <auto V>
using Constant = std::integral_constant<decltype(V), V>;

// Cuts M rows into tiles: calls compute(rows, prefetch, first row) for each; the first two are constants. The first tile
// of a panel streams it from memory; later tiles find it in the cache.
template <class Compute>
inline void tiles(int64_t M, Compute compute) {
  int64_t row = 0;
  auto next = [&](auto rows) {
    if (row == 0)
      compute(rows, Constant<true>{}, row);
    else
      compute(rows, Constant<false>{}, row);
  };
  for (; M - row >= TILE; row += TILE) next(Constant<TILE>{});
  switch (M - row) {
    case 1: return next(Constant<1>{});
    case 2: return next(Constant<2>{});
    case 3: return next(Constant<3>{});
    case 4: return next(Constant<4>{});
    case 5: return next(Constant<5>{});
    case 6: return next(Constant<6>{});
    case 7: return next(Constant<7>{});
    default: return;
  }
}

// Calls compute(vectors per panel, first row, rows, first column) for this thread's panels of N outputs; the number of
// vectors is a constant.
template <class Compute>
inline void panels(int64_t M, int64_t N, int thread, int threads, Compute compute) {
  constexpr int64_t width = PANEL * 16;
  Share mine = share((N + width - 1) / width, thread, threads);
  for (int64_t row = 0; row < M; row += CHUNK) {
    int64_t rows = std::min(CHUNK, M - row);
    for (int64_t column = mine.begin * width; column < std::min(N, mine.end * width); column += width) {
      switch (std::min(width, N - column) / 16) {
        case 3: compute(Constant<3>{}, row, rows, column); break;
        case 2: compute(Constant<2>{}, row, rows, column); break;
        default: compute(Constant<1>{}, row, rows, column); break;
      }
    }
  }
}

}  // namespace
