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
  stream.shut[large] = large && config_.bounded() ? StreamState::kBounded : 0;
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
  if (sizes.least <= kSmallUnits || stream.cache.has_large()) {
    std::lock_guard guard(stream.lock);
    collect(stream, sizes);
  }
  if (drained_ == 0) return false;
  while (drained_ != 0) {
    const Index next = blocks()[drained_].link_after;
    pending_.return_home(drained_, ask);  // if it throws, nothing has changed
    drained_ = next;
  }
  return true;
}

void Caches::drain_all() {
  for (const StreamSet& streams : caching_)
    streams.each([this](StreamNumber number) {
      drain(streams_[number]);
      close(streams_[number]);
      return false;
    });
}

void Caches::arrange() {
  for (StreamState& stream : streams_) {
    std::lock_guard guard(stream.lock);
    stream.shut[true] &= static_cast<std::uint8_t>(~StreamState::kBounded);
    if (config_.bounded()) stream.shut[true] |= StreamState::kBounded;
  }
  if (config_.bounded()) drain_all();
}

}  // namespace vram
