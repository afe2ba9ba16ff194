// Real memory by mmap and one worker thread per stream. ledger.cpp validates the memory calls; this file
// performs them.
#include "backends/host.hpp"

#include <cxxabi.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <new>
#include <system_error>
#include <thread>

#include "base/forks.hpp"
#include "base/waits.hpp"

namespace vram {

// ---- streams ------------------------------------------------------------------------------------

// An ordered queue and the thread that empties it. The thread starts with the first operation and
// holds a reference to the stream, not to the backend.
class HostStream : public std::enable_shared_from_this<HostStream> {
 public:
  // A position in a stream's order, behind this many of its operations.
  struct Point {
    std::shared_ptr<HostStream> stream;
    std::uint64_t position = 0;
    bool reached() const { return stream->reached(position); }
  };

  // In the child of a fork nothing of it is destroyed: its thread belongs to the parent.
  static std::shared_ptr<HostStream> make() {
    return {new HostStream(), [generation = process_generation()](HostStream* stream) {
              if (generation == process_generation()) delete stream;
            }};
  }

  // Code::closed once close() was called, Code::failed if no thread can be started.
  Code enqueue(std::function<void()> work, int* native) {
    const std::lock_guard lock(mutex_);
    return enqueue_locked(std::move(work), native);
  }
  // Makes later operations wait for another stream.
  Code enqueue_wait(const Point& point, int* native) {
    const std::lock_guard lock(mutex_);
    const auto wait = [point] { (void)point.stream->wait_for(point.position); };
    if (const Code code = enqueue_locked(wait, native); code != Code::ok) return code;
    waits_.push_back({queued_, point});
    return Code::ok;
  }
  std::uint64_t queued() {
    const std::lock_guard lock(mutex_);
    return queued_;
  }
  bool reached(std::uint64_t position) const { return finished_.load(std::memory_order_acquire) >= position; }
  // The host's wait for a point. Code::deadlock if it would never end: the caller is work on a stream, and
  // the point is behind that work, in the same stream or through waits of others.
  static Code wait(const Point& point) {
    if (point.reached()) return Code::ok;
    if (current == nullptr) return point.stream->wait_for(point.position);
    {
      const std::lock_guard lock(waiting_works);
      if (behind_this_work(point)) return Code::deadlock;
      current->set_awaited(point);
    }
    const Code code = point.stream->wait_for(point.position);
    current->set_awaited({});
    return code;
  }
  // Whether this thread runs this stream's work.
  bool here() const { return current == this; }
  // Whether this thread runs a stream's work.
  static bool on_a_stream() { return current != nullptr; }
  void close() {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  // Whether join() would return immediately.
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  // pre: closed, and not started or not called on its own thread.
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Wait {
    std::uint64_t operation;  // counted like positions
    Point point;
  };

  HostStream() = default;

  // pre: the lock is held.
  Code enqueue_locked(std::function<void()> work, int* native) {
    if (closing_) return Code::closed;
    if (!thread_.joinable()) {
      if (const int error = start(); error != 0) return *native = error, Code::failed;
    }
    queue_.push_back(std::move(work));
    ++queued_;
    changed_.notify_all();
    return Code::ok;
  }
  Code wait_for(std::uint64_t position) {
    std::unique_lock lock(mutex_);
    const auto there = [&] { return reached(position); };
    if (!interruptible()) {
      changed_.wait(lock, there);
      return Code::ok;
    }
    while (!changed_.wait_for(lock, kWaitSlice, there)) {
      lock.unlock();
      if (interrupted()) return Code::interrupted;
      lock.lock();
    }
    return Code::ok;
  }
  void set_awaited(const Point& point) {
    const std::lock_guard lock(mutex_);
    awaited_ = point;
  }
  // What must be reached before this stream gets to the position: what its queue waits for, and what the
  // running work waits for.
  void add_needs(std::uint64_t position, std::vector<Point>* out) {
    const std::lock_guard lock(mutex_);
    if (reached(position)) return;
    for (const Wait& wait : waits_)
      if (wait.operation <= position) out->push_back(wait.point);
    if (awaited_.stream) out->push_back(awaited_);
  }
  // Whether a point is reached only after the work running on this thread has completed. A point needs only
  // what was queued before it, so a cycle of waits is closed by a wait of the work itself and found here.
  // pre: waiting_works is held, so that one of two works that wait for each other sees the other's wait.
  static bool behind_this_work(const Point& point) {
    std::unordered_map<HostStream*, std::uint64_t> asked;
    std::vector<Point> needs = {point};
    while (!needs.empty()) {
      const Point need = std::move(needs.back());
      needs.pop_back();
      if (need.reached()) continue;
      if (need.stream.get() == current) return true;
      std::uint64_t& farthest = asked[need.stream.get()];
      if (need.position <= farthest) continue;
      farthest = need.position;
      need.stream->add_needs(need.position, &needs);
    }
    return false;
  }

  // Signals go to the program's own threads.
  int start() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    try {
      thread_ = std::thread([self = shared_from_this()] { self->run(); });
    } catch (const std::system_error& failure) {
      error = failure.code().value();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return error;
  }
  void run() {
    current = this;
    while (wait_for_work()) run_next();
    ended_.store(true, std::memory_order_release);
  }
  // False if the stream is closed and nothing is left to do.
  bool wait_for_work() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closing_ || !queue_.empty(); });
    return !queue_.empty();
  }
  // The work is destroyed before it counts as completed: its references are released when a wait returns.
  bool run_next() {
    std::function<void()> work;
    {
      const std::lock_guard lock(mutex_);
      if (queue_.empty()) return false;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    run_guarded(work);
    work = nullptr;
    Wait passed;  // dropped after the lock
    const std::lock_guard lock(mutex_);
    const std::uint64_t finished = finished_.fetch_add(1, std::memory_order_release) + 1;
    if (!waits_.empty() && waits_.front().operation == finished) {
      passed = std::move(waits_.front());
      waits_.pop_front();
    }
    changed_.notify_all();
    return true;
  }

  // Ignores what the work throws, except for the unwinding that cancels a thread.
  static void run_guarded(const std::function<void()>& work) {
    try {
      work();
    } catch (const abi::__forced_unwind&) {
      throw;
    } catch (...) {
    }
  }

  static thread_local HostStream* current;  // the stream whose thread this is
  static std::mutex waiting_works;          // before any stream's
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::deque<Wait> waits_;  // of unfinished operations that wait for other streams
  Point awaited_;           // what the running work waits for on the host
  std::uint64_t queued_ = 0;
  std::atomic<std::uint64_t> finished_{0};
  bool closing_ = false;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

thread_local HostStream* HostStream::current = nullptr;
constinit std::mutex HostStream::waiting_works;

// ---- the backend --------------------------------------------------------------------------------

namespace {

constexpr Status kOk{};

std::int64_t clock_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

std::uint64_t physical_bytes() {
  struct sysinfo machine{};
  if (sysinfo(&machine) != 0) return 0;
  return std::uint64_t{machine.totalram} * machine.mem_unit;
}

Status from_errno(const char* call) {
  return {errno == ENOMEM ? Code::out_of_memory : Code::failed, errno, call};
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

// Makes a range inaccessible but keeps its addresses reserved.
bool block_range(Address address, std::uint64_t bytes) {
  return mmap(pointer(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
              0) != MAP_FAILED;
}

int page_size_index(std::uint64_t bytes) {
  int index = 0;
  while (kPageSlots[index] * kSlotBytes != bytes) ++index;
  return index;
}

}  // namespace

HostBackend::HostBackend(std::uint64_t capacity_bytes)
    : generation_(process_generation()),
      ledger_((capacity_bytes == 0 ? physical_bytes() : capacity_bytes) / kSlotBytes * kSlotBytes) {
  info_.name = "host";
  info_.total_bytes = ledger_.capacity();
  info_.pages = open_store();
  info_.host_accessible = true;
  info_.host_pages = info_.pages;
  streams_.emplace(0, HostStream::make());
}

HostBackend::~HostBackend() {
  if (inherited()) return;
  const auto streams = all_streams();
  for (const auto& stream : streams) stream->close();
  for (const auto& stream : streams) stream->join();
  ledger_.each_range([](Address address, std::uint64_t bytes) { munmap(pointer(address), bytes); });
  ledger_.each_page([](const Ledger::Page& page) {
    if (page.host) munmap(pointer(page.copies), page.bytes);
  });
  if (store_ >= 0) ::close(store_);
}

Status HostBackend::close() {
  return {HostStream::on_a_stream() && !inherited() ? Code::deadlock : Code::ok, 0, "close"};
}

bool HostBackend::inherited() const { return generation_ != process_generation(); }

// False if the system has no memory files or cannot release memory inside them.
bool HostBackend::open_store() {
  store_ = memfd_create("vram", MFD_CLOEXEC);
  if (store_ < 0) return false;
  const off_t length = static_cast<off_t>(kSlotBytes);
  if (ftruncate(store_, length) == 0 &&
      fallocate(store_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, length) == 0) {
    store_bytes_ = kSlotBytes;
    free_offsets_[0].push_back(0);
    ++offsets_[0];
    return true;
  }
  ::close(store_);
  store_ = -1;
  return false;
}

Status HostBackend::memory_info(std::uint64_t* free_bytes, std::uint64_t* total_bytes) {
  if (inherited()) return {Code::closed, 0, "memory_info"};
  const std::lock_guard lock(mutex_);
  *total_bytes = ledger_.capacity();
  *free_bytes = ledger_.capacity() - ledger_.used_bytes();
  return kOk;
}

// ---- plain memory -------------------------------------------------------------------------------

Status HostBackend::reserve(std::uint64_t bytes, Address* out) {
  if (inherited()) return {Code::closed, 0, "reserve"};
  const std::lock_guard lock(mutex_);
  if (const Code code = ledger_.may_reserve(bytes); code != Code::ok) return {code, 0, "reserve"};
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return from_errno("reserve");
  *out = reinterpret_cast<Address>(memory);
  try {
    ledger_.reserve(*out, bytes);
  } catch (const std::bad_alloc&) {
    munmap(memory, bytes);
    throw;
  }
  return kOk;
}

Status HostBackend::release(Address address, std::uint64_t bytes) {
  if (inherited()) return {Code::closed, 0, "release"};
  const std::lock_guard lock(mutex_);
  if (const Code code = ledger_.may_release(address, bytes); code != Code::ok) return {code, 0, "release"};
  if (munmap(pointer(address), bytes) != 0) return from_errno("release");
  ledger_.release(address);
  return kOk;
}

// ---- pages --------------------------------------------------------------------------------------

Status HostBackend::space_reserve(std::uint64_t bytes, Address* out) {
  if (inherited()) return {Code::closed, 0, "space_reserve"};
  if (!info_.pages) return {Code::unsupported, 0, "space_reserve"};
  const std::lock_guard lock(mutex_);
  if (const Code code = ledger_.may_space_reserve(bytes); code != Code::ok) return {code, 0, "space_reserve"};
  const std::uint64_t wanted = bytes + kSlotBytes;
  if (wanted < bytes) return {Code::out_of_memory, 0, "space_reserve"};
  void* memory = mmap(nullptr, wanted, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return from_errno("space_reserve");
  const Address start = reinterpret_cast<Address>(memory);
  *out = round_up(start, kSlotBytes);
  if (*out > start) munmap(memory, *out - start);
  if (*out + bytes < start + wanted) munmap(pointer(*out + bytes), start + wanted - *out - bytes);
  try {
    ledger_.space_reserve(*out, bytes);
  } catch (const std::bad_alloc&) {
    munmap(pointer(*out), bytes);
    throw;
  }
  return kOk;
}

Status HostBackend::space_release(Address address, std::uint64_t bytes) {
  if (inherited()) return {Code::closed, 0, "space_release"};
  const std::lock_guard lock(mutex_);
  const Code code = ledger_.may_space_release(address, bytes);
  if (code != Code::ok) return {code, 0, "space_release"};
  if (munmap(pointer(address), bytes) != 0) return from_errno("space_release");
  ledger_.space_release(address);
  return kOk;
}

// Offsets return to one list per page size, so the store grows to at most three times the capacity in
// addresses, never in memory.
Status HostBackend::take_offset(std::uint64_t bytes, std::uint64_t* out) {
  std::vector<std::uint64_t>& free_offsets = free_offsets_[page_size_index(bytes)];
  if (!free_offsets.empty()) {
    *out = free_offsets.back();
    free_offsets.pop_back();
    return kOk;
  }
  std::size_t& made = offsets_[page_size_index(bytes)];
  if (free_offsets.capacity() <= made) free_offsets.reserve(2 * made + 1);  // for give_back()
  if (ftruncate(store_, static_cast<off_t>(store_bytes_ + bytes)) != 0) return from_errno("page_create");
  ++made;
  *out = store_bytes_;
  store_bytes_ += bytes;
  return kOk;
}

Status HostBackend::page_create(std::uint64_t bytes, PageHandle* out) {
  if (inherited()) return {Code::closed, 0, "page_create"};
  if (!info_.pages) return {Code::unsupported, 0, "page_create"};
  const std::lock_guard lock(mutex_);
  if (const Code code = ledger_.may_page_create(bytes); code != Code::ok) return {code, 0, "page_create"};
  std::uint64_t offset = 0;
  if (const Status status = take_offset(bytes, &offset); !status.ok()) return status;
  *out = ledger_.page_create(bytes, offset);
  return kOk;
}

Status HostBackend::page_release(PageHandle page, std::uint64_t bytes) {
  if (inherited()) return {Code::closed, 0, "page_release"};
  const std::lock_guard lock(mutex_);
  const Code code = ledger_.may_page_release(page, bytes);
  if (code != Code::ok) return {code, 0, "page_release"};
  if (const Status status = give_back(ledger_.page(page)->offset, bytes, "page_release"); !status.ok())
    return status;
  ledger_.page_release(page);
  return kOk;
}

// Releases memory of the store.
Status HostBackend::give_back(std::uint64_t offset, std::uint64_t bytes, const char* call) {
  if (fallocate(store_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(bytes)) != 0)
    return from_errno(call);
  free_offsets_[page_size_index(bytes)].push_back(offset);
  return kOk;
}

Status HostBackend::host_page_create(std::uint64_t bytes, PageHandle* out, Address* copies) {
  if (inherited()) return {Code::closed, 0, "host_page_create"};
  if (!info_.host_pages) return {Code::unsupported, 0, "host_page_create"};
  const std::lock_guard lock(mutex_);
  if (const Code code = ledger_.may_host_page_create(bytes); code != Code::ok)
    return {code, 0, "host_page_create"};
  std::uint64_t offset = 0;
  if (const Status status = take_offset(bytes, &offset); !status.ok()) return status;
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, store_, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) {
    free_offsets_[page_size_index(bytes)].push_back(offset);
    return from_errno("host_page_create");
  }
  *copies = reinterpret_cast<Address>(memory);
  *out = ledger_.host_page_create(bytes, offset, *copies);
  return kOk;
}

Status HostBackend::host_page_release(PageHandle page, std::uint64_t bytes, Address copies) {
  if (inherited()) return {Code::closed, 0, "host_page_release"};
  const std::lock_guard lock(mutex_);
  const Code code = ledger_.may_host_page_release(page, bytes, copies);
  if (code != Code::ok) return {code, 0, "host_page_release"};
  const std::uint64_t offset = ledger_.page(page)->offset;
  if (const Status status = give_back(offset, bytes, "host_page_release"); !status.ok()) return status;
  munmap(pointer(copies), bytes);
  ledger_.page_release(page);
  return kOk;
}

Status HostBackend::map(Address address, std::uint64_t bytes, PageHandle page) {
  if (inherited()) return {Code::closed, 0, "map"};
  const std::lock_guard lock(mutex_);
  if (const Code code = ledger_.may_map(address, bytes, page); code != Code::ok) return {code, 0, "map"};
  const off_t offset = static_cast<off_t>(ledger_.page(page)->offset);
  if (mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, store_, offset) == MAP_FAILED) {
    return from_errno("map");
  }
  ledger_.map(address, bytes, page);
  return kOk;
}

Status HostBackend::set_access(Address address, std::uint64_t bytes) {
  if (inherited()) return {Code::closed, 0, "set_access"};
  const std::lock_guard lock(mutex_);
  const Code code = ledger_.may_set_access(address, bytes);
  if (code != Code::ok) return {code, 0, "set_access"};
  if (mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE) != 0) return from_errno("set_access");
  ledger_.set_access(address, bytes);
  return kOk;
}

Status HostBackend::unmap(Address address, std::uint64_t bytes) {
  if (inherited()) return {Code::closed, 0, "unmap"};
  const std::lock_guard lock(mutex_);
  if (const Code code = ledger_.may_unmap(address, bytes); code != Code::ok) return {code, 0, "unmap"};
  if (!block_range(address, bytes)) return from_errno("unmap");
  ledger_.unmap(address, bytes);
  return kOk;
}

// ---- streams ------------------------------------------------------------------------------------

std::shared_ptr<HostStream> HostBackend::stream_of(StreamHandle handle) {
  const auto found = streams_.find(handle);
  return found == streams_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<HostStream>> HostBackend::all_streams() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<HostStream>> all = retired_;
  for (const auto& [handle, stream] : streams_) all.push_back(stream);
  return all;
}

// Joins the threads of destroyed streams that have ended. pre: the lock is held.
void HostBackend::reap() {
  std::erase_if(retired_, [](const std::shared_ptr<HostStream>& stream) {
    if (!stream->ended()) return false;
    stream->join();
    return true;
  });
}

Status HostBackend::stream_create(StreamHandle* out) {
  if (inherited()) return {Code::closed, 0, "stream_create"};
  const std::lock_guard lock(mutex_);
  reap();
  *out = next_stream_++;
  streams_.emplace(*out, HostStream::make());
  return kOk;
}

Status HostBackend::stream_destroy(StreamHandle stream) {
  if (inherited()) return {Code::closed, 0, "stream_destroy"};
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end() || stream == 0) return {Code::invalid, 0, "stream_destroy"};
  found->second->close();
  if (found->second->queued() > 0) retired_.push_back(found->second);
  streams_.erase(found);
  reap();
  return kOk;
}

