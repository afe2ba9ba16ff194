// Buffer: the Python handle of one live block, or of a part of an arena. Dropping it frees the block (an
// arena's memory is released with its scope); memoryviews and DLPack capsules keep it alive. Other libraries
// use it without a copy through the buffer protocol, DLPack and the CUDA array interface. Allocation itself
// is in pool.cpp.
#include <Python.h>
#include <structmember.h>

#include <cstring>

#include "backends/cuda.hpp"
#include "backends/patterns.hpp"
#include "bindings.hpp"
#include "into_python.hpp"
#include "python_types.hpp"
#include "stacks.hpp"
#include "waiting.hpp"

namespace vram {

PyTypeObject* buffer_type = nullptr;

namespace {

// ---- DLPack: the parts of its binary interface that a flat array of bytes needs -----------------------

struct DlDevice {
  std::int32_t type;
  std::int32_t id;
};
struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t dimensions;
  std::uint8_t type_code;
  std::uint8_t type_bits;
  std::uint16_t type_lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct DlManaged {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManaged*);
};
struct DlManagedVersioned {
  std::uint32_t major;
  std::uint32_t minor;
  void* context;
  void (*deleter)(DlManagedVersioned*);
  std::uint64_t flags;
  DlTensor tensor;
};
constexpr std::int32_t kDlCpu = 1;
constexpr std::int32_t kDlCuda = 2;
constexpr std::int32_t kDlExtension = 12;  // a device that only special consumers support: a model
constexpr std::uint8_t kDlUnsigned = 1;
// How DLPack and the CUDA array interface name the default stream, because 0 would be ambiguous.
constexpr StreamHandle kLegacyDefault = 1;

template <typename Managed>
struct Export {
  Managed managed;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  PyBuffer* buffer;
};

PyBuffer* self_of(PyObject* object) { return reinterpret_cast<PyBuffer*>(object); }

// The scope has ended or the arena was reset: raises with the place of the allocation.
bool raise_over(PyBuffer* self) {
  static PyObject* words = nullptr;
  PyObject* function = python_function(words, "vram.lifetimes.arena", "_outlived");
  PyObject* stack = function == nullptr ? nullptr : stack_of(self->tag);
  PyObject* error = stack == nullptr
                        ? nullptr
                        : PyObject_CallFunction(function, "OKN", self->piece->owner,
                                                static_cast<unsigned long long>(self->size), stack);
  if (error != nullptr) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_XDECREF(error);
  return false;
}

bool over(PyBuffer* self) { return self->piece->over->load(std::memory_order_acquire); }

// Live, and possibly suspended.
bool require_held(PyBuffer* self) {
  if (self->piece != nullptr && over(self)) return raise_over(self);
  if (self->live && self->pool->closing == 0 && !self->pool->pool->closed()) [[likely]]
    return true;
  raise({self->live ? Code::closed : Code::invalid, 0, "free"}, "use the buffer");
  return false;
}

bool require_live(PyBuffer* self) {
  if (!require_held(self)) return false;
  if (!self->pool->pool->suspended(self->address)) [[likely]]
    return true;
  raise({Code::suspended, 0, "suspended"}, "use the buffer");
  return false;
}

bool host_accessible(PyBuffer* self) { return self->pool->pool->host_accessible(); }

void add_view(PyBuffer* self) {
  ++self->views;
  ++self->pool->views;
  if (self->piece != nullptr) ++self->piece->core->views;
}
void drop_view(PyBuffer* self) {
  --self->views;
  --self->pool->views;
  if (self->piece != nullptr) drop_arena_view(self->piece->core);
}

// Records in the pool or the arena that the stream uses the memory.
Status tell_use(PyBuffer* self, StreamHandle stream) {
  if (self->piece != nullptr) {
    const std::shared_ptr<Arena> arena = self->piece->core->arena;
    return waiting([&] { return arena->record_stream(stream); });
  }
  return self->pool->pool.call([&](Allocator& pool) { return pool.record_stream(self->block, stream); });
}

// ---- lifetime -----------------------------------------------------------------------------------------

// If zeroing fails, the buffer stays live and can be freed again.
Status release(PyBuffer* self) {
  self->live = false;  // first: another thread may get the GIL in between
  if (self->base != nullptr) return {};
  const Status status = free_address(self->pool, self->address);
  self->live = status.code == Code::failed || status.code == Code::out_of_memory;
  return status;
}

// A pool may refer to its buffers, for example through a callback that frees them. There is nothing to clear:
// the reference that closes such a cycle belongs to the pool.
int traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(self_of(object)->pool);
  Py_VISIT(self_of(object)->stream_object);
  if (self_of(object)->piece != nullptr) Py_VISIT(self_of(object)->piece->owner);
  Py_VISIT(self_of(object)->base);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

void dealloc(PyObject* object) {
  PyBuffer* self = self_of(object);
  PyObject_GC_UnTrack(object);
  if (self->live && self->piece == nullptr) {
    if (watcher != nullptr && self->base == nullptr) [[unlikely]] {
      const IntoPython python;
      if (!tell_watcher("on_drop", "OK", self->pool, static_cast<unsigned long long>(self->address)))
        Waiting::interrupt_or_report(reinterpret_cast<PyObject*>(self->pool));
    }
    // Nothing to do for a pool that is closed or belongs to the parent of a fork.
    if (self->base == nullptr) (void)drop_address(self->pool, self->address);
  }
  if (self->weak_references != nullptr) PyObject_ClearWeakRefs(object);
  Py_XDECREF(self->stream_object);  // after the free, which its stream orders
  if (self->piece != nullptr) {
    if (self->piece->held) {
      --self->pool->views;
      drop_arena_view(self->piece->core);
    }
    Py_DECREF(self->piece->owner);
    Py_XDECREF(self->piece->shape);
    Py_XDECREF(self->piece->typestr);
    delete self->piece;
  }
  Py_XDECREF(self->base);
  Py_DECREF(self->pool);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

PyObject* free_method(PyObject* object, PyObject*) {
  PyBuffer* self = self_of(object);
  if (!require_held(self)) return nullptr;
  if (self->piece != nullptr)
    return raise({Code::invalid, 0, "free"},
                 "free a part of an arena; its memory is released with its scope or at a reset");
  if (self->views != 0)
    return PyErr_Format(PyExc_BufferError, "%zd view(s) of the buffer exist; drop them before free()",
                        self->views);
  if (watcher != nullptr && self->base == nullptr &&
      !tell_watcher("on_free", "OK", self->pool, static_cast<unsigned long long>(self->address)))
    return nullptr;
  if (const Status status = release(self); !status.ok()) return raise(status, "free the buffer");
  Py_RETURN_NONE;
}

PyObject* enter(PyObject* object, PyObject*) { return Py_NewRef(object); }

PyObject* leave(PyObject* object, PyObject*) {
  if (!self_of(object)->live || self_of(object)->piece != nullptr) Py_RETURN_NONE;
  return free_method(object, nullptr);
}

// ---- use on streams -------------------------------------------------------------------------------------
//
// Queuing releases the GIL: a driver whose queue is full, or that copies pageable memory, waits for the
// stream, where a Python function may be waiting for the GIL.

// The buffer's own stream. False with an error set if it was closed: its handle may be reused by now.
bool own_stream(PyBuffer* self, StreamHandle* out) {
  *out = self->stream;
  return self->stream_object == nullptr || stream_from(self->stream_object, self->pool, out);
}

// The stream of a call: the one given, else the buffer's. A use on another stream is recorded, so that the
// memory is not reused before it.
bool stream_for_use(PyBuffer* self, PyObject* given, StreamHandle* out) {
  if (given == nullptr || given == Py_None) return own_stream(self, out);
  return stream_from(given, self->pool, out);
}

bool note_use(PyBuffer* self, StreamHandle stream, bool writes, const char* what) {
  if (watcher != nullptr &&
      !tell_watcher("on_use", "OKKKKKOs", self->pool, static_cast<unsigned long long>(self->block),
                    static_cast<unsigned long long>(self->address),
                    static_cast<unsigned long long>(self->size),
                    static_cast<unsigned long long>(self->stream), static_cast<unsigned long long>(stream),
                    writes ? Py_True : Py_False, what))
    return false;
  const bool host = self->piece != nullptr && self->piece->core->arena->host_accessible();
  if (stream == self->stream && !host && !self->pool->pool->backend().info().host_writes) return true;
  const Status status = tell_use(self, stream);
  if (!status.ok()) raise(status, "record the use on another stream");
  return status.ok();
}

PyObject* record_stream(PyObject* object, PyObject* argument) {
  PyBuffer* self = self_of(object);
  StreamHandle stream = 0;
  if (!require_live(self) || !stream_from(argument, self->pool, &stream)) return nullptr;
  if (watcher != nullptr &&
      !tell_watcher("on_record_stream", "OKK", self->pool, static_cast<unsigned long long>(self->block),
                    static_cast<unsigned long long>(stream)))
    return nullptr;
  if (const Status status = tell_use(self, stream); !status.ok())
    return raise(status, "record the use on another stream");
  Py_RETURN_NONE;
}

// Queues work that uses the buffer's memory, and possibly a peer's; neither pool is closed meanwhile.
template <typename Queue>
Status queue_work(PyBuffer* self, PyBuffer* peer, Queue queue) {
  const std::shared_ptr<Allocator> others = (peer == nullptr ? self : peer)->pool->pool.shared();
  return self->pool->pool.call([&](Allocator& pool) {
    const Allocator::Access access(pool);
    const Allocator::Access to_peer(*others);
    if (access.refused() || to_peer.refused()) return Status{Code::closed, 0, "use"};
    return pool.backend().beside_swaps(queue);
  });
}

struct Pattern {
  std::uint8_t bytes[kMaxPatternBytes];
  std::uint64_t length = 1;
};

// A number for one byte, or bytes that divide the size. False with an error set if it is neither.
bool pattern_from(PyObject* value, std::uint64_t size, Pattern* out) {
  if (!PyBytes_Check(value)) {
    std::uint64_t byte = 0;
    if (!whole_from(value, "value", 255, &byte)) return false;
    out->bytes[0] = static_cast<std::uint8_t>(byte);
    return true;
  }
  out->length = static_cast<std::uint64_t>(PyBytes_GET_SIZE(value));
  if (out->length == 0 || out->length > kMaxPatternBytes || size % out->length != 0) {
    PyErr_Format(PyExc_ValueError,
                 "a pattern of %llu bytes does not fill %llu bytes; use 1 to %d bytes that divide the size",
                 static_cast<unsigned long long>(out->length), static_cast<unsigned long long>(size),
                 static_cast<int>(kMaxPatternBytes));
    return false;
  }
  std::memcpy(out->bytes, PyBytes_AS_STRING(value), out->length);
  return true;
}

PyObject* fill(PyObject* object, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"value", "stream", nullptr};
  PyBuffer* self = self_of(object);
  Pattern pattern;
  PyObject* value = nullptr;
  PyObject* given = nullptr;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|$O:fill", const_cast<char**>(names), &value,
                                   &given) ||
      !pattern_from(value, self->size, &pattern))
    return nullptr;
  StreamHandle stream = 0;
  if (!require_live(self) || !stream_for_use(self, given, &stream) || !note_use(self, stream, true, "fill"))
    return nullptr;
  if (self->size == 0) Py_RETURN_NONE;
  Backend& backend = self->pool->pool->backend();
  const Status status = queue_work(self, nullptr, [&] {
    return fill_pattern(backend, self->address, pattern.bytes, pattern.length, self->size, stream);
  });
  if (!status.ok()) return raise(status, "fill the buffer");
  Py_RETURN_NONE;
}

