// zero_on_allocate and zero_on_free. Defines Zeroing.
//
// Device memory is zeroed in stream order. Host memory is zeroed by the host, at once: programs write there
// without any stream, and queued zeros would overwrite what they write. For this, free memory must have no
// work left, so a free waits (as a pending block) until its own stream has finished with it. If `host_writes`
// is set, the pool learns of uses on the own stream, and waits only for those.
//
// While the pool closes, no zeros are queued, because close() may have waited for the stream already. What is
// freed meanwhile stays pending; if the pool stays open after all, it is zeroed later.
#pragma once

#include "pool/state.hpp"

namespace vram {

class Zeroing : PoolPart {
 public:
  // While it exists, frees are as slow as such a configuration wants them. Made and destroyed under the
  // mutex.
  class SlowFrees {
   public:
    SlowFrees(Zeroing& zeroing, std::unique_lock<std::mutex>& lock) : zeroing_(zeroing), lock_(lock) {
      zeroing_.slow_frees_.store(true, std::memory_order_relaxed);
      ++zeroing_.changes_;
    }
    ~SlowFrees() {
      if (!lock_.owns_lock()) lock_.lock();
      --zeroing_.changes_;
      zeroing_.configure(zeroing_.config_);
    }
    SlowFrees(const SlowFrees&) = delete;
    SlowFrees& operator=(const SlowFrees&) = delete;

   private:
    Zeroing& zeroing_;
    std::unique_lock<std::mutex>& lock_;
  };

  explicit Zeroing(PoolState& state) : PoolPart(state) { configure(state.config); }
  // pre: wants_slow_frees(config) ⇒ frees were slow when everything that is free now was freed.
  void configure(const PoolConfig& config);
  bool wants_slow_frees(const PoolConfig& config) const;

  // Read without a lock.
  bool on_allocate() const { return on_allocate_.load(std::memory_order_relaxed); }
  bool on_free() const { return on_free_.load(std::memory_order_relaxed); }
  bool slow_frees() const { return slow_frees_.load(std::memory_order_relaxed); }  // frees cannot be cached

  // Zeroes a live block that is about to be freed, if so configured. A block that is used elsewhere, too,
  // whose owner is gone or a graph, or that is suspended, is zeroed when it has no uses left (Pending); so is
  // host memory that its own stream still uses, and device memory while the pool closes (*busy).
  Status before_free(Address address, bool* busy);
  // closed: the pool closes. pre: of host memory, no queued work uses it.
  Status fill(Address address, std::uint64_t bytes, StreamHandle stream);
  // Zeroes the part of a freed block that has memory.
  Status fill_resident(const Block& block, StreamHandle stream);

 private:
  std::atomic<bool> on_allocate_;
  std::atomic<bool> on_free_;
  std::atomic<bool> slow_frees_;
  std::uint32_t changes_ = 0;  // that want slow frees and wait for work of earlier ones
};

}  // namespace vram
