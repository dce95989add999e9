// Kernels in bfloat16 for x86-64 with AVX-512 BF16, and the executor that runs lists of operations on several threads.
// Plain C interface, no dependency but OpenMP; compiled by engine/backends/cpu/build.py.
//
// The order of summation does not depend on the number of rows or threads, so a row's result does not depend on the
// rest of the batch.

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <vector>

#include "attention.hpp"
#include "elementwise.hpp"
#include "int8_kv.hpp"
#include "linear.hpp"
#include "linear_int8.hpp"
#include "op.hpp"
#include "prompt_attention.hpp"
#include "reading.hpp"
#include "sampling.hpp"
#include "vectors.hpp"

namespace {

void perform(const Op& op, int thread, int threads, std::vector<bf16>& shared) {
  const bool scaled_kv = op.number[9];
  switch (op.code) {
    case LINEAR: return linear(op, thread, threads, shared);
    case RMS_NORM: return rms_norm(op, thread, threads);
    case ATTEND: return (scaled_kv ? attend<int8_t> : attend<bf16>)(op, thread, threads);
    case PREFILL: return (scaled_kv ? prefill<int8_t> : prefill<bf16>)(op, thread, threads, shared);
    case READ: return read_pieces(op, thread, threads);
    case LINEAR_INT8: return linear_int8(op, thread, threads);
    default: return elementwise(op, thread, threads);
  }
}

// Neighbours whose cores are borrowed. `rests`: of each a byte that is 1 while it rests; `uses`, so many bytes after it:
// a counter of what is computed on its cores. `counts`: how many it has; `cores`: those of all.
struct Lenders {
  volatile uint8_t* const* rests;
  int64_t uses;
  const int* counts;
  const int* cores;
  int number;

  uint64_t resting() const {
    uint64_t found = 0;
    for (int i = 0; i < number; i++) found |= (uint64_t)(*rests[i] != 0) << i;
    return found;
  }
};

// Which of them rest while a list of operations is computed, and the cores of those.
struct Loan {
  const Lenders& lenders;
  uint64_t resting;
  std::vector<int> cores;

  explicit Loan(const Lenders& lenders) : lenders(lenders), resting(lenders.resting()) {
    const int* next = lenders.cores;
    for (int i = 0; i < lenders.number; next += lenders.counts[i++])
      if (resting >> i & 1) cores.insert(cores.end(), next, next + lenders.counts[i]);
  }

  bool changed() const { return lenders.resting() != resting; }

  void count_use() const {
    for (int i = 0; i < lenders.number; i++)
      if (resting >> i & 1) ++*(volatile uint32_t*)(lenders.rests[i] + lenders.uses);
  }
};

// Moves the calling thread to a core, unless it is there. Returns whether the system lets it.
bool move_to(int core) {
  static thread_local int at = -1;
  if (at == core) return true;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof(set), &set)) return false;
  at = core;
  return true;
}

// Every thread walks the whole list. Parallel operations are shared by all threads, with a barrier before and after;
// thread 0 computes runs of serial operations alone, without barriers between them. Once a neighbour wants its cores
// back or another one rests, it ends before the next operation that has a barrier; `*end` says which.
void execute(const Op* ops, int64_t count, int thread, int threads, std::vector<bf16>& shared, const Loan* loan,
             int64_t* end) {
  bool parallel = false;  // whether the previous operation was parallel
  for (int64_t i = 0; i < count; i++) {
    if (!ops[i].serial || parallel) {
      if (loan && thread == 0) {
        loan->count_use();
        // Only a thread that has passed the barrier writes again, and then another number: so all see the same.
        if (loan->changed()) __atomic_store_n(end, i, __ATOMIC_RELAXED);
      }
#pragma omp barrier
      if (loan && __atomic_load_n(end, __ATOMIC_RELAXED) == i) return;
    }
    parallel = !ops[i].serial;
    if (parallel)
      perform(ops[i], thread, threads, shared);
    else if (thread == 0)
      perform(ops[i], 0, 1, shared);
  }
}

