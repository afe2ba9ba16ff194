// PoolCore: the pool as a Python type, which vram.Pool extends. Its malloc, free and allocate are optimized
// for speed; statistics and reports are plain dicts, which the Python side converts.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <unordered_map>

#include "backends/model.hpp"
#include "base/waits.hpp"
#include "bindings.hpp"
#include "errors.hpp"
#include "into_python.hpp"
#include "python_types.hpp"
#include "stacks.hpp"
#include "waiting.hpp"

namespace nb = nanobind;

namespace vram {

PyObject* watcher = nullptr;

namespace {

PyTypeObject* pool_type = nullptr;
PyObject* tag_variable = nullptr;  // the ContextVar of vram.tag, once it is used

PyPool* self_of(PyObject* object) { return reinterpret_cast<PyPool*>(object); }
unsigned long long wide(std::uint64_t value) { return value; }
constexpr std::uint64_t kAny = ~std::uint64_t{0};
constexpr const char* kTooLong = "an integer with thousands of digits";

// A number as text, a new reference; null without an error if Python refuses to format so many digits.
PyObject* shown_number(PyObject* number) {
  PyObject* shown = PyObject_Str(number);
  if (shown == nullptr) PyErr_Clear();
  return shown;
}

PyObject* done(const Status& status, const char* what) {
  if (!status.ok()) return raise(status, what);
  Py_RETURN_NONE;
}

// ---- tags ------------------------------------------------------------------------------------------------

constexpr Py_ssize_t kMostTags = 1 << 16;  // of a pool; the last one stands for all later tags
constexpr const char* kOtherTags = "(other tags)";

// The number of a known tag; 0 for None and for unknown tags. -1 with an error set on failure.
long known_tag(PyPool* self, PyObject* name) {
  if (name == nullptr || name == Py_None) return 0;
  if (!PyUnicode_Check(name)) {
    PyErr_Format(PyExc_TypeError, "a tag must be a str, not %.100s", type_name(name).c_str());
    return -1;
  }
  if (PyObject* known = PyDict_GetItemWithError(self->tag_ids, name); known != nullptr)
    return PyLong_AsLong(known);
  return PyErr_Occurred() ? -1 : 0;
}

constexpr Py_ssize_t kMostTagBytes = 1 << 20;  // of a name, because the pool keeps every name

// Whether a name can be kept and written to a recording; otherwise false with an error set.
bool good_tag(PyObject* name) {
  Py_ssize_t bytes = 0;
  if (PyUnicode_AsUTF8AndSize(name, &bytes) != nullptr && bytes <= kMostTagBytes) return true;
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_UnicodeError)) return false;
  PyErr_Clear();
  PyErr_Format(PyExc_ValueError, "a tag must be valid Unicode of at most %zd bytes in UTF-8", kMostTagBytes);
  return false;
}

long add_tag(PyPool* self, PyObject* name) {
  if (!good_tag(name)) return -1;
  if (PyList_Append(self->tag_names, name) != 0) return -1;
  const long id = static_cast<long>(PyList_GET_SIZE(self->tag_names));
  PyObject* number = PyLong_FromLong(id);
  const bool stored = number != nullptr && PyDict_SetItem(self->tag_ids, name, number) == 0;
  Py_XDECREF(number);
  return stored ? id : -1;
}

// The number of a tag; new tags are numbered from 1; 0 for None. -1 with an error set on failure.
long tag_id(PyPool* self, PyObject* name) {
  const long known = known_tag(self, name);
  if (known != 0 || name == nullptr || name == Py_None) return known;
  const Py_ssize_t count = PyList_GET_SIZE(self->tag_names);
  if (count + 1 < kMostTags) return add_tag(self, name);
  ++self->other_tags;
  if (count == kMostTags) return static_cast<long>(count);
  PyObject* other = PyUnicode_FromString(kOtherTags);
  const long id = other == nullptr ? -1 : add_tag(self, other);
  Py_XDECREF(other);
  return id;
}

}  // namespace

bool tags_in_use() { return tag_variable != nullptr; }

long current_tag(PyPool* self, PyObject* given) {
  if (given != nullptr && given != Py_None) return tag_id(self, given);
  if (tag_variable == nullptr) return 0;
  PyObject* value = nullptr;
  if (context_var_get(tag_variable, Py_None, &value) != 0) return -1;
  const long id = tag_id(self, value);
  Py_XDECREF(value);
  return id;
}

namespace {

// The label of an allocation: its tag, and its stack if stacks are recorded. -1 with an error set.
std::int64_t label_for(PyPool* self, PyObject* given) {
  const long tag = given == nullptr && tag_variable == nullptr ? 0 : current_tag(self, given);
  if (!self->stacks || tag < 0) [[likely]]
    return tag;
  return label_here(static_cast<std::uint32_t>(tag));
}

// ---- allocation
// -----------------------------------------------------------------------------------------------

// Allocates after the arguments are parsed; false with an error set.
bool allocate_address(PyPool* self, std::uint64_t size, StreamHandle stream, std::uint64_t align,
                      std::uint32_t tag, Address* out) {
  // Cached memory must not go into a graph; the default stream cannot be captured.
  const bool ask = stream != 0 && self->captures;
  Pool* quick = ask && self->pool->backend().capturing(stream) ? nullptr : self->quick;
  const bool served =
      quick != nullptr && align <= kUnit && size <= kMaxRequest && quick->try_own(size, stream, tag, out);
  if (!served) {
    OutOfMemoryReport report;
    const Status status = self->pool.call(
        [&](Allocator& pool) { return pool.allocate_slow(size, stream, align, tag, out, &report); });
    if (status.code == Code::out_of_memory) {
      raise_out_of_memory(self, size, stream, report);
      return false;
    }
    if (!status.ok()) {
      raise(status, "allocate");
      return false;
    }
  }
  if (watcher != nullptr) [[unlikely]] {
    if (tell_watcher("on_allocate", "OKKK", self, wide(*out), wide(size), wide(stream))) return true;
    (void)free_address(self, *out);
    return false;
  }
  return true;
}

PyObject* malloc_method(PyObject* object, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  PyPool* self = self_of(object);
  PyObject* stream_object = count > 1 ? arguments[1] : nullptr;
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (count == 1 && named == 1 &&
      PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "stream") == 0) {
    stream_object = arguments[1];
  } else if (count < 1 || count > 2 || named != 0) {
    PyErr_SetString(PyExc_TypeError, "malloc(size, stream=0) takes a size and an optional stream");
    return nullptr;
  }
  std::uint64_t size = 0;
  StreamHandle stream = 0;
  Address address = 0;
  if (!size_from(arguments[0], &size) || !stream_from(stream_object, self, &stream)) return nullptr;
  const std::int64_t label = label_for(self, nullptr);
  if (label < 0) return nullptr;
  if (!allocate_address(self, size, stream, 0, static_cast<std::uint32_t>(label), &address)) return nullptr;
  return PyLong_FromUnsignedLongLong(address);
}

PyObject* free_method(PyObject* object, PyObject* pointer) {
  PyPool* self = self_of(object);
  Address address = 0;
  if (!whole_from(pointer, "ptr", kAny, &address)) {
    if (!PyErr_ExceptionMatches(PyExc_ValueError)) return nullptr;
    PyErr_Clear();
    return raise({Code::invalid, 0, "free"}, "free the pointer");
  }
  if (watcher != nullptr && !tell_watcher("on_free", "OK", self, wide(address))) return nullptr;
  const Status status = free_address(self, address);
  if (!status.ok()) return raise(status, "free the pointer");
  Py_RETURN_NONE;
}

struct AllocateArguments {
  PyObject* size = nullptr;
  PyObject* stream = nullptr;
  PyObject* align = nullptr;
  PyObject* tag = nullptr;
};

bool parse_allocate(PyObject* const* arguments, Py_ssize_t count, PyObject* names, AllocateArguments* out) {
  if (count == 1) out->size = arguments[0];
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    PyObject* value = arguments[count + i];
    if (PyUnicode_CompareWithASCIIString(name, "stream") == 0) {
      out->stream = value;
    } else if (PyUnicode_CompareWithASCIIString(name, "align") == 0) {
      out->align = value;
    } else if (PyUnicode_CompareWithASCIIString(name, "tag") == 0) {
      out->tag = value;
    } else if (PyUnicode_CompareWithASCIIString(name, "size") == 0 && out->size == nullptr) {
      out->size = value;
    } else {
      PyErr_Format(PyExc_TypeError, "allocate() got an unexpected keyword argument '%U'", name);
      return false;
    }
  }
  if (out->size != nullptr && count <= 1) return true;
  PyErr_SetString(PyExc_TypeError, "allocate(size, *, stream=None, align=None, tag=None) takes one size");
  return false;
}

bool align_from(PyObject* object, std::uint64_t* out) {
  *out = 0;
  if (object == nullptr || object == Py_None) return true;
  if (!size_from(object, out)) return false;
  if (*out != 0 && (*out & (*out - 1)) == 0 && *out <= kMaxRequest) return true;
  PyErr_Format(PyExc_ValueError, "align must be a power of two up to 1 TiB, not %llu", wide(*out));
  return false;
}

PyObject* allocate_method(PyObject* object, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  PyPool* self = self_of(object);
  AllocateArguments given;
  if (count == 1 && names == nullptr) {
    given.size = arguments[0];
  } else if (!parse_allocate(arguments, count, names, &given)) {
    return nullptr;
  }
  std::uint64_t size = 0;
  std::uint64_t align = 0;
  StreamHandle stream = 0;
  Address address = 0;
  if (!size_from(given.size, &size) || !stream_from(given.stream, self, &stream) ||
      !align_from(given.align, &align))
    return nullptr;
  const std::int64_t label = label_for(self, given.tag);
  if (label < 0) return nullptr;
  if (!allocate_address(self, size, stream, align, static_cast<std::uint32_t>(label), &address))
    return nullptr;
  return make_buffer(self, address, size, stream, given.stream, static_cast<std::uint32_t>(label));
}

