#include "null_gpu/pools.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "null_gpu/errors.hpp"
#include "null_gpu/profile.hpp"

namespace vram::null_gpu {

namespace {

constexpr std::uint64_t kPiece = std::uint64_t{32} << 20;  // a pool grows by whole pieces
constexpr std::uint64_t kUnit = 512;                       // sizes of allocations

// Numbers of CUmemPool_attribute.
constexpr int kLastReuse = 3, kThreshold = 4, kReserved = 5, kReservedPeak = 6, kUsed = 7, kUsedPeak = 8;

std::uint64_t rounded(std::uint64_t bytes, std::uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

std::mutex all_mutex;
std::set<MemoryPool*>& all() {
  static auto* const pools = new std::set<MemoryPool*>;
  return *pools;
}

struct Own {
  MemoryPool* own;
  MemoryPool* current;
};
Own& own_of(int device) {
  static auto* const pools = [] {
    auto* const made = new std::unordered_map<int, Own>;
    for (int i = 0; memory_of(i) != nullptr; ++i) {
      auto* const pool = new MemoryPool(i);
      made->emplace(i, Own{pool, pool});
    }
    return made;
  }();
  return pools->at(device);
}

}  // namespace

MemoryPool::MemoryPool(int device, std::uint64_t limit, Kind kind)
    : device_(device), limit_(limit), kind_(kind) {
  const std::lock_guard lock(all_mutex);
  all().insert(this);
}

MemoryPool::~MemoryPool() {
  {
    const std::lock_guard lock(all_mutex);
    all().erase(this);
  }
  for (const auto& [address, bytes] : blocks_) {
    memory_of(device_)->remove_range(address);
    Addresses::get().give(address, bytes);
  }
  memory_of(device_)->give(reserved_);
}

Result MemoryPool::allocate(std::uint64_t bytes, DevicePointer* out) {
  const std::lock_guard lock(mutex_);
  *out = 0;
  if (bytes == 0) return kSuccess;
  if (kind_ == Kind::imported) return kInvalidValue;
  Memory& memory = *memory_of(device_);
  if (bytes > Profile::get().memory) {
    (void)memory.take(bytes);  // counts as refused
    return kOutOfMemory;
  }
  bytes = rounded(bytes, kUnit);
  if (used_ + bytes > reserved_) {
    if (limit_ != 0 && used_ + bytes > limit_) return kOutOfMemory;
    const std::uint64_t more = rounded(used_ + bytes, kPiece) - reserved_;
    if (!memory.take(more)) return kOutOfMemory;
    reserved_ += more;
    reserved_peak_ = std::max(reserved_peak_, reserved_);
  }
  const DevicePointer address = Addresses::get().take(bytes);
  if (address == 0) return kOutOfMemory;
  used_ += bytes;
  used_peak_ = std::max(used_peak_, used_);
  blocks_.emplace(address, bytes);
  memory.add_range(address, bytes);
  *out = address;
  return kSuccess;
}

Result MemoryPool::free(DevicePointer address) {
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(address);
  if (block == blocks_.end()) return kNotFound;
  used_ -= block->second;
  memory_of(device_)->remove_range(address);
  Addresses::get().give(address, block->second);
  blocks_.erase(block);
  return kSuccess;
}

bool MemoryPool::holds(DevicePointer address) {
  const std::lock_guard lock(mutex_);
  return blocks_.contains(address);
}

void MemoryPool::trim_locked(std::uint64_t keep) {
  const std::uint64_t least = std::max(rounded(used_, kPiece), rounded(keep, kPiece));
  if (reserved_ <= least) return;
  memory_of(device_)->give(reserved_ - least);
  reserved_ = least;
}

void MemoryPool::trim(std::uint64_t keep) {
  const std::lock_guard lock(mutex_);
  trim_locked(std::min(keep, Profile::get().memory));
}

void MemoryPool::synchronize() {
  const std::lock_guard lock(mutex_);
  trim_locked(std::min(threshold_, Profile::get().memory));
}

Result MemoryPool::get(int attribute, void* out) {
  const std::lock_guard lock(mutex_);
  if (attribute >= 1 && attribute <= kLastReuse) {
    std::memcpy(out, &reuse_[attribute - 1], sizeof(int));
    return kSuccess;
  }
  const std::uint64_t values[] = {threshold_, reserved_, reserved_peak_, used_, used_peak_};
  if (attribute < kThreshold || attribute > kUsedPeak) return kInvalidValue;
  std::memcpy(out, &values[attribute - kThreshold], sizeof(std::uint64_t));
  return kSuccess;
}

Result MemoryPool::set(int attribute, const void* value) {
  const std::lock_guard lock(mutex_);
  if (attribute >= 1 && attribute <= kLastReuse) {
    std::memcpy(&reuse_[attribute - 1], value, sizeof(int));
    return kSuccess;
  }
  std::uint64_t number;
  std::memcpy(&number, value, sizeof(number));
  if (attribute == kThreshold) {
    threshold_ = number;
    return kSuccess;
  }
  // A peak can only be set back to what is current.
  if (number != 0 || (attribute != kReservedPeak && attribute != kUsedPeak)) return kInvalidValue;
  (attribute == kUsedPeak ? used_peak_ : reserved_peak_) = attribute == kUsedPeak ? used_ : reserved_;
  return kSuccess;
}

// ---- other processes ------------------------------------------------------------------------------------

namespace {

struct PoolRecord {  // what the file of a descriptor says
  char kind[8];
  std::int64_t device;
};
constexpr char kPoolKind[8] = {'v', 'r', 'a', 'm', 'p', 'o', 'o', 'l'};
constexpr char kPointerKind[8] = {'v', 'r', 'a', 'm', 'm', 'e', 'm', 'o'};

}  // namespace

Result MemoryPool::share(int* descriptor) {
  if (kind_ != Kind::shareable) return kInvalidValue;
  PoolRecord record{{}, device_};
  std::memcpy(record.kind, kPoolKind, sizeof(kPoolKind));
  const int file = memfd_create("vram null pool", MFD_CLOEXEC);
  if (file < 0) return kUnknownError;
  if (pwrite(file, &record, sizeof(record), 0) != sizeof(record)) {
    close(file);
    return kUnknownError;
  }
  *descriptor = file;
  return kSuccess;
}

Result MemoryPool::import(int descriptor, MemoryPool** out) {
  PoolRecord record{};
  if (pread(descriptor, &record, sizeof(record), 0) != sizeof(record)) return kInvalidValue;
  if (std::memcmp(record.kind, kPoolKind, sizeof(kPoolKind)) != 0) return kInvalidValue;
  const int device = static_cast<int>(record.device);
  if (memory_of(device) == nullptr) return kInvalidDevice;
  *out = new MemoryPool(device, 0, Kind::imported);
  return kSuccess;
}

Result MemoryPool::share(DevicePointer address, Pointer* out) {
  const std::lock_guard lock(all_mutex);
  for (MemoryPool* const pool : all()) {
    const std::lock_guard guard(pool->mutex_);
    const auto block = pool->blocks_.find(address);
    if (block == pool->blocks_.end()) continue;
    if (pool->kind_ != Kind::shareable) return kInvalidValue;
    *out = {{}, block->second, pool->device_, {}};
    std::memcpy(out->kind, kPointerKind, sizeof(kPointerKind));
    return kSuccess;
  }
  return kInvalidValue;
}

// The memory counts for the process that allocated it.
Result MemoryPool::import(const Pointer& pointer, DevicePointer* out) {
  const std::lock_guard lock(mutex_);
  const bool known = std::memcmp(pointer.kind, kPointerKind, sizeof(kPointerKind)) == 0;
  if (kind_ != Kind::imported || !known || pointer.device != device_) return kInvalidValue;
  if (pointer.bytes == 0 || pointer.bytes > Profile::get().memory) return kInvalidValue;
  *out = Addresses::get().take(pointer.bytes);
  if (*out == 0) return kOutOfMemory;
  used_ += pointer.bytes;
  blocks_.emplace(*out, pointer.bytes);
  memory_of(device_)->add_range(*out, pointer.bytes);
  return kSuccess;
}

MemoryPool*& MemoryPool::current(int device) { return own_of(device).current; }
MemoryPool* MemoryPool::own(int device) { return own_of(device).own; }

Result MemoryPool::free_anywhere(DevicePointer address) {
  const std::lock_guard lock(all_mutex);
  for (MemoryPool* const pool : all())
    if (pool->free(address) == kSuccess) return kSuccess;
  return kNotFound;
}

void MemoryPool::synchronize_all() {
  const std::lock_guard lock(all_mutex);
  for (MemoryPool* const pool : all()) pool->synchronize();
}

}  // namespace vram::null_gpu

// ---- the driver's and the runtime's functions -----------------------------------------------------------

using namespace vram::null_gpu;

namespace {

struct PoolProperties {  // CUmemPoolProps
  int type;
  int handle_types;
  Location location;
  void* security;
  std::size_t max_bytes;  // 0: as the device has
};
MemoryPool* pool_of(Handle handle) { return static_cast<MemoryPool*>(handle); }
DevicePointer address_of(void* pointer) { return reinterpret_cast<DevicePointer>(pointer); }

}  // namespace

VRAM_NULL_API Result cuMemPoolCreate(Handle* out, const PoolProperties* properties) {
  if (memory_of(properties->location.id) == nullptr) return kInvalidDevice;
  const bool shareable = properties->handle_types == kFileDescriptor;
  if (!shareable && properties->handle_types != 0) return kNotSupported;
  *out = new MemoryPool(properties->location.id, properties->max_bytes,
                        shareable ? MemoryPool::Kind::shareable : MemoryPool::Kind::own);
  return kSuccess;
}
VRAM_NULL_API Result cuMemPoolDestroy(Handle pool) {
  delete pool_of(pool);
  return kSuccess;
}
VRAM_NULL_API Result cuMemPoolGetAttribute(Handle pool, int attribute, void* out) {
  return pool_of(pool)->get(attribute, out);
}
VRAM_NULL_API Result cuMemPoolSetAttribute(Handle pool, int attribute, void* value) {
  return pool_of(pool)->set(attribute, value);
}
VRAM_NULL_API Result cuMemPoolTrimTo(Handle pool, std::size_t keep) {
  pool_of(pool)->trim(keep);
  return kSuccess;
}
VRAM_NULL_API Result cuMemPoolSetAccess(Handle, const void*, std::size_t) { return kSuccess; }
VRAM_NULL_API Result cuMemPoolGetAccess(int* flags, Handle, Location*) {
  *flags = 3;  // read and write
  return kSuccess;
}
VRAM_NULL_API Result cuDeviceGetDefaultMemPool(Handle* out, int device) {
  if (memory_of(device) == nullptr) return kInvalidDevice;
  *out = MemoryPool::own(device);
  return kSuccess;
}
VRAM_NULL_API Result cuDeviceGetMemPool(Handle* out, int device) {
  if (memory_of(device) == nullptr) return kInvalidDevice;
  *out = MemoryPool::current(device);
  return kSuccess;
}
VRAM_NULL_API Result cuDeviceSetMemPool(int device, Handle pool) {
  if (memory_of(device) == nullptr) return kInvalidDevice;
  MemoryPool::current(device) = pool_of(pool);
  return kSuccess;
}
VRAM_NULL_API Result cuMemAllocFromPoolAsync(DevicePointer* out, std::size_t bytes, Handle pool, Handle) {
  return pool_of(pool)->allocate(bytes, out);
}
VRAM_NULL_API Result cuMemAllocAsync(DevicePointer* out, std::size_t bytes, Handle) {
  return MemoryPool::current(chosen_device())->allocate(bytes, out);
}
VRAM_NULL_API Result cuMemFreeAsync(DevicePointer address, Handle) {
  return MemoryPool::free_anywhere(address) == kSuccess ? kSuccess : memory_at(address).free(address);
}

VRAM_NULL_API Result cuMemPoolExportToShareableHandle(void* out, Handle pool, int kind, unsigned long long) {
  int descriptor = -1;
  if (kind != kFileDescriptor) return kInvalidValue;
  const Result result = pool_of(pool)->share(&descriptor);
  if (result == kSuccess) std::memcpy(out, &descriptor, sizeof(descriptor));
  return result;
}
VRAM_NULL_API Result cuMemPoolImportFromShareableHandle(Handle* out, void* descriptor, int kind,
                                                        unsigned long long) {
  if (kind != kFileDescriptor) return kInvalidValue;
  MemoryPool* pool = nullptr;
  const auto file = static_cast<int>(reinterpret_cast<std::intptr_t>(descriptor));
  const Result result = MemoryPool::import(file, &pool);
  *out = pool;
  return result;
}
VRAM_NULL_API Result cuMemPoolExportPointer(MemoryPool::Pointer* out, DevicePointer address) {
  return MemoryPool::share(address, out);
}
VRAM_NULL_API Result cuMemPoolImportPointer(DevicePointer* out, Handle pool, MemoryPool::Pointer* pointer) {
  return pool_of(pool)->import(*pointer, out);
}

VRAM_NULL_API Result cudaMallocAsync(void** out, std::size_t bytes, Handle stream) {
  DevicePointer address = 0;
  const Result result = cuMemAllocAsync(&address, bytes, stream);
  *out = reinterpret_cast<void*>(address);
  return returned(result);
}
VRAM_NULL_API Result cudaMallocFromPoolAsync(void** out, std::size_t bytes, Handle pool, Handle) {
  DevicePointer address = 0;
  const Result result = pool_of(pool)->allocate(bytes, &address);
  *out = reinterpret_cast<void*>(address);
  return returned(result);
}
VRAM_NULL_API Result cudaFreeAsync(void* pointer, Handle stream) {
  return returned(cuMemFreeAsync(address_of(pointer), stream));
}
VRAM_NULL_API Result cudaMemPoolCreate(Handle* out, const PoolProperties* properties) {
  return returned(cuMemPoolCreate(out, properties));
}
VRAM_NULL_API Result cudaMemPoolDestroy(Handle pool) { return returned(cuMemPoolDestroy(pool)); }
VRAM_NULL_API Result cudaMemPoolGetAttribute(Handle pool, int attribute, void* out) {
  return returned(cuMemPoolGetAttribute(pool, attribute, out));
}
VRAM_NULL_API Result cudaMemPoolSetAttribute(Handle pool, int attribute, void* value) {
  return returned(cuMemPoolSetAttribute(pool, attribute, value));
}
VRAM_NULL_API Result cudaMemPoolTrimTo(Handle pool, std::size_t keep) {
  return returned(cuMemPoolTrimTo(pool, keep));
}
VRAM_NULL_API Result cudaMemPoolSetAccess(Handle, const void*, std::size_t) { return kSuccess; }
VRAM_NULL_API Result cudaDeviceGetDefaultMemPool(Handle* out, int device) {
  return returned(cuDeviceGetDefaultMemPool(out, device));
}
VRAM_NULL_API Result cudaDeviceGetMemPool(Handle* out, int device) {
  return returned(cuDeviceGetMemPool(out, device));
}
VRAM_NULL_API Result cudaDeviceSetMemPool(int device, Handle pool) {
  return returned(cuDeviceSetMemPool(device, pool));
}
VRAM_NULL_API Result cudaMemPoolExportToShareableHandle(void* out, Handle pool, int kind, unsigned flags) {
  return returned(cuMemPoolExportToShareableHandle(out, pool, kind, flags));
}
VRAM_NULL_API Result cudaMemPoolImportFromShareableHandle(Handle* out, void* descriptor, int kind,
                                                          unsigned flags) {
  return returned(cuMemPoolImportFromShareableHandle(out, descriptor, kind, flags));
}
VRAM_NULL_API Result cudaMemPoolExportPointer(MemoryPool::Pointer* out, void* pointer) {
  return returned(cuMemPoolExportPointer(out, address_of(pointer)));
}
VRAM_NULL_API Result cudaMemPoolImportPointer(void** out, Handle pool, MemoryPool::Pointer* pointer) {
  DevicePointer address = 0;
  const Result result = cuMemPoolImportPointer(&address, pool, pointer);
  *out = reinterpret_cast<void*>(address);
  return returned(result);
}
