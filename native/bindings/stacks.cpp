// Walks Python's frames and interns the stacks in a table. See stacks.hpp.
#include "stacks.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <unordered_map>
#include <vector>

#include "bindings.hpp"
#include "python_types.hpp"

namespace nb = nanobind;

namespace vram {

namespace {

constexpr std::size_t kMostFrames = 64;         // the innermost ones are kept
constexpr std::uint32_t kMostStacks = 1 << 18;  // different stacks; they keep code objects alive
constexpr std::uint32_t kStackBit = 1u << 31;   // distinguishes labels from plain tags

// A place in a program. The line number is computed only when it is read.
struct Place {
  PyCodeObject* code;
  int instruction;
  bool operator==(const Place&) const = default;
};
using Walk = std::array<Place, kMostFrames>;

std::uint64_t mixed(std::uint64_t hash, const Place& place) {
  hash ^= reinterpret_cast<std::uint64_t>(place.code) + static_cast<std::uint64_t>(place.instruction);
  hash *= 0xD6E8FEB86659FD93u;
  return hash ^ (hash >> 32);
}
struct PlaceHash {
  std::size_t operator()(const Place& place) const { return mixed(0, place); }
};

struct Entry {
  std::uint64_t hash = 0;
  std::size_t first = 0;  // in places
  std::uint32_t count = 0;
  std::uint32_t tag = 0;
  PyObject* frames = nullptr;  // strong; created on first use
};

// Guarded by the GIL. Never destroyed: events that refer to its entries are written until the process ends.
struct Table {
  std::vector<Place> places;  // of all entries in sequence; each holds its code object
  std::vector<Entry> entries;
  std::vector<std::uint32_t> slots = std::vector<std::uint32_t>(1024);  // 1 + entry, open addressing; 0: none
  std::unordered_map<Place, PyObject*, PlaceHash> frames;               // strong; of places that were read
  std::uint64_t lost = 0;  // labels that were requested but not kept
};
Table& table() {
  static Table* const kept = new Table();
  return *kept;
}

// The current stack, innermost call first. Code objects are borrowed from running frames.
std::size_t walk(Walk& out) {
  std::size_t count = 0;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr && count < kMostFrames) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    out[count++] = {code, frame_get_lasti(frame)};
    Py_DECREF(reinterpret_cast<PyObject*>(code));
    PyFrameObject* caller = frame_get_back(frame);
    Py_DECREF(reinterpret_cast<PyObject*>(frame));
    frame = caller;
  }
  Py_XDECREF(reinterpret_cast<PyObject*>(frame));
  return count;
}

std::uint64_t hash_of(const Walk& places, std::size_t count, std::uint32_t tag) {
  std::uint64_t hash = 0x9E3779B97F4A7C15u ^ tag;
  for (std::size_t i = 0; i < count; ++i) hash = mixed(hash, places[i]);
  return hash;
}

// The slot of the entry, or the slot where it can be inserted.
std::uint32_t& slot_of(Table& stacks, std::uint64_t hash, const Walk& places, std::size_t count,
                       std::uint32_t tag) {
  const std::size_t mask = stacks.slots.size() - 1;
  for (std::size_t i = hash & mask;; i = (i + 1) & mask) {
    if (stacks.slots[i] == 0) return stacks.slots[i];
    const Entry& entry = stacks.entries[stacks.slots[i] - 1];
    if (entry.hash == hash && entry.tag == tag && entry.count == count &&
        std::equal(places.begin(), places.begin() + static_cast<std::ptrdiff_t>(count),
                   stacks.places.begin() + static_cast<std::ptrdiff_t>(entry.first)))
      return stacks.slots[i];
  }
}

void grow(Table& stacks) {
  std::vector<std::uint32_t> slots(2 * stacks.slots.size());
  for (std::uint32_t number = 0; number < stacks.entries.size(); ++number) {
    std::size_t i = stacks.entries[number].hash & (slots.size() - 1);
    while (slots[i] != 0) i = (i + 1) & (slots.size() - 1);
    slots[i] = number + 1;
  }
  stacks.slots.swap(slots);
}

const Entry* entry_of(std::uint32_t label) {
  return (label & kStackBit) != 0 ? &table().entries[label & ~kStackBit] : nullptr;
}

// ---- reading ----------------------------------------------------------------------------------------------

