// The arena functions of vram.h.
#include "arena/arena.hpp"
#include "state.hpp"

namespace vram::c {

constinit Registry<ArenaHandle, vram_arena, 3> arenas;

namespace {

template <class Body>
vram_status with_arena(vram_arena* handle, const char* call, Body body) noexcept {
  return with(arenas, handle, "arena", call, body);
}

// Reports why an arena's allocation failed.
vram_status refused(const Status& status, const OutOfMemoryReport& report, const char* call,
                    const Arena& arena) {
  if (status.code != Code::out_of_memory) return fail(status, call);
  if (std::strcmp(status.call, Arena::kFull) == 0)
    return fail(
        VRAM_OUT_OF_MEMORY, call,
        "%llu bytes requested from an arena of fixed size, which has used %llu of its %llu bytes; reset or "
        "rewind it, make it larger, or let it grow",
        static_cast<unsigned long long>(report.requested),
        static_cast<unsigned long long>(arena.stats().used),
        static_cast<unsigned long long>(arena.stats().capacity));
  if (report.device_total == 0) return fail(status, call);
  return fail_out_of_memory(report, call, arena.pool().backend(), arena.stream());
}

}  // namespace

}  // namespace vram::c

using namespace vram;
using namespace vram::c;

extern "C" {

vram_status vram_arena_create(vram_pool* pool, const vram_arena_options* options, vram_arena** out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  return with(pools, pool, "pool", __func__, [&, call = __func__](PoolHandle& found) {
    vram_arena_options chosen = VRAM_ARENA_OPTIONS_INIT;
    if (const vram_status status = take(options, &chosen, call); status != VRAM_OK) return status;
    if (chosen.fixed && chosen.size == 0)
      return fail(VRAM_BAD_ARGUMENT, call, "an arena of fixed size needs a size above 0");
    ArenaOptions core;
    core.size = chosen.size;
    core.growable = !chosen.fixed;
    core.align = chosen.align;
    core.stream = handle_of(chosen.stream);
    core.poison = chosen.poison != 0;
    std::unique_ptr<Arena> arena;
    OutOfMemoryReport report;
    if (const Status status = Arena::open(found.allocator, core, &arena, &report); !status.ok())
      return status.code == Code::out_of_memory && report.device_total != 0
                 ? fail_out_of_memory(report, call, found.allocator->backend(), core.stream)
                 : fail(status, call);
    auto made = std::make_unique<ArenaHandle>();
    made->device = found.device;
    made->arena = {arena.release(), end<Arena>};
    made->pinned = found.pinned;
    made->device->add(made->arena);
    *out = arenas.add(std::move(made));
    return VRAM_OK;
  });
}

vram_status vram_arena_destroy(vram_arena* arena) {
  return guarded(__func__, [&, call = __func__] {
    if (const ArenaHandle* const found = arenas.find(arena); found != nullptr && found->arena->in_callback())
      return fail({Code::invalid, 0, Arena::kInCallback}, call);
    const std::unique_ptr<ArenaHandle> gone = arenas.take(arena);
    if (gone == nullptr) return bad_handle(call, "arena");
    const Status status = gone->arena->close();
    return status.code == Code::closed ? VRAM_OK
                                       : result(status, call);  // the pool already has the memory back
  });
}

vram_status vram_arena_adopt(vram_arena* arena) {
  return with_arena(arena, __func__, [](ArenaHandle& found) {
    found.arena->adopt();
    return VRAM_OK;
  });
}

vram_status vram_arena_allocate(vram_arena* arena, size_t size, size_t align, void** out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  ArenaHandle* const found = arenas.find(arena);
  if (found == nullptr) return bad_handle(__func__, "arena");
  Address address = 0;
  if (found->arena->try_allocate(size, align, &address)) {
    *out = pointer_of(address);
    return VRAM_OK;
  }
  return guarded(__func__, [&, call = __func__] {
    OutOfMemoryReport report;
    const Status status = found->arena->allocate(size, align, &address, &report);
    if (!status.ok()) return refused(status, report, call, *found->arena);
    *out = pointer_of(address);
    return VRAM_OK;
  });
}

vram_status vram_arena_reset(vram_arena* arena, int zero) {
  return with_arena(arena, __func__, [&, call = __func__](ArenaHandle& found) {
    return result(found.arena->reset(zero != 0), call);
  });
}

vram_status vram_arena_mark(vram_arena* arena, vram_mark* out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  return with_arena(arena, __func__, [&, call = __func__](ArenaHandle& found) {
    Arena::Mark mark;
    if (const Status status = found.arena->mark(&mark); !status.ok()) return fail(status, call);
    *out = {mark.id, mark.depth};
    return VRAM_OK;
  });
}

vram_status vram_arena_rewind(vram_arena* arena, vram_mark mark) {
  return with_arena(arena, __func__, [&, call = __func__](ArenaHandle& found) {
    return result(found.arena->rewind({mark.id, mark.depth}), call);
  });
}

vram_status vram_arena_on_reset(vram_arena* arena, void (*function)(void*), void* argument) {
  if (function == nullptr) return null_pointer(__func__, "function");
  return with_arena(arena, __func__, [&, call = __func__](ArenaHandle& found) {
    return result(found.arena->on_reset(function, argument), call);
  });
}

vram_status vram_arena_record_stream(vram_arena* arena, vram_stream stream) {
  return with_arena(arena, __func__, [&, call = __func__](ArenaHandle& found) {
    return result(found.arena->record_stream(handle_of(stream)), call);
  });
}

vram_status vram_arena_trim(vram_arena* arena) {
  return with_arena(arena, __func__,
                    [&, call = __func__](ArenaHandle& found) { return result(found.arena->trim(), call); });
}

vram_status vram_arena_find(vram_arena* arena, const void* address, void** begin, size_t* bytes) {
  return with_arena(arena, __func__, [&, call = __func__](ArenaHandle& found) {
    Address base = 0;
    std::uint64_t size = 0;
    if (!found.arena->ours()) return fail({Code::invalid, 0, Arena::kOtherThread}, call);
    if (!found.arena->chunk_of(address_of(address), &base, &size))
      return fail({Code::invalid, 0, "find"}, call);
    if (begin != nullptr) *begin = pointer_of(base);
    if (bytes != nullptr) *bytes = size;
    return VRAM_OK;
  });
}

vram_status vram_arena_get_stats(vram_arena* arena, vram_arena_stats* out) {
  return with_arena(arena, __func__, [&, call = __func__](ArenaHandle& found) {
    const ArenaStats stats = found.arena->stats();
    vram_arena_stats full = VRAM_ARENA_STATS_INIT;
    full.used = stats.used;
    full.high_water = stats.high_water;
    full.capacity = stats.capacity;
    full.resting = stats.resting;
    full.chunks = stats.chunks;
    full.allocations = stats.allocations;
    full.requests = stats.requests;
    full.resets = stats.resets;
    full.host_waits = stats.host_waits;
    full.marks = static_cast<std::uint32_t>(stats.depth);
    full.pinned = found.pinned;
    return give(full, out, call);
  });
}

vram_status vram_arena_reset_peak(vram_arena* arena) {
  return with_arena(arena, __func__, [&, call = __func__](ArenaHandle& found) {
    if (!found.arena->ours()) return fail({Code::invalid, 0, Arena::kOtherThread}, call);
    found.arena->reset_peak();
    return VRAM_OK;
  });
}

}  // extern "C"
