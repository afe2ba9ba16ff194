// Zeroing on allocation and on free.
#include "pool/zeroing.hpp"

#include <cstring>
#include <new>

namespace vram {

bool Zeroing::wants_slow_frees(const PoolConfig& config) const {
  const DeviceInfo& info = backend_->info();
  return config.zero_on_free || (config.zero_on_allocate && info.host_accessible && !info.host_writes);
}

void Zeroing::configure(const PoolConfig& config) {
  on_allocate_.store(config.zero_on_allocate, std::memory_order_relaxed);
  on_free_.store(config.zero_on_free, std::memory_order_relaxed);
  slow_frees_.store(wants_slow_frees(config) || changes_ != 0, std::memory_order_relaxed);
}

Status Zeroing::before_free(Address address, bool* busy) {
  const Index i = space().find(address);
  if (i == 0) return {Code::invalid, 0, "free"};
  const Block& block = blocks()[i];
  StreamState& owner = owner_of(block);
  if (block.is(BlockState::suspended)) return {};
  if (!block.is(BlockState::live)) return {Code::invalid, 0, "free"};
  if (block.used_elsewhere || owner.gone() || owner.capture != 0) return {};
  const DeviceInfo& info = backend_->info();
  *busy = info.host_accessible && !info.host_writes && !fences_.finished(owner, owner.now());
  if (*busy || !on_free()) return {};
  const Status status = fill(address, bytes_of(block), owner.handle);
  *busy = status.code == Code::closed;
  return *busy ? Status{} : status;
}

Status Zeroing::fill(Address address, std::uint64_t bytes, StreamHandle stream) {
  if (!backend_->info().host_accessible) {
    if (state_.access.is_shut()) return {Code::closed, 0, "fill"};
    try {
      return backend_->fill(address, 0, bytes, stream);
    } catch (const std::bad_alloc&) {  // the block is in no list now, so nobody else could return it
      return {Code::failed, 0, "fill"};
    }
  }
  std::memset(reinterpret_cast<void*>(address), 0, bytes);
  return {};
}

Status Zeroing::fill_resident(const Block& block, StreamHandle stream) {
  const Address address = space().address_of(block);
  if (!stock().any_aside() || space().segment(block).plain) return fill(address, bytes_of(block), stream);
  Status first;
  stock().each_page(block, [&](Index page, Units from, Units to) {
    if (stock().pages()[page].suspended && !stock().pages()[page].moving) return;
    const Status status = fill(address + bytes_of(from - block.offset), bytes_of(to - from), stream);
    if (first.ok()) first = status;
  });
  return first;
}

}  // namespace vram