Status HostBackend::stream_synchronize(StreamHandle stream) {
  if (inherited()) return {Code::closed, 0, "stream_synchronize"};
  std::shared_ptr<HostStream> target;
  {
    const std::lock_guard lock(mutex_);
    target = stream_of(stream);
  }
  if (!target) return {Code::invalid, 0, "stream_synchronize"};
  const std::uint64_t queued = target->queued();
  return {HostStream::wait({std::move(target), queued}), 0, "stream_synchronize"};
}

Status HostBackend::stream_query(StreamHandle stream) {
  if (inherited()) return {Code::closed, 0, "stream_query"};
  const std::lock_guard lock(mutex_);
  const auto target = stream_of(stream);
  if (!target) return {Code::invalid, 0, "stream_query"};
  return {target->reached(target->queued()) ? Code::ok : Code::not_ready, 0, "stream_query"};
}

Status HostBackend::stream_wait(StreamHandle stream, EventHandle event) {
  if (inherited()) return {Code::closed, 0, "stream_wait"};
  const std::lock_guard lock(mutex_);
  const Event* found = events_.find(event);
  const std::shared_ptr<HostStream> target = stream_of(stream);
  if (!found || !target) return {Code::invalid, 0, "stream_wait"};
  const HostStream::Point point{found->stream, found->position};
  if (!point.stream || point.stream == target || point.reached()) return kOk;
  int native = 0;
  const Code code = target->enqueue_wait(point, &native);
  return {code, native, "stream_wait"};
}

