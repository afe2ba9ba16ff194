// The allocation patterns that benchmarks time, in C++: the cost of an allocate+free pair without Python. One
// call is one run; the caller repeats, takes the minimum and prints.
#pragma once

#include <vector>

#include "backends/cuda.hpp"
#include "pool/pool.hpp"

namespace vram::bench {

// ---- six patterns, the same in src/vram/bench/workloads.py --------------------------------------------
enum class Scenario : std::uint8_t {
  bytes_512,    // 512 B, one live at a time
  kib_256,      // 256 KiB, one live at a time
  mib_64,       // 64 MiB, one live at a time
  thousand,     // 1000 blocks of 64 KiB, then all freed
  transformer,  // layers of kKept and kTemporary, freed in the backward pass
  variable,     // kLive blocks live, a random one replaced by one of another size
};
inline constexpr int kScenarios = 6;
const char* name_of(Scenario scenario);

inline constexpr std::size_t kOneLivePairs = 50'000;
inline constexpr std::size_t kThousand = 1000;
inline constexpr std::uint64_t kThousandBytes = 64 * kKiB;
inline constexpr std::size_t kThousandRounds = 10;

// A layer of the transformer step keeps these until the backward pass …
inline constexpr std::uint64_t kKept[] = {96 * kKiB, 24 * kMiB, 6 * kMiB,    384 * kKiB,
                                          12 * kMiB, 64 * kMiB, 1536 * kKiB, 16 * kKiB};
// … and these only until its end.
inline constexpr std::uint64_t kTemporary[] = {24 * kMiB, 6 * kMiB};
inline constexpr std::size_t kLayers = 12;
inline constexpr std::size_t kSteps = 20;

// One replacement of `variable`: the block in `slot` is replaced by one of `bytes`.
struct Swap {
  std::uint32_t slot;
  std::uint64_t bytes;
};
inline constexpr std::size_t kLive = 64;
inline constexpr std::size_t kSwaps = 6400;
// The first kLive fill the slots in order. 512 B to 2 MiB, equal in every run.
const std::vector<Swap>& swaps();

// Runs a pattern on the default stream; *ns is the wall time per pair.
Status run_pairs(Pool& pool, Scenario scenario, double* ns);
// The same with the driver's own stream-ordered allocator (cuMemAllocFromPoolAsync, cuMemFreeAsync), from a
// separate pool that never releases memory: its best configuration.
Status run_driver_pairs(const CudaBackend& cuda, Scenario scenario, double* ns);

// ---- threads ---------------------------------------------------------------------------------------------
struct ThreadsCost {
  double wall_ns = 0;      // per pair, as seen by its thread; mean of the threads
  double cpu_ns = 0;       // the same in processor time, which other programs do not affect
  double handed_over = 0;  // share of the blocks that another thread freed
};
// One thread per stream, each allocating on its own stream: batches of 64 blocks of 512 B to 64 KiB. With
// `hand_over`, the next thread frees half of each batch; a thread that is far ahead waits. There is one pool
// for all, or one pool per stream: then the threads share nothing, which shows the cost of the machine
// itself. pre: with hand_over there is one pool.
Status run_threads(const std::vector<Pool*>& pools, const std::vector<StreamHandle>& streams, bool hand_over,
                   std::size_t batches, ThreadsCost* out);

}  // namespace vram::bench
