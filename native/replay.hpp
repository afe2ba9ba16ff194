// Runs a recorded program of allocations and frees through the real pool on a model device and reports
// what it would have cost. Reading recordings is done elsewhere; here they are plain columns.
#pragma once

#include <optional>

#include "backends/model.hpp"
#include "pool.hpp"

namespace vram {

// One row an event, in order of time.
struct ReplayProgram {
  std::size_t events = 0;
  const std::uint8_t* op = nullptr;            // 0: allocate, 1: free
  const std::uint32_t* id = nullptr;           // of the allocation; dense, below `allocations`
  const std::uint64_t* size = nullptr;         // bytes requested
  const std::uint32_t* stream = nullptr;       // number of the stream, below `streams`
  const std::int64_t* time_us = nullptr;       // since the first event
  const std::int64_t* completed_us = nullptr;  // of a free that waited for other streams, else -1
  std::uint32_t allocations = 0;
  std::uint32_t streams = 1;
};

struct ReplayFailure {
  std::size_t event = 0;
  std::uint64_t size = 0;
  std::uint64_t allocated = 0;
  std::uint64_t reserved = 0;
};

struct ReplayResult {
  std::uint64_t peak_allocated = 0;
  std::uint64_t peak_reserved = 0;
  std::uint64_t driver_calls = 0;
  std::uint64_t memory_calls = 0;  // of these, the ones about memory rather than order
  double driver_us = 0;
  double seconds = 0;
  std::size_t last_memory_call = 0;  // the event that made it
  std::optional<ReplayFailure> failure;
  PoolStats stats;
};

// capacity: of the model device, 0 for as much as is ever needed.
ReplayResult replay(const ReplayProgram& program, const PoolConfig& config, std::uint64_t capacity,
                    double lag_us);

}  // namespace vram
