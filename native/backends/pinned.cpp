// Maps, faults in and pins host memory. See pinned.hpp.
#include "backends/pinned.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "backends/cuda.hpp"

namespace vram {

namespace {

// One thread faults in this much at a time; with less than two such pieces, a second thread does not help.
constexpr std::uint64_t kFaultBytes = 8 * kMiB;
// More threads than this are limited by the memory itself.
constexpr unsigned kMaxThreads = 4;
// This share of the memory is left to the system.
constexpr std::uint64_t kLeftShare = 64;
// The host's pages are 4 to 64 KiB long.
constexpr std::uint64_t kGrain = 64 * kKiB;
#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14
#endif

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

Status from_errno(int error, const char* call) {
  return {error == ENOMEM ? Code::out_of_memory : Code::failed, error, call};
}

// ---- how much there is ----------------------------------------------------------------------------------

constexpr std::uint64_t kUnknown = ~std::uint64_t{0};

// The number after `key` in a file of lines "key number", or the file's first number if key is empty.
// Plain C: other libraries in the process may change how C++ streams parse numbers.
std::uint64_t number_in(const char* path, const std::string& key) {
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return kUnknown;
  std::uint64_t number = kUnknown;
  char line[256];
  while (number == kUnknown && std::fgets(line, sizeof line, file) != nullptr) {
    if (std::strncmp(line, key.c_str(), key.size()) != 0) continue;
    char* end = nullptr;
    const std::uint64_t found = std::strtoull(line + key.size(), &end, 10);
    if (end != line + key.size()) number = found;
  }
  (void)std::fclose(file);
  return number;
}

struct Memory {
  std::uint64_t total = 0;
  std::uint64_t free = 0;
};

// Containers show the limits of their control group in these files, in its two versions.
struct Group {
  const char* limit;
  const char* used;
  const char* parts;
};
constexpr Group kGroups[] = {
    {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"},
    {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
     "/sys/fs/cgroup/memory/memory.stat"},
};

Memory machine_memory() {
  struct sysinfo machine{};
  (void)sysinfo(&machine);
  Memory memory;
  memory.total = std::uint64_t{machine.totalram} * machine.mem_unit;
  const std::uint64_t available_kib = number_in("/proc/meminfo", "MemAvailable:");
  memory.free =
      available_kib == kUnknown ? std::uint64_t{machine.freeram} * machine.mem_unit : available_kib * kKiB;
  for (const Group& group : kGroups) {
    const std::uint64_t limit = number_in(group.limit, "");
    const std::uint64_t used = number_in(group.used, "");
    if (limit >= memory.total || used == kUnknown) continue;
    std::uint64_t held = used;
    for (const char* files : {"inactive_file ", "active_file "}) {  // the system can drop these
      const std::uint64_t cache = number_in(group.parts, files);
      held -= std::min(held, cache == kUnknown ? 0 : cache);
    }
    memory.total = limit;
    memory.free = std::min(memory.free, limit - std::min(limit, held));
  }
  memory.free = std::min(memory.free, memory.total);
  return memory;
}

// ---- mapping and faulting in ------------------------------------------------------------------------------

// Addresses aligned to large pages, which the system is asked to use: fewer faults, and fewer entries for the
// driver to pin.
Status map_aligned(std::uint64_t bytes, Address* out) {
  const std::uint64_t wanted = bytes + kSlotBytes;
  void* memory =
      mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return from_errno(errno, "mmap");
  const Address start = reinterpret_cast<Address>(memory);
  *out = round_up(start, kSlotBytes);
  if (*out > start) munmap(memory, *out - start);
  if (*out + bytes < start + wanted) munmap(pointer(*out + bytes), start + wanted - *out - bytes);
  (void)madvise(pointer(*out), bytes, MADV_HUGEPAGE);
  return {};
}

// Returns 0 or an error number.
int fault_in(Address start, std::uint64_t bytes) {
  if (madvise(pointer(start), bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  // An older kernel: touching the pages does the same, but does not report failures.
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  for (std::uint64_t at = 0; at < bytes; at += page) *static_cast<volatile char*>(pointer(start + at)) = 0;
  return 0;
}

// Starts a thread that receives no signals. False if the system cannot start one.
template <class Work>
bool start_thread(std::vector<std::thread>& threads, Work& work) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    threads.emplace_back([&work] { work(); });
  } catch (const std::system_error&) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

// The calling thread does its part, so this works with any number of threads.
Status fault_in_parallel(Address start, std::uint64_t bytes, unsigned most) {
  std::atomic<std::uint64_t> next{0};
  std::atomic<int> error{0};
  const auto work = [&] {
    for (std::uint64_t at = 0; error == 0 && (at = next.fetch_add(kFaultBytes)) < bytes;)
      if (const int failed = fault_in(start + at, std::min(kFaultBytes, bytes - at)); failed != 0)
        error = failed;
  };
  const auto useful = static_cast<unsigned>(std::min<std::uint64_t>(most, bytes / kFaultBytes));
  std::vector<std::thread> threads;
  while (threads.size() + 1 < useful && start_thread(threads, work)) {
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return error == 0 ? Status{} : from_errno(error, "madvise");
}

// ---- CUDA -----------------------------------------------------------------------------------------------

constexpr unsigned kCuRegisterPortable = 1;
constexpr unsigned kCuRegisterDeviceMapped = 2;
constexpr unsigned kCuRegisterReadOnly = 8;
constexpr int kCuAttributeReadOnlyRegister = 113;

class CudaPageLock final : public PageLock {
 public:
  explicit CudaPageLock(CudaBackend& device) : device_(device) {}
  Status lock(Address address, std::uint64_t bytes, bool writable) override {
    constexpr unsigned flags = kCuRegisterPortable | kCuRegisterDeviceMapped;
    const Status status = enter(address, bytes, flags);
    // Memory that even this process cannot write is pinned only for reading, on devices that support it.
    if (status.ok() || writable || status.native == kCuAlreadyRegistered ||
        device_.attribute(kCuAttributeReadOnlyRegister) == 0)
      return status;
    return enter(address, bytes, flags | kCuRegisterReadOnly);
  }
  Status unlock(Address address) override {
    return device_.unseen_by_captures("cuMemHostUnregister",
                                      [&] { return device_.driver().host_unregister(pointer(address)); });
  }

 private:
  Status enter(Address address, std::uint64_t bytes, unsigned flags) {
    return device_.unseen_by_captures(
        "cuMemHostRegister", [&] { return device_.driver().host_register(pointer(address), bytes, flags); });
  }
  CudaBackend& device_;
};

}  // namespace

std::unique_ptr<PageLock> page_lock_of(Backend& device) {
  auto* cuda = dynamic_cast<CudaBackend*>(&device);
  return cuda == nullptr ? nullptr : std::make_unique<CudaPageLock>(*cuda);
}

namespace {

// Adds the time of a scope to a counter of microseconds.
class Timed {
 public:
  explicit Timed(std::atomic<std::uint64_t>& counter) : counter_(counter) {}
  ~Timed() {
    using namespace std::chrono;
    counter_ += static_cast<std::uint64_t>(duration_cast<microseconds>(steady_clock::now() - start_).count());
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  std::atomic<std::uint64_t>& counter_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

// ---- the backend ------------------------------------------------------------------------------------------

PinnedBackend::PinnedBackend(std::shared_ptr<Backend> device, unsigned threads)
    : PinnedBackend(device, page_lock_of(*device), threads) {}

PinnedBackend::PinnedBackend(std::shared_ptr<Backend> device, std::unique_ptr<PageLock> lock,
                             unsigned threads)
    : device_(std::move(device)),
      lock_(std::move(lock)),
      threads_(threads != 0 ? threads : std::clamp(std::thread::hardware_concurrency(), 1u, kMaxThreads)),
      process_(getpid()),
      ledger_(machine_memory().total / kSlotBytes * kSlotBytes, kGrain) {
  info_.name = "pinned";
  info_.total_bytes = ledger_.capacity();
  info_.host_accessible = true;
  info_.host_writes = true;
  info_.grain = kGrain;
  info_.captures = device_->info().captures;
  info_.release_waits = lock_ != nullptr;
  info_.no_pages = "pinned memory is registered in whole pieces";
}

PinnedBackend::~PinnedBackend() {
  if (inherited()) return;
  ledger_.each_range([this](Address address, std::uint64_t bytes) {
    if (lock_ != nullptr) (void)lock_->unlock(address);
    munmap(pointer(address), bytes);
  });
}

bool PinnedBackend::inherited() const { return getpid() != process_; }

Status PinnedBackend::memory_info(std::uint64_t* free_bytes, std::uint64_t* total_bytes) {
  if (inherited()) return {Code::closed, 0, "memory_info"};
  *total_bytes = info_.total_bytes;
  *free_bytes = std::min(machine_memory().free, info_.total_bytes);
  return {};
}

Status PinnedBackend::reserve(std::uint64_t bytes, Address* out) {
  if (inherited()) return {Code::closed, 0, "reserve"};
  const Timed timed(reserve_us_);
  const std::lock_guard lock(mutex_);
  if (const Code code = ledger_.may_reserve(bytes); code != Code::ok) return {code, 0, "reserve"};
  const Memory memory = machine_memory();
  if (bytes + memory.total / kLeftShare > memory.free) return {Code::out_of_memory, 0, "reserve"};
  Address made = 0;
  Status status = map_aligned(bytes, &made);
  if (!status.ok()) return status;
  status = fault_in_parallel(made, bytes, threads_);
  if (status.ok() && lock_ != nullptr) status = lock_->lock(made, bytes, true);
  if (!status.ok()) {
    munmap(pointer(made), bytes);
    return status;
  }
  ledger_.reserve(made, bytes);
  *out = made;
  return {};
}

Status PinnedBackend::release(Address address, std::uint64_t bytes) {
  if (inherited()) return {Code::closed, 0, "release"};
  const Timed timed(release_us_);
  const std::lock_guard lock(mutex_);
  if (const Code code = ledger_.may_release(address, bytes); code != Code::ok) return {code, 0, "release"};
  if (lock_ != nullptr)
    if (const Status status = lock_->unlock(address); !status.ok()) return status;
  ledger_.release(address);
  if (munmap(pointer(address), bytes) != 0) return from_errno(errno, "munmap");
  return {};
}

}  // namespace vram
