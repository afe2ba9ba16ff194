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

// One Value for each process, made on first use: the child of a fork has its own, as the parent's may be
// locked by a thread that the child does not have. Never destroyed, because threads use it until the process
// ends.
template <class Value>
class PerProcess {
 public:
  Value& get() {
    Held* found = held_.load(std::memory_order_acquire);
    while (found == nullptr || found->generation != process_generation()) {
      auto* const made = new Held{process_generation(), {}};
      if (held_.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return made->value;
      delete made;
    }
    return found->value;
  }
  // Null if this process has not used it yet.
  Value* find() const {
    Held* const found = held_.load(std::memory_order_acquire);
    return found != nullptr && found->generation == process_generation() ? &found->value : nullptr;
  }
  // The parent's, in the child of a fork that has not used its own; else this process's. May be null.
  Value* latest() const {
    Held* const found = held_.load(std::memory_order_acquire);
    return found != nullptr ? &found->value : nullptr;
  }

 private:
  struct Held {
    std::uint32_t generation;
    Value value;
  };
  std::atomic<Held*> held_{nullptr};
};

}  // namespace vram
