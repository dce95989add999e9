// Kernels in bfloat16 for x86-64 with AVX-512 BF16, and what runs lists of them on several threads.
// Plain C interface, no dependency but OpenMP; engine/cpu/build.py compiles it.
//
// Sums are made in the same order whatever the number of rows or threads, so a row's result does not depend on what else
// is in the batch.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "attention.hpp"
#include "elementwise.hpp"
#include "linear.hpp"
#include "linear_int8.hpp"
#include "op.hpp"
#include "prompt_attention.hpp"
#include "sampling.hpp"
#include "vectors.hpp"

namespace {

void perform(const Op& op, int thread, int threads, std::vector<bf16>& shared) {
  switch (op.code) {
    case LINEAR: return linear(op, thread, threads);
    case RMS_NORM: return rms_norm(op, thread, threads);
    case ATTEND: return attend(op, thread, threads);
    case PREFILL: return prefill(op, thread, threads, shared);
    case LINEAR_INT8: return linear_int8(op, thread, threads);
    default: return elementwise(op, thread, threads);
  }
}

// Every thread goes through the whole list; they meet only around an operation that is everybody's.
void play(const Op* ops, int64_t count, int thread, int threads, std::vector<bf16>& shared) {
  bool together = false;  // whether the last operation was everybody's
  for (int64_t i = 0; i < count; i++) {
    if (!ops[i].serial || together) {
#pragma omp barrier
    }
    together = !ops[i].serial;
    if (together)
      perform(ops[i], thread, threads, shared);
    else if (thread == 0)
      perform(ops[i], 0, 1, shared);
  }
}

void run(const Op* ops, int64_t count, int threads) {
  static thread_local std::vector<bf16> memory;  // of who calls, for all threads
  std::vector<bf16>& shared = memory;
  if (threads == 1 || (count == 1 && ops->serial)) {
    for (int64_t i = 0; i < count; i++) perform(ops[i], 0, 1, shared);
    return;
  }
  // OpenMP's threads, because torch's operations before and after use them too: others would fight them for the cores.
#pragma omp parallel num_threads(threads)
  play(ops, count, omp_get_thread_num(), omp_get_num_threads(), shared);
}

}  // namespace

extern "C" {

int64_t splitserve_op_bytes() { return sizeof(Op); }

void splitserve_run(const void* ops, int64_t count, int threads) { run((const Op*)ops, count, threads); }

// `weights` [N, row_bytes], bfloat16 or int8, N a multiple of 16; `packed` as above, as large.
void splitserve_pack(const char* weights, int64_t N, int64_t row_bytes, char* packed) {
  for (int64_t column = 0; column < N; column += PANEL * 16) {
    int64_t width = std::min<int64_t>(PANEL * 16, N - column);
    for (int64_t at = 0; at < row_bytes; at += 4)
      for (int64_t n = 0; n < width; n++, packed += 4) std::memcpy(packed, weights + (column + n) * row_bytes + at, 4);
  }
}

// `places` [rows]; `x` [rows, n], rows `ldx` apart.
void splitserve_likeliest(int threads, const uint16_t* x, int64_t rows, int64_t n, int64_t ldx, int64_t* places) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int64_t row = 0; row < rows; row++) places[row] = likeliest(x + row * ldx, n);
}

// y = x W^T + bias, in one call; see `linear`.
void splitserve_linear(int threads, const void* x, const void* packed, const void* bias, void* y, int64_t M, int64_t ldx,
                       int64_t N, int64_t K) {
  Op op{};
  op.code = LINEAR;
  op.pointer[0] = (void*)x, op.pointer[1] = (void*)packed, op.pointer[2] = (void*)bias, op.pointer[3] = y;
  op.number[0] = M, op.number[1] = ldx, op.number[2] = N, op.number[3] = K, op.number[4] = N;
  run(&op, 1, threads);
}

void splitserve_rms_norm(int threads, const void* x, const void* weight, void* y, int64_t rows, int64_t H, int64_t kind,
                         double epsilon) {
  Op op{};
  op.code = RMS_NORM;
  op.serial = rows < 16;
  op.pointer[0] = (void*)x, op.pointer[1] = (void*)weight, op.pointer[2] = y;
  op.number[0] = rows, op.number[1] = H, op.number[2] = kind;
  op.real[0] = epsilon;
  run(&op, 1, threads);
}
}
