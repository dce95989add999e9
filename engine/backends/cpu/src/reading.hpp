// Reading alone, to measure attention against.

#pragma once

#include <cstdint>

#include "op.hpp"
#include "vectors.hpp"

namespace {

// Reads pieces of memory and writes the exclusive or of a thread's share of them to its element of `seen`. Fields:
// pointer: memory, table of pieces int32, seen uint64 [threads]; number: pieces in the table, bytes from one to the
// next in memory, bytes of one (a multiple of 256).
void read_pieces(const Op& op, int thread, int threads) {
  const char* memory = (const char*)op.pointer[0];
  const int32_t* table = (const int32_t*)op.pointer[1];
  __m512i seen[4] = {};
  Share mine = share(op.number[0], thread, threads);
  for (int64_t i = mine.begin; i < mine.end; i++) {
    const char* piece = memory + table[i] * op.number[1];
    for (int64_t at = 0; at < op.number[2]; at += 256)
      for (int v = 0; v < 4; v++) seen[v] = _mm512_xor_si512(seen[v], _mm512_loadu_si512(piece + at + v * 64));
  }
  __m512i all = _mm512_xor_si512(_mm512_xor_si512(seen[0], seen[1]), _mm512_xor_si512(seen[2], seen[3]));
  uint64_t lanes[8], sum = 0;
  _mm512_storeu_si512(lanes, all);
  for (uint64_t lane : lanes) sum ^= lane;
  ((uint64_t*)op.pointer[2])[thread] = sum;
}

}  // namespace
