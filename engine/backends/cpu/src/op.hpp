// Operations, in the layout of engine/backends/cpu/ops.py, and how threads divide one.

#pragma once

#include <cstdint>

namespace {

enum Code : int64_t {
  LINEAR = 0,
  RMS_NORM = 1,
  BINARY = 2,
  UNARY = 3,
  ATTEND = 4,
  PREFILL = 5,
};
enum Binary : int64_t { ADD = 0, SUB = 1, MUL = 2 };
enum Unary : int64_t { COPY = 0, NEG = 1, SILU = 2 };

// One operation. Strides and sizes are in elements. The function that computes it documents the fields that it reads.
struct Op {
  int64_t code;
  void* pointer[6];
  int64_t size[4];
  int64_t stride[3][4];
  int64_t number[9];
  double real[2];
};

constexpr int64_t SERIAL_ELEMENTS = 16384;

// Whether one thread computes it alone: of so few elements it is faster than several, which must be synchronized first.
inline bool serial(const Op& op) {
  if (op.code == RMS_NORM) return op.number[0] * op.number[1] <= SERIAL_ELEMENTS;
  if (op.code != BINARY && op.code != UNARY) return false;
  return op.size[0] * op.size[1] * op.size[2] * op.size[3] <= SERIAL_ELEMENTS;
}

struct Share {
  int64_t begin, end;
};

// The part of `items` that a thread computes.
inline Share share(int64_t items, int thread, int threads) {
  return {items * thread / threads, items * (thread + 1) / threads};
}

}  // namespace
