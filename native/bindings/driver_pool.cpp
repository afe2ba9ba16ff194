// DriverPoolCore: the driver's own pool as a Python type. It extends PoolCore (pool.cpp), which allocates,
// frees and reports. This file has its creation, its attributes and its exchange between processes.
#include "driver_pool/driver_pool.hpp"

#include <nanobind/nanobind.h>

#include <cstring>

#include "bindings.hpp"
#include "python_types.hpp"
#include "waiting.hpp"

namespace nb = nanobind;

namespace vram {

namespace {

PyPool* self_of(PyObject* object) { return reinterpret_cast<PyPool*>(object); }
unsigned long long wide(std::uint64_t value) { return value; }

// Null with an error set if __init__ has not run.
DriverPool* driver_pool_of(PyObject* object) {
  auto* pool = dynamic_cast<DriverPool*>(self_of(object)->pool.shared().get());
  if (pool == nullptr) raise({Code::closed, 0, "DriverPoolCore"}, "use a pool that was not created");
  return pool;
}

// ---- creating ---------------------------------------------------------------------------------------------

int init(PyObject* object, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"device", "config", "origin", "kind", "shareable", "max_size", "fd", nullptr};
  PyPool* self = self_of(object);
  PyObject* device = nullptr;
  PyObject* dict = nullptr;
  const char* origin = nullptr;
  const char* kind = "device";
  int shareable = 0;
  Whole max_size{"max_size"};
  DriverPool::Source source;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!s|spO&i:DriverPoolCore",
                                   const_cast<char**>(names), &device, &PyDict_Type, &dict, &origin, &kind,
                                   &shareable, whole_argument, &max_size, &source.fd))
    return -1;
  if (dynamic_cast<DriverPool*>(self->pool.shared().get()) != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the pool was already created; create another one");
    return -1;
  }
  if (std::strcmp(origin, "default") == 0) source.origin = DriverPool::Origin::shared_default;
  if (std::strcmp(origin, "imported") == 0) source.origin = DriverPool::Origin::imported;
  for (int i = 0; i < 3; ++i)
    if (std::strcmp(kind, kDriverPoolKinds[i]) == 0) source.properties.kind = static_cast<DriverPoolKind>(i);
  source.properties.shareable = shareable != 0;
  source.properties.max_size = max_size.value;
  PoolConfig config;
  if (!config_from(dict, &config)) return -1;
  std::shared_ptr<DriverPool> pool;
  Status status;
  try {
    const nb::object backend = nb::borrow(device).attr("backend");
    const std::shared_ptr<Backend> shared = backend_of(nb::cast<Backend&>(backend));
    status = waiting([&] { return DriverPool::open(shared, source, config, &pool); });
  } catch (nb::python_error& error) {
    error.restore();
    return -1;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return -1;
  }
  if (!status.ok()) {
    raise(status, "open the driver pool");
    return -1;
  }
  self->pool = PoolHandle(std::move(pool));
  Py_SETREF(self->device, Py_NewRef(device));
  return 0;
}

// ---- attributes -------------------------------------------------------------------------------------------

bool attribute_from(PyObject* name, DriverPoolAttribute* out) {
  if (!PyUnicode_Check(name)) {
    PyErr_Format(PyExc_TypeError, "the name of an attribute must be a str, not %.100s",
                 type_name(name).c_str());
    return false;
  }
  for (int i = 0; i < kDriverPoolAttributes; ++i)
    if (PyUnicode_CompareWithASCIIString(name, kDriverPoolAttributeNames[i]) == 0) {
      *out = static_cast<DriverPoolAttribute>(i + 1);
      return true;
    }
  PyErr_SetString(PyExc_ValueError, "a driver pool has no attribute with this name");
  return false;
}

PyObject* attribute(PyObject* object, PyObject* name_object) {
  DriverPoolAttribute attribute{};
  if (!attribute_from(name_object, &attribute)) return nullptr;
  DriverPool* pool = driver_pool_of(object);
  if (pool == nullptr) return nullptr;
  std::uint64_t value = 0;
  if (const Status status = waiting([&] { return pool->attribute(attribute, &value); }); !status.ok())
    return raise(status, "read an attribute of the driver pool");
  return PyLong_FromUnsignedLongLong(value);
}

