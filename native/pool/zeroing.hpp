// zero_on_allocate and zero_on_free. Defines Zeroing.
//
// Device memory is zeroed in stream order. Host memory is zeroed by the host, at once: programs write there
// without any stream, and queued zeros would overwrite what they write. For this, free memory must have no
// work left, so a free waits (as a pending block) until its own stream has finished with it. If `host_writes`
// is set, the pool learns of uses on the own stream, and waits only for those.
#pragma once

#include "pool/state.hpp"

namespace vram {

class Zeroing : PoolPart {
 public:
  explicit Zeroing(PoolState& state) : PoolPart(state) { configure(state.config); }
  void configure(const PoolConfig& config);

  // Read without a lock.
  bool on_allocate() const { return on_allocate_.load(std::memory_order_relaxed); }
  bool on_free() const { return on_free_.load(std::memory_order_relaxed); }
  bool slow_frees() const { return slow_frees_.load(std::memory_order_relaxed); }  // frees cannot be cached

  // Zeroes a live block that is about to be freed, if so configured. A block that is used elsewhere, too,
  // whose owner is gone or a graph, or that is suspended, is zeroed when it has no uses left (Pending); so is
  // host memory that its own stream still uses (*busy).
  Status before_free(Address address, bool* busy);
  // pre: of host memory, no queued work uses it.
  Status fill(Address address, std::uint64_t bytes, StreamHandle stream);
  // Zeroes the part of a freed block that has memory.
  Status fill_resident(const Block& block, StreamHandle stream);

 private:
  std::atomic<bool> on_allocate_;
  std::atomic<bool> on_free_;
  std::atomic<bool> slow_frees_;
};

}  // namespace vram
