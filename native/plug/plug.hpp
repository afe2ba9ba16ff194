// Pools as other libraries use them. Defines Plug: which pool serves which device, and what a pool needs to
// know from Python. Each device has one pool, which is kept until the process ends, so that a free may come
// from any thread, also while the interpreter exits.
//
// Two interfaces use it: pluggable.hpp, with the signatures of PyTorch's CUDAPluggableAllocator, and
// engine.h, for the library that is compiled against PyTorch.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "pool/pool.hpp"

namespace vram {

class Plug {
 public:
  static constexpr int kDevices = 64;

  // ---- configuration --------------------------------------------------------------------------
  // Sets the pool that serves a device from now on; null: none. Earlier pools are kept, because their memory
  // may be live.
  static void set_pool(int device, std::shared_ptr<Pool> pool);
  // Formats the report of a failed allocation; called without any lock.
  using Explain = std::string (*)(int device, std::uint64_t size, StreamHandle stream,
                                  const OutOfMemoryReport& report);
  static void set_explain(Explain explain);
  // Sets the pool of a device on its first use; called without any lock.
  using Make = void (*)(int device);
  static void set_make(Make make);
  // Adopts the streams of the other library that are never destroyed (Backend::stream_adopt). Called once per
  // device, before the first use of a stream other than the default one, without any lock.
  using Adopt = void (*)(int device);
  static void set_adopt(Adopt adopt);
  // Returns the label of an allocation; called without any lock. Null: no tag.
  using Label = std::uint32_t (*)(int device);
  static void set_label(Label label);

  // Told of the memory of every pool, under the pool's lock. Null: nobody.
  using Listen = void (*)(int device, const PoolEvent& event);
  static void set_listen(Listen listen);
  // Told of every stream that is recorded for a block, without any lock. Null: nobody.
  using Recorded = void (*)(int device, Address block, StreamHandle stream);
  static void set_recorded(Recorded recorded);

  // ---- use ------------------------------------------------------------------------------------
  static Pool* pool(int device);     // null: not used yet
  static Pool* serving(int device);  // created on first use; null: there is no such device
  static Status allocate(int device, std::size_t size, StreamHandle stream, Address* out,
                         OutOfMemoryReport* report);
  // With room for more bytes than are requested (Pool::allocate_padded).
  static Status allocate_padded(int device, std::size_t size, std::size_t room, StreamHandle stream,
                                Address* out, OutOfMemoryReport* report);
  // The text of an out-of-memory error: the words of PyTorch's own error, then what `set_explain` formats.
  static std::string explain(int device, std::uint64_t size, StreamHandle stream,
                             const OutOfMemoryReport& report);
  // These find the pool by the address; invalid: it is of no pool. `hint` is the device, if it is known.
  static Status free(Address address, int hint = 0);
  static Status record_stream(Address address, StreamHandle stream);
  static Status find(Address address, BlockInfo* out, int* device);
};

}  // namespace vram
