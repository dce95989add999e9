// Addressing the KV of a step's sequences in the pool's blocks.

#pragma once

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

// One layer of the pool, elements of type T. `block` and `head` are strides in elements; within a block, a head's
// positions are contiguous, head_dim elements each. int8 elements have a scale for each vector: bfloat16
// [2, kv_heads, block_size] in each block, `scales` bytes behind its first key (int8_kv.hpp).
template <typename T>
struct PoolView {
  T *keys, *values;
  int64_t block, head, block_size, head_dim, kv_heads, scales;
  const T* key(const int32_t* table, int64_t h, int64_t position) const { return at(keys, table, h, position); }
  T* at(T* base, const int32_t* table, int64_t h, int64_t position) const {
    return base + table[position / block_size] * block + h * head + position % block_size * head_dim;
  }
  // Of the key, or the value, at a position. `base` as for `at`.
  bf16* scale(const T* base, const int32_t* table, int64_t h, int64_t position) const {
    bf16* first = (bf16*)(keys + table[position / block_size] * block + scales);
    return first + ((base == values ? kv_heads : 0) + h) * block_size + position % block_size;
  }
};

// The pool of an operation with the fields of `attend`.
template <typename T>
inline PoolView<T> pool_of(const Op& op) {
  T* pool = (T*)op.pointer[4];
  return {pool, pool + op.number[6], op.number[7], op.number[8], op.number[4], op.number[3], op.number[1], op.number[9]};
}

// Writes one position's key and value.
inline void write_kv(const PoolView<bf16>& kv, const int32_t* table, int64_t h, int64_t position, const bf16* key,
                     const bf16* value) {
  std::memcpy(kv.at(kv.keys, table, h, position), key, kv.head_dim * 2);
  std::memcpy(kv.at(kv.values, table, h, position), value, kv.head_dim * 2);
}

}  // namespace