Status HostBackend::synchronize() {
  if (inherited()) return {Code::closed, 0, "synchronize"};
  for (const auto& stream : all_streams()) {
    const Code code = HostStream::wait({stream, stream->queued()});
    if (code != Code::ok) return {code, 0, "synchronize"};
  }
  return kOk;
}

// ---- events -------------------------------------------------------------------------------------

Status HostBackend::event_create(EventHandle* out) {
  if (inherited()) return {Code::closed, 0, "event_create"};
  const std::lock_guard lock(mutex_);
  *out = events_.add({});
  return kOk;
}

Status HostBackend::timing_event_create(EventHandle* out) {
  if (inherited()) return {Code::closed, 0, "timing_event_create"};
  const std::lock_guard lock(mutex_);
  *out = events_.add({nullptr, 0, true, nullptr});
  return kOk;
}

Status HostBackend::elapsed_ms(EventHandle from, EventHandle to, double* out) {
  if (inherited()) return {Code::closed, 0, "elapsed_ms"};
  const std::lock_guard lock(mutex_);
  const Event* first = events_.find(from);
  const Event* last = events_.find(to);
  if (!first || !last || !first->moment || !last->moment) return {Code::invalid, 0, "elapsed_ms"};
  const std::int64_t begin = *first->moment;
  const std::int64_t end = *last->moment;
  if (begin == 0 || end == 0) return {Code::not_ready, 0, "elapsed_ms"};
  *out = static_cast<double>(end - begin) / 1e6;
  return kOk;
}

