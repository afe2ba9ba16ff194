// The allocation patterns that benchmarks time, in C++: what a pair of allocate and free costs without Python
// in the way. One call is one run; repeating, taking the least and drawing are left to the caller.
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
  transformer,  // layers of kKept and kTemporary, freed on the way back
  variable,     // kLive blocks live, a random one replaced by one of another size
};
inline constexpr int kScenarios = 6;
const char* name_of(Scenario scenario);

inline constexpr std::size_t kOneLivePairs = 50'000;
inline constexpr std::size_t kThousand = 1000;
inline constexpr std::uint64_t kThousandBytes = 64 * kKiB;
inline constexpr std::size_t kThousandRounds = 10;

// A layer of the transformer step keeps these until the way back …
inline constexpr std::uint64_t kKept[] = {96 * kKiB, 24 * kMiB, 6 * kMiB,    384 * kKiB,
                                          12 * kMiB, 64 * kMiB, 1536 * kKiB, 16 * kKiB};
// … and these only until its end.
inline constexpr std::uint64_t kTemporary[] = {24 * kMiB, 6 * kMiB};
inline constexpr std::size_t kLayers = 12;
inline constexpr std::size_t kSteps = 20;

// One replacement of `variable`: what lies in `slot` goes, a block of `bytes` comes.
struct Swap {
  std::uint32_t slot;
  std::uint64_t bytes;
};
inline constexpr std::size_t kLive = 64;
inline constexpr std::size_t kSwaps = 6400;
// The first kLive fill the slots in order. 512 B to 2 MiB, the same in every run.
const std::vector<Swap>& swaps();

// One run through a pattern on the default stream; *ns is the wall time of a pair.
Status run_pairs(Pool& pool, Scenario scenario, double* ns);
// The same through the driver's own stream-ordered allocator (cuMemAllocFromPoolAsync, cuMemFreeAsync) from a
// pool of its own that never gives memory back: its best configuration.
Status run_driver_pairs(const CudaBackend& cuda, Scenario scenario, double* ns);

// ---- threads ---------------------------------------------------------------------------------------------
struct ThreadsCost {
  double wall_ns = 0;      // of a pair, as its thread sees it; mean of the threads
  double cpu_ns = 0;       // the same in time on a processor, which other programs do not lengthen
  double handed_over = 0;  // share of the blocks that another thread freed
};
// A thread for each stream, each allocating on its own: batches of 64 blocks of 512 B to 64 KiB. With
// `hand_over`, half of each batch is left for the next thread to free; a thread that is far ahead waits. One
// pool for all, or as many as streams: then the threads share nothing, which shows what the machine itself
// costs. pre: with hand_over there is one pool.
Status run_threads(const std::vector<Pool*>& pools, const std::vector<StreamHandle>& streams, bool hand_over,
                   std::size_t batches, ThreadsCost* out);

}  // namespace vram::bench