bool same_size(PyBuffer* self, std::uint64_t size) {
  if (self->size == size) return true;
  PyErr_Format(PyExc_ValueError, "sizes differ: %llu and %llu bytes",
               static_cast<unsigned long long>(self->size), static_cast<unsigned long long>(size));
  return false;
}

// Copies memory in the order of the same device's streams, without a wait.
PyObject* queue_copy(PyBuffer* self, PyBuffer* peer, Address other, StreamHandle stream, bool from_other) {
  if (self->size == 0) Py_RETURN_NONE;
  Backend& backend = self->pool->pool->backend();
  const Status status = queue_work(self, peer, [&] {
    return backend.copy(from_other ? self->address : other, from_other ? other : self->address, self->size,
                        stream);
  });
  if (!status.ok()) return raise(status, "copy between buffers");
  Py_RETURN_NONE;
}

// A pin waits for the device before it releases its memory, so the use need not be recorded.
PyObject* copy_pinned(PyBuffer* self, const PinnedSpan& pin, StreamHandle stream, bool from_other) {
  if (!from_other && !pin.writable) {
    PyErr_SetString(PyExc_BufferError, "the pinned memory is read-only");
    return nullptr;
  }
  return same_size(self, pin.size) ? queue_copy(self, nullptr, pin.address, stream, from_other) : nullptr;
}