Status HostBackend::event_destroy(EventHandle event) {
  if (inherited()) return {Code::closed, 0, "event_destroy"};
  const std::lock_guard lock(mutex_);
  if (!events_.find(event)) return {Code::invalid, 0, "event_destroy"};
  events_.remove(event);
  return kOk;
}

Status HostBackend::event_record(EventHandle event, StreamHandle stream) {
  if (inherited()) return {Code::closed, 0, "event_record"};
  const std::lock_guard lock(mutex_);
  Event* found = events_.find(event);
  auto target = stream_of(stream);
  if (!found || !target) return {Code::invalid, 0, "event_record"};
  std::shared_ptr<std::atomic<std::int64_t>> moment;
  if (found->timing) {
    moment = std::make_shared<std::atomic<std::int64_t>>(0);
    int native = 0;
    const Code code = target->enqueue([moment] { *moment = clock_ns(); }, &native);
    if (code != Code::ok) return {code, native, "event_record"};
  }
  const std::uint64_t position = target->queued();
  *found = {std::move(target), position, found->timing, std::move(moment)};
  return kOk;
}

Status HostBackend::event_query(EventHandle event) {
  if (inherited()) return {Code::closed, 0, "event_query"};
  const std::lock_guard lock(mutex_);
  const Event* found = events_.find(event);
  if (!found) return {Code::invalid, 0, "event_query"};
  const bool passed = !found->stream || found->stream->reached(found->position);
  return {passed ? Code::ok : Code::not_ready, 0, "event_query"};
}

