// The words of failures: what vram_last_error and vram_last_out_of_memory say. Kept for each thread, without
// memory of the heap, so that it works at the end of a thread and when there is no memory.
#include <cctype>
#include <cstdarg>
#include <cstdio>

#include "backends/cuda_driver.hpp"
#include "state.hpp"

namespace vram::c {

namespace {

constexpr std::size_t kTextBytes = 2048;
thread_local constinit char last_text[kTextBytes] = "";
thread_local constinit OutOfMemoryReport last_report;

// "1.5 GiB", in a place of the caller's.
struct SizeText {
  explicit SizeText(std::uint64_t bytes) {
    static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
    if (bytes < kKiB) {
      std::snprintf(text, sizeof text, "%u B", static_cast<unsigned>(bytes));
      return;
    }
    double value = static_cast<double>(bytes) / kKiB;
    int unit = 0;
    for (; value >= 1023.995 && unit < 3; ++unit) value /= kKiB;
    std::snprintf(text, sizeof text, "%.2f %s", value, kUnits[unit]);
  }
  operator const char*() const { return text; }
  char text[32];
};

// What was not valid, by the core's word for the call.
vram_status invalid_as(const char* call) {
  static constexpr struct {
    const char* call;
    vram_status status;
  } kKinds[] = {
      {"free", VRAM_BAD_POINTER},
      {"find", VRAM_BAD_POINTER},
      {"record_stream", VRAM_BAD_POINTER},
      {Arena::kOtherThread, VRAM_OTHER_THREAD},
      {Arena::kOpenMarks, VRAM_BAD_MARK},
      {Arena::kMarkOver, VRAM_BAD_MARK},
      {Arena::kInCallback, VRAM_IN_CALLBACK},
  };
  for (const auto& kind : kKinds)
    if (std::strcmp(call, kind.call) == 0) return kind.status;
  return VRAM_BAD_ARGUMENT;
}

vram_status status_of(const Status& status) {
  switch (status.code) {
    case Code::ok:
      return VRAM_OK;
    case Code::out_of_memory:
      return VRAM_OUT_OF_MEMORY;
    case Code::invalid:
      return invalid_as(status.call);
    case Code::unsupported:
    case Code::absent:
      return VRAM_UNSUPPORTED;
    case Code::closed:
      return VRAM_CLOSED;
    case Code::capturing:
      return VRAM_CAPTURING;
    case Code::deadlock:
      return VRAM_DEADLOCK;
    default:
      return VRAM_FAILED;
  }
}

const char* advice(vram_status status, const char* call) {
  if (std::strcmp(call, "space_reserve") == 0)
    return "there is no room for the addresses of pages, as under valgrind or a limit of addresses (ulimit "
           "-v); "
           "set the option plain of the pool";
  switch (status) {
    case VRAM_OUT_OF_MEMORY:
      return "the device has no room for it; free memory here or in other processes, or ask for less";
    case VRAM_BAD_POINTER:
      return "the pointer is not a live allocation here: it was freed before, points inside an allocation, "
             "or "
             "came from elsewhere; free what was allocated, once";
    case VRAM_BAD_ARGUMENT:
      return "an argument is not valid on this device: a stream that is gone or another device's, an address "
             "it does not know, or an alignment that is no power of two";
    case VRAM_UNSUPPORTED:
      return "the device does not offer this";
    case VRAM_CLOSED:
      return "the pool below was destroyed, or all of it belongs to the parent of a fork; make a new one";
    case VRAM_CAPTURING:
      return "the stream is being captured into a graph, where its work cannot be waited for; do this before "
             "the capture begins or after it has ended";
    case VRAM_DEADLOCK:
      return "the call came from work of a stream and would wait for work behind it, which cannot begin "
             "before the call returns; make it from another thread";
    case VRAM_OTHER_THREAD:
      return "the arena belongs to another thread; once that has finished with it, call vram_arena_adopt "
             "here";
    case VRAM_BAD_MARK:
      return "marks end in the reverse order of their making: rewind to the outermost open one before a "
             "reset, "
             "and not to one that has ended";
    case VRAM_IN_CALLBACK:
      return "a function of vram_arena_on_reset called it while the arena is being reset; allocate, mark, "
             "rewind, reset, register and destroy after the reset has returned";
    default:
      return "the driver refused it; the device may need to be reset";
  }
}

class Text {
 public:
  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    std::va_list arguments;
    va_start(arguments, format);
    add(format, arguments);
    va_end(arguments);
  }
  void add(const char* format, std::va_list arguments) {
    const int more = std::vsnprintf(last_text + used_, kTextBytes - used_, format, arguments);
    if (more > 0) used_ = std::min(kTextBytes - 1, used_ + static_cast<std::size_t>(more));
  }

 private:
  std::size_t used_ = 0;
};

}  // namespace