// Copies between the buffer and host memory; the copy has completed on return.
Status copy_host(PyBuffer* self, Address to, Address from, StreamHandle stream) {
  Backend& backend = self->pool->pool->backend();
  if (backend.info().host_accessible) {
    // Wait first, so that nothing is queued if the wait fails, and without access to the pool: work on the
    // stream may close it.
    const Status status = waiting([&] { return backend.stream_synchronize(stream); });
    if (!status.ok()) return status;
    return queue_work(self, nullptr, [&] {
      std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), self->size);
      return Status{};
    });
  }
  const Status status = queue_work(self, nullptr, [&] { return backend.copy(to, from, self->size, stream); });
  if (!status.ok()) return status;
  // The pool may be closed in the meantime, but closing waits for the copy as well.
  return waiting([&] {
    const InterruptScope quiet(nullptr);
    return backend.stream_synchronize(stream);
  });
}

// Copies between memory of two devices, in the order of the stream and of the peer's own stream.
PyObject* copy_devices(PyBuffer* self, PyBuffer* peer, StreamHandle stream, bool from_other) {
  const char* what = from_other ? "copy_from" : "copy_to";
  Backend& here = self->pool->pool->backend();
  Backend& there = peer->pool->pool->backend();
  StreamHandle theirs = 0;
  if (!require_live(peer) || !own_stream(peer, &theirs) || !same_size(self, peer->size) ||
      !note_use(self, stream, from_other, what) || !note_use(peer, theirs, !from_other, what))
    return nullptr;
  if (self->size == 0) Py_RETURN_NONE;
  Status status;
  // First, so that a wait that is interrupted leaves nothing behind, and without access to the pools: work on
  // the streams may close them.
  if (host_waits(here, there))
    status = waiting([&] {
      const Status ours = here.stream_synchronize(stream);
      return ours.ok() ? there.stream_synchronize(theirs) : ours;
    });
  if (status.ok())
    status = queue_work(self, peer, [&] {
      return copy_across(here, self->address, stream, there, peer->address, theirs, from_other, self->size);
    });
  if (!status.ok()) return raise(status, "copy between devices");
  if (watcher != nullptr &&
      !tell_watcher("on_copy_between", "OKOK", self->pool, static_cast<unsigned long long>(stream),
                    peer->pool, static_cast<unsigned long long>(theirs)))
    return nullptr;
  Py_RETURN_NONE;
}

// Whether it is a vram.Stream of the peer's device. False also if it is nothing with a device.
bool stream_of_peer(PyObject* given, PyBuffer* self, PyBuffer* peer) {
  if (given == nullptr || given == Py_None || PyLong_Check(given)) return false;
  PyObject* device = PyObject_GetAttrString(given, "device");
  const bool theirs = device != nullptr && PyObject_RichCompareBool(device, peer->pool->device, Py_EQ) == 1 &&
                      PyObject_RichCompareBool(device, self->pool->device, Py_EQ) == 0;
  Py_XDECREF(device);
  PyErr_Clear();
  return theirs;
}

// Waits until work on the buffer's own stream no longer uses it. False with an error set.
bool wait_for_own(PyBuffer* self) {
  StreamHandle stream = 0;
  if (!require_live(self) || !own_stream(self, &stream)) return false;
  Backend& backend = self->pool->pool->backend();
  const Status status = waiting([&] { return backend.stream_synchronize(stream); });
  if (!status.ok()) return raise(status, "wait for the buffer's stream") != nullptr;
  return watcher == nullptr ||
         tell_watcher("on_host_wait", "OK", self->pool, static_cast<unsigned long long>(stream));
}