bool sizes_from(PyObject* object, std::vector<std::uint64_t>* out) {
  PyObject* sizes = PySequence_Tuple(object);  // a copy: parsing a size may run code that changes a list
  if (sizes == nullptr) return false;
  out->resize(static_cast<std::size_t>(PyTuple_GET_SIZE(sizes)));
  bool good = true;
  for (std::size_t i = 0; i < out->size() && good; ++i)
    good = size_from(PyTuple_GET_ITEM(sizes, static_cast<Py_ssize_t>(i)), &(*out)[i]);
  Py_DECREF(sizes);
  return good;
}

// Allocates Buffers or raw addresses for all sizes, or none.
PyObject* batch(PyObject* object, PyObject* arguments, PyObject* keywords, bool buffers) {
  static const char* names[] = {"sizes", "stream", "tag", nullptr};
  PyPool* self = self_of(object);
  PyObject* sizes_object = nullptr;
  PyObject* stream_object = nullptr;
  PyObject* tag_object = nullptr;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|OO", const_cast<char**>(names), &sizes_object,
                                   &stream_object, &tag_object))
    return nullptr;
  std::vector<std::uint64_t> sizes;
  StreamHandle stream = 0;
  if (!sizes_from(sizes_object, &sizes) || !stream_from(stream_object, self, &stream)) return nullptr;
  const std::int64_t labelled = label_for(self, tag_object);
  if (labelled < 0) return nullptr;
  const auto label = static_cast<std::uint32_t>(labelled);
  std::vector<Address> addresses;
  OutOfMemoryReport report;
  const Status status = self->pool.call(
      [&](Allocator& pool) { return pool.allocate_batch(sizes, stream, label, addresses, &report); });
  if (status.code == Code::out_of_memory) {
    std::uint64_t total = 0;
    for (std::uint64_t size : sizes) total += size;
    return raise_out_of_memory(self, total, stream, report);
  }
  if (!status.ok()) return raise(status, "allocate the batch");
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(sizes.size()));
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (list != nullptr && watcher != nullptr &&
        !tell_watcher("on_allocate", "OKKK", self, wide(addresses[i]), wide(sizes[i]), wide(stream)))
      Py_CLEAR(list);
    PyObject* item = nullptr;
    if (list != nullptr)
      item = buffers ? make_buffer(self, addresses[i], sizes[i], stream, stream_object, label)
                     : PyLong_FromUnsignedLongLong(addresses[i]);
    if (item == nullptr) {
      if (list != nullptr && buffers) addresses[i] = 0;  // make_buffer has already freed it
      Py_CLEAR(list);
      if (addresses[i] != 0) (void)free_address(self, addresses[i]);
      continue;
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), item);
  }
  return list;
}
PyObject* allocate_batch(PyObject* object, PyObject* arguments, PyObject* keywords) {
  return batch(object, arguments, keywords, true);
}
PyObject* malloc_batch(PyObject* object, PyObject* arguments, PyObject* keywords) {
  return batch(object, arguments, keywords, false);
}

PyObject* record_stream(PyObject* object, PyObject* arguments) {
  PyPool* self = self_of(object);
  Whole address{"ptr"};
  PyObject* stream_object = nullptr;
  StreamHandle stream = 0;
  if (!PyArg_ParseTuple(arguments, "O&O:record_stream", whole_argument, &address, &stream_object))
    return nullptr;
  if (!stream_from(stream_object, self, &stream)) return nullptr;
  if (watcher != nullptr && !tell_watcher("on_record_stream", "OKK", self, wide(address.value), wide(stream)))
    return nullptr;
  return done(self->pool.call([&](Allocator& pool) { return pool.record_stream(address.value, stream); }),
              "record the use on another stream");
}

// ---- growable buffers, used by vram.lifetimes.growable
// ---------------------------------------------------------------------------------------------

// Null with an error set if the pool is a driver pool.
std::shared_ptr<Pool> paged_pool(PyObject* object, const char* what) {
  std::shared_ptr<Pool> pool = own_pool(object);
  if (pool == nullptr) raise({Code::unsupported, 0, "growable"}, what);
  return pool;
}

PyObject* growable_open(PyObject* object, PyObject* arguments) {
  constexpr const char* kWhat = "open a growable buffer";
  PyPool* self = self_of(object);
  Whole max{"max"};
  PyObject* stream_object = nullptr;
  StreamHandle stream = 0;
  if (!PyArg_ParseTuple(arguments, "O&O:growable_open", whole_argument, &max, &stream_object)) return nullptr;
  if (!stream_from(stream_object, self, &stream)) return nullptr;
  const std::shared_ptr<Pool> pool = paged_pool(object, kWhat);
  if (pool == nullptr) return nullptr;
  Address address = 0;
  const Status status = waiting([&] { return pool->growable_open(max.value, stream, &address); });
  if (!status.ok()) return raise(status, kWhat);
  return Py_BuildValue("KK", wide(address), wide(stream));
}

PyObject* growable_resize(PyObject* object, PyObject* arguments) {
  constexpr const char* kWhat = "resize the growable buffer";
  PyPool* self = self_of(object);
  Whole given_address{"ptr"};
  Whole given_bytes{"bytes"};
  Whole given_ahead{"ahead"};
  Whole given_stream{"stream"};
  PyObject* tag = nullptr;
  if (!PyArg_ParseTuple(arguments, "O&O&O&O&O:growable_resize", whole_argument, &given_address,
                        whole_argument, &given_bytes, whole_argument, &given_ahead, whole_argument,
                        &given_stream, &tag))
    return nullptr;
  const unsigned long long address = given_address.value;
  const unsigned long long bytes = given_bytes.value;
  const unsigned long long ahead = given_ahead.value;
  const unsigned long long stream = given_stream.value;
  const std::int64_t label = label_for(self, tag);
  if (label < 0) return nullptr;
  const std::shared_ptr<Pool> pool = paged_pool(object, kWhat);
  if (pool == nullptr) return nullptr;
  if (watcher != nullptr && !tell_watcher("on_shrink", "OKK", self, address, bytes)) return nullptr;
  OutOfMemoryReport report;
  const Status status = waiting([&] {
    return pool->growable_resize(address, bytes, ahead, static_cast<std::uint32_t>(label), &report);
  });
  if (status.code == Code::out_of_memory && report.device_total != 0)
    return raise_out_of_memory(self, report.requested, stream, report);
  if (status.ok() && watcher != nullptr && !tell_watcher("on_grow", "OKKK", self, address, bytes, stream))
    return nullptr;
  return done(status, kWhat);
}

PyObject* growable_prepare(PyObject* object, PyObject* arguments) {
  constexpr const char* kWhat = "prepare pages for the growable buffer";
  Whole address{"ptr"};
  Whole bytes{"bytes"};
  if (!PyArg_ParseTuple(arguments, "O&O&:growable_prepare", whole_argument, &address, whole_argument, &bytes))
    return nullptr;
  const std::shared_ptr<Pool> pool = paged_pool(object, kWhat);
  if (pool == nullptr) return nullptr;
  const Status status = waiting([&] { return pool->growable_prepare(address.value, bytes.value); });
  return status.code == Code::out_of_memory ? Py_NewRef(Py_None) : done(status, kWhat);
}

PyObject* growable_close(PyObject* object, PyObject* arguments) {
  constexpr const char* kWhat = "close the growable buffer";
  Whole address{"ptr"};
  int dropped = 0;  // by the garbage collector: no caller could get a race
  if (!PyArg_ParseTuple(arguments, "O&|p:growable_close", whole_argument, &address, &dropped)) return nullptr;
  const std::shared_ptr<Pool> pool = paged_pool(object, kWhat);
  if (pool == nullptr) return nullptr;
  if (watcher != nullptr &&
      !tell_watcher(dropped != 0 ? "on_drop" : "on_free", "OK", object, wide(address.value)))
    return nullptr;
  return done(waiting([&] { return pool->growable_close(address.value); }), kWhat);
}

PyObject* growable_info(PyObject* object, PyObject* argument) {
  constexpr const char* kWhat = "query the growable buffer";
  std::uint64_t address = 0;
  if (!whole_from(argument, "ptr", kAny, &address)) return nullptr;
  const std::shared_ptr<Pool> pool = paged_pool(object, kWhat);
  if (pool == nullptr) return nullptr;
  GrowableInfo info;
  const Status status = waiting([&] { return pool->growable_info(address, &info); });
  if (!status.ok()) return raise(status, kWhat);
  return Py_BuildValue("{sKsKsKsK}", "bytes", wide(info.bytes), "pending", wide(info.pending), "ready",
                       wide(info.ready), "max", wide(info.max));
}

PyObject* part_of(PyObject* object, PyObject* arguments) {
  PyPool* self = self_of(object);
  Whole block{"block"};
  Whole offset{"offset"};
  Whole size{"size"};
  PyObject* stream_object = nullptr;
  PyObject* base = nullptr;
  StreamHandle stream = 0;
  if (!PyArg_ParseTuple(arguments, "O&O&O&OO:part_of", whole_argument, &block, whole_argument, &offset,
                        whole_argument, &size, &stream_object, &base))
    return nullptr;
  if (!stream_from(stream_object, self, &stream)) return nullptr;
  const std::shared_ptr<Pool> pool = paged_pool(object, "query the growable buffer");
  if (pool == nullptr) return nullptr;
  GrowableInfo whole;
  const Status status = waiting([&] { return pool->growable_info(block.value, &whole); });
  if (!status.ok()) return raise(status, "query the growable buffer");
  if (offset.value > whole.bytes || size.value > whole.bytes - offset.value)
    return PyErr_Format(PyExc_ValueError, "%llu bytes from byte %llu exceed the length of %llu",
                        wide(size.value), wide(offset.value), wide(whole.bytes));
  return make_part(self, block.value, offset.value, size.value, stream, stream_object, base);
}

