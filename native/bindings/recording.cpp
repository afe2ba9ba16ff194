// EventReader: the events of a pool, from its journal or from a recording, as the columns of a
// vram.trace.Trace. vram.core.journal makes a Trace of them; vram.observe.recorder writes them to a file.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "bindings.hpp"
#include "python_types.hpp"
#include "stacks.hpp"

namespace nb = nanobind;

namespace vram {

namespace {

constexpr std::uint64_t kMostBytes = INT64_MAX;  // readers accept no more, but a request may be larger
constexpr std::size_t kKeptEntries = 1 << 20;    // memory for this many is kept between calls

// A part of vram.trace.Action.
enum class TraceAction : std::uint8_t {
  alloc = 0,
  free_requested = 1,
  free_completed = 2,
  segment_map = 5,
  segment_unmap = 6,
  oom = 8,
  user_defined = 9,
};

TraceAction trace_action(Action action) {
  switch (action) {
    case Action::allocate:
      return TraceAction::alloc;
    case Action::free:
    case Action::free_pending:
      return TraceAction::free_requested;
    case Action::free_complete:
      return TraceAction::free_completed;
    case Action::grow:
      return TraceAction::segment_map;
    case Action::shrink:
      return TraceAction::segment_unmap;
    case Action::spilled:
    case Action::returned:
      return TraceAction::user_defined;
    default:
      return TraceAction::oom;
  }
}

// A map whose last key is usually the next one.
template <typename Key, typename Value>
class Known {
 public:
  // Whether the key is new.
  bool add(Key key) {
    if (last_ != nullptr && last_->first == key) return false;
    const auto [place, added] = all_.try_emplace(key);
    last_ = &*place;  // elements do not move
    return added;
  }
  Value& operator[](Key key) {
    (void)add(key);
    return last_->second;
  }

 private:
  std::unordered_map<Key, Value> all_;
  std::pair<const Key, Value>* last_ = nullptr;
};

// A column of a trace. Its memory is reused, so that the kernel does not have to clear new pages.
template <typename Number>
class Column {
 public:
  void begin(std::size_t rows) {
    if (numbers_.size() < rows) numbers_.resize(rows);
    rows_ = rows;
  }
  Number* data() { return numbers_.data(); }
  nb::object view() {
    static char nothing = 0;
    char* first = rows_ == 0 ? &nothing : reinterpret_cast<char*>(numbers_.data());
    PyObject* made =
        PyMemoryView_FromMemory(first, static_cast<Py_ssize_t>(rows_ * sizeof(Number)), PyBUF_READ);
    if (made == nullptr) throw nb::python_error();
    return nb::steal(made);
  }

 private:
  std::vector<Number> numbers_;
  std::size_t rows_ = 0;
};

struct Columns {
  void begin(std::size_t rows) {
    each([rows](const char*, auto& column) { column.begin(rows); });
  }
  nb::dict views() {
    nb::dict all;
    each([&all](const char* name, auto& column) { all[name] = column.view(); });
    return all;
  }
  template <typename Do>
  void each(Do&& apply) {
    apply("action", action);
    apply("stream", stream);
    apply("address", address);
    apply("size", size);
    apply("time_us", time_us);
    apply("stack", stack);
    apply("tag", tag);
  }

  Column<std::uint8_t> action;
  Column<std::uint32_t> stream;
  Column<std::uint64_t> address;
  Column<std::uint64_t> size;
  Column<std::int64_t> time_us;
  Column<std::uint32_t> stack;
  Column<std::uint32_t> tag;
};

// Reads the events of one pool. One thread at a time, except for mark().
class EventReader {
 public:
  EventReader(nb::object pool, nb::object tables, std::uint64_t start_ns)
      : pool_(std::move(pool)),
        tables_(std::move(tables)),
        core_(allocator_of(pool_.ptr())),
        start_ns_(start_ns) {
    if (core_ == nullptr) throw nb::type_error("only a pool has events");
  }
  EventReader(const EventReader&) = delete;
  EventReader& operator=(const EventReader&) = delete;

  std::size_t read_journal() {
    const Status status = pool()->pool.call([this](Allocator& pool) { pool.journal(entries_, &dropped_); });
    if (!status.ok()) {
      (void)raise(status, "read the journal of the pool");
      throw nb::python_error();
    }
    return entries_.size();
  }

  void record(std::uint64_t most) {
    const nb::gil_scoped_release released;
    core_->start_recording(most);
  }

  std::size_t collect() {
    const nb::gil_scoped_release released;
    dropped_ += core_->take_recorded(entries_);
    return entries_.size();
  }

  nb::tuple columns() {
    columns_.begin(learn());
    std::vector<std::pair<std::uint64_t, std::int64_t>> marks;
    {
      const nb::gil_scoped_release released;
      fill(marks);
      entries_.clear();
      if (entries_.capacity() > kKeptEntries) entries_.shrink_to_fit();
    }
    nb::list list;
    for (const auto& [number, time_us] : marks) list.append(nb::make_tuple(number, time_us));
    return nb::make_tuple(columns_.views(), list, std::exchange(dropped_, 0));
  }

  void mark(std::uint64_t number) {
    const nb::gil_scoped_release released;
    core_->mark(number);
  }

 private:
  // The numbers of a label in the trace.
  struct Numbers {
    std::uint32_t stack = 0;
    std::uint32_t tag = 0;
  };

  PyPool* pool() const { return reinterpret_cast<PyPool*>(pool_.ptr()); }

