// The two types on the hot path. They are written against Python's C interface, because a call through a
// general binding layer costs more than the allocation itself. Everything else is bound with nanobind.
#pragma once

#include <Python.h>

#include <memory>
#include <string>
#include <vector>

#include "arena/arena.hpp"
#include "pool/pool.hpp"
#include "stable_abi.hpp"
#include "waiting.hpp"

namespace vram {

// A pool as the bindings access it: with the GIL for calls that never wait, and through call() for everything
// else. No binding can therefore wait for the pool's mutex while it holds the GIL.
class PoolHandle {
 public:
  explicit PoolHandle(std::shared_ptr<Allocator> pool) : pool_(std::move(pool)) {}
  PoolHandle* operator->() { return this; }
  const PoolHandle* operator->() const { return this; }

  bool closed() const { return pool_->closed(); }
  Backend& backend() const { return pool_->backend(); }
  bool host_accessible() const { return pool_->host_accessible(); }
  const std::shared_ptr<Allocator>& shared() const { return pool_; }

  // Runs work(pool) by waiting(). Refused in the child of a fork, where the pool belongs to the parent.
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

// vram._native.PoolCore: a pool and its device object.
struct PyPool {
  PyObject_HEAD PoolHandle pool;
  Pool* quick;          // the same pool if it has fast paths, else null
  bool captures;        // streams can be captured, so each allocation queries them
  bool stacks;          // allocations are labelled with the Python stack (stacks.hpp); guarded by the GIL
  PyObject* device;     // strong
  PyObject* tag_names;  // list: id - 1 → str
  PyObject* tag_ids;    // dict: str → id
  std::uint64_t other_tags;  // allocations with a tag beyond the maximum number
  PyObject* oom_callback;    // strong, or null
  PyObject* high_callback;   // the same
  PyObject* spill_callback;  // the same
  Py_ssize_t views;          // memoryviews and DLPack capsules over its buffers
  int closing;               // running calls of close(): no view may be created
};

// The native part of vram.Arena: an arena and what keeps it alive. Guarded by the GIL, except for the arena.
struct ArenaCore {
  PyPool* pool;             // strong
  PyObject* stream_object;  // strong, or null: the stream object passed by the caller
  std::shared_ptr<Arena> arena;
  Py_ssize_t views = 0;  // memoryviews, DLPack capsules and held arrays
  bool checked = false;  // allocations are labelled with the Python stack
  std::vector<std::pair<std::uint64_t, Address>>
      watched;                            // (depth, address) of what was reported to a watcher
  std::vector<PyObject*> callbacks = {};  // strong: what on_reset registered, in the order of the arena's
  PyObject* raised = nullptr;             // strong, or null: a list of what running callbacks have raised
  ~ArenaCore();
};

// What makes a Buffer a part of an arena instead of a separate block.
struct ArenaPiece {
  PyObject* owner;  // strong: the object of the core
  ArenaCore* core;
  Arena::Over over;
  PyObject* shape;    // strong, or null: bytes
  PyObject* typestr;  // strong, or null: bytes
  std::uint8_t code;  // DLPack's code of the type
  std::uint8_t bits;
  bool held;  // counts as a view: NumPy arrays keep the Buffer, not a view
};
// Closes an arena that has ended when its last view is dropped.
void drop_arena_view(ArenaCore* core);

// vram._native.Buffer: one live block, or a part of an arena. It supports garbage collection, because its
// pool may refer to it.
struct PyBuffer {
  PyObject_HEAD PyPool* pool;  // strong
  Address address;
  std::uint64_t size;
  StreamHandle stream;
  PyObject* stream_object;  // strong, or null: the passed stream, which stays open with the buffer
  std::uint32_t tag;        // a label (stacks.hpp)
  Py_ssize_t views;
  PyObject* weak_references;
  ArenaPiece* piece;  // owned; null: a separate block
  bool live;
  Address block;   // start of the allocation: `address`, except for a part of one
  PyObject* base;  // strong, or null: what this is a part of; dropping it then frees nothing
};

extern PyTypeObject* buffer_type;

// Creates a Buffer for an allocation; on failure the allocation is freed. `stream_object` is the object that
// named the stream, or null.
PyObject* make_buffer(PyPool* pool, Address address, std::uint64_t size, StreamHandle stream,
                      PyObject* stream_object, std::uint32_t tag);
// Creates a Buffer for a part of the allocation at `block`, which `base` keeps alive.
PyObject* make_part(PyPool* pool, Address block, std::uint64_t offset, std::uint64_t size,
                    StreamHandle stream, PyObject* stream_object, PyObject* base);

// Memory of a vram.pin: in the order of the device it was pinned for.
struct PinnedSpan {
  PyObject* memory;  // borrowed; null: the pin is closed
  const Backend* order;
  Address address;
  std::uint64_t size;
  bool writable;
};
// False if the object is not a pin.
bool pinned_span(PyObject* object, PinnedSpan* out);

// A function of one of our modules, imported once and kept in `cache`; borrowed, or null with an error set.
PyObject* python_function(PyObject*& cache, const char* module, const char* name);

// Argument conversion. Each sets a Python error and returns false on failure.
// An integer from 0 to `most`: anything with __index__, including NumPy's integers. TypeError if it has none,
// ValueError if it is out of range.
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
// Raises the exception for the status; returns null for convenience.
PyObject* raise(const Status& status, const char* what);
// The number of the given tag, or of vram.tag in this context. -1 with an error set on failure.
long current_tag(PyPool* pool, PyObject* given);
// The tag name of a label, a new reference; None for 0.
PyObject* tag_name(PyPool* pool, std::uint32_t label);

// The watcher of allocations and uses (race checking), or null. Its methods are called with the GIL held:
// on_allocate(pool, address, size, stream)   on_free(pool, address)   on_drop(pool, address): Buffer dropped
//   on_grow(pool, address, size, stream), after; on_shrink(pool, address, size), before: a growable buffer
//   on_piece(pool, address, size, stream, arena, waits)   on_arena_stream(pool, arena, stream, waits)
//   on_settled(pool, arena, stream, over): the arena has waited for its streams
//   on_record_stream(pool, address, stream)   on_plug_record_stream: the same, by PyTorch itself
//   on_use(pool, block, address, size, owning stream, stream, writes, what): a Buffer, by a copy or fill
//   on_touch(pool, address, size, stream, writes, what): host memory, regardless of the owner
//   on_host_wait(pool, stream): the host has waited for everything queued there
//   on_stream_wait(pool, stream, other): the stream waits for everything queued on the other
//   on_copy_between(pool, stream, other pool, other stream): two devices wait for each other's stream
// The call raises what a method raises; a free, shrink or use is then not performed. on_drop,
// on_settled and on_plug_record_stream must not raise.
extern PyObject* watcher;
// False with a Python error set if the watcher raised.
template <typename... Arguments>
bool tell_watcher(const char* method, const char* format, Arguments... arguments) {
  PyObject* result = PyObject_CallMethod(watcher, method, format, arguments...);
  Py_XDECREF(result);
  return result != nullptr;
}

// Frees with the fast path first; releases the GIL for the slow one.
Status free_address(PyPool* pool, Address address);
// The same for memory that nobody can free again: if the device fails, it is done later.
Status drop_address(PyPool* pool, Address address);

// Parses options by name into a config.
bool config_from(PyObject* dict, PoolConfig* config);

// Raises OutOfMemory with the pool's report; returns null for convenience.
PyObject* raise_out_of_memory(PyPool* pool, std::uint64_t size, StreamHandle stream,
                              const OutOfMemoryReport& report);
// The report as a dict; a new reference, or null with an error set.
PyObject* report_dict(const OutOfMemoryReport& report);
// The pool of a PoolCore of any kind; otherwise null.
std::shared_ptr<Allocator> allocator_of(PyObject* object);
// The pool of a PoolCore if it is vram's own pool, not a driver pool; otherwise null.
std::shared_ptr<Pool> own_pool(PyObject* object);

// Whether vram.tag was ever used.
bool tags_in_use();
// The use of tags or the `stacks` of a pool has changed: update what other libraries allocate from it.
void follow_labels();
// Has recorded streams reported to the watcher, if there is one.
void follow_records();

bool add_buffer_type(PyObject* module);

}  // namespace vram