// ---- housekeeping
// ---------------------------------------------------------------------------------------------

PyObject* trim_to(PyObject* object, PyObject* arguments) {
  PyPool* self = self_of(object);
  Whole keep{"keep"};
  int wait = 0;
  if (!PyArg_ParseTuple(arguments, "O&p:trim_to", whole_argument, &keep, &wait)) return nullptr;
  return done(self->pool.call([&](Allocator& pool) { return pool.trim(keep.value, wait != 0); }),
              "trim the pool");
}

// The predicate for allocations with the tag; all of them for None. False with an error set.
bool wanted_from(PyPool* self, PyObject* tag, Pool::Wanted* out) {
  *out = nullptr;
  if (tag == Py_None) return true;
  const long id = known_tag(self, tag);
  if (id < 0) return false;
  if (id == 0) {
    *out = [](std::uint32_t) { return false; };
    return true;
  }
  *out = [labels = labels_of(static_cast<std::uint32_t>(id))](std::uint32_t label) {
    return std::binary_search(labels.begin(), labels.end(), label);
  };
  return true;
}

// suspend_blocks(tag, keep, store): returns the released bytes. `store` is a pool of host memory, or None.
PyObject* suspend_blocks(PyObject* object, PyObject* arguments) {
  PyPool* self = self_of(object);
  PyObject* tag = nullptr;
  PyObject* store_object = nullptr;
  int keep = 0;
  if (!PyArg_ParseTuple(arguments, "OpO:suspend_blocks", &tag, &keep, &store_object)) return nullptr;
  const std::shared_ptr<Pool> pool = own_pool(object);
  if (pool == nullptr) return raise({Code::unsupported, 0, "suspend"}, "suspend allocations of this pool");
  const std::shared_ptr<Allocator> store = allocator_of(store_object);
  if (store_object != Py_None &&
      (store == nullptr || store == self->pool.shared() || !store->host_accessible()))
    return PyErr_Format(PyExc_TypeError, "the store must be another pool of host memory, not %R",
                        store_object);
  Pool::Wanted wanted;
  if (!wanted_from(self, tag, &wanted)) return nullptr;
  std::uint64_t given = 0;
  OutOfMemoryReport report;
  const Status status = waiting([&] { return pool->suspend(wanted, keep != 0, store, &given, &report); });
  if (status.code == Code::out_of_memory && report.requested != 0)
    return raise_out_of_memory(self_of(store_object), report.requested, 0, report);
  if (!status.ok()) return raise(status, "suspend allocations of the pool");
  return PyLong_FromUnsignedLongLong(given);
}

// resume_blocks(tag): returns the restored bytes.
PyObject* resume_blocks(PyObject* object, PyObject* tag) {
  PyPool* self = self_of(object);
  const std::shared_ptr<Pool> pool = own_pool(object);
  if (pool == nullptr) return raise({Code::unsupported, 0, "suspend"}, "resume allocations of this pool");
  Pool::Wanted wanted;
  if (!wanted_from(self, tag, &wanted)) return nullptr;
  std::uint64_t taken = 0;
  OutOfMemoryReport report;
  const Status status = waiting([&] { return pool->resume(wanted, &taken, &report); });
  if (status.code == Code::out_of_memory && report.requested != 0)
    return raise_out_of_memory(self, report.requested, 0, report);
  if (!status.ok()) return raise(status, "resume allocations of the pool");
  return PyLong_FromUnsignedLongLong(taken);
}

PyObject* release_unused(PyObject* object, PyObject* argument) {
  const int wait = PyObject_IsTrue(argument);
  if (wait < 0) return nullptr;
  const auto release = [&](Allocator& pool) { return pool.release_unused(wait != 0); };
  return done(self_of(object)->pool.call(release), "release unused memory");
}

PyObject* coalesce(PyObject* object, PyObject*) {
  return done(self_of(object)->pool.call([](Allocator& pool) { return pool.coalesce(); }),
              "coalesce free blocks");
}

PyObject* set_limit(PyObject* object, PyObject* argument) {
  std::uint64_t bytes = 0;
  if (!whole_from(argument, "bytes", kAny, &bytes)) return nullptr;
  return done(self_of(object)->pool.call([&](Allocator& pool) { return pool.set_limit(bytes); }),
              "set the limit");
}

PyObject* add_peer(PyObject* object, PyObject* argument) {
  std::uint64_t device = 0;
  if (!whole_from(argument, "device", 0x7fffffff, &device)) return nullptr;
  return done(
      self_of(object)->pool.call([&](Allocator& pool) { return pool.add_peer(static_cast<int>(device)); }),
      "let another device use the memory of the pool");
}

PyObject* retire_stream(PyObject* object, PyObject* argument) {
  StreamHandle handle = 0;
  if (!whole_from(argument, "handle", kAny, &handle)) return nullptr;
  PyPool* self = self_of(object);
  if (self->pool->closed()) Py_RETURN_NONE;
  return done(self->pool.call([&](Allocator& pool) { return pool.retire_stream(handle); }),
              "retire the stream");
}

// The function that a stream calls before it is destroyed. It does not use the pool's Python object: if both
// are garbage, the collector clears weak references to the pool before it finalizes the stream, and memory
// that the stream's work still uses would be released to the device.
constexpr const char* kListener = "vram.stream_listener";

PyObject* hear(PyObject* capsule, PyObject* argument) {
  const auto* held = static_cast<std::weak_ptr<Allocator>*>(PyCapsule_GetPointer(capsule, kListener));
  if (argument == Py_None) return PyBool_FromLong(!held->expired());
  StreamHandle handle = 0;
  if (!whole_from(argument, "handle", kAny, &handle)) return nullptr;
  std::shared_ptr<Allocator> pool = held->lock();
  if (pool == nullptr || pool->closed()) Py_RETURN_FALSE;
  const Status status = waiting([&] {
    const Status retired = pool->retire_stream(handle);
    pool.reset();  // here, because releasing the last reference waits for the device
    return retired;
  });
  if (!status.ok() && status.code != Code::closed) return raise(status, "retire the stream");
  Py_RETURN_TRUE;
}

PyObject* stream_listener(PyObject* object, PyObject*) {
  static PyMethodDef call = {"stream_listener", hear, METH_O, nullptr};
  auto held = std::make_unique<std::weak_ptr<Allocator>>(self_of(object)->pool.shared());
  PyObject* capsule = PyCapsule_New(held.get(), kListener, [](PyObject* gone) {
    delete static_cast<std::weak_ptr<Allocator>*>(PyCapsule_GetPointer(gone, kListener));
  });
  if (capsule == nullptr) return nullptr;
  (void)held.release();
  PyObject* function = PyCFunction_New(&call, capsule);
  Py_DECREF(capsule);
  return function;
}

PyObject* close_method(PyObject* object, PyObject*) {
  PyPool* self = self_of(object);
  if (self->pool->closed()) Py_RETURN_NONE;
  if (self->views != 0)
    return PyErr_Format(PyExc_BufferError,
                        "%zd view(s) of the pool's buffers exist; drop them before close()", self->views);
  ++self->closing;
  const Status status = self->pool.call([](Allocator& pool) { return pool.close(); });
  --self->closing;
  return done(status, "close the pool");
}

// The callback runs without any lock of the pool. An exception is raised by the allocation. The errors of the
// program's own callbacks do not come here: vram.core.pool logs them.
bool call_back(PyPool* self, std::uint64_t size, StreamHandle stream) {
  const IntoPython python;
  PyObject* function = Py_NewRef(self->oom_callback == nullptr ? Py_None : self->oom_callback);
  PyObject* result = function == Py_None ? Py_NewRef(Py_False)
                                         : PyObject_CallFunction(function, "KK", wide(size), wide(stream));
  const int again = result == nullptr ? -1 : PyObject_IsTrue(result);
  if (again < 0) Waiting::interrupt(function);
  Py_XDECREF(result);
  Py_DECREF(function);
  return again > 0;
}

// A function, or None; otherwise sets an error.
bool is_callback(PyObject* function) {
  if (function == Py_None || PyCallable_Check(function) != 0) return true;
  PyErr_Format(PyExc_TypeError, "the callback must be callable, not %.100s", type_name(function).c_str());
  return false;
}

// The function belongs to the Python object, not to the pool, which would drop it under its lock. The caller
// of an allocation holds the object, so the callback finds it alive.
PyObject* set_oom_callback(PyObject* object, PyObject* function) {
  PyPool* self = self_of(object);
  if (!is_callback(function)) return nullptr;
  Allocator::Callback callback;
  if (function != Py_None)
    callback = [self](std::uint64_t size, StreamHandle stream) { return call_back(self, size, stream); };
  Py_XSETREF(self->oom_callback, function == Py_None ? nullptr : Py_NewRef(function));
  return done(self->pool.call([&](Allocator& pool) { pool.on_out_of_memory(callback); }),
              "set the out-of-memory callback");
}

// The same for callbacks whose result does not matter; `failed` is called where one raises.
template <typename... Sizes>
void call_with(PyObject* const& callback, void (*failed)(PyObject*), Sizes... bytes) {
  const IntoPython python;
  PyObject* function = Py_NewRef(callback == nullptr ? Py_None : callback);
  const std::string format(sizeof...(bytes), 'K');
  PyObject* result = function == Py_None ? Py_NewRef(Py_None)
                                         : PyObject_CallFunction(function, format.c_str(), wide(bytes)...);
  if (result == nullptr) failed(function);
  Py_XDECREF(result);
  Py_DECREF(function);
}

