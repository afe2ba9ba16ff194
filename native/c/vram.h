/* vram for C and C++: pools, the driver's own pools, pinned host memory, growable buffers and arenas, on a
 * GPU or on the host, without Python.
 *
 *   vram_device *device;
 *   vram_pool *pool;
 *   void *memory;
 *   vram_device_open(NULL, &device);               the GPU, or the host if there is none
 *   vram_pool_create(device, NULL, &pool);
 *   if (vram_pool_allocate(pool, 1 << 20, NULL, &memory) != VRAM_OK) puts(vram_last_error());
 *   vram_pool_free(pool, memory);
 *
 * Build with `cc program.c $(python -m vram --include --libs)` or with pkg-config; see docs/guide/c.md.
 *
 * Results. Every call that can fail returns a vram_status. Results are returned through a pointer, which is
 *   written only on VRAM_OK. vram_last_error() describes the last failure on the calling thread.
 * Handles. Handles are checked: null, destroyed handles and handles of another kind return VRAM_BAD_HANDLE. A
 *   handle keeps what it depends on alive: a device may be closed before its pools, a pool before its arenas.
 * Threads. Every function may be called from any thread, concurrently and on the same handle, with two
 *   exceptions: destroy a handle only when no other thread is inside a call with it, and an arena belongs to
 *   one thread at a time.
 * Streams. A stream is a handle of the device: a CUstream or cudaStream_t on a GPU, from vram_stream_create
 *   elsewhere; NULL is the default stream. Memory belongs to the stream it was allocated on: see
 *   vram_pool_record_stream before using it on another stream. On the host, code that does not queue work
 *   needs no streams.
 * Fork. In a child, calls on objects of the parent return VRAM_CLOSED; open the device again there.
 * Exit. The system releases what is still open when the process ends.
 */
#ifndef VRAM_H
#define VRAM_H

#include <stddef.h>
#include <stdint.h>

#define VRAM_VERSION_MAJOR 0
#define VRAM_VERSION_MINOR 1
#define VRAM_VERSION_PATCH 0
#define VRAM_VERSION_TEXT "0.1.0"
/* As one comparable number, as returned by vram_version(): 1.2.3 is 10203. */
#define VRAM_VERSION (VRAM_VERSION_MAJOR * 10000 + VRAM_VERSION_MINOR * 100 + VRAM_VERSION_PATCH)

#if defined(__GNUC__)
#define VRAM_API __attribute__((visibility("default")))
#else
#define VRAM_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct vram_device vram_device;
typedef struct vram_pool vram_pool;
typedef struct vram_arena vram_arena;
typedef struct vram_span vram_span;
typedef void* vram_stream;

/* The version of the loaded library, which may differ from that of this header. */
VRAM_API int vram_version(void);

/* ---- results ------------------------------------------------------------------------------------------ */

typedef enum vram_status {
  VRAM_OK = 0,
  VRAM_OUT_OF_MEMORY = 1, /* out of memory; see vram_last_out_of_memory for numbers */
  VRAM_BAD_ARGUMENT = 2,  /* a null pointer, an unknown name, an alignment that is not a power of two */
  VRAM_BAD_HANDLE = 3,    /* null, already destroyed, or of another kind */
  VRAM_BAD_POINTER = 4,   /* not a live allocation: already freed, foreign, or interior */
  VRAM_UNSUPPORTED = 5,   /* the device does not support it, or does not exist */
  VRAM_CLOSED = 6,        /* the pool was destroyed, or belongs to the parent of a fork */
  VRAM_CAPTURING = 7,     /* the stream is being captured into a graph */
  VRAM_FAILED = 8,        /* the driver failed */
  VRAM_OTHER_THREAD = 9,  /* the arena belongs to another thread; see vram_arena_adopt */
  VRAM_BAD_MARK = 10,     /* a mark that has ended, or a reset while marks are open */
  VRAM_DEADLOCK = 11,     /* work on a stream would wait for work queued behind it */
  VRAM_IN_CALLBACK = 12   /* a function of vram_arena_on_reset would change its arena */
} vram_status;

