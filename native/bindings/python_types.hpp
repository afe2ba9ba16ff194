// The two types on the hot path, written against Python's C interface because a call through a general
// binding layer costs more than the allocation itself. Everything else is bound with nanobind.
#pragma once

#include <Python.h>

#include <memory>
#include <string>
#include <vector>

#include "arena/arena.hpp"
#include "pool/pool.hpp"
#include "waiting.hpp"

namespace vram {

// A pool as the bindings reach it: with the GIL, for what waits for nothing, and by call() for everything
// else. So no binding can wait for the pool's mutex with the GIL held.
class PoolHandle {
 public:
  explicit PoolHandle(std::shared_ptr<Allocator> pool) : pool_(std::move(pool)) {}
  PoolHandle* operator->() { return this; }
  const PoolHandle* operator->() const { return this; }

  bool closed() const { return pool_->closed(); }
  Backend& backend() const { return pool_->backend(); }
  bool host_accessible() const { return pool_->host_accessible(); }
  const std::shared_ptr<Allocator>& shared() const { return pool_; }

  // work(pool) by waiting(). Refused in the child of a fork, where all of the pool is the parent's.
  template <typename Work>
  Status call(Work work) const {
    if (pool_->inherited()) return {Code::closed, 0, "pool"};
    const std::shared_ptr<Allocator> pool = pool_;
    return waiting([&] { return work(*pool); });
  }
  bool suspended(Address address) const {
    bool answer = false;
    if (pool_->any_suspended()) (void)call([&](Allocator& pool) { answer = pool.suspended(address); });
    return answer;
  }