PyObject* set_high_water(PyObject* object, PyObject* arguments) {
  PyPool* self = self_of(object);
  Whole mark{"mark"};
  PyObject* function = nullptr;
  if (!PyArg_ParseTuple(arguments, "O&O:set_high_water", whole_argument, &mark, &function)) return nullptr;
  if (!is_callback(function)) return nullptr;
  HighWater::Callback callback;
  if (function != Py_None)
    callback = [self](std::uint64_t reserved) {
      call_with(self->high_callback, Waiting::interrupt_or_report, reserved);
    };
  Py_XSETREF(self->high_callback, function == Py_None ? nullptr : Py_NewRef(function));
  const std::uint64_t at = function == Py_None ? HighWater::kNone : mark.value;
  return done(self->pool.call([&](Allocator& pool) { pool.on_high_water(at, callback); }),
              "set the high-water mark");
}

// ---- spilling
// ----------------------------------------------------------------------------------------------

// set_spill_callback(function): function(needed, moved), called before pages move to the host because memory
// is full, with 0, and afterwards.
PyObject* set_spill_callback(PyObject* object, PyObject* function) {
  if (!is_callback(function)) return nullptr;
  PyPool* self = self_of(object);
  const std::shared_ptr<Pool> pool = own_pool(object);
  if (pool == nullptr) Py_RETURN_NONE;
  Py_XSETREF(self->spill_callback, function == Py_None ? nullptr : Py_NewRef(function));
  std::function<void(std::uint64_t, std::uint64_t)> hook;
  if (function != Py_None)
    hook = [self](std::uint64_t needed, std::uint64_t moved) {
      call_with(self->spill_callback, Waiting::interrupt, needed, moved);
    };
  return done(self->pool.call([&](Allocator&) { pool->around_spill(hook); }), "set the spill callback");
}

// Adds the labels of each tag in a sequence of names.
bool add_labels(PyPool* self, PyObject* names, std::vector<std::uint32_t>* labels) {
  PyObject* list = PySequence_List(names);
  if (list == nullptr) return false;
  bool good = true;
  for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(list); ++i) {
    const long id = known_tag(self, PyList_GET_ITEM(list, i));
    good = id >= 0;
    if (id <= 0) continue;  // nothing was allocated with it
    const std::vector<std::uint32_t> more = labels_of(static_cast<std::uint32_t>(id));
    labels->insert(labels->end(), more.begin(), more.end());
  }
  Py_DECREF(list);
  std::sort(labels->begin(), labels->end());
  return good;
}

// steer_spill(first, never): names of tags.
PyObject* steer_spill(PyObject* object, PyObject* arguments) {
  PyPool* self = self_of(object);
  PyObject* first_names = nullptr;
  PyObject* never_names = nullptr;
  if (!PyArg_ParseTuple(arguments, "OO:steer_spill", &first_names, &never_names)) return nullptr;
  std::vector<std::uint32_t> first, never;
  if (!add_labels(self, first_names, &first) || !add_labels(self, never_names, &never)) return nullptr;
  const std::shared_ptr<Pool> pool = own_pool(object);
  if (pool == nullptr) Py_RETURN_NONE;
  const auto wish = [first = std::move(first), never = std::move(never)](std::uint32_t label) {
    if (std::binary_search(never.begin(), never.end(), label)) return SpillWish::never;
    return std::binary_search(first.begin(), first.end(), label) ? SpillWish::first : SpillWish::none;
  };
  return done(self->pool.call([&](Allocator&) { pool->steer_spill(wish); }), "steer spilling");
}

// Adds the addresses of a sequence with one wish.
bool add_wishes(PyObject* given, SpillWish wish, std::unordered_map<Address, SpillWish>* wishes) {
  PyObject* const items = PySequence_Fast(given, "addresses must be a sequence");
  if (items == nullptr) return false;
  bool valid = true;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items) && valid; ++i) {
    std::uint64_t address = 0;
    valid = whole_from(PySequence_Fast_GET_ITEM(items, i), "an address", kAny, &address);
    if (valid) wishes->insert_or_assign(address, wish);
  }
  Py_DECREF(items);
  return valid;
}

// steer_spill_allocations(first, last): addresses.
PyObject* steer_spill_allocations(PyObject* object, PyObject* arguments) {
  PyPool* self = self_of(object);
  PyObject* first = nullptr;
  PyObject* last = nullptr;
  if (!PyArg_ParseTuple(arguments, "OO:steer_spill_allocations", &first, &last)) return nullptr;
  std::unordered_map<Address, SpillWish> wishes;
  if (!add_wishes(first, SpillWish::first, &wishes) || !add_wishes(last, SpillWish::last, &wishes))
    return nullptr;
  const std::shared_ptr<Pool> pool = own_pool(object);
  if (pool == nullptr) Py_RETURN_NONE;
  return done(self->pool.call([&](Allocator&) { pool->steer_spill(std::move(wishes)); }), "steer spilling");
}

// Moves one allocation; returns the bytes that moved.
PyObject* move_block(PyObject* object, PyObject* argument, Status (Pool::*move)(Address, std::uint64_t*),
                     const char* what) {
  std::uint64_t address = 0, moved = 0;
  if (!whole_from(argument, "an address", kAny, &address)) return nullptr;
  const std::shared_ptr<Pool> pool = own_pool(object);
  const Status status = pool == nullptr ? Status{Code::unsupported, 0, what}
                                        : waiting([&] { return ((*pool).*move)(address, &moved); });
  if (!status.ok()) return raise(status, what);
  return PyLong_FromUnsignedLongLong(moved);
}
PyObject* spill_block(PyObject* object, PyObject* address) {
  return move_block(object, address, &Pool::spill, "spill an allocation");
}
PyObject* prefetch_block(PyObject* object, PyObject* address) {
  return move_block(object, address, &Pool::prefetch, "prefetch an allocation");
}

// Moves all allocations with a tag, or all; returns the bytes that moved.
PyObject* move_tag(PyObject* object, PyObject* tag, Status (Pool::*move)(const Pool::Wanted&, std::uint64_t*),
                   const char* what) {
  const std::shared_ptr<Pool> pool = own_pool(object);
  if (pool == nullptr) return raise({Code::unsupported, 0, what}, what);
  Pool::Wanted wanted;
  if (!wanted_from(self_of(object), tag, &wanted)) return nullptr;
  std::uint64_t moved = 0;
  const Status status = waiting([&] { return ((*pool).*move)(wanted, &moved); });
  if (!status.ok()) return raise(status, what);
  return PyLong_FromUnsignedLongLong(moved);
}
PyObject* park_blocks(PyObject* object, PyObject* tag) {
  return move_tag(object, tag, &Pool::park, "move allocations to host memory");
}
PyObject* unpark_blocks(PyObject* object, PyObject* tag) {
  return move_tag(object, tag, &Pool::unpark, "move allocations back to the device");
}

// bring_back(most, wait): returns the bytes that returned to the device.
PyObject* bring_back(PyObject* object, PyObject* arguments) {
  Whole most{"most"};
  std::uint64_t returned = 0;
  int wait = 0;
  if (!PyArg_ParseTuple(arguments, "O&|p:bring_back", whole_argument, &most, &wait)) return nullptr;
  const std::shared_ptr<Pool> pool = own_pool(object);
  if (pool == nullptr) return PyLong_FromLong(0);
  const Status status = waiting([&] { return pool->bring_back(most.value, &returned, wait != 0); });
  if (!status.ok()) return raise(status, "bring spilled memory back");
  return PyLong_FromUnsignedLongLong(returned);
}

// usage(restart_peak): returns live bytes, their peak, and how many of them are on host pages.
PyObject* usage(PyObject* object, PyObject* restart_peak) {
  Usage usage;
  const std::shared_ptr<Pool> pool = own_pool(object);
  if (!PyBool_Check(restart_peak))
    return PyErr_Format(PyExc_TypeError, "restart_peak must be a bool, not %R", restart_peak);
  if (pool != nullptr) {
    const bool restart = restart_peak == Py_True;
    const Status status = self_of(object)->pool.call([&](Allocator&) { usage = pool->usage(restart); });
    if (!status.ok()) return raise(status, "look at the usage of the pool");
  }
  return Py_BuildValue("(KKK)", wide(usage.live), wide(usage.peak_live), wide(usage.spilled));
}

// create_ahead(spare, most): returns the bytes of host pages that were created.
PyObject* create_ahead(PyObject* object, PyObject* arguments) {
  Whole spare{"spare"}, most{"most"};
  std::uint64_t created = 0;
  if (!PyArg_ParseTuple(arguments, "O&O&:create_ahead", whole_argument, &spare, whole_argument, &most))
    return nullptr;
  const std::shared_ptr<Pool> pool = own_pool(object);
  if (pool == nullptr) return PyLong_FromLong(0);
  const Status status = waiting([&] { return pool->create_ahead(spare.value, most.value, &created); });
  if (!status.ok()) return raise(status, "create host memory ahead of need");
  return PyLong_FromUnsignedLongLong(created);
}

// take_host_bytes(bytes): returns whether there was so much.
PyObject* take_host_bytes(PyObject* object, PyObject* argument) {
  std::uint64_t bytes = 0;
  if (!whole_from(argument, "bytes", kAny, &bytes)) return nullptr;
  const std::shared_ptr<Pool> pool = own_pool(object);
  if (pool == nullptr) Py_RETURN_FALSE;
  const Status status = waiting([&] { return pool->take_host_bytes(bytes); });
  if (!status.ok() && status.code != Code::out_of_memory) return raise(status, "take host memory");
  return PyBool_FromLong(status.ok());
}
PyObject* give_host_bytes(PyObject* object, PyObject* argument) {
  std::uint64_t bytes = 0;
  if (!whole_from(argument, "bytes", kAny, &bytes)) return nullptr;
  if (const std::shared_ptr<Pool> pool = own_pool(object)) pool->give_host_bytes(bytes);
  Py_RETURN_NONE;
}