PyObject* copy(PyBuffer* self, PyObject* other, PyObject* given, bool from_other);

// Copies between a Buffer on the host and one on another device: for that device, it is host memory.
PyObject* copy_to_device(PyBuffer* self, PyBuffer* peer, StreamHandle stream, bool from_other) {
  Backend& backend = self->pool->pool->backend();
  const Status status = waiting([&] { return backend.stream_synchronize(stream); });
  if (!status.ok()) return raise(status, "wait for the buffer's stream");
  if (watcher != nullptr &&
      !tell_watcher("on_host_wait", "OK", self->pool, static_cast<unsigned long long>(stream)))
    return nullptr;
  return copy(peer, reinterpret_cast<PyObject*>(self), nullptr, !from_other);
}

// Copies between the buffer and `other`: a Buffer or pinned memory of the device (queued on the stream), a
// Buffer of another device (queued, ordered on both devices), or host memory (waits, so that the memory need
// not outlive the call). For other devices, a Buffer on the host is host memory. A stream of the other
// buffer's device orders the copy as if the other buffer's method had been called.
PyObject* copy(PyBuffer* self, PyObject* other, PyObject* given, bool from_other) {
  const char* what = from_other ? "copy_from" : "copy_to";
  StreamHandle stream = 0;
  Backend& backend = self->pool->pool->backend();
  PyBuffer* peer = Py_TYPE(other) == buffer_type ? self_of(other) : nullptr;
  // Memory in the order of the same device's streams, of any kind.
  const bool same_device = peer != nullptr && peer->pool->pool->backend().order() == backend.order();
  if (peer != nullptr && !same_device && stream_of_peer(given, self, peer))
    return copy(peer, reinterpret_cast<PyObject*>(self), given, !from_other);
  if (!require_live(self) || !stream_for_use(self, given, &stream)) return nullptr;
  if (peer != nullptr && !same_device && !host_accessible(peer))
    return host_accessible(self) ? copy_to_device(self, peer, stream, from_other)
                                 : copy_devices(self, peer, stream, from_other);
  PinnedSpan pin = {};
  if (peer == nullptr && pinned_span(other, &pin)) {
    if (pin.memory == nullptr) {
      PyErr_SetString(PyExc_ValueError, "the pin is closed; pass the memory itself, or pin it again");
      return nullptr;
    }
    other = pin.memory;
  }
  if (!note_use(self, stream, from_other, what)) return nullptr;
  if (pin.memory != nullptr && pin.order == backend.order())
    return copy_pinned(self, pin, stream, from_other);
  if (same_device) {
    if (!require_live(peer) || !note_use(peer, stream, !from_other, what) || !same_size(self, peer->size))
      return nullptr;
    return queue_copy(self, peer, peer->address, stream, from_other);
  }
  if (peer != nullptr && !wait_for_own(peer)) return nullptr;
  Py_buffer view;
  if (PyObject_GetBuffer(other, &view, from_other ? PyBUF_SIMPLE : PyBUF_WRITABLE) != 0) return nullptr;
  if (!same_size(self, static_cast<std::uint64_t>(view.len))) {
    PyBuffer_Release(&view);
    return nullptr;
  }
  if (watcher != nullptr &&
      !tell_watcher("on_touch", "OKKKOs", self->pool, reinterpret_cast<unsigned long long>(view.buf),
                    static_cast<unsigned long long>(view.len), static_cast<unsigned long long>(stream),
                    from_other ? Py_False : Py_True, what)) {
    PyBuffer_Release(&view);
    return nullptr;
  }
  Status status;
  if (self->size != 0) {
    const auto host = reinterpret_cast<Address>(view.buf);
    status = copy_host(self, from_other ? self->address : host, from_other ? host : self->address, stream);
  }
  PyBuffer_Release(&view);
  if (!status.ok()) return raise(status, from_other ? "copy from host memory" : "copy to host memory");
  if (watcher != nullptr && self->size != 0 &&
      !tell_watcher("on_host_wait", "OK", self->pool, static_cast<unsigned long long>(stream)))
    return nullptr;
  Py_RETURN_NONE;
}

PyObject* copy_method(PyObject* object, PyObject* arguments, PyObject* keywords, bool from_other) {
  static const char* names[] = {"", "stream", nullptr};
  PyObject* other = nullptr;
  PyObject* stream = nullptr;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|$O", const_cast<char**>(names), &other, &stream))
    return nullptr;
  return copy(self_of(object), other, stream, from_other);
}
PyObject* copy_from(PyObject* object, PyObject* arguments, PyObject* keywords) {
  return copy_method(object, arguments, keywords, true);
}
PyObject* copy_to(PyObject* object, PyObject* arguments, PyObject* keywords) {
  return copy_method(object, arguments, keywords, false);
}

// ---- views ----------------------------------------------------------------------------------------------

int get_view(PyObject* object, Py_buffer* view, int flags) {
  PyBuffer* self = self_of(object);
  if (!require_live(self)) return -1;
  if (!host_accessible(self)) {
    PyErr_SetString(PyExc_BufferError, "the memory of this device cannot be read by the host; use copy_to()");
    return -1;
  }
  if (PyBuffer_FillInfo(view, object, reinterpret_cast<void*>(self->address),
                        static_cast<Py_ssize_t>(self->size), 0, flags) != 0)
    return -1;
  add_view(self);
  return 0;
}

void release_view(PyObject* object, Py_buffer*) { drop_view(self_of(object)); }

