// The pool functions of vram.h. The cached paths of allocate and free cost one lookup more than the core's.
#include "state.hpp"

namespace vram::c {

constinit Registry<PoolHandle, vram_pool, 2> pools;

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
  return VRAM_OK;
}

vram_status allocate(Pool& pool, std::size_t size, std::size_t align, vram_stream stream, void** out,
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
    auto made = std::make_unique<PoolHandle>();
    made->device = found.device;
    std::shared_ptr<Backend> memory = found.device->backend;
    if (chosen.pinned) {
      auto pinned = std::make_shared<PinnedBackend>(memory);
      made->pinned = pinned->pinned();
      memory = std::move(pinned);
    }
    made->pool = {new Pool(std::move(memory), config), end<Pool>};
    made->device->add(made->pool);
    *out = pools.add(std::move(made));
    return VRAM_OK;
  });
}

vram_status vram_pool_destroy(vram_pool* pool) {
  return guarded(__func__, [&, call = __func__] {
    const std::unique_ptr<PoolHandle> gone = pools.take(pool);
    return gone == nullptr ? bad_handle(call, "pool") : result(gone->pool->close(), call);
  });
}

vram_status vram_pool_allocate(vram_pool* pool, size_t size, vram_stream stream, void** out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  PoolHandle* const found = pools.find(pool);
  if (found == nullptr) return bad_handle(__func__, "pool");
  Address address = 0;
  if (size <= kMaxRequest && found->pool->try_cached(size, handle_of(stream), 0, &address)) {
    *out = pointer_of(address);
    return VRAM_OK;
  }
  return allocate(*found->pool, size, 0, stream, out, __func__);
}

vram_status vram_pool_allocate_aligned(vram_pool* pool, size_t size, size_t align, vram_stream stream,
                                       void** out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  PoolHandle* const found = pools.find(pool);
  if (found == nullptr) return bad_handle(__func__, "pool");
  return allocate(*found->pool, size, align, stream, out, __func__);
}

vram_status vram_pool_free(vram_pool* pool, void* memory) {
  PoolHandle* const found = pools.find(pool);
  if (found == nullptr) return bad_handle(__func__, "pool");
  if (memory == nullptr || found->pool->try_free_cached(address_of(memory))) return VRAM_OK;
  return guarded(__func__,
                 [&, call = __func__] { return result(found->pool->free_slow(address_of(memory)), call); });
}

vram_status vram_pool_record_stream(vram_pool* pool, void* memory, vram_stream stream) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    return result(found.pool->record_stream(address_of(memory), handle_of(stream)), call);
  });
}

vram_status vram_pool_find(vram_pool* pool, const void* address, void** begin, size_t* bytes) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    BlockInfo block;
    if (const Status status = found.pool->find(address_of(address), &block); !status.ok())
      return fail(status, call);
    if (begin != nullptr) *begin = pointer_of(block.address);
    if (bytes != nullptr) *bytes = block.bytes;
    return VRAM_OK;
  });
}

vram_status vram_pool_trim(vram_pool* pool, uint64_t keep, int wait) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    return result(found.pool->trim(keep, wait != 0), call);
  });
}

vram_status vram_pool_set_limit(vram_pool* pool, uint64_t bytes) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    return result(found.pool->set_limit(bytes), call);
  });
}

vram_status vram_pool_synchronize(vram_pool* pool) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    return result(found.device->synchronize(), call);
  });
}

vram_status vram_pool_on_out_of_memory(vram_pool* pool, vram_oom_callback callback, void* argument) {
  return with_pool(pool, __func__, [&](PoolHandle& found) {
    if (callback == nullptr) {
      found.pool->on_out_of_memory(nullptr);
    } else {
      found.pool->on_out_of_memory([callback, argument](std::uint64_t size, StreamHandle stream) {
        return callback(argument, size, reinterpret_cast<vram_stream>(stream)) != 0;
      });
    }
    return VRAM_OK;
  });
}

vram_status vram_pool_get_stats(vram_pool* pool, vram_pool_stats* out) {
  return with_pool(pool, __func__, [&, call = __func__](PoolHandle& found) {
    const PoolStats stats = found.pool->stats();
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
    found.pool->reset_peak();
    return VRAM_OK;
  });
}

}  // extern "C"