nb::object frame_at(const Place& place) {
  if (const auto known = table().frames.find(place); known != table().frames.end())
    return nb::borrow(known->second);
  static PyObject* frame_type = nullptr;
  PyObject* make = python_function(frame_type, "vram.trace.model", "Frame");
  if (make == nullptr) throw nb::python_error();
  const nb::handle code(reinterpret_cast<PyObject*>(place.code));
  const int line = code_addr2line(place.code, place.instruction);
  nb::object frame = nb::handle(make)(code.attr("co_filename"), std::max(line, 0), code.attr("co_qualname"));
  if (table().frames.emplace(place, frame.ptr()).second) frame.inc_ref();
  return frame;
}

// Whether a frame belongs to this package.
bool inside(const Place& place) {
  static const std::string package = [] {
    const auto file = nb::cast<std::string>(nb::module_::import_("vram").attr("__file__"));
    return file.substr(0, file.rfind('/') + 1);
  }();
  PyObject* name = PyObject_GetAttrString(reinterpret_cast<PyObject*>(place.code), "co_filename");
  const char* file = name == nullptr ? nullptr : utf8_of(name);
  if (file == nullptr) PyErr_Clear();
  const bool found = file != nullptr && std::strncmp(file, package.c_str(), package.size()) == 0;
  Py_XDECREF(name);
  return found;
}

nb::object frames_of(const Entry& entry) {
  const std::vector<Place> places(
      table().places.begin() + static_cast<std::ptrdiff_t>(entry.first),
      table().places.begin() + static_cast<std::ptrdiff_t>(entry.first + entry.count));
  const auto outside = std::find_if_not(places.begin(), places.end(), inside);
  nb::list frames;
  for (auto place = outside == places.end() ? places.begin() : outside; place != places.end(); ++place)
    frames.append(frame_at(*place));
  return nb::tuple(frames);
}

}  // namespace

std::uint32_t label_here(std::uint32_t tag) {
  Walk places;
  const std::size_t count = walk(places);  // may run finalizers; nothing below does
  if (count == 0) return tag;
  const std::uint64_t hash = hash_of(places, count, tag);
  Table& stacks = table();
  std::uint32_t& slot = slot_of(stacks, hash, places, count, tag);
  if (slot != 0) return kStackBit | (slot - 1);
  const auto number = static_cast<std::uint32_t>(stacks.entries.size());
  if (number == kMostStacks) {
    ++stacks.lost;
    return tag;
  }
  try {
    const std::size_t first = stacks.places.size();
    stacks.places.insert(stacks.places.end(), places.begin(),
                         places.begin() + static_cast<std::ptrdiff_t>(count));
    stacks.entries.push_back({hash, first, static_cast<std::uint32_t>(count), tag, nullptr});
    for (std::size_t i = 0; i < count; ++i) Py_INCREF(reinterpret_cast<PyObject*>(places[i].code));
    slot = number + 1;
    if (2 * stacks.entries.size() > stacks.slots.size()) grow(stacks);
  } catch (const std::bad_alloc&) {
    ++stacks.lost;
    return tag;  // the host is out of memory; the allocation itself may still succeed
  }
  return kStackBit | number;
}

std::uint64_t stacks_kept() { return table().entries.size(); }
std::uint64_t stacks_lost() { return table().lost; }

std::uint32_t tag_of(std::uint32_t label) {
  const Entry* entry = entry_of(label);
  return entry != nullptr ? entry->tag : label;
}

std::vector<std::uint32_t> labels_of(std::uint32_t tag) {
  std::vector<std::uint32_t> labels{tag};
  const auto count = static_cast<std::uint32_t>(table().entries.size());
  for (std::uint32_t number = 0; number < count; ++number)
    if (table().entries[number].tag == tag) labels.push_back(kStackBit | number);
  return labels;
}

PyObject* stack_of(std::uint32_t label) {
  const Entry* entry = entry_of(label);
  if (entry == nullptr) return PyTuple_New(0);
  if (entry->frames != nullptr) return Py_NewRef(entry->frames);
  try {
    PyObject* frames = frames_of(*entry).release().ptr();
    Py_XSETREF(table().entries[label & ~kStackBit].frames, frames);  // the table may have grown in between
    return Py_NewRef(frames);
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  }
}

void bind_stacks(nb::module_& module) {
  module.def(
      "stack_here",
      [] {
        PyObject* frames = stack_of(label_here(0));
        if (frames == nullptr) throw nb::python_error();
        return nb::steal(frames);
      },
      nb::sig("def stack_here() -> tuple[Frame, ...]"),
      "Return the current stack, innermost call first, without frames of this package.");
}

}  // namespace vram