// Whether this thread may take the GIL. During shutdown only the thread that ends the interpreter may; what
// other libraries release later is leaked until the process ends.
bool python_serves() {
  if (!Py_IsInitialized()) return false;
  return !is_finalizing() || has_gil();
}

template <typename Managed>
void delete_export(Managed* managed) {
  auto* exported = static_cast<Export<Managed>*>(managed->context);
  if (!python_serves()) return;
  const PyGILState_STATE state = PyGILState_Ensure();
  drop_view(exported->buffer);
  Py_DECREF(exported->buffer);
  PyGILState_Release(state);
  delete exported;
}

template <typename Managed>
void delete_capsule(PyObject* capsule) {
  // A consumer renames the capsule and calls the deleter itself.
  const char* name = PyCapsule_GetName(capsule);
  if (name == nullptr || std::strncmp(name, "used_", 5) == 0) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  if (managed != nullptr) managed->deleter(managed);
}

template <typename Managed>
PyObject* make_capsule(PyBuffer* self, const DlDevice& device, const char* name) {
  auto* exported = new Export<Managed>();
  Managed& managed = exported->managed;
  const ArenaPiece* piece = self->piece;
  if (piece == nullptr || piece->shape == nullptr) {
    exported->shape = {static_cast<std::int64_t>(self->size)};
  } else {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(piece->shape); ++i)
      exported->shape.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(piece->shape, i)));
  }
  exported->strides.assign(exported->shape.size(), 1);
  for (std::size_t i = exported->shape.size(); i > 1; --i)
    exported->strides[i - 2] = exported->strides[i - 1] * exported->shape[i - 1];
  exported->buffer = self;
  managed.tensor = {self->size == 0 ? nullptr : reinterpret_cast<void*>(self->address),
                    device,
                    static_cast<std::int32_t>(exported->shape.size()),
                    piece == nullptr ? kDlUnsigned : piece->code,
                    piece == nullptr ? std::uint8_t{8} : piece->bits,
                    1,
                    exported->shape.data(),
                    exported->strides.data(),
                    0};
  managed.context = exported;
  managed.deleter = delete_export<Managed>;
  if constexpr (std::is_same_v<Managed, DlManagedVersioned>) {
    managed.major = 1;
    managed.minor = 0;
  }
  PyObject* capsule = PyCapsule_New(&managed, name, delete_capsule<Managed>);
  if (capsule == nullptr) {
    delete exported;
    return nullptr;
  }
  Py_INCREF(reinterpret_cast<PyObject*>(self));
  add_view(self);
  return capsule;
}

bool two_numbers(PyObject* pair, const char* name, std::uint64_t* first, std::uint64_t* second) {
  if (PyTuple_Check(pair)) {
    Whole one{name};
    Whole other{name};
    if (!PyArg_ParseTuple(pair, "O&O&", whole_argument, &one, whole_argument, &other)) return false;
    *first = one.value;
    *second = other.value;
    return true;
  }
  PyErr_Format(PyExc_TypeError, "%s must be a tuple of two integers, not %.100s", name,
               type_name(pair).c_str());
  return false;
}

// The DLPack device of the memory. Pinned memory counts as host memory: every consumer supports that.
bool device_for_dlpack(PyBuffer* self, DlDevice* out) {
  Backend& backend = self->pool->pool->backend();
  if (host_accessible(self)) {
    *out = {kDlCpu, 0};
  } else if (const auto* cuda = dynamic_cast<CudaBackend*>(&backend)) {
    *out = {kDlCuda, cuda->device()};
  } else {
    PyObject* index = PyObject_GetAttrString(self->pool->device, "index");
    const long number = index == nullptr ? -1 : PyLong_AsLong(index);
    Py_XDECREF(index);
    if (PyErr_Occurred()) return false;
    *out = {kDlExtension, static_cast<std::int32_t>(number)};
  }
  return true;
}

constexpr StreamHandle kNoOrder = ~StreamHandle{0};  // the consumer's -1: the consumer ensures the order

// The consumer's stream: None and 1 are the default stream, 2 is that of the calling thread, -1 is none,
// other numbers are handles. Stream objects are accepted as everywhere.
bool consumer_stream(PyBuffer* self, PyObject* given, StreamHandle* out) {
  *out = 0;
  if (given == nullptr || given == Py_None) return true;
  int overflow = 0;
  long long number = 2;
  if (PyIndex_Check(given)) {
    PyObject* index = PyNumber_Index(given);
    if (index == nullptr) return false;
    number = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
  }
  if (overflow != 0 || number >= 2 || number < -1) return stream_from(given, self->pool, out);
  if (number == 0) {
    PyErr_SetString(PyExc_ValueError,
                    "stream 0 is ambiguous in DLPack: pass 1 for the default stream, 2 for that of the "
                    "calling thread, a handle, or -1 for no ordering");
    return false;
  }
  if (number == -1) *out = kNoOrder;
  return true;
}

// A wait between a captured stream and one that is not captured would break the capture.
bool require_same_capture(Backend& backend, StreamHandle from, StreamHandle to) {
  if (backend.capturing(from) == backend.capturing(to)) return true;
  PyErr_SetString(PyExc_BufferError,
                  "only one of the consumer's stream and the buffer's stream is being captured into a "
                  "graph, so neither can wait for the other: export the buffer before the capture begins, "
                  "or allocate and use it on the captured stream");
  return false;
}

Status queue_wait(Backend& backend, StreamHandle from, StreamHandle to) {
  EventHandle event = 0;
  if (Status status = backend.event_create(&event); !status.ok()) return status;
  Status status = backend.event_record(event, from);
  if (status.ok()) status = backend.stream_wait(to, event);
  (void)backend.event_destroy(event);
  return status;
}

