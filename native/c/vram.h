/* vram for C and C++: pools, page-locked host memory and arenas, on a GPU or on the host, without Python.
 *
 *   vram_device *device;
 *   vram_pool *pool;
 *   void *memory;
 *   vram_device_open(NULL, &device);               the GPU, or the host where there is none
 *   vram_pool_create(device, NULL, &pool);
 *   if (vram_pool_allocate(pool, 1 << 20, NULL, &memory) != VRAM_OK) puts(vram_last_error());
 *   vram_pool_free(pool, memory);
 *
 * Build with `cc program.c $(python -m vram --include --libs)` or with pkg-config; docs/guide/c.md has more.
 *
 * Results. Every call that can fail returns a vram_status and gives what it makes through a pointer, which it
 *   writes only on VRAM_OK. vram_last_error() says in words what the last failed call of this thread came to.
 * Handles. They are checked: null, one that was destroyed and one of another kind are VRAM_BAD_HANDLE. A
 *   handle keeps what it depends on: a device may be closed before its pools, a pool before its arenas.
 * Threads. Every call may come from any thread, several at once, on the same handle too, with two exceptions:
 *   a handle is destroyed only when no other thread is inside a call with it, and an arena belongs to one
 *   thread at a time.
 * Streams. A stream is a handle of the device: a CUstream or cudaStream_t on a GPU, from vram_stream_create
 *   elsewhere; NULL is the default stream. Memory belongs to the stream it was allocated on: see
 *   vram_pool_record_stream before using it on another. On the host, plain code that does not queue work
 *   needs no streams.
 * Fork. In a child, what the parent made answers VRAM_CLOSED; open the device again there.
 * Exit. What is still open when the process ends is left to the system.
 */
#ifndef VRAM_H
#define VRAM_H

#include <stddef.h>
#include <stdint.h>

#define VRAM_VERSION_MAJOR 0
#define VRAM_VERSION_MINOR 1
#define VRAM_VERSION_PATCH 0
#define VRAM_VERSION_TEXT "0.1.0"
/* As one number that can be compared, and as vram_version() gives it: 1.2.3 is 10203. */
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
typedef void* vram_stream;

/* The version of the library that is loaded, which may be another than that of this header. */
VRAM_API int vram_version(void);

/* ---- results ------------------------------------------------------------------------------------------ */

typedef enum vram_status {
  VRAM_OK = 0,
  VRAM_OUT_OF_MEMORY = 1, /* no room; vram_last_out_of_memory has the numbers */
  VRAM_BAD_ARGUMENT = 2,  /* a null pointer, an unknown name, an alignment that is no power of two */
  VRAM_BAD_HANDLE = 3,    /* null, destroyed before, or of another kind */
  VRAM_BAD_POINTER = 4,   /* not a live allocation: freed before, foreign, or inside of one */
  VRAM_UNSUPPORTED = 5,   /* the device does not offer it, or there is no such device */
  VRAM_CLOSED = 6,        /* the pool below was destroyed, or belongs to the parent of a fork */
  VRAM_CAPTURING = 7,     /* the stream is being captured into a graph */
  VRAM_FAILED = 8,        /* the driver failed */
  VRAM_OTHER_THREAD = 9,  /* the arena belongs to another thread; see vram_arena_adopt */
  VRAM_BAD_MARK = 10,     /* a mark that is over, or a reset while marks are open */
  VRAM_DEADLOCK = 11      /* work of a stream would wait for what is queued behind it */
} vram_status;

/* "ok", "out_of_memory", and so on; "unknown" for a number that is none of them. */
VRAM_API const char* vram_status_name(vram_status status);

/* What the last failed call of the calling thread came to, and what to do about it; "" where none failed yet.
 * The text stays until the next failure on this thread. */
VRAM_API const char* vram_last_error(void);

/* Where memory was when it ran out, in bytes. */
typedef struct vram_oom_report {
  size_t struct_size;      /* of the caller's structure; VRAM_OOM_REPORT_INIT sets it */
  uint64_t requested;      /* what was asked */
  uint64_t limit;          /* of the pool; 0: none */
  uint64_t device_total;   /* physical memory */
  uint64_t device_free;    /* of it, taken by nobody */
  uint64_t reserved;       /* what the pool holds from the device: the sum of all below but the last */
  uint64_t allocated;      /* live */
  uint64_t pending;        /* freed, but queued work may still use it */
  uint64_t cached;         /* idle, in the caches of streams */
  uint64_t free_pages;     /* idle, whole pages this stream could use */
  uint64_t free_elsewhere; /* idle, whole pages other streams hold */
  uint64_t stranded;       /* free between blocks that are in use */
  uint64_t largest_free;   /* the largest free piece */
} vram_oom_report;
#define VRAM_OOM_REPORT_INIT {sizeof(vram_oom_report), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* The report of the last VRAM_OUT_OF_MEMORY on the calling thread; all zero where there was none. */
VRAM_API vram_status vram_last_out_of_memory(vram_oom_report* out);

