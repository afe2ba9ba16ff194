// The functions of vram.h for pools, their spans and growable buffers. The cached paths of allocate and free
// cost one lookup more than the core's.
#include "state.hpp"

namespace vram::c {

constinit Registry<PoolHandle, vram_pool, 2> pools;
constinit Registry<SpanHandle, vram_span, 4> spans;

PoolStats Peaks::begin(Watch* watch) {
  const std::lock_guard guard(mutex_);
  watches_.reserve(watches_.size() + 1);
  PoolStats stats = settle();
  watches_.push_back(watch);
  return stats;
}

PoolStats Peaks::end(Watch* watch) {
  const std::lock_guard guard(mutex_);
  PoolStats stats = settle();
  stats.peak_live = watch->live;
  stats.reserved.peak = watch->reserved;
  std::erase(watches_, watch);
  return stats;
}

PoolStats Peaks::stats(const Watch* watch) {
  const std::lock_guard guard(mutex_);
  const Watch& asked = watch != nullptr ? *watch : own_;
  PoolStats stats = pool_->stats();
  stats.peak_live = std::max(stats.peak_live, asked.live);
  stats.reserved.peak = std::max(stats.reserved.peak, asked.reserved);
  return stats;
}

void Peaks::reset() {
  const std::lock_guard guard(mutex_);
  (void)settle();
  own_ = {};
}

PoolStats Peaks::settle() {
  const PoolStats stats = pool_->stats();
  const auto note = [&](Watch& watch) {
    watch.live = std::max(watch.live, stats.peak_live);
    watch.reserved = std::max(watch.reserved, stats.reserved.peak);
  };
  note(own_);
  for (Watch* const watch : watches_) note(*watch);
  pool_->reset_peak();
  return stats;
}

namespace {

// Pinning has a cost per call, so pinned memory is allocated in large pieces.
constexpr std::uint64_t kPinnedPiece = 64 * kMiB;

vram_status configure(const vram_pool_options& options, const char* call, PoolConfig* out) {
  if (options.cross_stream < VRAM_CROSS_STREAM_READY || options.cross_stream > VRAM_CROSS_STREAM_NEVER)
    return fail(VRAM_BAD_ARGUMENT, call, "cross_stream is %d, which is not a value of VRAM_CROSS_STREAM_*",
                static_cast<int>(options.cross_stream));
  out->limit = options.limit;
  out->segment_size = options.segment_size != 0 ? options.segment_size : options.pinned ? kPinnedPiece : 0;
  out->cross_stream = static_cast<CrossStream>(options.cross_stream);
  out->pages = !options.plain && !options.pinned;
  out->zero_on_allocate = options.zero_on_allocate != 0;
  out->zero_on_free = options.zero_on_free != 0;
  if (options.release_threshold != 0) out->release_threshold = options.release_threshold;
  return VRAM_OK;
}

vram_status open_driver_pool(const vram_pool_options& options, const PoolConfig& config, const char* call,
                             PoolHandle* out) {
  if (options.segment_size != 0 || options.cross_stream != 0 || options.pinned != 0 || options.plain != 0)
    return fail(VRAM_BAD_ARGUMENT, call,
                "segment_size, cross_stream, pinned and plain have no meaning in a driver pool");
  if (options.kind < VRAM_DEVICE_MEMORY || options.kind > VRAM_MANAGED_MEMORY)
    return fail(VRAM_BAD_ARGUMENT, call, "kind is %d, which is not a value of vram_pool_kind",
                static_cast<int>(options.kind));
  DriverPool::Source source;
  if (options.owner == VRAM_DRIVER_DEFAULT_POOL) {
    if (options.kind != 0 || options.max_size != 0)
      return fail(VRAM_BAD_ARGUMENT, call, "kind and max_size cannot be chosen for the default pool");
    source.origin = DriverPool::Origin::shared_default;
  }
  source.properties.kind = static_cast<DriverPoolKind>(options.kind);
  source.properties.max_size = options.max_size;
  std::shared_ptr<DriverPool> pool;
  Status status = DriverPool::open(out->device->backend, source, config, &pool);
  if (status.ok() && options.release_threshold != 0)
    status = pool->set_attribute(DriverPoolAttribute::release_threshold, options.release_threshold);
  if (!status.ok()) return fail(status, call);
  out->driver = pool.get();
  out->pinned = options.kind == VRAM_PINNED_MEMORY;
  out->allocator = std::move(pool);
  return VRAM_OK;
}

void open_pool(const vram_pool_options& options, const PoolConfig& config, PoolHandle* out) {
  std::shared_ptr<Backend> memory = out->device->backend;
  if (options.pinned != 0) {
    auto pinned = std::make_shared<PinnedBackend>(memory);
    out->pinned = pinned->pinned();
    memory = std::move(pinned);
  }
  const std::shared_ptr<Pool> pool{new Pool(std::move(memory), config), end<Pool>};
  out->pool = pool.get();
  out->allocator = pool;
}

vram_status allocate(Allocator& pool, std::size_t size, std::size_t align, vram_stream stream, void** out,
                     const char* call) noexcept {
  return guarded(call, [&] {
    Address address = 0;
    OutOfMemoryReport report;
    const Status status = pool.allocate_slow(size, handle_of(stream), align, 0, &address, &report);
    // If the driver is out of memory, the ladder may end without a report.
    if (status.code == Code::out_of_memory && report.device_total != 0)
      return fail_out_of_memory(report, call, pool.backend(), handle_of(stream));
    if (!status.ok()) return fail(status, call);
    *out = pointer_of(address);
    return VRAM_OK;
  });
}

template <class Body>
vram_status with_pool(vram_pool* handle, const char* call, Body body) noexcept {
  return with(pools, handle, "pool", call, body);
}

// body(pool), with a pool of ours.
template <class Body>
vram_status with_own(vram_pool* handle, const char* call, Body body) noexcept {
  return with_pool(handle, call, [&](PoolHandle& found) {
    if (found.pool == nullptr)
      return fail(VRAM_UNSUPPORTED, call, "a driver pool has no growable buffers; use a pool of vram");
    return body(*found.pool);
  });
}

bool known(std::int32_t attribute) {
  return attribute >= VRAM_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES && attribute <= VRAM_ATTR_USED_MEM_HIGH;
}
vram_status unknown(std::int32_t attribute, const char* call) {
  return fail(VRAM_BAD_ARGUMENT, call, "there is no attribute %d", attribute);
}
vram_status drivers_alone(std::int32_t attribute, const char* call) {
  return fail(VRAM_UNSUPPORTED, call,
              "attribute %d belongs to driver pools; cross_stream says what a pool of vram reuses",
              attribute);
}

vram_span_stats difference(const PoolStats& start, const PoolStats& now) {
  const auto rise = [](const Meter(&before)[2], const Meter(&after)[2], auto measure) {
    return after[0].*measure + after[1].*measure - before[0].*measure - before[1].*measure;
  };
  vram_span_stats full = VRAM_SPAN_STATS_INIT;
  full.allocations = rise(start.allocations, now.allocations, &Meter::total);
  full.frees = full.allocations - rise(start.allocations, now.allocations, &Meter::current);
  full.bytes = rise(start.bytes, now.bytes, &Meter::total);
  full.peak_allocated = now.peak_live;
  full.peak = now.peak_live - std::min(now.peak_live, start.live);
  full.peak_reserved = now.reserved.peak;
  full.cache_hits = now.hits - start.hits;
  full.segments = now.segments.total - start.segments.total;
  full.out_of_memory = now.out_of_memory - start.out_of_memory;
  return full;
}

}  // namespace

}  // namespace vram::c

