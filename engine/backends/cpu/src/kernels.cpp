// Kernels in bfloat16 for x86-64 with AVX-512 BF16, and the executor that runs lists of operations on several threads.
// Plain C interface, no dependency but OpenMP; compiled by engine/backends/cpu/build.py.
//
// The order of summation does not depend on the number of rows or threads, so a row's result does not depend on the
// rest of the batch.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "attention.hpp"
#include "elementwise.hpp"
#include "linear.hpp"
#include "op.hpp"
#include "prompt_attention.hpp"
#include "vectors.hpp"

namespace {

void perform(const Op& op, int thread, int threads, std::vector<bf16>& shared) {
  switch (op.code) {
    case LINEAR: return linear(op, thread, threads, shared);
    case RMS_NORM: return rms_norm(op, thread, threads);
    case ATTEND: return attend(op, thread, threads);
    case PREFILL: return prefill(op, thread, threads, shared);
    default: return elementwise(op, thread, threads);
  }
}

// Every thread walks the whole list. Parallel operations are shared by all threads, with a barrier before and after;
// thread 0 computes runs of serial operations alone, without barriers between them.
void execute(const Op* ops, int64_t count, int thread, int threads, std::vector<bf16>& shared) {
  bool parallel = false;  // whether the previous operation was parallel
  for (int64_t i = 0; i < count; i++) {
    if (!serial(ops[i]) || parallel) {
#pragma omp barrier
    }
    parallel = !serial(ops[i]);
    if (parallel)
      perform(ops[i], thread, threads, shared);
    else if (thread == 0)
      perform(ops[i], 0, 1, shared);
  }
}

void run(const Op* ops, int64_t count, int threads) {
  static thread_local std::vector<bf16> memory;  // the calling thread's; all OpenMP threads use it
  std::vector<bf16>& shared = memory;
  if (threads == 1 || (count == 1 && serial(*ops))) {
    for (int64_t i = 0; i < count; i++) perform(ops[i], 0, 1, shared);
    return;
  }
  // OpenMP's threads, because torch's operations before and after use them too: other threads would compete for cores.
#pragma omp parallel num_threads(threads)
  execute(ops, count, omp_get_thread_num(), omp_get_num_threads(), shared);
}

}  // namespace

extern "C" {

int64_t splitserve_op_bytes() { return sizeof(Op); }

void splitserve_run(const void* ops, int64_t count, int threads) { run((const Op*)ops, count, threads); }

// Packs `weights` [N, row_bytes], N a multiple of 16, into panels (panels.hpp); `packed` is as large.
// Four bytes move together: a pair of inputs of one output.
void splitserve_pack(const char* weights, int64_t N, int64_t row_bytes, char* packed) {
  for (int64_t column = 0; column < N; column += PANEL * 16) {
    int64_t width = std::min<int64_t>(PANEL * 16, N - column);
    for (int64_t at = 0; at < row_bytes; at += 4)
      for (int64_t n = 0; n < width; n++, packed += 4) std::memcpy(packed, weights + (column + n) * row_bytes + at, 4);
  }
}
}