/* "ok", "out_of_memory", and so on; "unknown" for any other number. */
VRAM_API const char* vram_status_name(vram_status status);

/* Describes the last failed call of the calling thread and what to do about it; "" if none has failed. The
 * text is valid until the next failure on this thread. */
VRAM_API const char* vram_last_error(void);

/* Use of memory at an out-of-memory error, in bytes. */
typedef struct vram_oom_report {
  size_t struct_size;      /* of the caller's structure; VRAM_OOM_REPORT_INIT sets it */
  uint64_t requested;      /* requested bytes */
  uint64_t limit;          /* limit of the pool; 0: none */
  uint64_t device_total;   /* physical memory */
  uint64_t device_free;    /* free physical memory */
  uint64_t reserved;       /* held from the device: the sum of all members below but the last */
  uint64_t allocated;      /* live */
  uint64_t pending;        /* freed, but queued work may still use it */
  uint64_t cached;         /* unused, in the caches of streams */
  uint64_t free_pages;     /* unused, whole pages that this stream can use */
  uint64_t free_elsewhere; /* unused, whole pages of other streams */
  uint64_t stranded;       /* free between blocks that are in use */
  uint64_t largest_free;   /* the largest free block */
} vram_oom_report;
#define VRAM_OOM_REPORT_INIT {sizeof(vram_oom_report), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* The report of the last VRAM_OUT_OF_MEMORY on the calling thread; all zero if there was none. */
VRAM_API vram_status vram_last_out_of_memory(vram_oom_report* out);

/* ---- devices ------------------------------------------------------------------------------------------ */

/* Opens a device by name: "cuda", "cuda:1", "host", or "model:16GiB" for a new model of a device, which has
 * addresses but no memory; NULL: the first GPU, or the host if there is none. Handles of the same host or GPU
 * share the device. */
VRAM_API vram_status vram_device_open(const char* name, vram_device** out);
/* The device itself is released with the last of its handles, pools and arenas. */
VRAM_API vram_status vram_device_close(vram_device* device);

typedef struct vram_device_info {
  size_t struct_size; /* of the caller's structure; VRAM_DEVICE_INFO_INIT sets it */
  char name[32];
  uint64_t total_bytes;    /* physical memory */
  uint64_t free_bytes;     /* free physical memory */
  int32_t host_accessible; /* the host can read and write its memory */
  int32_t page_locks;      /* host memory can be pinned for it */
} vram_device_info;
#define VRAM_DEVICE_INFO_INIT {sizeof(vram_device_info), {0}, 0, 0, 0, 0}

VRAM_API vram_status vram_device_get_info(vram_device* device, vram_device_info* out);
/* Waits for all work queued on every stream. */
VRAM_API vram_status vram_device_synchronize(vram_device* device);

/* ---- streams and work --------------------------------------------------------------------------------- */

VRAM_API vram_status vram_stream_create(vram_device* device, vram_stream* out);
/* For streams from vram_stream_create. Queued work still runs. */
VRAM_API vram_status vram_stream_destroy(vram_device* device, vram_stream stream);
/* Call it before another library destroys a stream that pools of this device have used. */
VRAM_API vram_status vram_stream_retire(vram_device* device, vram_stream stream);
VRAM_API vram_status vram_stream_synchronize(vram_device* device, vram_stream stream);
/* Work queued on `stream` from now on waits for the work queued on `other` so far. */
VRAM_API vram_status vram_stream_wait(vram_device* device, vram_stream stream, vram_stream other);

/* In stream order. Either side of a copy may be host memory, which must stay valid until the copy is done. */
VRAM_API vram_status vram_copy(vram_device* device, void* to, const void* from, size_t bytes,
                               vram_stream stream);
VRAM_API vram_status vram_fill(vram_device* device, void* to, unsigned char value, size_t bytes,
                               vram_stream stream);
/* Runs a host function in the order of the stream. It must not wait for the device. */
VRAM_API vram_status vram_launch(vram_device* device, void (*work)(void* argument), void* argument,
                                 vram_stream stream);

/* ---- existing host memory ----------------------------------------------------------------------------- */