PyObject* release_host_bytes(PyObject* object, PyObject*) {
  const std::shared_ptr<Pool> pool = own_pool(object);
  if (pool == nullptr) Py_RETURN_NONE;
  const Status status = waiting([&] { return pool->release_host_bytes(); });
  if (!status.ok()) return raise(status, "release host memory");
  Py_RETURN_NONE;
}

// ---- configuration
// ----------------------------------------------------------------------------------------------

struct Option {
  const char* name;
  bool (*set)(PoolConfig&, PyObject*);
  PyObject* (*get)(const PoolConfig&);
  void (*copy)(PoolConfig&, const PoolConfig&);
};

template <auto Member>
void copy_member(PoolConfig& to, const PoolConfig& from) {
  to.*Member = from.*Member;
}

template <auto Member>
bool set_number(PoolConfig& config, PyObject* value) {
  using Number = std::remove_reference_t<decltype(config.*Member)>;
  std::uint64_t number = 0;
  if (!whole_from(value, "the option", std::numeric_limits<Number>::max(), &number)) return false;
  config.*Member = static_cast<Number>(number);
  return true;
}
bool set_release_threshold(PoolConfig& config, PyObject* value) {
  int overflow = 0;
  const bool none =
      PyLong_Check(value) && PyLong_AsLongLongAndOverflow(value, &overflow) == -1 && overflow == 0;
  if (!none) return set_number<&PoolConfig::release_threshold>(config, value);
  config.release_threshold = kAny;
  return true;
}
template <auto Member>
PyObject* get_number(const PoolConfig& config) {
  return PyLong_FromUnsignedLongLong(config.*Member);
}
template <auto Member>
bool set_flag(PoolConfig& config, PyObject* value) {
  const int truth = PyObject_IsTrue(value);
  config.*Member = truth > 0;
  return truth >= 0;
}
template <auto Member>
PyObject* get_flag(const PoolConfig& config) {
  return PyBool_FromLong(config.*Member);
}

constexpr const char* kCrossStream[] = {"ready", "wait", "never"};

bool set_cross_stream(PoolConfig& config, PyObject* value) {
  const char* text = utf8_of(value);
  if (text == nullptr) return false;
  for (int i = 0; i < 3; ++i)
    if (std::strcmp(text, kCrossStream[i]) == 0) {
      config.cross_stream = static_cast<CrossStream>(i);
      return true;
    }
  PyErr_Format(PyExc_ValueError, "cross_stream must be ready, wait or never, not %R", value);
  return false;
}
PyObject* get_cross_stream(const PoolConfig& config) {
  return PyUnicode_FromString(kCrossStream[static_cast<int>(config.cross_stream)]);
}

constexpr Option kOptions[] = {
    {"limit", set_number<&PoolConfig::limit>, get_number<&PoolConfig::limit>,
     copy_member<&PoolConfig::limit>},
    {"cross_stream", set_cross_stream, get_cross_stream, copy_member<&PoolConfig::cross_stream>},
    {"pages", set_flag<&PoolConfig::pages>, get_flag<&PoolConfig::pages>, copy_member<&PoolConfig::pages>},
    {"best_fit", set_flag<&PoolConfig::best_fit>, get_flag<&PoolConfig::best_fit>,
     copy_member<&PoolConfig::best_fit>},
    {"segment_size", set_number<&PoolConfig::segment_size>, get_number<&PoolConfig::segment_size>,
     copy_member<&PoolConfig::segment_size>},
    {"max_page", set_number<&PoolConfig::max_page>, get_number<&PoolConfig::max_page>,
     copy_member<&PoolConfig::max_page>},
    {"stream_cache", set_number<&PoolConfig::stream_cache>, get_number<&PoolConfig::stream_cache>,
     copy_member<&PoolConfig::stream_cache>},
    {"release_threshold", set_release_threshold, get_number<&PoolConfig::release_threshold>,
     copy_member<&PoolConfig::release_threshold>},
    {"journal", set_number<&PoolConfig::journal>, get_number<&PoolConfig::journal>,
     copy_member<&PoolConfig::journal>},
    {"zero_on_allocate", set_flag<&PoolConfig::zero_on_allocate>, get_flag<&PoolConfig::zero_on_allocate>,
     copy_member<&PoolConfig::zero_on_allocate>},
    {"zero_on_free", set_flag<&PoolConfig::zero_on_free>, get_flag<&PoolConfig::zero_on_free>,
     copy_member<&PoolConfig::zero_on_free>},
    {"spill", set_number<&PoolConfig::spill>, get_number<&PoolConfig::spill>,
     copy_member<&PoolConfig::spill>},
};

}  // namespace

namespace {

// Reads the options of a dict, and notes which they are.
bool read_options(PyObject* dict, PoolConfig* config, std::vector<const Option*>* read) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value)) {
    const char* name = utf8_of(key);
    if (name == nullptr) return false;
    const Option* option = nullptr;
    for (const Option& each : kOptions)
      if (std::strcmp(each.name, name) == 0) option = &each;
    if (option == nullptr) {
      PyErr_Format(PyExc_ValueError, "the pool has no option %R", key);
      return false;
    }
    if (!option->set(*config, value)) return false;
    read->push_back(option);
  }
  return true;
}

}  // namespace

bool config_from(PyObject* dict, PoolConfig* config) {
  std::vector<const Option*> read;
  return read_options(dict, config, &read);
}

namespace {

PyObject* reconfigure(PyObject* object, PyObject* dict) {
  if (!PyDict_Check(dict)) return PyErr_Format(PyExc_TypeError, "options must be a dict, not %R", dict);
  PyPool* self = self_of(object);
  PoolConfig given;
  std::vector<const Option*> read;
  if (!read_options(dict, &given, &read)) return nullptr;
  const auto set = [&](PoolConfig& config) {
    for (const Option* option : read) option->copy(config, given);
  };
  return done(self->pool.call([&](Allocator& pool) { return pool.change(set); }), "configure the pool");
}

PyObject* config_method(PyObject* object, PyObject*) {
  PoolConfig config;
  const Status status = self_of(object)->pool.call([&](Allocator& pool) { config = pool.config(); });
  if (!status.ok()) return raise(status, "read the options of the pool");
  PyObject* dict = PyDict_New();
  for (const Option& option : kOptions) {
    PyObject* value = dict == nullptr ? nullptr : option.get(config);
    if (value == nullptr || PyDict_SetItemString(dict, option.name, value) != 0) Py_CLEAR(dict);
    Py_XDECREF(value);
  }
  return dict;
}

// ---- statistics and reports
// -----------------------------------------------------------------------------------------

nb::dict meter_dict(const Meter& meter) {
  nb::dict dict;
  dict["current"] = meter.current;
  dict["peak"] = meter.peak;
  dict["total"] = meter.total;
  return dict;
}

nb::dict kinds_dict(const Meter (&meters)[2]) {
  nb::dict dict;
  dict["small"] = meter_dict(meters[0]);
  dict["large"] = meter_dict(meters[1]);
  return dict;
}

nb::dict stats_dict(const PoolStats& stats) {
  nb::dict dict;
  dict["allocations"] = kinds_dict(stats.allocations);
  dict["bytes"] = kinds_dict(stats.bytes);
  dict["requested"] = kinds_dict(stats.requested);
  dict["reserved"] = meter_dict(stats.reserved);
  dict["segments"] = meter_dict(stats.segments);
  dict["pending"] = meter_dict(stats.pending);
  dict["live"] = stats.live;
  dict["peak_live"] = stats.peak_live;
  dict["pending_blocks"] = stats.pending_blocks;
  dict["peak_active"] = stats.peak_active;
  dict["cached"] = stats.cached;
  dict["cached_blocks"] = stats.cached_blocks;
  dict["free_blocks"] = stats.free_blocks;
  dict["free_bytes"] = stats.free_bytes;
  dict["free_page_bytes"] = stats.free_page_bytes;
  dict["inactive"] = meter_dict(stats.inactive[0]);
  dict["inactive_bytes"] = meter_dict(stats.inactive[1]);
  dict["largest_free"] = stats.largest_free;
  dict["hits"] = stats.hits;
  dict["retries"] = stats.retries;
  dict["out_of_memory"] = stats.out_of_memory;
  dict["mappings"] = stats.mappings;
  dict["suspended"] = stats.suspended;
  dict["suspended_live"] = stats.suspended_live;
  dict["suspended_blocks"] = stats.suspended_blocks;
  dict["kept"] = stats.kept;
  dict["host"] = stats.host;
  dict["spilled"] = stats.spilled;
  dict["spilled_live"] = stats.spilled_live;
  dict["parked"] = stats.parked;
  nb::dict spill;
  spill["spills"] = stats.spill.spills;
  spill["returns"] = stats.spill.returns;
  spill["spilled_bytes"] = stats.spill.spilled_bytes;
  spill["returned_bytes"] = stats.spill.returned_bytes;
  spill["late"] = stats.spill.late;
  spill["failures"] = stats.spill.failures;
  spill["seconds"] = stats.spill.seconds;
  spill["taken_bytes"] = stats.spill.taken_bytes;
  dict["spill"] = spill;
  dict["paged"] = stats.paged;
  nb::dict rungs;
  for (int i = 0; i < kRungs; ++i) rungs[name_of(static_cast<Rung>(i))] = stats.rungs[i];
  dict["rungs"] = rungs;
  nb::list streams;
  for (const StreamStats& each : stats.streams) {
    nb::dict stream;
    stream["handle"] = each.handle;
    stream["live"] = each.live;
    stream["cached"] = each.cached;
    stream["free"] = each.free;
    stream["pending_blocks"] = each.pending_blocks;
    stream["retired"] = each.retired;
    streams.append(stream);
  }
  dict["streams"] = streams;
  return dict;
}

PyObject* raw_stats(PyObject* object, PyObject*) {
  PoolStats stats;
  const Status status = self_of(object)->pool.call([&](Allocator& pool) { stats = pool.stats(); });
  if (!status.ok()) return raise(status, "read the statistics of the pool");
  return guarded([&] {
    nb::dict dict = stats_dict(stats);
    dict["tags"] = PyList_GET_SIZE(self_of(object)->tag_names);
    dict["other_tags"] = self_of(object)->other_tags;
    dict["stacks"] = stacks_kept();
    dict["lost_stacks"] = stacks_lost();
    return dict;
  });
}

constexpr const char* kStateNames[] = {"none", "live", "cached", "moving", "pending", "free", "suspended"};

nb::object tag_object(PyPool* self, std::uint32_t label) { return nb::steal(tag_name(self, label)); }

nb::object stack_object(std::uint32_t label) {
  PyObject* stack = stack_of(label);
  if (stack == nullptr) throw nb::python_error();
  return nb::steal(stack);
}

// Releases the GIL periodically while a long list is built.
class Breather {
 public:
  void count_one() {
    if (++made_ % kItems == 0) const nb::gil_scoped_release others;
  }

