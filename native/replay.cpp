// Replay through the real pool. See replay.hpp.
#include "replay.hpp"

#include <chrono>
#include <utility>

namespace vram {

namespace {

constexpr std::uint64_t kUnlimited = 256 * kGiB;

// A free that the recording shows waiting was used on some other stream; which one is not recorded, so
// the one that was active last stands in for it.
std::uint32_t other_stream(std::uint32_t own, std::uint32_t recent, std::uint32_t streams) {
  if (recent != own) return recent;
  return streams > 1 ? (own + 1) % streams : own;
}

}  // namespace

ReplayResult replay(const ReplayProgram& program, const PoolConfig& config, std::uint64_t capacity,
                    double lag_us) {
  ModelOptions options;
  options.lag_us = lag_us;
  auto model = std::make_shared<ModelBackend>(capacity != 0 ? capacity : kUnlimited, options);
  Pool pool(model, config);
  std::vector<StreamHandle> handles(program.streams, 0);
  for (std::uint32_t i = 1; i < program.streams; ++i) (void)model->stream_create(&handles[i]);
  const std::uint64_t calls_before = model->driver_calls();
  const double us_before = model->driver_us();
  std::vector<Address> addresses(program.allocations, 0);
  std::vector<std::uint32_t> owner(program.allocations, 0);
  std::uint32_t recent = 0;   // the last stream that was used, and
  std::uint32_t earlier = 0;  // the last one before it that differs
  ReplayResult result;
  std::uint64_t memory_calls = 0;
  // The model is asked nothing on the fast paths, so its clock and its counts are looked at on the slow ones
  // only.
  const auto before_slow = [&](std::size_t i) { model->set_time(static_cast<double>(program.time_us[i])); };
  const auto after_slow = [&](std::size_t i) {
    const std::uint64_t now = model->memory_calls();
    if (now != memory_calls) result.last_memory_call = i;
    memory_calls = now;
  };
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < program.events; ++i) {
    const std::uint32_t id = program.id[i];
    if (program.op[i] == 0) {
      const std::uint32_t stream = program.stream[i];
      if (stream != recent) earlier = recent;
      recent = stream;
      owner[id] = stream;
      if (pool.try_cached(program.size[i], handles[stream], 0, &addresses[id])) continue;
      before_slow(i);
      const Status status =
          pool.allocate_slow(program.size[i], handles[stream], 0, 0, &addresses[id], nullptr);
      after_slow(i);
      if (!status.ok()) {
        const PoolStats stats = pool.stats();
        result.failure = ReplayFailure{i, program.size[i], stats.live, stats.reserved.current};
        break;
      }
    } else {
      const Address address = std::exchange(addresses[id], 0);
      if (address == 0) continue;
      const bool delayed = program.completed_us[i] > program.time_us[i] && program.streams > 1;
      if (!delayed && pool.try_free_cached(address)) continue;
      before_slow(i);
      if (delayed) {
        const std::uint32_t own = owner[id];
        const std::uint32_t user = other_stream(own, own == recent ? earlier : recent, program.streams);
        (void)pool.record_stream(address, handles[user]);
      }
      (void)pool.free(address);
      after_slow(i);
    }
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  result.stats = pool.stats();
  result.peak_allocated = result.stats.peak_live;
  result.peak_reserved = result.stats.reserved.peak;
  result.driver_calls = model->driver_calls() - calls_before;
  result.memory_calls = model->memory_calls();
  result.driver_us = model->driver_us() - us_before;
  return result;
}

}  // namespace vram