/* Pins [address, address + bytes) for the copies of a GPU, all of it at once. On a device without pinning
 * (vram_device_info.page_locks) it only records the range. Ranges must not overlap. */
VRAM_API vram_status vram_pin(vram_device* device, void* address, size_t bytes);
/* Waits for the device, then unpins the memory that was pinned at this address. */
VRAM_API vram_status vram_unpin(vram_device* device, void* address);

/* ---- pools -------------------------------------------------------------------------------------------- */

/* When memory freed on one stream may be reused by another. */
typedef enum vram_cross_stream {
  VRAM_CROSS_STREAM_READY = 0, /* after its work has completed; with a wait only if the pool cannot grow */
  VRAM_CROSS_STREAM_WAIT = 1,  /* immediately, with a stream wait, before the pool grows */
  VRAM_CROSS_STREAM_NEVER = 2
} vram_cross_stream;

/* Whose pool it is. The driver's own pools (cudaMallocAsync) have the same functions. The driver places their
 * memory, so segment_size, cross_stream, pinned and plain must be 0, and there are no growable buffers. */
typedef enum vram_pool_owner {
  VRAM_OWN_POOL = 0,
  VRAM_DRIVER_POOL = 1, /* a new one of the driver */
  VRAM_DRIVER_DEFAULT_POOL =
      2 /* the device's, shared by the process; destroy frees only what was made here */
} vram_pool_owner;

/* The memory of a new driver pool. */
typedef enum vram_pool_kind {
  VRAM_DEVICE_MEMORY = 0,
  VRAM_PINNED_MEMORY = 1, /* CUDA 12.6 or later */
  VRAM_MANAGED_MEMORY = 2 /* CUDA 13.0 or later */
} vram_pool_kind;

/* 0 is the default of every member. */
typedef struct vram_pool_options {
  size_t struct_size;    /* of the caller's structure; VRAM_POOL_OPTIONS_INIT sets it */
  uint64_t limit;        /* maximum bytes to hold from the device; 0: no limit */
  uint64_t segment_size; /* minimum bytes of one allocation from the device */
  int32_t cross_stream;  /* a vram_cross_stream */
  int32_t pinned;        /* host memory, pinned for the device and in the order of its streams */
  int32_t plain;         /* plain driver allocations instead of pages, as required by legacy IPC */
  int32_t zero_on_allocate;
  int32_t zero_on_free;
  int32_t owner;              /* a vram_pool_owner */
  int32_t kind;               /* a vram_pool_kind, of a new driver pool */
  uint64_t max_size;          /* most bytes that the driver may reserve for a new driver pool; 0: no limit */
  uint64_t release_threshold; /* see VRAM_ATTR_RELEASE_THRESHOLD; 0: the default, which keeps everything in a
                                 pool of ours and nothing in a driver pool */
} vram_pool_options;
#define VRAM_POOL_OPTIONS_INIT {sizeof(vram_pool_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* Allocates nothing from the device before the first allocation. options may be null. */
VRAM_API vram_status vram_pool_create(vram_device* device, const vram_pool_options* options, vram_pool** out);
/* Waits for queued work and releases all memory, including live allocations. */
VRAM_API vram_status vram_pool_destroy(vram_pool* pool);

/* Allocates memory for work queued on `stream` from now on, aligned to 512 bytes. Size 0 gets a unique
 * address. The memory is not zeroed unless zero_on_allocate is set. */
VRAM_API vram_status vram_pool_allocate(vram_pool* pool, size_t size, vram_stream stream, void** out);
/* align: a power of two, or 0. */
VRAM_API vram_status vram_pool_allocate_aligned(vram_pool* pool, size_t size, size_t align,
                                                vram_stream stream, void** out);
/* Never waits: the memory is reused in stream order. Null returns VRAM_OK and does nothing. */
VRAM_API vram_status vram_pool_free(vram_pool* pool, void* memory);
/* Records that another stream uses the memory from now on: after the free it is reused only when the work
 * queued there until then has completed. An address inside of an allocation is accepted. The host writes to
 * the memory of a pinned pool outside of stream order, so record every stream with queued copies there,
 * including the allocation's own. */