 private:
  static constexpr std::size_t kItems = 1024;  // about a millisecond
  std::size_t made_ = 0;
};

PyObject* raw_snapshot(PyObject* object, PyObject*) {
  PyPool* self = self_of(object);
  std::vector<SegmentInfo> all;
  const Status status = self->pool.call([&](Allocator& pool) { all = pool.snapshot(); });
  if (!status.ok()) return raise(status, "read the blocks of the pool");
  return guarded([&] {
    nb::list segments;
    Breather breather;
    for (const SegmentInfo& info : all) {
      nb::list blocks;
      for (const BlockInfo& block : info.blocks) {
        breather.count_one();
        const bool used = block.state == BlockState::live || block.state == BlockState::pending ||
                          block.state == BlockState::suspended;
        blocks.append(nb::make_tuple(block.address, block.bytes, block.requested,
                                     kStateNames[static_cast<int>(block.state)], block.stream,
                                     tag_object(self, block.tag), block.serial,
                                     stack_object(used ? block.tag : 0), block.spilled));
      }
      nb::dict segment;
      segment["address"] = info.address;
      segment["bytes"] = info.bytes;
      segment["stream"] = info.stream;
      segment["small"] = info.small;
      segment["plain"] = info.plain;
      segment["blocks"] = blocks;
      segments.append(segment);
    }
    return segments;
  });
}

struct Holding {
  std::uint64_t blocks = 0;
  std::uint64_t bytes = 0;
  std::uint64_t requested = 0;
  std::uint64_t spilled = 0;
};

// Live blocks by label. It creates an object per label, not per block, so that a pool with millions of blocks
// can be queried while it works.
PyObject* raw_holders(PyObject* object, PyObject*) {
  PyPool* self = self_of(object);
  std::unordered_map<std::uint32_t, Holding> holdings;
  const Status status = self->pool.call([&](Allocator& pool) {
    for (const SegmentInfo& info : pool.snapshot())
      for (const BlockInfo& block : info.blocks) {
        if (block.state != BlockState::live) continue;
        Holding& holding = holdings[block.tag];
        ++holding.blocks;
        holding.bytes += block.bytes;
        holding.requested += block.requested;
        holding.spilled += block.spilled;
      }
  });
  if (!status.ok()) return raise(status, "read the blocks of the pool");
  return guarded([&] {
    nb::list list;
    for (const auto& [label, held] : holdings)
      list.append(nb::make_tuple(tag_object(self, label), stack_object(label), held.blocks, held.bytes,
                                 held.requested, held.spilled));
    return list;
  });
}

// A list of (tag, bytes, moved_out_bytes, moved_back_bytes, seconds).
PyObject* raw_spill_by_tag(PyObject* object, PyObject*) {
  PyPool* self = self_of(object);
  std::unordered_map<std::uint32_t, SpillOfLabel> labels;
  if (const std::shared_ptr<Pool> pool = own_pool(object)) {
    const Status status = self->pool.call([&](Allocator&) { labels = pool->spill_by_label(); });
    if (!status.ok()) return raise(status, "read what has spilled");
  }
  return guarded([&] {
    std::map<std::uint32_t, SpillOfLabel> tags;
    for (const auto& [label, each] : labels) {
      SpillOfLabel& sum = tags[tag_of(label)];
      sum.bytes += each.bytes;
      sum.moved_out_bytes += each.moved_out_bytes;
      sum.moved_back_bytes += each.moved_back_bytes;
      sum.seconds += each.seconds;
    }
    nb::list list;
    for (const auto& [tag, sum] : tags)
      list.append(nb::make_tuple(tag_object(self, tag), sum.bytes, sum.moved_out_bytes, sum.moved_back_bytes,
                                 sum.seconds));
    return list;
  });
}

PyObject* journal_start(PyObject* object, PyObject* argument) {
  static PyObject* config_error = nullptr;
  std::uint64_t entries = 0;
  if (!whole_from(argument, "entries", kMostJournaled, &entries)) {
    if (!PyErr_ExceptionMatches(PyExc_ValueError)) return nullptr;
    PyErr_Clear();
    PyObject* type = python_function(config_error, "vram.errors", "ConfigError");
    if (type == nullptr) return nullptr;
    PyObject* number = shown_number(argument);
    PyErr_Format(type, "a journal can keep 0 to %u events for each stream, not %V", kMostJournaled, number,
                 kTooLong);
    Py_XDECREF(number);
    return nullptr;
  }
  return done(self_of(object)->pool.call(
                  [&](Allocator& pool) { return pool.start_journal(static_cast<std::uint32_t>(entries)); }),
              "start the journal");
}

PyObject* info(PyObject* object, PyObject* argument) {
  PyPool* self = self_of(object);
  std::uint64_t address = 0;
  if (!whole_from(argument, "ptr", kAny, &address)) return nullptr;
  BlockInfo block;
  const Status status = self->pool.call([&](Allocator& pool) { return pool.info(address, &block); });
  if (!status.ok()) return raise(status, "look up the pointer");
  return guarded([&] {
    nb::dict dict;
    dict["address"] = block.address;
    dict["bytes"] = block.bytes;
    dict["requested"] = block.requested;
    dict["stream"] = block.stream;
    dict["tag"] = tag_object(self, block.tag);
    dict["serial"] = block.serial;
    return dict;
  });
}

PyObject* reset_peak(PyObject* object, PyObject*) {
  return done(self_of(object)->pool.call([](Allocator& pool) { pool.reset_peak(); }), "reset the peaks");
}

PyObject* live_bytes(PyObject* object, PyObject*) {
  std::uint64_t live = 0;
  const Status status = self_of(object)->pool.call([&](Allocator& pool) { live = pool.live_bytes(); });
  if (!status.ok()) return raise(status, "count the live bytes");
  return PyLong_FromUnsignedLongLong(live);
}

PyObject* check(PyObject* object, PyObject*) {
  std::string why;
  bool good = true;
  const Status status = self_of(object)->pool.call([&](Allocator& pool) { good = pool.check(&why); });
  if (!status.ok()) return raise(status, "check the pool");
  if (good) Py_RETURN_NONE;
  return PyUnicode_FromStringAndSize(why.data(), static_cast<Py_ssize_t>(why.size()));
}

PyObject* get_closed(PyObject* object, void*) { return PyBool_FromLong(self_of(object)->pool->closed()); }
PyObject* get_device(PyObject* object, void*) { return Py_NewRef(self_of(object)->device); }

PyObject* get_stacks(PyObject* object, void*) { return PyBool_FromLong(self_of(object)->stacks); }
int set_stacks(PyObject* object, PyObject* value, void*) {
  const int truth = value == nullptr ? 0 : PyObject_IsTrue(value);
  if (truth < 0) return -1;
  self_of(object)->stacks = truth != 0;
  follow_labels();
  return 0;
}

// ---- the type
// ------------------------------------------------------------------------------------------------------------

// Used until __init__ has run: every call on it is refused as on a closed pool.
const std::shared_ptr<Allocator>& not_made() {
  static const std::shared_ptr<Allocator> closed = [] {
    auto pool = std::make_shared<Pool>(std::make_shared<ModelBackend>(kSlotBytes), PoolConfig{});
    (void)pool->close();
    return pool;
  }();
  return closed;
}

PyObject* no_address_space() {
  PyErr_SetString(
      PyExc_MemoryError,
      "cannot create a pool: the process has too few addresses left for its tables, which need at least "
      "25 MiB. Raise the limit of virtual memory (ulimit -v).");
  return nullptr;
}

PyObject* new_pool(PyTypeObject* type, PyObject*, PyObject*) {
  std::shared_ptr<Allocator> pool;
  try {
    pool = not_made();
  } catch (const std::bad_alloc&) {
    return no_address_space();
  }
  PyObject* object = allocate_object(type);
  if (object == nullptr) return nullptr;
  new (&self_of(object)->pool) PoolHandle(std::move(pool));
  self_of(object)->tag_names = PyList_New(0);
  self_of(object)->tag_ids = PyDict_New();
  self_of(object)->device = Py_NewRef(Py_None);
  return object;
}

int init_pool(PyObject* object, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"device", "config", "backend", nullptr};
  PyPool* self = self_of(object);
  PyObject* device = nullptr;
  PyObject* dict = nullptr;
  PyObject* memory = nullptr;  // source of the memory, if it is not the device itself
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!|O:PoolCore", const_cast<char**>(names), &device,
                                   &PyDict_Type, &dict, &memory))
    return -1;
  if (self->pool.shared() != not_made()) {
    PyErr_SetString(PyExc_RuntimeError, "the pool was already created; create another one");
    return -1;
  }
  PoolConfig config;
  if (!config_from(dict, &config)) return -1;
  try {
    const bool own = memory == nullptr || memory == Py_None;
    const nb::object backend = own ? nb::object(nb::borrow(device).attr("backend")) : nb::borrow(memory);
    const std::shared_ptr<Pool> pool(new Pool(backend_of(nb::cast<Backend&>(backend)), config), end<Pool>);
    self->quick = pool.get();
    self->captures = pool->backend().info().captures;
    self->pool = PoolHandle(pool);
  } catch (nb::python_error& error) {
    error.restore();
    return -1;
  } catch (const std::bad_alloc&) {
    (void)no_address_space();
    return -1;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return -1;
  }
  Py_SETREF(self->device, Py_NewRef(device));
  return 0;
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(self_of(object)->device);
  Py_VISIT(self_of(object)->oom_callback);
  Py_VISIT(self_of(object)->high_callback);
  Py_VISIT(self_of(object)->spill_callback);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