vram_status fail(vram_status status, const char* call, const char* format, ...) {
  Text text;
  text.add("%s: ", call);
  std::va_list arguments;
  va_start(arguments, format);
  text.add(format, arguments);
  va_end(arguments);
  text.add(" [%s]", vram_status_name(status));
  return status;
}

vram_status fail(const Status& status, const char* call) {
  const vram_status said = status_of(status);
  if (said == VRAM_OUT_OF_MEMORY) last_report = {};
  Text text;
  text.add("%s: %s [%s, in %s", call, advice(said, status.call), vram_status_name(said), status.call);
  const bool cuda = std::strncmp(status.call, "cu", 2) == 0 && std::isupper(status.call[2]) != 0;
  if (status.native != 0)
    text.add(", %s", cuda ? cuda_error_text(status.native).c_str() : std::to_string(status.native).c_str());
  text.add("]");
  return said;
}

vram_status fail_out_of_memory(const OutOfMemoryReport& report, const char* call, const Backend& backend,
                               StreamHandle stream) {
  last_report = report;
  const std::uint64_t most =
      report.limit != 0 ? std::min(report.limit, report.device_total) : report.device_total;
  const bool limited = report.limit != 0 && report.limit < report.device_total;
  const std::uint64_t growth =
      std::min(report.device_free, most > report.reserved ? most - report.reserved : 0);
  Text text;
  text.add("%s: out of memory: failed to allocate %s on stream %#llx of %s; only %s are available", call,
           SizeText(report.requested).text, static_cast<unsigned long long>(stream),
           backend.info().name.c_str(), SizeText(growth + report.free_pages).text);
  if (limited) {
    text.add(" within the pool's limit of %s.\n", SizeText(report.limit).text);
  } else {
    text.add(" of the device's %s.\n", SizeText(report.device_total).text);
  }
  text.add("The pool holds %s: %s allocated", SizeText(report.reserved).text, SizeText(report.live).text);
  const struct {
    std::uint64_t bytes;
    const char* meaning;
  } parts[] = {
      {report.pending, "freed, but queued work may still use it"},
      {report.cached, "in stream caches"},
      {report.free_pages, "in free pages of this stream"},
      {report.free_elsewhere, "in free pages of other streams"},
      {report.stranded, "free, but split up by blocks in use"},
  };
  for (const auto& part : parts)
    if (part.bytes != 0) text.add(", %s %s", SizeText(part.bytes).text, part.meaning);
  text.add(". Of the device's %s, %s are free.\n", SizeText(report.device_total).text,
           SizeText(report.device_free).text);
  const std::uint64_t demand = report.live + report.requested;
  if (report.requested > most || demand < report.requested) {
    text.add("What would help: a smaller request; this one alone exceeds the available %s.",
             SizeText(most).text);
  } else if (demand > most) {
    text.add("What would help: freeing %s of the allocated memory", SizeText(demand - most).text);
    if (limited) text.add(", or a limit of at least %s", SizeText(round_up(demand, kSlotBytes)).text);
    text.add(".");
  } else {
    text.add("What would help: freeing blocks next to long-lived ones, %s, or requesting less.",
             limited ? "a larger limit" : "releasing memory of other pools and processes");
  }
  return VRAM_OUT_OF_MEMORY;
}

vram_status bad_handle(const char* call, const char* kind) {
  return fail(VRAM_BAD_HANDLE, call, "the %s is null, already destroyed, or a handle of another kind", kind);
}

vram_status null_pointer(const char* call, const char* argument) {
  return fail(VRAM_BAD_ARGUMENT, call, "%s is null", argument);
}

}  // namespace vram::c

using namespace vram::c;

extern "C" {

int vram_version(void) { return VRAM_VERSION; }

const char* vram_status_name(vram_status status) {
  static constexpr const char* kNames[] = {
      "ok",        "out_of_memory", "bad_argument", "bad_handle", "bad_pointer", "unsupported", "closed",
      "capturing", "failed",        "other_thread", "bad_mark",   "deadlock",    "in_callback",
  };
  static_assert(std::size(kNames) == VRAM_IN_CALLBACK + 1);
  const auto number = static_cast<std::size_t>(status);
  return number < std::size(kNames) ? kNames[number] : "unknown";
}

const char* vram_last_error(void) { return last_text; }

vram_status vram_last_out_of_memory(vram_oom_report* out) {
  vram_oom_report full = VRAM_OOM_REPORT_INIT;
  full.requested = last_report.requested;
  full.limit = last_report.limit;
  full.device_total = last_report.device_total;
  full.device_free = last_report.device_free;
  full.reserved = last_report.reserved;
  full.allocated = last_report.live;
  full.pending = last_report.pending;
  full.cached = last_report.cached;
  full.free_pages = last_report.free_pages;
  full.free_elsewhere = last_report.free_elsewhere;
  full.stranded = last_report.stranded;
  full.largest_free = last_report.largest_free;
  return give(full, out, "vram_last_out_of_memory");
}

}  // extern "C"
