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

// What a tile prefetches: its own panel, AHEAD bytes on; the next panel, all of it or one cache line in three; or
// nothing. Without it, memory would be read only during the first tile of a panel and idle during the others.
enum Fetch { THIS, NEXT, NEXT_LINE, NOTHING };

// Prefetches the lines that one step of a tile covers, `distance` bytes ahead of `weights`.
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

// Cuts M rows into tiles: calls compute(rows, fetch, first row, prefetch distance) for each; rows and fetch are
// constants. The first tile of a panel streams it from memory; later tiles find it in the cache and prefetch the next panel, with
// many rows spread over several tiles.
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