using namespace vram;
using namespace vram::c;

extern "C" {

vram_status vram_pool_create(vram_device* device, const vram_pool_options* options, vram_pool** out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  return with(devices, device, "device", __func__, [&, call = __func__](DeviceHandle& found) {
    vram_pool_options chosen = VRAM_POOL_OPTIONS_INIT;
    PoolConfig config;
    if (const vram_status status = take(options, &chosen, call); status != VRAM_OK) return status;
    if (const vram_status status = configure(chosen, call, &config); status != VRAM_OK) return status;
    if (found.device->inherited()) return fail({Code::closed, 0, "pool"}, call);
    if (chosen.owner < VRAM_OWN_POOL || chosen.owner > VRAM_DRIVER_DEFAULT_POOL)
      return fail(VRAM_BAD_ARGUMENT, call, "owner is %d, which is not a value of vram_pool_owner",
                  static_cast<int>(chosen.owner));
    if (chosen.owner == VRAM_OWN_POOL && (chosen.kind != 0 || chosen.max_size != 0))
      return fail(VRAM_BAD_ARGUMENT, call, "kind and max_size are for driver pools; limit bounds this pool");
    auto made = std::make_unique<PoolHandle>();
    made->device = found.device;
    if (chosen.owner == VRAM_OWN_POOL) {
      open_pool(chosen, config, made.get());
    } else if (const vram_status status = open_driver_pool(chosen, config, call, made.get());
               status != VRAM_OK) {
      return status;
    }
    made->peaks = std::make_shared<Peaks>(made->allocator);
    made->device->add(made->allocator);
    *out = pools.add(std::move(made));
    return VRAM_OK;
  });
}

vram_status vram_pool_destroy(vram_pool* pool) {
  return guarded(__func__, [&, call = __func__] {
    const std::unique_ptr<PoolHandle> gone = pools.take(pool);
    return gone == nullptr ? bad_handle(call, "pool") : result(gone->allocator->close(), call);
  });
}

vram_status vram_pool_allocate(vram_pool* pool, size_t size, vram_stream stream, void** out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  PoolHandle* const found = pools.find(pool);
  if (found == nullptr) return bad_handle(__func__, "pool");
  Address address = 0;
  if (found->pool != nullptr && size <= kMaxRequest &&
      found->pool->try_now(size, handle_of(stream), 0, &address)) {
    *out = pointer_of(address);
    return VRAM_OK;
  }
  return allocate(*found->allocator, size, 0, stream, out, __func__);
}

vram_status vram_pool_allocate_aligned(vram_pool* pool, size_t size, size_t align, vram_stream stream,
                                       void** out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  PoolHandle* const found = pools.find(pool);
  if (found == nullptr) return bad_handle(__func__, "pool");
  return allocate(*found->allocator, size, align, stream, out, __func__);
}

vram_status vram_pool_free(vram_pool* pool, void* memory) {
  PoolHandle* const found = pools.find(pool);
  if (found == nullptr) return bad_handle(__func__, "pool");
  if (memory == nullptr || (found->pool != nullptr && found->pool->try_free_cached(address_of(memory))))
    return VRAM_OK;
  return guarded(__func__, [&, call = __func__] {
    return result(found->allocator->free_slow(address_of(memory)), call);
  });
}

vram_status vram_pool_record_stream(vram_pool* pool, void* memory, vram_stream stream) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    return result(found.allocator->record_stream(address_of(memory), handle_of(stream)), call);
  });
}