VRAM_API vram_status vram_pool_record_stream(vram_pool* pool, void* memory, vram_stream stream);
/* Finds the live allocation that contains an address: its start and its usable bytes. Either of the two may
 * be null. */
VRAM_API vram_status vram_pool_find(vram_pool* pool, const void* address, void** begin, size_t* bytes);
/* Releases unused memory to the device until at most `keep` bytes are held; with `wait`, also memory that
 * queued work still uses, after that work has completed. */
VRAM_API vram_status vram_pool_trim(vram_pool* pool, uint64_t keep, int wait);
VRAM_API vram_status vram_pool_set_limit(vram_pool* pool, uint64_t bytes);

/* Attributes of pools, with the numbers of cudaMemPoolAttr. Pools of ours do not have the first three. */
typedef enum vram_pool_attribute {
  VRAM_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
  VRAM_ATTR_REUSE_ALLOW_OPPORTUNISTIC = 2,
  VRAM_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3,
  /* Unused bytes above this are released: when a block above 256 KiB is freed, and by
   * vram_device_synchronize, vram_stream_synchronize and vram_pool_synchronize. UINT64_MAX keeps everything.
   * Driver pools release at synchronization points of the driver. */
  VRAM_ATTR_RELEASE_THRESHOLD = 4,
  VRAM_ATTR_RESERVED_MEM_CURRENT = 5, /* read only */
  VRAM_ATTR_RESERVED_MEM_HIGH = 6,    /* can only be set to 0, which restarts it */
  VRAM_ATTR_USED_MEM_CURRENT = 7,     /* read only */
  VRAM_ATTR_USED_MEM_HIGH = 8         /* can only be set to 0, which restarts it */
} vram_pool_attribute;
/* attribute: a vram_pool_attribute. */
VRAM_API vram_status vram_pool_get_attribute(vram_pool* pool, int32_t attribute, uint64_t* out);
VRAM_API vram_status vram_pool_set_attribute(vram_pool* pool, int32_t attribute, uint64_t value);
/* Waits for all work queued on every stream of the pool's device. */
VRAM_API vram_status vram_pool_synchronize(vram_pool* pool);

/* Called in the allocating thread, without any lock, when nothing else helped: it may free and trim. Return
 * non-zero to try again. */
typedef int (*vram_oom_callback)(void* argument, size_t size, vram_stream stream);
/* Null removes the callback. */
VRAM_API vram_status vram_pool_on_out_of_memory(vram_pool* pool, vram_oom_callback callback, void* argument);

typedef struct vram_pool_stats {
  size_t struct_size; /* of the caller's structure; VRAM_POOL_STATS_INIT sets it */
  uint64_t allocated; /* bytes of live blocks */
  uint64_t peak_allocated;
  uint64_t requested; /* the same before rounding */
  uint64_t reserved;  /* bytes held from the device */
  uint64_t peak_reserved;
  uint64_t pending;           /* freed bytes that queued work may still use */
  uint64_t cached;            /* bytes in the caches of streams */
  uint64_t allocations;       /* live allocations */
  uint64_t total_allocations; /* in total */
  uint64_t cache_hits;        /* of these, served by the cache of a stream */
  uint64_t segments;          /* segments held from the device */
  uint64_t total_segments;    /* in total */
  uint64_t out_of_memory;     /* allocations that failed */
  int32_t pinned;             /* the memory is pinned for a GPU */
  int32_t paged;              /* the memory consists of pages */
} vram_pool_stats;
#define VRAM_POOL_STATS_INIT {sizeof(vram_pool_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

VRAM_API vram_status vram_pool_get_stats(vram_pool* pool, vram_pool_stats* out);
/* Restarts the peaks from the current values; spans keep theirs. */
VRAM_API vram_status vram_pool_reset_peak(vram_pool* pool);

