// Replay through the real pool. See replay.hpp.
#include "replay.hpp"

#include <chrono>

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

ReplayResult replay(const ReplayProgram& program, const PoolConfig& config, std::uint64_t capacity, double lag_us) {
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
  std::int64_t clock = -1;
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < program.events; ++i) {
    if (program.time_us[i] != clock) {
      clock = program.time_us[i];
      model->set_time(static_cast<double>(clock));
    }
    const std::uint32_t id = program.id[i];
    if (program.op[i] == 0) {
      const std::uint32_t stream = program.stream[i];
      if (stream != recent) earlier = recent;
      recent = stream;
      owner[id] = stream;
      const bool cached = pool.try_cached(program.size[i], handles[stream], 0, &addresses[id]);
      if (cached) continue;
      const Status status = pool.allocate_slow(program.size[i], handles[stream], 0, 0, &addresses[id], nullptr);
      if (!status.ok()) {
        const PoolStats stats = pool.stats();
        result.failure = ReplayFailure{i, program.size[i], stats.live, stats.reserved.current};
        break;
      }
    } else {
      if (addresses[id] == 0) continue;
      if (program.completed_us[i] > program.time_us[i] && program.streams > 1) {
        const std::uint32_t own = owner[id];
        const std::uint32_t user = other_stream(own, own == recent ? earlier : recent, program.streams);
        (void)pool.record_stream(addresses[id], handles[user]);
      }
      (void)pool.free(addresses[id]);
      addresses[id] = 0;
    }
    if (const std::uint64_t now = model->memory_calls(); now != memory_calls) {
      memory_calls = now;
      result.last_memory_call = i;
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
