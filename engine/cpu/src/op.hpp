// Operations as engine/cpu/program.py describes them, and how threads share one.

#pragma once

#include <cstdint>

namespace {

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

struct Share {
  int64_t begin, end;
};

inline Share share(int64_t items, int thread, int threads) {
  return {items * thread / threads, items * (thread + 1) / threads};
}

}  // namespace
