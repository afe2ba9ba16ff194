// Which process this is, counted in forks: in the child of one, locks may be held by threads that are not
// there.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace vram {

// Another number in the child than in the parent.
inline std::uint64_t process_generation() {
  static std::atomic<std::uint64_t> generation{0};
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace vram