vram_status vram_pool_find(vram_pool* pool, const void* address, void** begin, size_t* bytes) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    BlockInfo block;
    const Status status = found.pool != nullptr ? found.pool->find(address_of(address), &block)
                                                : found.allocator->info(address_of(address), &block);
    if (!status.ok()) return fail(status, call);
    if (begin != nullptr) *begin = pointer_of(block.address);
    if (bytes != nullptr) *bytes = block.bytes;
    return VRAM_OK;
  });
}

vram_status vram_pool_trim(vram_pool* pool, uint64_t keep, int wait) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    return result(found.allocator->trim(keep, wait != 0), call);
  });
}

vram_status vram_pool_set_limit(vram_pool* pool, uint64_t bytes) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    return result(found.allocator->set_limit(bytes), call);
  });
}

vram_status vram_pool_synchronize(vram_pool* pool) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    const Status status = found.device->synchronize();
    if (status.ok()) found.device->release_unused(true);
    return result(status, call);
  });
}

vram_status vram_pool_on_out_of_memory(vram_pool* pool, vram_oom_callback callback, void* argument) {
  return with_pool(pool, __func__, [&](PoolHandle& found) {
    if (callback == nullptr) {
      found.allocator->on_out_of_memory(nullptr);
    } else {
      found.allocator->on_out_of_memory([callback, argument](std::uint64_t size, StreamHandle stream) {
        return callback(argument, size, reinterpret_cast<vram_stream>(stream)) != 0;
      });
    }
    return VRAM_OK;
  });
}

