// The KV of a step's sequences, in blocks of the pool.

#pragma once

#include "vectors.hpp"

namespace {

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

}  // namespace