/* ---- devices ------------------------------------------------------------------------------------------ */

/* By name: "cuda", "cuda:1", "host", or "model:16GiB" for a new model of a device, which has addresses but no
 * memory behind them; NULL: the first GPU, or the host where there is none. Handles of one host or GPU share
 * the device. */
VRAM_API vram_status vram_device_open(const char* name, vram_device** out);
/* The device itself goes with the last of its handles, pools and arenas. */
VRAM_API vram_status vram_device_close(vram_device* device);

typedef struct vram_device_info {
  size_t struct_size; /* of the caller's structure; VRAM_DEVICE_INFO_INIT sets it */
  char name[32];
  uint64_t total_bytes;    /* physical memory */
  uint64_t free_bytes;     /* of it, taken by nobody */
  int32_t host_accessible; /* the host may read and write its memory */
  int32_t page_locks;      /* host memory can be page-locked for it; 0 where there is nobody to tell */
} vram_device_info;
#define VRAM_DEVICE_INFO_INIT {sizeof(vram_device_info), {0}, 0, 0, 0, 0}

VRAM_API vram_status vram_device_get_info(vram_device* device, vram_device_info* out);
/* Waits for everything queued on every stream. */
VRAM_API vram_status vram_device_synchronize(vram_device* device);

/* ---- streams and work --------------------------------------------------------------------------------- */

VRAM_API vram_status vram_stream_create(vram_device* device, vram_stream* out);
/* Of a stream from vram_stream_create. Its queued work still runs. */
VRAM_API vram_status vram_stream_destroy(vram_device* device, vram_stream stream);
/* To be called before another library destroys a stream that pools of this device have seen. */
VRAM_API vram_status vram_stream_retire(vram_device* device, vram_stream stream);
VRAM_API vram_status vram_stream_synchronize(vram_device* device, vram_stream stream);
/* What is queued on `stream` from now on waits for what is queued on `other` now. */
VRAM_API vram_status vram_stream_wait(vram_device* device, vram_stream stream, vram_stream other);

/* In the order of the stream; either side of a copy may be host memory, which must stay until it is done. */
VRAM_API vram_status vram_copy(vram_device* device, void* to, const void* from, size_t bytes,
                               vram_stream stream);
VRAM_API vram_status vram_fill(vram_device* device, void* to, unsigned char value, size_t bytes,
                               vram_stream stream);
/* Runs a host function in the order of the stream. It must not wait for the device. */
VRAM_API vram_status vram_launch(vram_device* device, void (*work)(void* argument), void* argument,
                                 vram_stream stream);

/* ---- host memory that exists already ------------------------------------------------------------------ */

/* Page-locks [address, address + bytes) for the copies of a GPU, all of it at once. On a device that has
 * nobody to tell (vram_device_info.page_locks) it only keeps the books. Ranges must not overlap. */
VRAM_API vram_status vram_pin(vram_device* device, void* address, size_t bytes);
/* Waits for the device, then unlocks what was pinned at this address. */
VRAM_API vram_status vram_unpin(vram_device* device, void* address);

/* ---- pools -------------------------------------------------------------------------------------------- */

/* When memory freed on one stream may serve another. */
typedef enum vram_cross_stream {
  VRAM_CROSS_STREAM_READY = 0, /* once its work has finished; by a wait only where the pool cannot grow */
  VRAM_CROSS_STREAM_WAIT = 1,  /* at once, the other stream waiting, before the pool grows */
  VRAM_CROSS_STREAM_NEVER = 2
} vram_cross_stream;