vram_status vram_pool_get_stats(vram_pool* pool, vram_pool_stats* out) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    const PoolStats stats = found.peaks->stats();
    vram_pool_stats full = VRAM_POOL_STATS_INIT;
    full.allocated = stats.live;
    full.peak_allocated = stats.peak_live;
    full.requested = stats.requested[0].current + stats.requested[1].current;
    full.reserved = stats.reserved.current;
    full.peak_reserved = stats.reserved.peak;
    full.pending = stats.pending.current;
    full.cached = stats.cached;
    full.allocations = stats.allocations[0].current + stats.allocations[1].current;
    full.total_allocations = stats.allocations[0].total + stats.allocations[1].total;
    full.cache_hits = stats.hits;
    full.segments = stats.segments.current;
    full.total_segments = stats.segments.total;
    full.out_of_memory = stats.out_of_memory;
    full.pinned = found.pinned;
    full.paged = stats.paged;
    return give(full, out, call);
  });
}

vram_status vram_pool_reset_peak(vram_pool* pool) {
  return with_pool(pool, __func__, [&](PoolHandle& found) {
    found.peaks->reset();
    return VRAM_OK;
  });
}

// ---- attributes -------------------------------------------------------------------------------------------

vram_status vram_pool_get_attribute(vram_pool* pool, std::int32_t attribute, uint64_t* out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    if (!known(attribute)) return unknown(attribute, call);
    if (found.allocator->closed()) return fail({Code::closed, 0, "attribute"}, call);
    if (found.driver != nullptr)
      return result(found.driver->attribute(static_cast<DriverPoolAttribute>(attribute), out), call);
    const PoolStats stats = found.peaks->stats();
    switch (attribute) {
      case VRAM_ATTR_RELEASE_THRESHOLD:
        *out = found.pool->config().release_threshold;
        return VRAM_OK;
      case VRAM_ATTR_RESERVED_MEM_CURRENT:
        *out = stats.reserved.current;
        return VRAM_OK;
      case VRAM_ATTR_RESERVED_MEM_HIGH:
        *out = stats.reserved.peak;
        return VRAM_OK;
      case VRAM_ATTR_USED_MEM_CURRENT:
        *out = stats.live;
        return VRAM_OK;
      case VRAM_ATTR_USED_MEM_HIGH:
        *out = stats.peak_live;
        return VRAM_OK;
      default:
        return drivers_alone(attribute, call);
    }
  });
}

vram_status vram_pool_set_attribute(vram_pool* pool, std::int32_t attribute, uint64_t value) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    if (!known(attribute)) return unknown(attribute, call);
    if (attribute == VRAM_ATTR_RESERVED_MEM_CURRENT || attribute == VRAM_ATTR_USED_MEM_CURRENT)
      return fail(VRAM_BAD_ARGUMENT, call, "attribute %d is counted and cannot be set", attribute);
    const bool high = attribute == VRAM_ATTR_RESERVED_MEM_HIGH || attribute == VRAM_ATTR_USED_MEM_HIGH;
    if (high && value != 0)
      return fail(VRAM_BAD_ARGUMENT, call, "attribute %d can only be set to 0, which restarts it", attribute);
    if (found.allocator->closed()) return fail({Code::closed, 0, "attribute"}, call);
    if (found.driver != nullptr)
      return result(found.driver->set_attribute(static_cast<DriverPoolAttribute>(attribute), value), call);
    if (high) {
      found.peaks->reset();
      return VRAM_OK;
    }
    if (attribute != VRAM_ATTR_RELEASE_THRESHOLD) return drivers_alone(attribute, call);
    return result(found.pool->change([value](PoolConfig& config) { config.release_threshold = value; }),
                  call);
  });
}

