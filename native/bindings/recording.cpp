// RecordingCore: the events of a pool under way to a trace file, as the columns that vram.trace writes. When
// to write, and where, is decided in vram.recorder.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "bindings.hpp"
#include "python_types.hpp"
#include "stacks.hpp"

namespace nb = nanobind;

namespace vram {

namespace {

// vram.trace.Action, in part.
enum class TraceAction : std::uint8_t {
  alloc = 0,
  free_requested = 1,
  free_completed = 2,
  segment_map = 5,
  segment_unmap = 6,
  oom = 8,
};

TraceAction code_of(Action action) {
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
    default:
      return TraceAction::oom;
  }
}

// A column of a trace: a bytes object that is filled without the GIL while nobody else knows it.
template <typename Number>
class Column {
 public:
  explicit Column(std::size_t rows)
      : bytes_(
            nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(rows * sizeof(Number))))) {
    if (!bytes_.is_valid()) throw nb::python_error();
    next_ = reinterpret_cast<Number*>(PyBytes_AS_STRING(bytes_.ptr()));
  }
  void add(Number value) { *next_++ = value; }
  const nb::object& bytes() const { return bytes_; }

 private:
  nb::object bytes_;
  Number* next_;
};

struct Columns {
  explicit Columns(std::size_t rows)
      : action(rows), stream(rows), address(rows), size(rows), time_us(rows), stack(rows), tag(rows) {}
  nb::dict dict() const {
    nb::dict all;
    all["action"] = action.bytes();
    all["stream"] = stream.bytes();
    all["address"] = address.bytes();
    all["size"] = size.bytes();
    all["time_us"] = time_us.bytes();
    all["stack"] = stack.bytes();
    all["tag"] = tag.bytes();
    return all;
  }

  Column<std::uint8_t> action;
  Column<std::uint32_t> stream;
  Column<std::uint64_t> address;
  Column<std::uint64_t> size;
  Column<std::int64_t> time_us;
  Column<std::uint32_t> stack;
  Column<std::uint32_t> tag;
};

// One recording of one pool. One thread at a time, except for mark().
class RecordingCore {
 public:
  RecordingCore(nb::object pool, nb::object writer, std::uint64_t start_ns, std::uint64_t most)
      : pool_(std::move(pool)),
        writer_(std::move(writer)),
        core_(allocator_of(pool_.ptr())),
        start_ns_(start_ns) {
    if (core_ == nullptr) throw nb::type_error("only a pool can be recorded");
    const nb::gil_scoped_release released;
    core_->start_recording(most);
  }
  RecordingCore(const RecordingCore&) = delete;
  RecordingCore& operator=(const RecordingCore&) = delete;

  std::size_t collect() {
    const nb::gil_scoped_release released;
    dropped_ += core_->take_recorded(entries_);
    return entries_.size();
  }

  nb::tuple columns() {
    const std::vector<JournalEntry> entries = std::exchange(entries_, {});
    learn(entries);
    const auto frees = std::count_if(entries.begin(), entries.end(),
                                     [](const JournalEntry& each) { return each.action == Action::free; });
    const auto marks = std::count_if(entries.begin(), entries.end(),
                                     [](const JournalEntry& each) { return each.action == Action::mark; });
    Columns columns(entries.size() + static_cast<std::size_t>(frees - marks));
    std::vector<std::pair<std::uint64_t, std::int64_t>> marked;
    {
      const nb::gil_scoped_release released;
      for (const JournalEntry& entry : entries) {
        if (entry.action == Action::mark) {
          marked.emplace_back(entry.bytes, last_us_ = std::max(last_us_ + 1, time_of(entry)));
        } else {
          add(columns, entry);
        }
      }
    }
    nb::list list;
    for (const auto& [number, time_us] : marked) list.append(nb::make_tuple(number, time_us));
    return nb::make_tuple(columns.dict(), list, std::exchange(dropped_, 0));
  }