/* In all of them 0 is the default. */
typedef struct vram_pool_options {
  size_t struct_size;    /* of the caller's structure; VRAM_POOL_OPTIONS_INIT sets it */
  uint64_t limit;        /* most bytes to hold from the device; 0: what it has */
  uint64_t segment_size; /* least bytes to take from the device at a time */
  int32_t cross_stream;  /* a vram_cross_stream */
  int32_t pinned;        /* host memory, page-locked for the device and in the order of its streams */
  int32_t plain;         /* whole driver allocations in place of pages, as legacy IPC needs them */
  int32_t zero_on_allocate;
  int32_t zero_on_free;
} vram_pool_options;
#define VRAM_POOL_OPTIONS_INIT {sizeof(vram_pool_options), 0, 0, 0, 0, 0, 0, 0}

/* Takes nothing from the device before the first allocation. options may be null. */
VRAM_API vram_status vram_pool_create(vram_device* device, const vram_pool_options* options, vram_pool** out);
/* Waits for queued work and gives all memory back, whatever is still allocated. */
VRAM_API vram_status vram_pool_destroy(vram_pool* pool);

/* Memory for work queued on `stream` from now on, aligned to 512 bytes. Size 0 gets an address of its own.
 * The memory is not zero unless zero_on_allocate says so. */
VRAM_API vram_status vram_pool_allocate(vram_pool* pool, size_t size, vram_stream stream, void** out);
/* align: a power of two, or 0. */
VRAM_API vram_status vram_pool_allocate_aligned(vram_pool* pool, size_t size, size_t align,
                                                vram_stream stream, void** out);
/* Never waits: the memory is reused in stream order. Null is VRAM_OK and does nothing. */
VRAM_API vram_status vram_pool_free(vram_pool* pool, void* memory);
/* The memory is used on another stream from now on: after its free it comes back only when what was queued
 * there until then is done. An address inside of an allocation will do. The host writes to the memory of a
 * pinned pool out of any stream's order, so there each stream with queued copies is told, its own too. */
VRAM_API vram_status vram_pool_record_stream(vram_pool* pool, void* memory, vram_stream stream);
/* The live allocation that holds an address: where it begins and how many bytes it may use. Either of the
 * two may be null. */
VRAM_API vram_status vram_pool_find(vram_pool* pool, const void* address, void** begin, size_t* bytes);
/* Gives idle memory back to the device until at most `keep` bytes are held; with `wait`, also what queued
 * work still uses, once that is done. */
VRAM_API vram_status vram_pool_trim(vram_pool* pool, uint64_t keep, int wait);
VRAM_API vram_status vram_pool_set_limit(vram_pool* pool, uint64_t bytes);
/* Waits for everything queued on every stream of the pool's device. */
VRAM_API vram_status vram_pool_synchronize(vram_pool* pool);

/* Called in the allocating thread, without any lock, when nothing else helped: it may free and trim.
 * Non-zero: try again. */
typedef int (*vram_oom_callback)(void* argument, size_t size, vram_stream stream);
/* Null takes it away. */
VRAM_API vram_status vram_pool_on_out_of_memory(vram_pool* pool, vram_oom_callback callback, void* argument);

typedef struct vram_pool_stats {
  size_t struct_size; /* of the caller's structure; VRAM_POOL_STATS_INIT sets it */
  uint64_t allocated; /* bytes of live blocks */
  uint64_t peak_allocated;
  uint64_t requested; /* the same as it was asked, before rounding */
  uint64_t reserved;  /* bytes held from the device */
  uint64_t peak_reserved;
  uint64_t pending;           /* bytes freed that queued work may still use */
  uint64_t cached;            /* bytes in the caches of streams */
  uint64_t allocations;       /* live now */
  uint64_t total_allocations; /* ever */
  uint64_t cache_hits;        /* of these, served by a stream's cache */
  uint64_t segments;          /* pieces held from the device */
  uint64_t total_segments;    /* ever taken from it */
  uint64_t out_of_memory;     /* allocations that failed */
  int32_t pinned;             /* the memory is page-locked for a GPU */
  int32_t paged;              /* the memory is pages */
} vram_pool_stats;
#define VRAM_POOL_STATS_INIT {sizeof(vram_pool_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

VRAM_API vram_status vram_pool_get_stats(vram_pool* pool, vram_pool_stats* out);
/* Peaks count from now. */
VRAM_API vram_status vram_pool_reset_peak(vram_pool* pool);

/* ---- arenas ------------------------------------------------------------------------------------------- */