  std::int64_t time_of(const JournalEntry& entry) const {
    return (static_cast<std::int64_t>(entry.time_ns) - static_cast<std::int64_t>(start_ns_)) / 1000;
  }

  static bool is_move(const JournalEntry& entry) {
    return entry.action == Action::spilled || entry.action == Action::returned;
  }
  // Moves are events of the user's kind, which every reader knows. Their stack says what they are.
  std::uint32_t move_stack(const JournalEntry& entry) const {
    return entry.action == Action::spilled ? spill_stack_ : return_stack_;
  }

  // Numbers every new stream and label; returns the number of rows to come.
  std::size_t learn() {
    std::size_t rows = 0;
    bool moved = false;
    std::vector<StreamHandle> streams;
    std::vector<std::uint32_t> labels;
    {
      const nb::gil_scoped_release released;
      for (const JournalEntry& entry : entries_) {
        rows += entry.action == Action::mark ? 0 : entry.action == Action::free ? 2 : 1;
        if (streams_.add(entry.stream)) streams.push_back(entry.stream);
        if (labels_.add(entry.tag)) labels.push_back(entry.tag);
        moved = moved || is_move(entry);
      }
    }
    if (moved && spill_stack_ == 0) {
      spill_stack_ = nb::cast<std::uint32_t>(tables_.attr("move")(false));
      return_stack_ = nb::cast<std::uint32_t>(tables_.attr("move")(true));
    }
    for (const StreamHandle stream : streams)
      streams_[stream] = nb::cast<std::uint32_t>(tables_.attr("stream")(stream));
    for (const std::uint32_t label : labels) labels_[label] = numbers_of(label);
    return rows;
  }

  Numbers numbers_of(std::uint32_t label) {
    PyObject* frames = stack_of(label);
    if (frames == nullptr) throw nb::python_error();
    const nb::object stack = nb::steal(frames);
    const nb::object tag = nb::steal(tag_name(pool(), label));
    return {nb::cast<std::uint32_t>(tables_.attr("stack")(stack)),
            nb::cast<std::uint32_t>(tables_.attr("tag")(tag))};
  }

  // Times never decrease: of two streams' events, the later one may have read the clock first. And a mark
  // lies between the events on either side of it, even if the clock gives them the same time.
  void fill(std::vector<std::pair<std::uint64_t, std::int64_t>>& marks) {
    std::uint8_t* __restrict action = columns_.action.data();
    std::uint32_t* __restrict stream = columns_.stream.data();
    std::uint64_t* __restrict address = columns_.address.data();
    std::uint64_t* __restrict size = columns_.size.data();
    std::int64_t* __restrict time_us = columns_.time_us.data();
    std::uint32_t* __restrict stack = columns_.stack.data();
    std::uint32_t* __restrict tag = columns_.tag.data();
    std::size_t row = 0;
    for (const JournalEntry& entry : entries_) {
      const bool is_mark = entry.action == Action::mark;
      last_us_ = std::max(last_us_ + (is_mark ? 1 : 0), time_of(entry));
      if (is_mark) {
        marks.emplace_back(entry.bytes, last_us_);
        continue;
      }
      const bool asked = entry.action == Action::allocate || entry.action == Action::out_of_memory;
      const Numbers numbers = labels_[entry.tag];
      const std::uint32_t number = streams_[entry.stream];
      const std::size_t end = row + (entry.action == Action::free ? 2 : 1);
      for (TraceAction code = trace_action(entry.action); row < end; ++row) {
        action[row] = static_cast<std::uint8_t>(code);
        stream[row] = number;
        address[row] = entry.address;
        size[row] = std::min(entry.bytes, kMostBytes);
        time_us[row] = last_us_;
        stack[row] = asked ? numbers.stack : is_move(entry) ? move_stack(entry) : 0;
        tag[row] = numbers.tag;
        code = TraceAction::free_completed;
      }
    }
  }

  nb::object pool_;
  nb::object tables_;
  std::shared_ptr<Allocator> core_;
  const std::uint64_t start_ns_;
  std::int64_t last_us_ = -1;
  std::uint32_t spill_stack_ = 0;  // 0: not known yet
  std::uint32_t return_stack_ = 0;
  std::uint64_t dropped_ = 0;
  std::vector<JournalEntry> entries_;
  Columns columns_;
  Known<StreamHandle, std::uint32_t> streams_;
  Known<std::uint32_t, Numbers> labels_;
};

}  // namespace

void bind_recording(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<EventReader>(module, "EventReader", "The events of a pool as columns of a trace.")
      .def(
          nb::init<nb::object, nb::object, std::uint64_t>(), "pool"_a, "tables"_a, "start_ns"_a,
          nb::sig("def __init__(self, pool: PoolCore, tables: Any, start_ns: int) -> None"),
          "`tables` numbers streams, tags and stacks (vram.trace.tables); times count from `start_ns` of the "
          "monotonic clock.")
      .def("read_journal", &EventReader::read_journal,
           "Copy the events that the pool's journal keeps; returns how many wait for columns().")
      .def("record", &EventReader::record, "most"_a,
           "Have the pool keep up to `most` events until they are collected; 0 ends it.")
      .def("collect", &EventReader::collect, "Take the recorded events; returns how many wait for columns().")
      .def("columns", &EventReader::columns,
           nb::sig("def columns(self) -> tuple[dict[str, memoryview], list[tuple[int, int]], int]"),
           "The events as columns, valid until the next call, marks as (number, time_us), and the number of "
           "dropped events.")
      .def("mark", &EventReader::mark, "number"_a, "Mark this point between the events of a recording.");
}

}  // namespace vram
