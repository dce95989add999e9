// Addressing the KV of a step's sequences in the pool's blocks.

#pragma once

#include <cstring>

#include "op.hpp"
#include "vectors.hpp"

namespace {

// The attention inputs of a step, at fixed addresses so that graphs can be replayed; filled by attention.py.
struct Step {
  // Decode: tokens of each row's sequence, the new one included; 0 for padding. Chunk: tokens of the sequence so far,
  // then new tokens in the chunk.
  const int64_t* lengths;
  const int32_t* tables;  // block tables [rows, columns]
  int64_t columns;
};

// One layer of the pool. `block` and `head` are strides in elements; within a block, a head's positions are contiguous,
// head_dim elements each.
struct PoolView {
  bf16 *keys, *values;
  int64_t block, head, block_size, head_dim;
  const bf16* key(const int32_t* table, int64_t h, int64_t position) const { return at(keys, table, h, position); }
  bf16* at(bf16* base, const int32_t* table, int64_t h, int64_t position) const {
    return base + table[position / block_size] * block + h * head + position % block_size * head_dim;
  }
};

// The pool of an operation with the fields of `attend`.
inline PoolView pool_of(const Op& op) {
  bf16* pool = (bf16*)op.pointer[4];
  return {pool, pool + op.number[6], op.number[7], op.number[8], op.number[4], op.number[3]};
}

// Writes one position's key and value.
inline void write_kv(const PoolView& kv, const int32_t* table, int64_t h, int64_t position, const bf16* key,
                     const bf16* value) {
  std::memcpy(kv.at(kv.keys, table, h, position), key, kv.head_dim * 2);
  std::memcpy(kv.at(kv.values, table, h, position), value, kv.head_dim * 2);
}

}  // namespace