// Adopts lasting streams before a pool uses them for the first time.
bool meet(PyBuffer* self, StreamHandle consumer) {
  static PyObject* function = nullptr;
  PyObject* found = python_function(function, "vram.core.stream", "meet");
  PyObject* met =
      found == nullptr
          ? nullptr
          : PyObject_CallFunction(found, "KO", static_cast<unsigned long long>(consumer), self->pool->device);
  Py_XDECREF(met);
  return met != nullptr;
}

// Work that the consumer queues from now on runs after what was queued on the buffer's stream. After the
// buffer is freed, its memory is not reused before that work.
bool hand_over(PyBuffer* self, StreamHandle consumer) {
  Backend& backend = self->pool->pool->backend();
  if (consumer == kNoOrder) return true;
  consumer = backend.canonical(consumer);
  StreamHandle own = 0;
  if (!own_stream(self, &own)) return false;
  own = backend.canonical(own);
  if (consumer == own) return true;
  const bool lasting = backend.lasting(own);
  if (lasting && !require_same_capture(backend, own, consumer)) return false;
  if (!meet(self, consumer)) return false;
  if (watcher != nullptr &&
      !tell_watcher("on_record_stream", "OKK", self->pool, static_cast<unsigned long long>(self->block),
                    static_cast<unsigned long long>(consumer)))
    return false;
  Status status = tell_use(self, consumer);
  if (status.ok()) {
    // The buffer's own stream may have been destroyed, if another library created it.
    status = waiting([&] { return lasting ? queue_wait(backend, own, consumer) : backend.synchronize(); });
  }
  if (!status.ok()) {
    raise(status, "make the consumer's stream wait for the buffer's");
    return false;
  }
  if (watcher != nullptr &&
      !tell_watcher("on_stream_wait", "OKK", self->pool, static_cast<unsigned long long>(consumer),
                    static_cast<unsigned long long>(own)))
    return false;
  return require_live(self);  // another thread may have freed it in between
}

bool same_dl_device(const DlDevice& own, PyObject* wanted) {
  if (wanted == nullptr || wanted == Py_None) return true;
  std::uint64_t type = 0;
  std::uint64_t id = 0;
  if (!two_numbers(wanted, "dl_device", &type, &id)) return false;
  if (type == static_cast<std::uint64_t>(own.type) && id == static_cast<std::uint64_t>(own.id)) return true;
  PyErr_Format(PyExc_BufferError, "the buffer is on DLPack device (%d, %d), not (%llu, %llu); copy it there",
               own.type, own.id, static_cast<unsigned long long>(type), static_cast<unsigned long long>(id));
  return false;
}

PyObject* dlpack(PyObject* object, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"stream", "max_version", "dl_device", "copy", nullptr};
  PyBuffer* self = self_of(object);
  PyObject* stream = nullptr;
  PyObject* max_version = nullptr;
  PyObject* wanted = nullptr;
  PyObject* make_copy = nullptr;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|$OOOO:__dlpack__", const_cast<char**>(names),
                                   &stream, &max_version, &wanted, &make_copy))
    return nullptr;
  DlDevice device = {};
  if (!require_live(self) || !device_for_dlpack(self, &device) || !same_dl_device(device, wanted))
    return nullptr;
  if (make_copy == Py_True) {
    PyErr_SetString(PyExc_BufferError, "a Buffer is exported without a copy; copy it with copy_to()");
    return nullptr;
  }
  std::uint64_t major = 0;
  std::uint64_t minor = 0;
  if (max_version != nullptr && max_version != Py_None &&
      !two_numbers(max_version, "max_version", &major, &minor))
    return nullptr;
  if (device.type == kDlCpu && stream != nullptr && stream != Py_None) {
    PyErr_SetString(PyExc_BufferError,
                    "host memory is exported without a stream, because the host reads it immediately");
    return nullptr;
  }
  StreamHandle consumer = 0;
  if (device.type != kDlCpu && (!consumer_stream(self, stream, &consumer) || !hand_over(self, consumer)))
    return nullptr;
  return major >= 1 ? make_capsule<DlManagedVersioned>(self, device, "dltensor_versioned")
                    : make_capsule<DlManaged>(self, device, "dltensor");
}

PyObject* dlpack_device(PyObject* object, PyObject*) {
  DlDevice device = {};
  if (!device_for_dlpack(self_of(object), &device)) return nullptr;
  return Py_BuildValue("(ii)", device.type, device.id);
}

PyObject* get_shape(PyObject* object, void*) {
  PyBuffer* self = self_of(object);
  if (self->piece != nullptr && self->piece->shape != nullptr) return Py_NewRef(self->piece->shape);
  return Py_BuildValue("(K)", static_cast<unsigned long long>(self->size));
}

PyObject* get_typestr(PyObject* object, void*) {
  PyBuffer* self = self_of(object);
  if (self->piece != nullptr && self->piece->typestr != nullptr) return Py_NewRef(self->piece->typestr);
  return PyUnicode_FromString("|u1");
}

// The stream that a consumer must wait for: the buffer's. If another library created it, it may have been
// destroyed; then the host waits for the device, and the consumer need not wait.
PyObject* order_of(PyBuffer* self) {
  Backend& backend = self->pool->pool->backend();
  if (backend.lasting(backend.canonical(self->stream)))
    return PyLong_FromUnsignedLongLong(self->stream == 0 ? kLegacyDefault : self->stream);
  Status status;
  Py_BEGIN_ALLOW_THREADS;
  status = backend.synchronize();
  Py_END_ALLOW_THREADS;
  return status.ok() ? Py_NewRef(Py_None) : raise(status, "wait for the device");
}