 private:
  std::shared_ptr<Allocator> pool_;
};

// vram._native.PoolCore: a pool and the device object it was made for.
struct PyPool {
  PyObject_HEAD PoolHandle pool;
  Pool* quick;          // the same pool where it has fast paths, else null
  bool captures;        // streams can be captured, so they are asked before each allocation
  bool stacks;          // allocations are labelled with the Python stack (stacks.hpp); guarded by the GIL
  PyObject* device;     // strong
  PyObject* tag_names;  // list: id - 1 → str
  PyObject* tag_ids;    // dict: str → id
  std::uint64_t other_tags;  // allocations under a tag that came after all numbers were taken
  PyObject* oom_callback;    // strong, or null
  Py_ssize_t views;          // memoryviews and DLPack capsules over its buffers
  int closing;               // calls of close() under way: no view may be made of what is about to go
};

// The native part of vram.Arena: an arena and what keeps it alive. Guarded by the GIL, but for the arena.
struct ArenaCore {
  PyPool* pool;             // strong
  PyObject* stream_object;  // strong, or null: the stream as it was given
  std::shared_ptr<Arena> arena;
  Py_ssize_t views = 0;                                    // memoryviews, DLPack capsules and held pieces
  bool checked = false;                                    // pieces are labelled with the Python stack
  std::vector<std::pair<std::uint64_t, Address>> watched;  // (depth, address) of what a watcher was told of
  ~ArenaCore();
};

// What makes a Buffer a piece of an arena instead of a block of its own.
struct ArenaPiece {
  PyObject* owner;  // strong: the object of the core
  ArenaCore* core;
  Arena::Over over;
  PyObject* shape;    // strong, or null: bytes
  PyObject* typestr;  // strong, or null: bytes
  std::uint8_t code;  // DLPack's, of the type
  std::uint8_t bits;
  bool held;  // counts as a view: arrays of NumPy keep the Buffer, not a view of it
};
// Closes an arena that has ended, once nobody looks at its memory.
void drop_arena_view(ArenaCore* core);

// vram._native.Buffer: one live block, or a piece of an arena. Known to the garbage collector, because its
// pool may lead back to it.
struct PyBuffer {
  PyObject_HEAD PyPool* pool;  // strong
  Address address;
  std::uint64_t size;
  StreamHandle stream;
  PyObject* stream_object;  // strong, or null: the stream as it was given, which stays open with the buffer
  std::uint32_t tag;        // a label (stacks.hpp)
  Py_ssize_t views;
  PyObject* weak_references;
  ArenaPiece* piece;  // owned; null: a block of its own
  bool live;
  Address block;   // of the allocation: `address`, but for a part of one
  PyObject* base;  // strong, or null: what this is a part of and keeps alive; dropping it then frees nothing
};

extern PyTypeObject* buffer_type;

// A new Buffer over an allocation; on failure the allocation is freed. `stream_object` is what named the
// stream, or null.
PyObject* make_buffer(PyPool* pool, Address address, std::uint64_t size, StreamHandle stream,
                      PyObject* stream_object, std::uint32_t tag);
// A Buffer over a part of the allocation at `block`, which `base` holds.
PyObject* make_part(PyPool* pool, Address block, std::uint64_t offset, std::uint64_t size,
                    StreamHandle stream, PyObject* stream_object, PyObject* base);

// Memory under a vram.pin: in the order of the device it was pinned for.
struct PinnedSpan {
  PyObject* memory;  // borrowed; null: the pin is closed
  const Backend* order;
  Address address;
  std::uint64_t size;
  bool writable;
};
// False where the object is no pin.
bool pinned_span(PyObject* object, PinnedSpan* out);

// A function of a module of ours, imported once and kept in `cache`; borrowed, or null with an error set.
PyObject* python_function(PyObject*& cache, const char* module, const char* name);

// Argument conversion. Each sets a Python error and returns false where it fails.
// A whole number from 0 to `most`: whatever has __index__, as NumPy's integers do. TypeError where it has
// none, ValueError where it is out of range.
bool whole_from(PyObject* object, const char* name, std::uint64_t most, std::uint64_t* out);
// The same for "O&" of PyArg_Parse: `whole_argument, &whole`.
struct Whole {
  const char* name;
  std::uint64_t most = ~std::uint64_t{0};
  std::uint64_t value = 0;
};
int whole_argument(PyObject* object, void* whole);
bool size_from(PyObject* object, std::uint64_t* out);
bool stream_from(PyObject* object, PyPool* pool, StreamHandle* out);
// Raises what the status stands for; returns null for convenience.
PyObject* raise(const Status& status, const char* what);
// The number of a tag, given or else that of vram.tag in this context. -1 with an error set on failure.
long current_tag(PyPool* pool, PyObject* given);
// The name of a label's tag, a new reference; None for 0.
PyObject* tag_name(PyPool* pool, std::uint32_t label);

// The watcher of allocations and uses (race checking), or null. Its methods are called with the GIL held:
//   on_allocate(pool, address, size, stream)   on_free(pool, address)   on_drop(pool, address): a Buffer dies
//   on_grow(pool, address, size, stream), after; on_shrink(pool, address, size), before: a growable buffer
//   on_piece(pool, address, size, stream, arena, waits)   on_arena_stream(pool, arena, stream, waits)
//   on_settled(pool, arena, stream, over): the arena has waited for its streams
//   on_record_stream(pool, address, stream)
//   on_use(pool, block, address, size, owning stream, stream, writes, what): of a Buffer by a copy or fill
//   on_touch(pool, address, size, stream, writes, what): of host memory, regardless of the owner
//   on_host_wait(pool, stream): the host has waited for all that was queued there
//   on_stream_wait(pool, stream, other): the stream waits for all that was queued on the other
// What it raises comes out of the call; before a free, a shrink or a use, that is then not done. on_drop and
// on_settled must not raise.
extern PyObject* watcher;
// False with a Python error set when the watcher raised.
template <typename... Arguments>
bool tell_watcher(const char* method, const char* format, Arguments... arguments) {
  PyObject* result = PyObject_CallMethod(watcher, method, format, arguments...);
  Py_XDECREF(result);
  return result != nullptr;
}

// Frees with the fast path first; gives the GIL away for the slow one.
Status free_address(PyPool* pool, Address address);
// The same for what nobody can free again: where the device fails, it is done later.
Status drop_address(PyPool* pool, Address address);

// Reads options by name into a config.
bool config_from(PyObject* dict, PoolConfig* config);

// Raises OutOfMemory with the pool's account of itself; returns null for convenience.
PyObject* raise_out_of_memory(PyPool* pool, std::uint64_t size, StreamHandle stream,
                              const OutOfMemoryReport& report);
// What the report says, as a dict; a new reference, or null with an error set.
PyObject* report_dict(const OutOfMemoryReport& report);
// The pool of a PoolCore, whichever kind it is; else null.
std::shared_ptr<Allocator> allocator_of(PyObject* object);
// The pool of a PoolCore that is one of our own, not the driver's; else null.
std::shared_ptr<Pool> own_pool(PyObject* object);

// Whether vram.tag was ever used.
bool tags_in_use();
// That, or the `stacks` of a pool, has changed: what other libraries allocate from it follows.
void follow_labels();

bool add_buffer_type(PyObject* module);

}  // namespace vram
