// The state that the parts of a pool share.
#include "pool/state.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace vram {

namespace {

PlacementOptions affordable(PlacementOptions options) {
  options.space_bytes = AddressSpace::affordable(options.space_bytes);
  if (!options.pages) return options;
  // Twice as many offsets for plain segments as the device has memory.
  options.plain_bytes = round_up(options.space_bytes / 8, kSlotBytes);
  options.space_bytes = std::min(options.space_bytes, kMaxSpaceBytes - kSlotBytes - options.plain_bytes);
  return options;
}

}  // namespace

PlacementOptions placement_options(const Backend& backend, const PoolConfig& config) {
  PlacementOptions options;
  const DeviceInfo& device = backend.info();
  options.pages = config.pages && device.pages;
  // Many times as many addresses as there is memory, so that pages find new addresses and old ones need not
  // be unmapped.
  const std::uint64_t spill = std::min(config.spill, kMaxSpaceBytes);
  const std::uint64_t wished = 16 * std::clamp(device.total_bytes + spill, kGiB, kMaxSpaceBytes);
  options.space_bytes = std::min(round_up(wished, kSlotBytes), kMaxSpaceBytes - kSlotBytes);
  options.segment_size = std::min(config.segment_size, kMaxRequest);
  options.grain = device.grain;
  options.max_page = config.max_page;
  options.best_fit = config.best_fit;
  return options;
}

PoolState::PoolState(std::shared_ptr<Backend> device, const PoolConfig& configured)
    : backend(std::move(device)),
      made_in(process_generation()),
      generation(made_in),
      cache_generation(made_in),
      config(configured),
      placement(*backend, affordable(placement_options(*backend, configured))),
      fences(*backend),
      finished([this](StreamNumber number, Tick tick) {
        return streams[number].capture == 0 && fences.finished(streams[number], tick);
      }) {}

bool PoolState::look(std::unique_lock<std::mutex>* lock) {
  if (inherited()) return false;
  *lock = std::unique_lock(mutex);
  return true;
}

void PoolState::check_placement() {
  constexpr std::size_t kFew = 64;
  if (closed()) return;  // by another thread during a wait of this call: everything was released
  if (++walks % (placement.space().blocks().size() / kFew + 1) != 0) return;
  std::string why;
  try {
    if (placement.check(&why)) return;
  } catch (const std::bad_alloc&) {
    return;  // the host has no memory for the check
  }
  std::fprintf(stderr, "vram: pool check failed: %s\n", why.c_str());
  std::abort();
}

}  // namespace vram
