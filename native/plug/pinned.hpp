// Pinned memory as other libraries use it: one pool for all devices, because it is pinned for all of them.
// Defines PinnedPlug. The pool is kept until the process ends.
#pragma once

#include <memory>

#include "pool/pool.hpp"

namespace vram {

class PinnedPlug {
 public:
  static void set_pool(std::shared_ptr<Pool> pool);
  static Pool* pool();  // null: not used yet
  // Sets the pool, in the order of a device's streams, on its first use; called without any lock.
  using Make = void (*)(int device);
  static void set_make(Make make);
};

}  // namespace vram
