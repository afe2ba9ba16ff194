// Which process this is, counted in forks: in the child of a fork, locks may be held by threads that do not
// exist there, and devices and pools belong to the parent.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace vram {

namespace forks {
inline std::atomic<std::uint32_t> generation{1};
// The child runs this before anything else.
inline const int registered =
    pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
}  // namespace forks

// Another number in the child than in the parent; never 0.
inline std::uint32_t process_generation() { return forks::generation.load(std::memory_order_relaxed); }

}  // namespace vram