// For device memory of CUDA. Other memory has no such attribute, because consumers assume that an object
// with it is GPU memory.
PyObject* cuda_array_interface(PyObject* object, void*) {
  PyBuffer* self = self_of(object);
  if (host_accessible(self) || dynamic_cast<CudaBackend*>(&self->pool->pool->backend()) == nullptr)
    return PyErr_Format(PyExc_AttributeError,
                        "a buffer on %S has no __cuda_array_interface__: its memory is not on a CUDA device",
                        self->pool->device);
  if (!require_live(self)) return nullptr;
  PyObject* stream = order_of(self);
  if (stream == nullptr) return nullptr;
  return Py_BuildValue("{sNsNs(KO)sOsisN}", "shape", get_shape(object, nullptr), "typestr",
                       get_typestr(object, nullptr), "data",
                       static_cast<unsigned long long>(self->size == 0 ? 0 : self->address), Py_False,
                       "strides", Py_None, "version", 3, "stream", stream);
}

// ---- attributes
// ---------------------------------------------------------------------------------------------

PyObject* get_ptr(PyObject* object, void*) { return PyLong_FromUnsignedLongLong(self_of(object)->address); }
PyObject* get_size(PyObject* object, void*) { return PyLong_FromUnsignedLongLong(self_of(object)->size); }
PyObject* get_device(PyObject* object, void*) { return Py_NewRef(self_of(object)->pool->device); }
PyObject* get_pool(PyObject* object, void*) {
  return Py_NewRef(reinterpret_cast<PyObject*>(self_of(object)->pool));
}
PyObject* get_stream(PyObject* object, void*) { return PyLong_FromUnsignedLongLong(self_of(object)->stream); }
PyObject* get_tag(PyObject* object, void*) { return tag_name(self_of(object)->pool, self_of(object)->tag); }
PyObject* get_freed(PyObject* object, void*) {
  PyBuffer* self = self_of(object);
  return PyBool_FromLong(!self->live || (self->piece != nullptr && over(self)));
}
PyObject* get_base(PyObject* object, void*) {
  PyObject* base = self_of(object)->base;
  return Py_NewRef(base == nullptr ? Py_None : base);
}
PyObject* get_views(PyObject* object, void*) { return PyLong_FromSsize_t(self_of(object)->views); }
PyObject* get_spilled(PyObject* object, void*) {
  PyBuffer* self = self_of(object);
  std::uint64_t bytes = 0;
  const std::shared_ptr<Pool> pool = own_pool(reinterpret_cast<PyObject*>(self->pool));
  if (self->live && self->size != 0 && pool != nullptr)
    (void)self->pool->pool.call([&](Allocator&) { (void)pool->spilled(self->address, &bytes, self->size); });
  return PyLong_FromUnsignedLongLong(bytes);
}

// spill() and prefetch(): the pool's, with the buffer's address.
PyObject* move_by(PyObject* object, const char* method) {
  PyBuffer* self = self_of(object);
  if (!self->live) return raise({Code::invalid, 0, method}, "move a buffer that was freed");
  return PyObject_CallMethod(reinterpret_cast<PyObject*>(self->pool), method, "K",
                             static_cast<unsigned long long>(self->address));
}
PyObject* spill(PyObject* object, PyObject*) { return move_by(object, "spill_block"); }
PyObject* prefetch(PyObject* object, PyObject*) { return move_by(object, "prefetch_block"); }

PyObject* get_suspended(PyObject* object, void*) {
  PyBuffer* self = self_of(object);
  return PyBool_FromLong(self->live && !self->pool->pool->closed() &&
                         self->pool->pool->suspended(self->address));
}

Py_ssize_t length(PyObject* object) { return static_cast<Py_ssize_t>(self_of(object)->size); }

PyObject* repr(PyObject* object) {
  PyBuffer* self = self_of(object);
  return PyUnicode_FromFormat("<vram.Buffer %llu bytes at %p on %R%s>",
                              static_cast<unsigned long long>(self->size),
                              reinterpret_cast<void*>(self->address), self->pool->device,
                              !self->live                                  ? ", freed"
                              : self->piece != nullptr && over(self)       ? ", ended"
                              : self->pool->pool->suspended(self->address) ? ", suspended"
                                                                           : "");
}