  void mark(std::uint64_t number) { core_->mark(number); }

  void stop() {
    const nb::gil_scoped_release released;
    core_->start_recording(0);
  }

 private:
  // What the numbers of a label are in the file.
  struct Numbers {
    std::uint32_t stack;
    std::uint32_t tag;
  };

  std::int64_t time_of(const JournalEntry& entry) const {
    return (static_cast<std::int64_t>(entry.time_ns) - static_cast<std::int64_t>(start_ns_)) / 1000;
  }

  // Gives every stream and label that is new its number in the file.
  void learn(const std::vector<JournalEntry>& entries) {
    for (const JournalEntry& entry : entries) {
      if (entry.action == Action::mark) continue;
      if (!streams_.contains(entry.stream))
        streams_[entry.stream] = nb::cast<std::uint32_t>(writer_.attr("stream")(entry.stream));
      if (entry.tag == 0 || labels_.contains(entry.tag)) continue;
      PyObject* frames = stack_of(entry.tag);
      if (frames == nullptr) throw nb::python_error();
      const nb::object name = nb::steal(tag_name(reinterpret_cast<PyPool*>(pool_.ptr()), entry.tag));
      labels_[entry.tag] = {nb::cast<std::uint32_t>(writer_.attr("stack")(nb::steal(frames))),
                            nb::cast<std::uint32_t>(writer_.attr("tag")(name))};
    }
  }

  // Times never fall: of two streams' events, the later one may have looked at the clock first.
  void add(Columns& columns, const JournalEntry& entry) {
    last_us_ = std::max(last_us_, time_of(entry));
    const Numbers numbers = entry.tag == 0 ? Numbers{0, 0} : labels_.find(entry.tag)->second;
    const std::uint32_t stream = streams_.find(entry.stream)->second;
    const bool asked = entry.action == Action::allocate || entry.action == Action::out_of_memory;
    const auto row = [&](TraceAction code) {
      columns.action.add(static_cast<std::uint8_t>(code));
      columns.stream.add(stream);
      columns.address.add(entry.address);
      columns.size.add(entry.bytes);
      columns.time_us.add(last_us_);
      columns.stack.add(asked ? numbers.stack : 0);
      columns.tag.add(numbers.tag);
    };
    row(code_of(entry.action));
    if (entry.action == Action::free) row(TraceAction::free_completed);
  }

  nb::object pool_;
  nb::object writer_;
  std::shared_ptr<Allocator> core_;
  const std::uint64_t start_ns_;
  std::int64_t last_us_ = -1;
  std::uint64_t dropped_ = 0;
  std::vector<JournalEntry> entries_;
  std::unordered_map<StreamHandle, std::uint32_t> streams_;
  std::unordered_map<std::uint32_t, Numbers> labels_;
};

}  // namespace

void bind_recording(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<RecordingCore>(module, "RecordingCore", "The events of a pool under way to a trace file.")
      .def(nb::init<nb::object, nb::object, std::uint64_t, std::uint64_t>(), "pool"_a, "writer"_a,
           "start_ns"_a, "most"_a,
           nb::sig("def __init__(self, pool: PoolCore, writer: Any, start_ns: int, most: int) -> None"),
           "Begin: from now on the pool keeps up to `most` events until they are collected. `writer` numbers "
           "streams, tags and stacks; times count from `start_ns` of the monotonic clock.")
      .def("collect", &RecordingCore::collect,
           "Take over what has happened; how many events wait for columns().")
      .def("columns", &RecordingCore::columns,
           nb::sig("def columns(self) -> tuple[dict[str, bytes], list[tuple[int, int]], int]"),
           "What was collected as columns of a trace, marks as (number, time_us), and how many events were "
           "dropped.")
      .def("mark", &RecordingCore::mark, "number"_a, "Mark this place between the events.")
      .def("stop", &RecordingCore::stop, "Have the pool keep no more events.");
}

}  // namespace vram
