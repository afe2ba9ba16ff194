// The stream caches as the pool sees them: which streams may have cached blocks, and emptying them. Defines
// Caches. A cache itself is in order/stream_cache.hpp, and the fast paths that use it are in pool.cpp.
#pragma once

#include "pool/pending.hpp"

namespace vram {

class Caches : PoolPart {
 public:
  Caches(PoolState& state, Accounts& accounts, Pending& pending)
      : PoolPart(state), accounts_(accounts), pending_(pending) {}

  // Lets the cache of a live block's owner take it, if only the pool's accounts prevented that.
  void open(Address address);
  // After blocks were taken out of a stream's cache: the pool need not look there until the next free.
  void close(StreamState& stream);
  // Takes cached blocks out of a stream's cache; drain returns them. Under the stream's lock.
  void collect(StreamState& stream, const Sizes& sizes) {
    drained_ = stream.cache.drain(blocks(), sizes, drained_);
  }
  bool collected() const { return drained_ != 0; }
  // Returns cached blocks to their streams; true if there were any. Unless `ask` is set, the device is not
  // called.
  bool drain(StreamState& stream, const Sizes& sizes = kAllSizes, bool ask = true);
  void drain_all();
  // After the configuration has changed. With a release threshold, caches take small blocks only: larger ones
  // would keep memory that the threshold wants released with the free.
  void arrange();
  const StreamSet& with_large() const { return caching_[true]; }
  std::uint64_t steps() const { return caching_[0].steps() + caching_[1].steps(); }

 private:
  Accounts& accounts_;
  Pending& pending_;
  StreamSet caching_[2];  // streams whose cache may have small blocks, or others
  Index drained_ = 0;     // list of blocks that were taken out of a cache and not yet returned
};

}  // namespace vram