PyMethodDef methods[] = {
    {"free", free_method, METH_NOARGS, "free()\n--\n\nFree the memory now; later use raises InvalidFree."},
    {"record_stream", record_stream, METH_O,
     "record_stream(stream, /)\n--\n\nRecord that work on another stream uses the buffer. After its free, "
     "the memory is not reused before that work has completed."},
    {"fill", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(fill)), METH_VARARGS | METH_KEYWORDS,
     "fill(value, *, stream=None)\n--\n\nSet every byte to a number, or repeat up to 16 bytes, in stream "
     "order."},
    {"copy_from", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(copy_from)),
     METH_VARARGS | METH_KEYWORDS,
     "copy_from(source, /, *, stream=None)\n--\n\nCopy from a Buffer of any device or vram.pin "
     "(queued on the stream) or from other host memory (completed on return) of the same size. If the other "
     "Buffer is on another GPU, the copy is also ordered on its own stream. A Buffer on the host is host "
     "memory for other devices."},
    {"copy_to", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(copy_to)), METH_VARARGS | METH_KEYWORDS,
     "copy_to(target, /, *, stream=None)\n--\n\nCopy to a Buffer of any device or vram.pin (queued "
     "on the stream) or to other writable host memory (completed on return) of the same size. If the other "
     "Buffer is on another GPU, the copy is also ordered on its own stream. A Buffer on the host is host "
     "memory for other devices."},
    {"spill", spill, METH_NOARGS,
     "spill()\n--\n\nMove the contents to host memory, under the same address; kernels can still use them. "
     "Return the bytes that moved; pages that must stay on the device stay. Needs a pool with the option "
     "spill. Waits for work that is queued on the device."},
    {"prefetch", prefetch, METH_NOARGS,
     "prefetch()\n--\n\nMove what was spilled back to the device. Return the bytes that moved. Raises "
     "OutOfMemory if the device has too little free memory; what did not fit stays on the host."},
    {"__dlpack__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(dlpack)),
     METH_VARARGS | METH_KEYWORDS,
     "__dlpack__(*, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\nExport the memory as a "
     "DLPack capsule of bytes, without a copy. The consumer's `stream` (1 or None: the default, 2: the "
     "thread's, a handle, -1: no ordering) waits for the buffer's."},
    {"__dlpack_device__", dlpack_device, METH_NOARGS,
     "__dlpack_device__()\n--\n\nReturn the DLPack device of the memory."},
    {"__enter__", enter, METH_NOARGS, nullptr},
    {"__exit__", leave, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef attributes[] = {
    {"ptr", get_ptr, nullptr, "Address of the first byte.", nullptr},
    {"size", get_size, nullptr, "Requested bytes.", nullptr},
    {"spilled", get_spilled, nullptr, "Bytes of it that are in host memory now.", nullptr},
    {"device", get_device, nullptr, "The device of the memory.", nullptr},
    {"pool", get_pool, nullptr, "The pool it was allocated from; the buffer keeps it alive.", nullptr},
    {"stream", get_stream, nullptr, "Handle of the stream that orders the memory.", nullptr},
    {"tag", get_tag, nullptr, "The tag of the allocation, or None.", nullptr},
    {"freed", get_freed, nullptr, "Whether free() was called, or its scope in an arena has ended.", nullptr},
    {"shape", get_shape, nullptr, "Number of elements in each dimension; bytes for a block of a pool.",
     nullptr},
    {"typestr", get_typestr, nullptr, "NumPy's name of the element type; bytes for a block of a pool.",
     nullptr},
    {"base", get_base, nullptr,
     "The object that it is a part of and keeps alive, or None; free() then frees nothing.", nullptr},
    {"views", get_views, nullptr, "Number of memoryviews and DLPack capsules of it.", nullptr},
    {"suspended", get_suspended, nullptr,
     "Whether Pool.suspend() has released its memory; it can then be freed, but not used.", nullptr},
    {"__cuda_array_interface__", cuda_array_interface, nullptr,
     "Version 3, an array of bytes; only for device memory on CUDA.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(PyBuffer, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc,
     const_cast<char*>("One live block of a pool. Dropping it frees the block; it keeps its pool alive. Or a "
                       "part of an arena, with shape and type: it keeps the arena alive.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {Py_tp_members, members},
    {Py_tp_repr, reinterpret_cast<void*>(repr)},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {Py_bf_getbuffer, reinterpret_cast<void*>(get_view)},
    {Py_bf_releasebuffer, reinterpret_cast<void*>(release_view)},
    {0, nullptr},
};

PyType_Spec spec = {
    "vram._native.Buffer", sizeof(PyBuffer), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    slots};

// For a new Buffer that is an allocation by itself.
void fill_in(PyBuffer* self, PyPool* pool, Address address, std::uint64_t size, StreamHandle stream,
             PyObject* stream_object, std::uint32_t tag) {
  self->pool = reinterpret_cast<PyPool*>(Py_NewRef(reinterpret_cast<PyObject*>(pool)));
  self->address = address;
  self->size = size;
  self->stream = stream;
  const bool named = stream_object == nullptr || stream_object == Py_None || PyLong_CheckExact(stream_object);
  self->stream_object = named ? nullptr : Py_NewRef(stream_object);
  self->tag = tag;
  self->views = 0;
  self->weak_references = nullptr;
  self->piece = nullptr;
  self->live = true;
  self->block = address;
  self->base = nullptr;
}

}  // namespace

PyObject* make_buffer(PyPool* pool, Address address, std::uint64_t size, StreamHandle stream,
                      PyObject* stream_object, std::uint32_t tag) {
  PyBuffer* self = PyObject_GC_New(PyBuffer, buffer_type);
  if (self == nullptr) {
    (void)free_address(pool, address);
    return nullptr;
  }
  fill_in(self, pool, address, size, stream, stream_object, tag);
  PyObject_GC_Track(self);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* make_part(PyPool* pool, Address block, std::uint64_t offset, std::uint64_t size,
                    StreamHandle stream, PyObject* stream_object, PyObject* base) {
  PyBuffer* self = PyObject_GC_New(PyBuffer, buffer_type);
  if (self == nullptr) return nullptr;
  fill_in(self, pool, block + offset, size, stream, stream_object, 0);
  self->block = block;
  self->base = Py_NewRef(base);
  PyObject_GC_Track(self);
  return reinterpret_cast<PyObject*>(self);
}

bool add_buffer_type(PyObject* module) {
  PyObject* type = PyType_FromModuleAndSpec(module, &spec, nullptr);
  if (type == nullptr) return false;
  buffer_type = reinterpret_cast<PyTypeObject*>(type);
  return PyModule_AddObjectRef(module, "Buffer", type) == 0;
}

}  // namespace vram
