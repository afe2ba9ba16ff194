// Opening, closing and emptying the caches of streams.
#include "pool/caches.hpp"

namespace vram {

void Caches::open(Address address) {
  const Index i = space().find(address);
  if (i == 0) return;
  const Block& block = blocks()[i];
  StreamState& stream = owner_of(block);
  std::lock_guard guard(stream.lock);
  if (!block.is(BlockState::live) || block.owned_by() != stream.number) return;
  const bool large = block.units > kSmallUnits;
  if ((stream.shut[large] & StreamState::kLeaving) != 0) return;
  accounts_.loosen(stream);
  stream.shut[large] = 0;
  caching_[large].add(stream.number);
}

void Caches::close(StreamState& stream) {
  std::lock_guard guard(stream.lock);
  const bool filled[] = {stream.cache.has_small(), stream.cache.has_large()};
  for (const bool large : {false, true}) {
    if (filled[large]) continue;
    stream.shut[large] |= StreamState::kUnlisted;
    caching_[large].remove(stream.number);
  }
}

bool Caches::drain(StreamState& stream, const Sizes& sizes, bool ask) {
  drained_.clear();
  {
    std::lock_guard guard(stream.lock);
    stream.cache.drain(blocks(), sizes, drained_);
  }
  for (Index i : drained_) pending_.return_home(i, ask);
  return !drained_.empty();
}

void Caches::drain_all() {
  for (const StreamSet& streams : caching_)
    streams.each([this](StreamNumber number) {
      drain(streams_[number]);
      close(streams_[number]);
      return false;
    });
}

}  // namespace vram