// ---- spans ------------------------------------------------------------------------------------------------

vram_status vram_span_begin(vram_pool* pool, vram_span** out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    if (found.allocator->closed()) return fail({Code::closed, 0, "span"}, call);
    auto made = std::make_unique<SpanHandle>();
    made->peaks = found.peaks;
    made->start = found.peaks->begin(&made->watch);
    *out = spans.add(std::move(made));
    return VRAM_OK;
  });
}

vram_status vram_span_get_stats(vram_span* span, vram_span_stats* out) {
  return with(spans, span, "span", __func__, [&, call = __func__](SpanHandle& found) {
    return give(difference(found.start, found.peaks->stats(&found.watch)), out, call);
  });
}

vram_status vram_span_end(vram_span* span, vram_span_stats* out) {
  return guarded(__func__, [&, call = __func__] {
    const std::unique_ptr<SpanHandle> gone = spans.take(span);
    if (gone == nullptr) return bad_handle(call, "span");
    const vram_span_stats full = difference(gone->start, gone->peaks->stats(&gone->watch));
    return out == nullptr ? VRAM_OK : give(full, out, call);
  });
}

// ---- growable buffers
// ---------------------------------------------------------------------------------------

vram_status vram_growable_open(vram_pool* pool, size_t max, vram_stream stream, void** out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  return with_own(pool, __func__, [&, call = __func__](Pool& own) {
    Address address = 0;
    if (max == 0) return fail(VRAM_BAD_ARGUMENT, call, "max is 0");
    if (const Status status = own.growable_open(max, handle_of(stream), &address); !status.ok())
      return fail(status, call);
    *out = pointer_of(address);
    return VRAM_OK;
  });
}

vram_status vram_growable_resize(vram_pool* pool, void* buffer, size_t bytes) {
  return with_own(pool, __func__, [&, call = __func__](Pool& own) {
    GrowableInfo info;
    if (const Status status = own.growable_info(address_of(buffer), &info); !status.ok())
      return fail(status, call);
    if (bytes > info.max)
      return fail(VRAM_BAD_ARGUMENT, call, "%zu bytes are more than the maximum of the buffer, %zu", bytes,
                  static_cast<std::size_t>(info.max));
    OutOfMemoryReport report;
    const Status status = own.growable_resize(address_of(buffer), round_up(bytes, kSlotBytes), 0, 0, &report);
    if (status.code == Code::out_of_memory && report.device_total != 0)
      return fail_out_of_memory(report, call, own.backend(), 0);
    return result(status, call);
  });
}

vram_status vram_growable_prepare(vram_pool* pool, void* buffer, size_t bytes) {
  return with_own(pool, __func__, [&, call = __func__](Pool& own) {
    return result(own.growable_prepare(address_of(buffer), bytes), call);
  });
}

vram_status vram_growable_close(vram_pool* pool, void* buffer) {
  return with_own(pool, __func__, [&, call = __func__](Pool& own) {
    return result(own.growable_close(address_of(buffer)), call);
  });
}

vram_status vram_growable_get_info(vram_pool* pool, void* buffer, vram_growable_info* out) {
  return with_own(pool, __func__, [&, call = __func__](Pool& own) {
    GrowableInfo info;
    if (const Status status = own.growable_info(address_of(buffer), &info); !status.ok())
      return fail(status, call);
    vram_growable_info full = VRAM_GROWABLE_INFO_INIT;
    full.bytes = info.bytes;
    full.pending = info.pending;
    full.ready = info.ready;
    full.max = info.max;
    return give(full, out, call);
  });
}

}  // extern "C"