Status HostBackend::event_synchronize(EventHandle event) {
  if (inherited()) return {Code::closed, 0, "event_synchronize"};
  HostStream::Point point;
  {
    const std::lock_guard lock(mutex_);
    const Event* found = events_.find(event);
    if (!found) return {Code::invalid, 0, "event_synchronize"};
    point = {found->stream, found->position};
  }
  if (!point.stream) return kOk;
  return {HostStream::wait(point), 0, "event_synchronize"};
}

// ---- gates --------------------------------------------------------------------------------------

struct HostBackend::Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool arrived = false;
  bool open = false;
  std::shared_ptr<HostStream> stream;

  void pass() {
    std::unique_lock lock(mutex);
    arrived = true;
    changed.notify_all();
    changed.wait(lock, [this] { return open; });
  }
};

Status HostBackend::gate_close(StreamHandle stream, GateHandle* out) {
  if (inherited()) return {Code::closed, 0, "gate_close"};
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<HostStream> target = stream_of(stream);
  return target ? close_gate(target, out) : Status{Code::invalid, 0, "gate_close"};
}

Status HostBackend::gates_close(const std::vector<StreamHandle>& except,
                                const std::function<void(GateHandle)>& closed) {
  if (inherited()) return {Code::closed, 0, "gate_close"};
  const std::lock_guard lock(mutex_);
  for (const auto& [handle, stream] : streams_) {
    if (std::find(except.begin(), except.end(), handle) != except.end()) continue;
    GateHandle gate = 0;
    if (const Status status = close_gate(stream, &gate); !status.ok()) return status;
    closed(gate);
  }
  return kOk;
}