// Returns how many operations were computed: all, unless the neighbours that rest are others than those of `loan` now.
int64_t run(const Op* ops, int64_t count, int own, const Loan* loan = nullptr) {
  static thread_local std::vector<bf16> memory;  // the calling thread's; all OpenMP threads use it
  std::vector<bf16>& shared = memory;
  int threads = own + (loan ? loan->cores.size() : 0);
  if (threads == 1 || (count == 1 && ops->serial)) {
    for (int64_t i = 0; i < count; i++) {
      if (loan && loan->changed()) return i;
      perform(ops[i], 0, 1, shared);
    }
    return count;
  }
  int64_t end = count;
  // OpenMP's threads, because torch's operations before and after use them too: other threads would compete for cores.
#pragma omp parallel num_threads(threads)
  {
    int thread = omp_get_thread_num();
    if (thread >= own) move_to(loan->cores[thread - own]);
    execute(ops, count, thread, omp_get_num_threads(), shared, loan, &end);
  }
  return end;
}

}  // namespace

extern "C" {

int64_t splitserve_op_bytes() { return sizeof(Op); }

void splitserve_run(const void* ops, int64_t count, int threads) { run((const Op*)ops, count, threads); }

// The same on `own` threads, and on the cores of those of `number` neighbours (see `Lenders`) that rest at the time.
// Returns how many operations were computed with lent cores, once for each of these.
int64_t splitserve_run_lent(const void* ops, int64_t count, int own, uint8_t* const* rests, int64_t uses,
                            const int* counts, const int* cores, int number) {
  Lenders lenders{rests, uses, counts, cores, number};
  int64_t done = 0, with_lent = 0;
  while (done < count) {
    Loan loan(lenders);
    int64_t computed = run((const Op*)ops + done, count - done, own, &loan);
    done += computed;
    with_lent += computed * (int64_t)loan.cores.size();
  }
  return with_lent;
}

// Moves OpenMP's threads behind the first `own` to a core each. Returns whether the system let it.
int splitserve_place(int own, int more, const int* cores) {
  int failed = 0;
#pragma omp parallel num_threads(own + more) reduction(+ : failed)
  {
    int thread = omp_get_thread_num();
    if (thread >= own) failed = !move_to(cores[thread - own]);
  }
  return !failed;
}

// Packs `weights` [N, row_bytes], bfloat16 or int8, N a multiple of 16, into panels (panels.hpp); `packed` is as large.
// Four bytes move together: a pair of bfloat16 or four int8 inputs of one output.
void splitserve_pack(const char* weights, int64_t N, int64_t row_bytes, char* packed) {
  for (int64_t column = 0; column < N; column += PANEL * 16) {
    int64_t width = std::min<int64_t>(PANEL * 16, N - column);
    for (int64_t at = 0; at < row_bytes; at += 4)
      for (int64_t n = 0; n < width; n++, packed += 4) std::memcpy(packed, weights + (column + n) * row_bytes + at, 4);
  }
}

// The index of the largest value of each row into `indices` [rows]; see `argmax`. `x` [rows, n], rows `ldx` apart.
void splitserve_argmax(int threads, const uint16_t* x, int64_t rows, int64_t n, int64_t ldx, int64_t* indices) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int64_t row = 0; row < rows; row++) indices[row] = argmax(x + row * ldx, n);
}

// y = x W^T + bias as a single operation; see `linear`.
void splitserve_linear(int threads, const void* x, const void* packed, const void* bias, void* y, int64_t M, int64_t ldx,
                       int64_t N, int64_t K) {
  Op op{};
  op.code = LINEAR;
  op.pointer[0] = (void*)x, op.pointer[1] = (void*)packed, op.pointer[2] = (void*)bias, op.pointer[3] = y;
  op.number[0] = M, op.number[1] = ldx, op.number[2] = N, op.number[3] = K, op.number[4] = N;
  run(&op, 1, threads);
}

// See `rms_norm`; a single operation.
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
