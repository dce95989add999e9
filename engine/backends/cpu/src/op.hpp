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
  int64_t serial;      // small: one thread computes it alone
  void* pointer[6];
  int64_t size[4];
  int64_t stride[3][4];
  int64_t number[9];
  double real[2];
};

struct Share {
  int64_t begin, end;
};

// The part of `items` that a thread computes.
inline Share share(int64_t items, int thread, int threads) {
  return {items * thread / threads, items * (thread + 1) / threads};
}

}  // namespace