// pre: the lock is held.
Status HostBackend::close_gate(const std::shared_ptr<HostStream>& stream, GateHandle* out) {
  auto gate = std::make_shared<Gate>();
  gate->stream = stream;
  int native = 0;
  const Code code = gate->stream->enqueue([gate] { gate->pass(); }, &native);
  if (code == Code::ok) *out = gates_.add(gate);
  return {code, native, "gate_close"};
}

Status HostBackend::gate_wait(GateHandle handle, double seconds) {
  if (inherited()) return {Code::closed, 0, "gate_wait"};
  std::shared_ptr<Gate> gate;
  {
    const std::lock_guard lock(mutex_);
    const std::shared_ptr<Gate>* found = gates_.find(handle);
    if (!found) return {Code::invalid, 0, "gate_wait"};
    gate = *found;
  }
  if (gate->stream->here()) return {Code::deadlock, 0, "gate_wait"};
  std::unique_lock lock(gate->mutex);
  const bool arrived =
      gate->changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return gate->arrived; });
  return {arrived ? Code::ok : Code::not_ready, 0, "gate_wait"};
}

void HostBackend::gate_open(GateHandle handle) {
  if (inherited()) return;
  std::shared_ptr<Gate> gate;
  {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Gate>* found = gates_.find(handle);
    if (!found) return;
    gate = *found;
    gates_.remove(handle);
  }
  const std::lock_guard lock(gate->mutex);
  gate->open = true;
  gate->changed.notify_all();
}

