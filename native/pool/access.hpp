// Access to the memory of a pool against its close(): calls in progress end first, later ones are refused.
// Defines AccessGate. Entering never waits.
#pragma once

#include <atomic>
#include <cstdint>

namespace vram {

class AccessGate {
 public:
  // False if it is shut; then do not call leave.
  bool enter() {
    if ((state_.fetch_add(1, std::memory_order_acquire) & kShut) == 0) return true;
    leave();
    return false;
  }
  void leave() {
    if (state_.fetch_sub(1, std::memory_order_release) == (kShut | 1)) state_.notify_all();
  }
  // Refuses all calls from now on and returns when all have left. One thread at a time.
  void shut() {
    std::uint32_t now = state_.fetch_or(kShut, std::memory_order_acquire) | kShut;
    for (; now != kShut; now = state_.load(std::memory_order_acquire)) state_.wait(now);
  }
  void open() { state_.fetch_and(~kShut, std::memory_order_release); }
  bool is_shut() const { return (state_.load(std::memory_order_acquire) & kShut) != 0; }

 private:
  static constexpr std::uint32_t kShut = std::uint32_t{1} << 31;
  std::atomic<std::uint32_t> state_{0};  // those inside, and kShut
};

}  // namespace vram