int clear(PyObject* object) {
  Py_SETREF(self_of(object)->device, Py_NewRef(Py_None));
  Py_CLEAR(self_of(object)->oom_callback);
  Py_CLEAR(self_of(object)->high_callback);
  Py_CLEAR(self_of(object)->spill_callback);
  return 0;
}

void dealloc(PyObject* object) {
  PyPool* self = self_of(object);
  PyObject_GC_UnTrack(object);
  {
    const Waiting scope;  // closing waits for the device
    self->pool.~PoolHandle();
  }
  Py_CLEAR(self->device);
  Py_CLEAR(self->oom_callback);
  Py_CLEAR(self->high_callback);
  Py_CLEAR(self->spill_callback);
  Py_CLEAR(self->tag_names);
  Py_CLEAR(self->tag_ids);
  PyTypeObject* type = Py_TYPE(object);
  free_object(type, object);
  Py_DECREF(type);
}

template <typename Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"malloc", as_method(malloc_method), METH_FASTCALL | METH_KEYWORDS,
     "malloc(size, stream=0)\n--\n\nAllocate memory and return its address, without a handle object; free "
     "it with free()."},
    {"free", free_method, METH_O, "free(ptr, /)\n--\n\nFree memory allocated with malloc()."},
    {"allocate", as_method(allocate_method), METH_FASTCALL | METH_KEYWORDS,
     "allocate(size, *, stream=None, align=None, tag=None)\n--\n\nAllocate a Buffer of `size` bytes, "
     "ordered by `stream`."},
    {"allocate_batch", as_method(allocate_batch), METH_VARARGS | METH_KEYWORDS,
     "allocate_batch(sizes, stream=None, tag=None)\n--\n\nAllocate Buffers for all sizes or none, "
     "contiguous where possible."},
    {"malloc_batch", as_method(malloc_batch), METH_VARARGS | METH_KEYWORDS,
     "malloc_batch(sizes, stream=None, tag=None)\n--\n\nLike allocate_batch, with raw addresses."},
    {"record_stream", record_stream, METH_VARARGS,
     "record_stream(ptr, stream, /)\n--\n\nRecord that work on another stream uses the allocation with this "
     "address."},
    {"growable_open", growable_open, METH_VARARGS,
     "growable_open(max, stream, /)\n--\n\nReserve addresses for a growable buffer without memory. Return "
     "its address and the handle of its stream."},
    {"growable_resize", growable_resize, METH_VARARGS,
     "growable_resize(ptr, bytes, ahead, stream, tag, /)\n--\n\nBack its first `bytes` with memory, a "
     "multiple of 2 MiB, and `ahead` more in the background."},
    {"growable_prepare", growable_prepare, METH_VARARGS,
     "growable_prepare(ptr, bytes, /)\n--\n\nMap pages for this many more bytes, as far as there are "
     "any."},
    {"growable_close", growable_close, METH_VARARGS,
     "growable_close(ptr, dropped=False, /)\n--\n\nRelease its memory and its addresses."},
    {"growable_info", growable_info, METH_O,
     "growable_info(ptr, /)\n--\n\nReturn the bytes that are backed, pending and ready, and the maximum."},
    {"part_of", part_of, METH_VARARGS,
     "part_of(block, offset, size, stream, base, /)\n--\n\nA Buffer over a part of a growable buffer that "
     "`base` holds."},
    {"trim_to", trim_to, METH_VARARGS,
     "trim_to(keep, wait, /)\n--\n\nRelease unused memory until at most `keep` bytes are reserved."},
    {"suspend_blocks", suspend_blocks, METH_VARARGS,
     "suspend_blocks(tag, keep, store, /)\n--\n\nRelease the pages of allocations and move their contents to "
     "the store. Return the released bytes."},
    {"resume_blocks", resume_blocks, METH_O,
     "resume_blocks(tag, /)\n--\n\nBack suspended allocations with memory again. Return the restored bytes."},
    {"set_spill_callback", set_spill_callback, METH_O,
     "set_spill_callback(function, /)\n--\n\nfunction(needed, moved), called before memory moves to the host "
     "because the device is full, with 0, and afterwards; None removes it."},
    {"steer_spill", steer_spill, METH_VARARGS,
     "steer_spill(first, never, /)\n--\n\nNames of tags whose memory goes to the host first, or never."},
    {"steer_spill_allocations", steer_spill_allocations, METH_VARARGS,
     "steer_spill_allocations(first, last, /)\n--\n\nAddresses of allocations that go to the host first, or "
     "last. Replaces what was said before."},
    {"spill_block", spill_block, METH_O,
     "spill_block(ptr, /)\n--\n\nMove an allocation to host memory. Return the bytes that moved."},
    {"prefetch_block", prefetch_block, METH_O,
     "prefetch_block(ptr, /)\n--\n\nMove an allocation back to the device. Return the bytes that moved."},
    {"park_blocks", park_blocks, METH_O,
     "park_blocks(tag, /)\n--\n\nMove allocations to host memory, where they stay. Return the bytes that "
     "moved."},
    {"unpark_blocks", unpark_blocks, METH_O,
     "unpark_blocks(tag, /)\n--\n\nMove parked allocations back to the device. Return the bytes that moved."},
    {"bring_back", bring_back, METH_VARARGS,
     "bring_back(most, wait=False, /)\n--\n\nMove at most so many bytes back to the device while enough of "
     "it "
     "is free; with `wait`, after all work queued so far. Return the bytes that moved."},
    {"create_ahead", create_ahead, METH_VARARGS,
     "create_ahead(spare, most, /)\n--\n\nCreate host memory to spill to until `spare` bytes are unused, but "
     "at "
     "most `most` bytes. Return the bytes that were created."},
    {"usage", usage, METH_O,
     "usage(restart_peak, /)\n--\n\nReturn live bytes, their peak since the last call that restarted it, and "
     "how many of them are in host memory."},
    {"take_host_bytes", take_host_bytes, METH_O,
     "take_host_bytes(bytes, /)\n--\n\nTake a part of the option `spill` for other copies in host memory. "
     "Return whether there was so much."},
    {"give_host_bytes", give_host_bytes, METH_O,
     "give_host_bytes(bytes, /)\n--\n\nReturn what `take_host_bytes` took. It is kept for the next time."},
    {"release_host_bytes", release_host_bytes, METH_NOARGS,
     "release_host_bytes()\n--\n\nLet pages have the host memory that was returned and kept."},
    {"release_unused", release_unused, METH_O,
     "release_unused(wait, /)\n--\n\nRelease unused memory beyond the release threshold, with what the "
     "streams' caches keep.\n\n`wait`: wait for the device if memory is still in use."},
    {"coalesce", coalesce, METH_NOARGS, "coalesce()\n--\n\nEmpty the stream caches and merge free blocks."},
    {"set_limit", set_limit, METH_O,
     "set_limit(bytes, /)\n--\n\nSet the maximum memory to hold from the device; 0 for no limit."},
    {"add_peer", add_peer, METH_O,
     "add_peer(number, /)\n--\n\nLet the device with this number use the memory, including what is "
     "allocated later."},
    {"stream_listener", stream_listener, METH_NOARGS,
     "stream_listener()\n--\n\nReturn the function that streams call with their handle before they are "
     "destroyed. It holds no reference and returns False once the pool is gone; None only queries."},
    {"retire_stream", retire_stream, METH_O,
     "retire_stream(handle, /)\n--\n\nThe stream will be destroyed: take over its memory once its work has "
     "finished."},
    {"set_high_water", set_high_water, METH_VARARGS,
     "set_high_water(mark, function, /)\n--\n\nfunction(reserved), called when the reserved bytes have risen "
     "above the mark; None removes it."},
    {"set_oom_callback", set_oom_callback, METH_O,
     "set_oom_callback(function, /)\n--\n\nfunction(size, stream) -> bool, called before an allocation "
     "fails."},
    {"reconfigure", reconfigure, METH_O, "reconfigure(options, /)\n--\n\nChange options of a pool in use."},
    {"config", config_method, METH_NOARGS, "config()\n--\n\nReturn the effective options."},
    {"raw_stats", raw_stats, METH_NOARGS, "raw_stats()\n--\n\nReturn all counters."},
    {"raw_snapshot", raw_snapshot, METH_NOARGS, "raw_snapshot()\n--\n\nReturn all segments and blocks."},
    {"raw_holders", raw_holders, METH_NOARGS,
     "raw_holders()\n--\n\nLive blocks by tag and stack: (tag, stack, blocks, bytes, requested, "
     "spilled) each."},
    {"raw_spill_by_tag", raw_spill_by_tag, METH_NOARGS,
     "raw_spill_by_tag()\n--\n\nReturn what spilling has moved, and what is in host memory now, by tag."},
    {"journal_start", journal_start, METH_O,
     "journal_start(entries, /)\n--\n\nKeep this many events for each stream; 0 turns the journal off."},
    {"info", info, METH_O, "info(ptr, /)\n--\n\nReturn what is known about a live allocation."},
    {"reset_peak", reset_peak, METH_NOARGS, "reset_peak()\n--\n\nRestart all peaks."},
    {"live_bytes", live_bytes, METH_NOARGS, "live_bytes()\n--\n\nReturn the bytes of live allocations."},
    {"check", check, METH_NOARGS, "check()\n--\n\nVerify every invariant; return None or what is wrong."},
    {"close", close_method, METH_NOARGS,
     "close()\n--\n\nWait for the device and release all memory; live buffers become invalid."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef attributes[] = {
    {"closed", get_closed, nullptr,
     "Whether close() was called, or the pool belongs to the parent of a fork.", nullptr},
    {"device", get_device, nullptr, "The device of the pool.", nullptr},
    {"keeps_stacks", get_stacks, set_stacks, "Whether allocations record their Python stacks.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("The native part of vram.Pool.")},
    {Py_tp_new, reinterpret_cast<void*>(new_pool)},
    {Py_tp_init, reinterpret_cast<void*>(init_pool)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, nullptr},
};

PyType_Spec spec = {"vram._native.PoolCore", sizeof(PyPool), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

// ---- shared with buffer.cpp
// ------------------------------------------------------------------------------------------------

Status free_address(PyPool* self, Address address) {
  if (self->quick != nullptr && self->quick->try_free_cached(address)) return {};
  return self->pool.call([&](Allocator& pool) { return pool.free_slow(address); });
}

Status drop_address(PyPool* self, Address address) {
  if (self->quick != nullptr && self->quick->try_free_cached(address)) return {};
  return self->pool.call([&](Allocator& pool) { return pool.drop(address); });
}

// vram.core.pool formats the message.
PyObject* raise_out_of_memory(PyPool* self, std::uint64_t size, StreamHandle stream,
                              const OutOfMemoryReport& report) {
  static PyObject* words = nullptr;
  PyObject* function = python_function(words, "vram.core.pool", "_out_of_memory");
  if (function == nullptr) return nullptr;
  PyObject* facts = report_dict(report);
  if (facts == nullptr) return nullptr;
  PyObject* error = PyObject_CallFunction(function, "OKKO", self, wide(size), wide(stream), facts);
  Py_DECREF(facts);
  if (error == nullptr) return nullptr;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_DECREF(error);
  return nullptr;
}

namespace {

// Why no memory could move to the host, in one word; "" if that was not tried.
const char* word_of(const Status& spill) {
  switch (spill.code) {
    case Code::ok:
    case Code::unsupported:
      return "";
    case Code::out_of_memory:
      if (std::strcmp(spill.call, Spiller::kHostPage) == 0) return "host";
      if (std::strcmp(spill.call, Spiller::kNothing) == 0) return "nothing";
      return std::strcmp(spill.call, Spiller::kBudget) == 0 ? "limit" : "failed";
    case Code::not_ready:
      return std::strcmp(spill.call, Spiller::kTurn) == 0 ? "busy" : "late";
    case Code::deadlock:
      return "deadlock";
    case Code::capturing:
      return "capture";
    default:
      return "failed";
  }
}

}  // namespace

PyObject* report_dict(const OutOfMemoryReport& report) {
  return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKss}", "requested", wide(report.requested),
                       "limit", wide(report.limit), "device_total", wide(report.device_total), "device_free",
                       wide(report.device_free), "reserved", wide(report.reserved), "allocated",
                       wide(report.live), "pending", wide(report.pending), "cached", wide(report.cached),
                       "free_pages", wide(report.free_pages), "free_elsewhere", wide(report.free_elsewhere),
                       "stranded", wide(report.stranded), "largest_free", wide(report.largest_free),
                       "suspended", wide(report.suspended), "spill", wide(report.spill_limit), "host",
                       wide(report.host), "spilled", wide(report.spilled), "spill_left",
                       wide(report.spill_left), "align", wide(report.align), "addresses",
                       wide(report.addresses), "spill_refused", word_of(report.spill));
}

std::shared_ptr<Allocator> allocator_of(PyObject* object) {
  return PyObject_TypeCheck(object, pool_type) ? self_of(object)->pool.shared() : nullptr;
}

std::shared_ptr<Pool> own_pool(PyObject* object) {
  if (!PyObject_TypeCheck(object, pool_type) || self_of(object)->quick == nullptr) return nullptr;
  return std::static_pointer_cast<Pool>(self_of(object)->pool.shared());
}

bool size_from(PyObject* object, std::uint64_t* out) {
  static PyObject* parse_size = nullptr;
  PyObject* number = object;
  if (!PyLong_CheckExact(object)) {
    if (PyUnicode_Check(object) || PyBool_Check(object)) {  // parse_size refuses a bool
      PyObject* function = python_function(parse_size, "vram.sizes", "parse_size");
      number = function == nullptr ? nullptr : PyObject_CallOneArg(function, object);
    } else {
      number = PyNumber_Index(object);
    }
    if (number == nullptr) return false;
  } else {
    Py_INCREF(number);
  }
  *out = PyLong_AsUnsignedLongLong(number);
  const bool failed = *out == ~std::uint64_t{0} && PyErr_Occurred();
  if (failed && PyErr_ExceptionMatches(PyExc_OverflowError)) {
    PyErr_Clear();
    PyObject* zero = PyLong_FromLong(0);
    const bool negative = PyObject_RichCompareBool(number, zero, Py_LT) == 1;
    Py_DECREF(zero);
    Py_DECREF(number);
    if (!negative) return true;  // larger than any device: the pool reports it
    static PyObject* config_error = nullptr;
    if (PyObject* type = python_function(config_error, "vram.errors", "ConfigError"))
      PyErr_SetString(type, "a size cannot be negative");
    return false;
  }
  Py_DECREF(number);
  return !failed;
}

bool whole_from(PyObject* object, const char* name, std::uint64_t most, std::uint64_t* out) {
  PyObject* number = PyLong_CheckExact(object) ? Py_NewRef(object) : PyNumber_Index(object);
  if (number == nullptr) return false;
  *out = PyLong_AsUnsignedLongLong(number);
  const bool outside = *out == kAny && PyErr_Occurred();
  const bool good = !outside && *out <= most;
  if (!good) {
    PyErr_Clear();
    PyObject* shown = shown_number(number);
    PyErr_Format(PyExc_ValueError, "%s must be an integer from 0 to %llu, not %V", name, wide(most), shown,
                 kTooLong);
    Py_XDECREF(shown);
  }
  Py_DECREF(number);
  return good;
}

int whole_argument(PyObject* object, void* whole) {
  auto* given = static_cast<Whole*>(whole);
  return whole_from(object, given->name, given->most, &given->value) ? 1 : 0;
}

PyObject* python_function(PyObject*& cache, const char* module, const char* name) {
  if (cache != nullptr) return cache;
  PyObject* imported = PyImport_ImportModule(module);
  if (imported == nullptr) return nullptr;
  cache = PyObject_GetAttrString(imported, name);
  Py_DECREF(imported);
  return cache;
}

bool stream_from(PyObject* object, PyPool* pool, StreamHandle* out) {
  static PyObject* named_handle = nullptr;
  *out = 0;
  if (object == nullptr || object == Py_None) return true;
  PyObject* number = nullptr;
  if (PyLong_CheckExact(object)) {
    number = Py_NewRef(object);
  } else {
    PyObject* function = python_function(named_handle, "vram.core.stream", "named_handle");
    if (function != nullptr) number = PyObject_CallFunctionObjArgs(function, object, pool->device, nullptr);
    if (number == nullptr) return false;
  }
  *out = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  if (*out != ~std::uint64_t{0} || !PyErr_Occurred()) return true;
  PyErr_Clear();
  PyErr_SetString(PyExc_ValueError, "a stream handle must be an integer from 0 to 2**64 - 1");
  return false;
}

PyObject* raise(const Status& status, const char* what) {
  try {
    raise_status(status, what);
  } catch (nb::python_error& error) {
    error.restore();
  }
  return nullptr;
}

PyObject* tag_name(PyPool* self, std::uint32_t label) {
  const std::uint32_t tag = tag_of(label);
  if (tag == 0 || static_cast<Py_ssize_t>(tag) > PyList_GET_SIZE(self->tag_names)) Py_RETURN_NONE;
  return Py_NewRef(PyList_GET_ITEM(self->tag_names, static_cast<Py_ssize_t>(tag) - 1));
}

void bind_pool(nb::module_& module) {
  PyObject* type = PyType_FromModuleAndSpec(module.ptr(), &spec, nullptr);
  if (type == nullptr || !add_buffer_type(module.ptr())) throw nb::python_error();
  pool_type = reinterpret_cast<PyTypeObject*>(type);
  if (PyModule_AddObjectRef(module.ptr(), "PoolCore", type) != 0) throw nb::python_error();
  module.def(
      "set_tag_source",
      [](nb::handle variable) {
        Py_XSETREF(tag_variable, variable.is_none() ? nullptr : Py_NewRef(variable.ptr()));
        follow_labels();
      },
      nb::arg("variable").none(), "Set the ContextVar that holds the current tag, or None.");
  module.def(
      "set_watcher",
      [](nb::handle object) {
        Py_XSETREF(watcher, object.is_none() ? nullptr : Py_NewRef(object.ptr()));
        follow_records();
      },
      nb::arg("watcher").none(), "Set the object that is notified of allocations, frees and uses, or None.");
}

}  // namespace vram