/* Allocations with one common lifetime: each costs the move of a cursor, and all of them end at once. An
 * arena takes its memory from a pool in chunks and keeps them, so that an iteration like one before it asks
 * the pool for nothing; growing never moves what is live.
 *
 * Its memory is in the order of one stream: after a reset it may be used there at once, by work queued after
 * the call. Other streams that use it are told by vram_arena_record_stream; a reset then makes the arena's
 * stream wait for them, not the host. Memory of a pinned pool that queued copies still use at a reset rests
 * until they are done, and other memory serves meanwhile. Threads of the host are nobody's stream: what they
 * do with the memory must have ended before the reset.
 *
 * An arena belongs to the thread that made it, until another calls vram_arena_adopt. Calls from a thread that
 * it does not belong to are VRAM_OTHER_THREAD, but for record_stream, get_stats and destroy. */
typedef struct vram_arena_options {
  size_t struct_size; /* of the caller's structure; VRAM_ARENA_OPTIONS_INIT sets it */
  uint64_t size;      /* bytes to take from the pool at once; 0: as allocations come */
  uint64_t align;     /* of allocations that ask for none; 0: 64 where the host uses the memory, else 256 */
  vram_stream stream;
  int32_t fixed;  /* `size` is all there is; else the arena grows */
  int32_t poison; /* what ends is overwritten with 0xFF in stream order: later uses of it show */
} vram_arena_options;
#define VRAM_ARENA_OPTIONS_INIT {sizeof(vram_arena_options), 0, 0, NULL, 0, 0}

/* options may be null. */
VRAM_API vram_status vram_arena_create(vram_pool* pool, const vram_arena_options* options, vram_arena** out);
/* Gives the memory back to the pool, in stream order; may come from any thread. */
VRAM_API vram_status vram_arena_destroy(vram_arena* arena);
/* The calling thread is the arena's from now on. The program sees to it that the one before has finished. */
VRAM_API vram_status vram_arena_adopt(vram_arena* arena);

/* align: a power of two up to 2 MiB, or 0 for that of the arena. Size 0 gets an address of its own. */
VRAM_API vram_status vram_arena_allocate(vram_arena* arena, size_t size, size_t align, void** out);
/* Ends everything, in constant time. With `zero`, what is handed out until the next reset reads as zero. Not
 * while marks are open. */
VRAM_API vram_status vram_arena_reset(vram_arena* arena, int zero);

/* A lifetime inside the present one. Of the arena that made it only. */
typedef struct vram_mark {
  uint64_t id;
  uint32_t depth;
} vram_mark;
VRAM_API vram_status vram_arena_mark(vram_arena* arena, vram_mark* out);
/* Ends what was allocated since the mark, and the marks made since. */
VRAM_API vram_status vram_arena_rewind(vram_arena* arena, vram_mark mark);

/* Work on the stream uses memory of the arena, from now until the next reset. */
VRAM_API vram_status vram_arena_record_stream(vram_arena* arena, vram_stream stream);
/* Gives chunks that hold nothing live back to the pool. After a reset, the next growth is one chunk that
 * suffices for the most that was ever used. */
VRAM_API vram_status vram_arena_trim(vram_arena* arena);
/* The chunk that holds an address of the arena: where it begins and its bytes, to register all of it at once
 * with another library. Chunks stay where they are until a trim or the end of the arena. */
VRAM_API vram_status vram_arena_find(vram_arena* arena, const void* address, void** begin, size_t* bytes);

typedef struct vram_arena_stats {
  size_t struct_size;  /* of the caller's structure; VRAM_ARENA_STATS_INIT sets it */
  uint64_t used;       /* bytes of live allocations and the padding between them */
  uint64_t high_water; /* the most that was used at a time */
  uint64_t capacity;   /* bytes held from the pool */
  uint64_t resting;    /* of these, waiting for queued copies */
  uint64_t chunks;
  uint64_t allocations; /* ever */
  uint64_t requests;    /* chunks ever asked of the pool; constant once the arena has grown */
  uint64_t resets;
  uint64_t host_waits; /* the host had to wait for resting chunks */
  uint32_t marks;      /* open */
  int32_t pinned;      /* the memory is page-locked for a GPU */
} vram_arena_stats;
#define VRAM_ARENA_STATS_INIT {sizeof(vram_arena_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

VRAM_API vram_status vram_arena_get_stats(vram_arena* arena, vram_arena_stats* out);
/* high_water counts from now. */
VRAM_API vram_status vram_arena_reset_peak(vram_arena* arena);

#ifdef __cplusplus
}
#endif
#endif