std::vector<StreamHandle> HostBackend::held_streams() {
  std::vector<StreamHandle> held;
  if (inherited()) return held;
  const std::lock_guard lock(mutex_);
  for (const auto& [handle, stream] : streams_) held.push_back(handle);
  return held;
}

// ---- work ---------------------------------------------------------------------------------------

Status HostBackend::enqueue(StreamHandle stream, std::function<void()> work, const char* call) {
  std::shared_ptr<HostStream> target;
  {
    const std::lock_guard lock(mutex_);
    target = stream_of(stream);
  }
  if (!target) return {Code::invalid, 0, call};
  int native = 0;
  const Code code = target->enqueue(std::move(work), &native);
  return {code, native, call};
}

Status HostBackend::copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) {
  if (inherited()) return {Code::closed, 0, "copy"};
  {
    const std::lock_guard lock(mutex_);
    if (ledger_.may_touch(to, bytes) != Code::ok) return {Code::invalid, 0, "copy"};
    if (ledger_.may_touch(from, bytes) != Code::ok) return {Code::invalid, 0, "copy"};
  }
  return enqueue(
      stream,
      [=] {
        if (bytes > 0) std::memmove(pointer(to), pointer(from), bytes);
      },
      "copy");
}

Status HostBackend::fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) {
  if (inherited()) return {Code::closed, 0, "fill"};
  {
    const std::lock_guard lock(mutex_);
    if (ledger_.may_touch(to, bytes) != Code::ok) return {Code::invalid, 0, "fill"};
  }
  return enqueue(
      stream,
      [=] {
        if (bytes > 0) std::memset(pointer(to), value, bytes);
      },
      "fill");
}

Status HostBackend::launch(StreamHandle stream, std::function<void()> work) {
  if (inherited()) return {Code::closed, 0, "launch"};
  if (!work) return {Code::invalid, 0, "launch"};
  return enqueue(stream, std::move(work), "launch");
}

bool HostBackend::check(std::string* why) {
  if (inherited()) {
    if (why != nullptr) *why = "the device belongs to the parent of a fork";
    return false;
  }
  const std::lock_guard lock(mutex_);
  return ledger_.check(why);
}

}  // namespace vram