/* What a pool did during a span of time, on any thread. Spans nest and overlap freely. */
typedef struct vram_span_stats {
  size_t struct_size;   /* of the caller's structure; VRAM_SPAN_STATS_INIT sets it */
  uint64_t allocations; /* made */
  uint64_t frees;
  uint64_t bytes;          /* allocated, in blocks; freed ones included */
  uint64_t peak;           /* most bytes live at once, above those live at the beginning */
  uint64_t peak_allocated; /* the same, with those live at the beginning */
  uint64_t peak_reserved;  /* most bytes held from the device */
  uint64_t cache_hits;     /* allocations that the cache of a stream served */
  uint64_t segments;       /* segments requested from the device */
  uint64_t out_of_memory;  /* allocations that failed */
} vram_span_stats;
#define VRAM_SPAN_STATS_INIT {sizeof(vram_span_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0}

VRAM_API vram_status vram_span_begin(vram_pool* pool, vram_span** out);
/* So far. */
VRAM_API vram_status vram_span_get_stats(vram_span* span, vram_span_stats* out);
/* Ends the span; out may be null. */
VRAM_API vram_status vram_span_end(vram_span* span, vram_span_stats* out);

/* ---- growable buffers --------------------------------------------------------------------------------- */

/* Addresses for `max` bytes, which stay the buffer's until it is closed. They have no memory yet; a resize
 * gives memory to the first of them and never moves or copies what is there. Needs a pool with pages. Other
 * streams that use the memory are recorded with vram_pool_record_stream. */
VRAM_API vram_status vram_growable_open(vram_pool* pool, size_t max, vram_stream stream, void** out);
/* Gives memory to the first `bytes`, rounded up to 2 MiB, and to no more. Memory that is released is reused
 * when the work queued so far has completed; the host does not wait. On failure the old length stays. */
VRAM_API vram_status vram_growable_resize(vram_pool* pool, void* buffer, size_t bytes);
/* Maps pages for `bytes` more, so that a resize finds them. */
VRAM_API vram_status vram_growable_prepare(vram_pool* pool, void* buffer, size_t bytes);
/* Releases the memory, in stream order, and the addresses. */
VRAM_API vram_status vram_growable_close(vram_pool* pool, void* buffer);

typedef struct vram_growable_info {
  size_t struct_size; /* of the caller's structure; VRAM_GROWABLE_INFO_INIT sets it */
  uint64_t bytes;     /* that have memory */
  uint64_t pending;   /* released behind them, and not yet available to others */
  uint64_t ready;     /* that follow and are prepared */
  uint64_t max;
} vram_growable_info;
#define VRAM_GROWABLE_INFO_INIT {sizeof(vram_growable_info), 0, 0, 0, 0}
VRAM_API vram_status vram_growable_get_info(vram_pool* pool, void* buffer, vram_growable_info* out);

/* ---- arenas ------------------------------------------------------------------------------------------- */

/* Allocations that share one lifetime: each moves a cursor, and all of them end at once. An arena allocates
 * chunks from a pool and keeps them, so an iteration like an earlier one makes no request to the pool.
 * Growing never moves live allocations.
 *
 * The memory follows the order of one stream: after a reset it may be used there immediately, by work queued
 * after the call. Record other streams that use it with vram_arena_record_stream; a reset then makes the
 * arena's stream wait for them, not the host. Memory of a pinned pool that queued copies still use at a reset
 * rests until they complete; other memory is used in the meantime. Host threads are not covered by any
 * stream: their uses of the memory must have ended before the reset.
 *
 * An arena belongs to the thread that created it, until another calls vram_arena_adopt. Calls from other
 * threads return VRAM_OTHER_THREAD, except for record_stream, get_stats and destroy. */
typedef struct vram_arena_options {
  size_t struct_size; /* of the caller's structure; VRAM_ARENA_OPTIONS_INIT sets it */
  uint64_t size;      /* bytes to allocate from the pool immediately; 0: on demand */
  uint64_t align;     /* default alignment; 0: 64 if the host uses the memory, else 256 */
  vram_stream stream;
  int32_t fixed;  /* do not grow beyond `size` */
  int32_t poison; /* overwrite released memory with 0xFF in stream order, to expose later uses */
} vram_arena_options;
#define VRAM_ARENA_OPTIONS_INIT {sizeof(vram_arena_options), 0, 0, NULL, 0, 0}

