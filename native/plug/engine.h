// What the library that vram compiles against an installed PyTorch (src/vram/torch/native) may call: plain
// functions and plain data, because that library is built by another compiler, with another C++ library.
// Defines VramEngine, a table of functions; vram_engine() in the native module returns it.
//
// Every function may be called from any thread and never throws. Devices are CUDA's numbers; -1 is every
// device in use. A device gets its pool on first use. Heaps are named by two numbers, as PyTorch does.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct VramHeap {
  uint64_t first;
  uint64_t second;
} VramHeap;  // {0, 0}: none

typedef struct VramMeter {
  uint64_t current, peak, total;
} VramMeter;

typedef struct VramStats {
  VramMeter allocations[2], bytes[2], requested[2];  // up to 1 MiB; larger
  VramMeter reserved, segments, pending, inactive, inactive_bytes;
  uint64_t live, peak_live, peak_active, pending_blocks;
  uint64_t largest_free;
  uint64_t retries, out_of_memory, host_waits;
} VramStats;

// Why an allocation failed.
typedef struct VramFailure {
  uint64_t limit, device_total, device_free, reserved, live;
  int out_of_memory;  // 0: another reason, in `call` and `native`
  int native;
  const char* call;
} VramFailure;

typedef enum VramBlockState { VRAM_BLOCK_FREE, VRAM_BLOCK_LIVE, VRAM_BLOCK_PENDING } VramBlockState;

typedef struct VramBlock {
  uint64_t address, bytes, requested;
  void* stream;
  uint32_t tag;
  VramBlockState state;
  int used_elsewhere;  // its free waits for another stream
  VramHeap heap;
} VramBlock;

// A run of addresses with memory; the calls of VramSnapshot::block that follow are its blocks, in order.
typedef struct VramSegment {
  uint64_t address, bytes;
  void* stream;
  VramHeap heap;
  int small, plain;
} VramSegment;

typedef struct VramSnapshot {
  void* context;
  void (*segment)(void* context, const VramSegment*);
  void (*block)(void* context, const VramBlock*);
} VramSnapshot;

// Memory for a heap that does not come from the pool's device.
typedef struct VramSource {
  void* context;
  void* (*reserve)(void* context, size_t bytes);  // null: none
  void (*release)(void* context, void* address);
  void (*drop)(void* context);  // called once, when the source is no longer needed
} VramSource;

typedef struct VramServes {
  void* context;
  int (*serves)(void* context, void* stream);
  void (*drop)(void* context);
} VramServes;

typedef enum VramEventKind {
  VRAM_EVENT_RESERVED,   // memory was reserved, or mapped at an address
  VRAM_EVENT_RELEASED,   // … or released, or unmapped there
  VRAM_EVENT_COMPLETED,  // a free that had to wait for other streams
} VramEventKind;

typedef struct VramEvent {
  VramEventKind kind;
  int device;
  int plain;
  uint64_t address, bytes;
  void* stream;
  VramHeap heap;
} VramEvent;

typedef struct VramPinnedStats {
  VramMeter active, active_bytes;      // allocations in use, and blocks that streams still use
  VramMeter reserved, reserved_bytes;  // segments of pinned memory
  uint64_t allocate_us, release_us;    // spent in the driver
} VramPinnedStats;

#define VRAM_SHARED_NAME 512  // longer than the name of any shared allocation

typedef struct VramEngine {
  // ---- device memory ----------------------------------------------------------------------------
  void* (*allocate)(int device, size_t bytes, void* stream, VramFailure* failure);  // null: see failure
  // With room for more bytes than are requested.
  void* (*allocate_padded)(int device, size_t bytes, size_t room, void* stream, VramFailure* failure);
  int (*free)(void* address);                               // 0: not allocated here
  int (*record_stream)(void* address, void* stream);        // 0: not allocated here
  int (*find)(void* address, VramBlock* out, int* device);  // the live block that contains an address
  // Says why the last allocation on this thread that failed did, in words; valid until the next call.
  const char* (*explain)(int device, size_t bytes, void* stream);
  void (*trim)(int device, VramHeap heap);        // releases unused memory of the device, or of one heap
  void (*set_limit)(int device, uint64_t bytes);  // 0: none
  uint64_t (*limit)(int device);
  int (*stats)(int device, VramStats* out);  // 0: the device has not been used
  void (*reset_peaks)(int device);
  // Lets `peer` use the memory of `device`, which the driver allows already for other memory. 0: failed.
  int (*add_peer)(int device, int peer);
  void (*snapshot)(int device, const VramSnapshot* visit);
  // Calls back for every event from now on, under the pool's lock; null: no more.
  void (*listen)(void (*tell)(const VramEvent*));

  // ---- heaps: memory kept apart (Pool::heap_begin) ----------------------------------------------
  // Creates a heap of plain segments, or adds a use. `source` may be null.
  int (*heap_open)(int device, VramHeap heap, const VramSource* source);
  int (*heap_begin)(int device, VramHeap heap, VramServes serves);  // creates a heap, or adds a use
  int (*heap_end)(int device, VramHeap heap);
  int (*heap_release)(int device, VramHeap heap);  // removes a use
  int (*heap_uses)(int device, VramHeap heap);
  int (*heap_set)(int device, VramHeap heap, int use_on_oom, int no_split);  // -1: as it is
  void (*heap_live)(int device, VramHeap heap, void* context, void (*visit)(void*, const VramBlock*));
  // Frees what is live in the heap, then allocates these blocks at their addresses. 0: impossible.
  int (*heap_restore)(int device, VramHeap heap, const VramBlock* blocks, size_t count);

  // ---- memory shared between processes -------------------------------------------------------------
  // Writes a name for the live allocation that contains `address`, for another process, and the distance
  // from the start of what that process will map. Returns the length of the name. 0: *why says why.
  size_t (*share)(void* address, char* name, size_t room, int64_t* offset, const char** why);
  // `device` is the one that will use it, as this process numbers it.
  void* (*attach)(int device, const char* name, size_t length, const char** why);  // null: *why says why
  void (*detach)(void* address);

  // ---- pinned host memory ---------------------------------------------------------------------------
  // One pool for all devices. `device` is one whose context exists: the first call makes the pool there.
  void* (*pinned_allocate)(int device, size_t bytes, const char** why);  // null: *why says why
  int (*pinned_free)(void* address);                                     // 0: not allocated here
  // The block that contains the address is used on a stream of a device; 0: not allocated here.
  int (*pinned_record)(void* address, int device, void* stream);
  void (*pinned_trim)(void);
  void (*pinned_stats)(VramPinnedStats* out);
  void (*pinned_reset_peaks)(void);
} VramEngine;

const VramEngine* vram_engine(void);

#ifdef __cplusplus
}
#endif