PyObject* set_attribute(PyObject* object, PyObject* arguments) {
  PyObject* name = nullptr;
  Whole value{"value"};
  DriverPoolAttribute attribute{};
  if (!PyArg_ParseTuple(arguments, "OO&:set_attribute", &name, whole_argument, &value) ||
      !attribute_from(name, &attribute))
    return nullptr;
  DriverPool* pool = driver_pool_of(object);
  if (pool == nullptr) return nullptr;
  if (const Status status = waiting([&] { return pool->set_attribute(attribute, value.value); });
      !status.ok())
    return raise(status, "set an attribute of the driver pool");
  Py_RETURN_NONE;
}

// ---- other processes --------------------------------------------------------------------------------------

PyObject* export_fd(PyObject* object, PyObject*) {
  DriverPool* pool = driver_pool_of(object);
  if (pool == nullptr) return nullptr;
  int fd = -1;
  if (const Status status = waiting([&] { return pool->export_pool(&fd); }); !status.ok())
    return raise(status, "export the pool");
  return PyLong_FromLong(fd);
}

PyObject* export_pointer(PyObject* object, PyObject* argument) {
  Address address = 0;
  if (!whole_from(argument, "ptr", ~Address{0}, &address)) return nullptr;
  DriverPool* pool = driver_pool_of(object);
  if (pool == nullptr) return nullptr;
  SharedPointer pointer{};
  std::uint64_t offset = 0;
  const Status status = waiting([&] { return pool->export_pointer(address, &pointer, &offset); });
  if (!status.ok()) return raise(status, "export the allocation");
  return Py_BuildValue("NK",
                       PyBytes_FromStringAndSize(reinterpret_cast<const char*>(pointer.data()),
                                                 static_cast<Py_ssize_t>(pointer.size())),
                       wide(offset));
}

PyObject* import_pointer(PyObject* object, PyObject* arguments) {
  PyPool* self = self_of(object);
  Py_buffer given = {};
  Whole offset{"offset"};
  Whole bytes{"size"};
  PyObject* stream_object = nullptr;
  if (!PyArg_ParseTuple(arguments, "y*O&O&|O:import_pointer", &given, whole_argument, &offset, whole_argument,
                        &bytes, &stream_object))
    return nullptr;
  const unsigned long long size = bytes.value;
  SharedPointer pointer{};
  const bool whole = given.len == static_cast<Py_ssize_t>(pointer.size());
  if (whole) std::memcpy(pointer.data(), given.buf, pointer.size());
  PyBuffer_Release(&given);
  if (!whole)
    return PyErr_Format(PyExc_ValueError, "an exported pointer must have %zu bytes", pointer.size());
  DriverPool* pool = driver_pool_of(object);
  StreamHandle stream = 0;
  if (pool == nullptr || !stream_from(stream_object, self, &stream)) return nullptr;
  Address address = 0;
  const Status status =
      waiting([&] { return pool->import_pointer(pointer, offset.value, size, stream, 0, &address); });
  if (!status.ok()) return raise(status, "import the allocation");
  if (watcher != nullptr && !tell_watcher("on_allocate", "OKKK", object, wide(address), size, wide(stream))) {
    (void)free_address(self, address);
    return nullptr;
  }
  return make_buffer(self, address, size, stream, stream_object, 0);
}

// ---- the type ---------------------------------------------------------------------------------------------

PyMethodDef methods[] = {
    {"attribute", attribute, METH_O, "attribute(name, /)\n--\n\nReturn an attribute of the driver's pool."},
    {"set_attribute", set_attribute, METH_VARARGS,
     "set_attribute(name, value, /)\n--\n\nSet an attribute of the driver's pool."},
    {"export_fd", export_fd, METH_NOARGS,
     "export_fd()\n--\n\nReturn a file descriptor that another process can import."},
    {"export_pointer", export_pointer, METH_O,
     "export_pointer(ptr, /)\n--\n\nReturn the driver's exported pointer, and the offset of the "
     "allocation in what it mean."},
    {"import_pointer", import_pointer, METH_VARARGS,
     "import_pointer(words, offset, size, stream=None, /)\n--\n\nA Buffer over another process's "
     "allocation."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("The native part of vram.DriverPool.")},
    {Py_tp_init, reinterpret_cast<void*>(init)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"vram._native.DriverPoolCore", sizeof(PyPool), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

}  // namespace

void bind_driver_pool(nb::module_& module) {
  const nb::object base = module.attr("PoolCore");
  PyObject* type = PyType_FromModuleAndSpec(module.ptr(), &spec, base.ptr());
  if (type == nullptr) throw nb::python_error();
  if (PyModule_AddObjectRef(module.ptr(), "DriverPoolCore", type) != 0) throw nb::python_error();
  Py_DECREF(type);
}

}  // namespace vram