/* options may be null. */
VRAM_API vram_status vram_arena_create(vram_pool* pool, const vram_arena_options* options, vram_arena** out);
/* Calls the functions of vram_arena_on_reset and returns the memory to the pool, in stream order; any thread
 * may call it. */
VRAM_API vram_status vram_arena_destroy(vram_arena* arena);
/* Makes the calling thread the owner. The caller must ensure that the previous owner has finished. */
VRAM_API vram_status vram_arena_adopt(vram_arena* arena);

/* align: a power of two up to 2 MiB, or 0 for that of the arena. Size 0 gets a unique address. */
VRAM_API vram_status vram_arena_allocate(vram_arena* arena, size_t size, size_t align, void** out);
/* Releases everything, in constant time besides the functions of vram_arena_on_reset. With `zero`, memory
 * allocated until the next reset reads as zero. Fails while marks are open. */
VRAM_API vram_status vram_arena_reset(vram_arena* arena, int zero);

/* A lifetime nested in the current one. Valid only for the arena that created it. */
typedef struct vram_mark {
  uint64_t id;
  uint32_t depth;
} vram_mark;
VRAM_API vram_status vram_arena_mark(vram_arena* arena, vram_mark* out);
/* Releases what was allocated since the mark, and ends later marks. */
VRAM_API vram_status vram_arena_rewind(vram_arena* arena, vram_mark mark);

/* Calls function(argument) once, when the current lifetime ends: at the next reset, at the rewind to an open
 * mark, or at destroy, before the memory is reused. It can release what another library keeps about the
 * memory, such as the data handles of a task runtime, and wait for the host threads that use it.
 *
 * The function that was registered last is called first. It runs on the host, in the thread that resets,
 * rewinds or destroys, and before the arena orders its stream after the recorded ones. It may read and write
 * the memory, and call vram_arena_record_stream, vram_arena_get_stats and vram_arena_find. Calls that change
 * the arena return VRAM_IN_CALLBACK. It must not throw C++ exceptions. If the reset fails afterwards, it is
 * not called again. A pool that is destroyed before its arena releases the memory first: destroy the arena
 * first. In the child of a fork it is not called. */
VRAM_API vram_status vram_arena_on_reset(vram_arena* arena, void (*function)(void* argument), void* argument);

/* Records that work on the stream uses memory of the arena, from now until the next reset. */
VRAM_API vram_status vram_arena_record_stream(vram_arena* arena, vram_stream stream);
/* Returns chunks without live allocations to the pool. After a reset, the next growth is one chunk that is
 * large enough for the maximum ever used. */
VRAM_API vram_status vram_arena_trim(vram_arena* arena);
/* Finds the chunk that contains an address of the arena: its start and its bytes, for example to register it
 * with another library. Chunks stay at their address until a trim or the end of the arena. */
VRAM_API vram_status vram_arena_find(vram_arena* arena, const void* address, void** begin, size_t* bytes);

typedef struct vram_arena_stats {
  size_t struct_size;  /* of the caller's structure; VRAM_ARENA_STATS_INIT sets it */
  uint64_t used;       /* bytes of live allocations and the padding between them */
  uint64_t high_water; /* maximum of `used` */
  uint64_t capacity;   /* bytes held from the pool */
  uint64_t resting;    /* of these, waiting for queued copies */
  uint64_t chunks;
  uint64_t allocations; /* in total */
  uint64_t requests;    /* chunks requested from the pool; constant once the arena has grown */
  uint64_t resets;
  uint64_t host_waits; /* how often the host waited for resting chunks */
  uint32_t marks;      /* open marks */
  int32_t pinned;      /* the memory is pinned for a GPU */
} vram_arena_stats;
#define VRAM_ARENA_STATS_INIT {sizeof(vram_arena_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

VRAM_API vram_status vram_arena_get_stats(vram_arena* arena, vram_arena_stats* out);
/* Restarts high_water from the current value. */
VRAM_API vram_status vram_arena_reset_peak(vram_arena* arena);

#ifdef __cplusplus
}
#endif
#endif
