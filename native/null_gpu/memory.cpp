#include "null_gpu/memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <utility>

#include "null_gpu/profile.hpp"
#include "null_gpu/report.hpp"

namespace vram::null_gpu {

namespace {

std::uint64_t rounded(std::uint64_t bytes, std::uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

// ---- addresses ------------------------------------------------------------------------------------------

Addresses& Addresses::get() {
  static auto* const addresses = new Addresses;  // used until the process has ended
  return *addresses;
}

// As much as the process may reserve: a limit (ulimit -v) or a sanitizer leaves less than all.
Addresses::Addresses() {
  for (std::uint64_t bytes = kSpace; bytes >= kLeastSpace; bytes /= 2) {
    void* const space = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) continue;
    const auto begin = reinterpret_cast<std::uint64_t>(space);
    base_ = rounded(begin, kStretch);
    end_ = (begin + bytes) / kStretch * kStretch;
    lowest_ = end_;
    return;
  }
  std::fputs("vram: the null GPU cannot reserve 4 GiB of addresses (ulimit -v?)\n", stderr);
  std::abort();
}

DevicePointer Addresses::take(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  bytes = rounded(bytes, kGranule);
  if (const auto freed = freed_.find(bytes); freed != freed_.end()) {
    const DevicePointer address = freed->second;
    freed_.erase(freed);
    return address;
  }
  for (auto rest = rests_.rbegin(); rest != rests_.rend(); ++rest) {
    if (rest->bytes < bytes) continue;
    const DevicePointer address = rest->address;
    rest->address += bytes;
    rest->bytes -= bytes;
    if (rest->bytes == 0) rests_.erase(std::next(rest).base());
    return address;
  }
  const std::uint64_t stretch = rounded(bytes, kStretch);
  if (stretch > lowest_ - base_) return 0;
  lowest_ -= stretch;
  if (stretch > bytes) rests_.push_back({lowest_ + bytes, stretch - bytes});
  return lowest_;
}

void Addresses::give(DevicePointer address, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  freed_.emplace(rounded(bytes, kGranule), address);
}

// ---- memory ---------------------------------------------------------------------------------------------

Memory::Memory(int device) : device_(device), used_(Profile::get().overhead), peak_(used_) {}

bool Memory::take_locked(std::uint64_t bytes) {
  drop_returned();
  const std::uint64_t total = Profile::get().memory;
  const bool taken = used_ <= total && bytes <= total - used_;
  if (taken)
    used_ += bytes;
  else
    refused_ = bytes;
  if (taken && used_ <= peak_) return true;
  peak_ = std::max(peak_, used_);
  leave_use(device_, {peak_, refused_});
  return taken;
}

bool Memory::take(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  return take_locked(bytes);
}

void Memory::give(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  used_ -= bytes;
}

std::uint64_t Memory::used() {
  const std::lock_guard lock(mutex_);
  drop_returned();
  return used_;
}

std::uint64_t Memory::peak() {
  const std::lock_guard lock(mutex_);
  return peak_;
}

std::uint64_t Memory::refused() {
  const std::lock_guard lock(mutex_);
  return refused_;
}

Result Memory::allocate(std::uint64_t bytes, DevicePointer* out) {
  const std::lock_guard lock(mutex_);
  *out = 0;
  if (bytes == 0) return kSuccess;
  if (bytes <= Profile::get().memory) bytes = rounded(bytes, kGranule);
  if (!take_locked(bytes)) return kOutOfMemory;
  const DevicePointer address = Addresses::get().take(bytes);
  if (address == 0) {
    used_ -= bytes;
    return kOutOfMemory;
  }
  blocks_.emplace(address, bytes);
  *out = address;
  return kSuccess;
}

Result Memory::free(DevicePointer address) {
  if (address == 0) return kSuccess;
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(address);
  if (block == blocks_.end()) return kInvalidValue;
  used_ -= block->second;
  Addresses::get().give(address, block->second);
  blocks_.erase(block);
  return kSuccess;
}

void Memory::info(std::uint64_t* free_bytes, std::uint64_t* total_bytes) {
  const std::lock_guard lock(mutex_);
  drop_returned();
  *total_bytes = Profile::get().memory;
  *free_bytes = used_ < *total_bytes ? *total_bytes - used_ : 0;
}

void Memory::add_range(DevicePointer address, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  ranges_.emplace(address, bytes);
}

void Memory::remove_range(DevicePointer address) {
  const std::lock_guard lock(mutex_);
  ranges_.erase(address);
}

namespace {

// The range of a map from beginnings to lengths that holds an address.
template <typename Ranges, typename Length>
bool in(const Ranges& ranges, const Length& length, DevicePointer address, DevicePointer* begin,
        std::uint64_t* bytes) {
  auto range = ranges.upper_bound(address);
  if (range == ranges.begin() || address - (--range)->first >= length(range->second)) return false;
  *begin = range->first;
  *bytes = length(range->second);
  return true;
}
constexpr auto kWhole = [](std::uint64_t length) { return length; };

}  // namespace

bool Memory::find(DevicePointer address, DevicePointer* begin, std::uint64_t* bytes) {
  const std::lock_guard lock(mutex_);
  const auto mapped = [](const Mapping& mapping) { return mapping.bytes; };
  return in(blocks_, kWhole, address, begin, bytes) || in(ranges_, kWhole, address, begin, bytes) ||
         in(mappings_, mapped, address, begin, bytes);
}

bool Memory::find_allocated(DevicePointer address, DevicePointer* begin, std::uint64_t* bytes) {
  const std::lock_guard lock(mutex_);
  return in(blocks_, kWhole, address, begin, bytes);
}

// ---- pages ----------------------------------------------------------------------------------------------

std::uint64_t Memory::add_page(const Page& page) {
  // Handles of different devices differ.
  const std::uint64_t handle = ++last_page_ << 8 | static_cast<std::uint64_t>(device_);
  pages_.emplace(handle, page);
  return handle;
}

Result Memory::page_create(std::uint64_t bytes, std::uint64_t* out, bool shareable) {
  const std::lock_guard lock(mutex_);
  if (bytes == 0 || bytes % kGranule != 0) return kInvalidValue;
  if (!take_locked(bytes)) return kOutOfMemory;
  *out = add_page({.bytes = bytes, .holders = 1, .shareable = shareable});
  return kSuccess;
}

Result Memory::host_page_create(std::uint64_t bytes, std::uint64_t* out) {
  const std::lock_guard lock(mutex_);
  if (bytes == 0 || bytes % kGranule != 0) return kInvalidValue;
  *out = add_page({.bytes = bytes, .holders = 1, .host = true});
  return kSuccess;
}

bool Memory::page_known(std::uint64_t handle, bool* shareable) {
  const std::lock_guard lock(mutex_);
  const auto page = pages_.find(handle);
  if (page == pages_.end()) return false;
  *shareable = page->second.shareable;
  return true;
}

Result Memory::page_retain(DevicePointer address, std::uint64_t* out) {
  const std::lock_guard lock(mutex_);
  auto mapping = mappings_.upper_bound(address);
  if (mapping == mappings_.begin()) return kInvalidValue;
  --mapping;
  if (address - mapping->first >= mapping->second.bytes) return kInvalidValue;
  *out = mapping->second.page;
  ++pages_.at(*out).holders;
  return kSuccess;
}

void Memory::drop(std::unordered_map<std::uint64_t, Page>::iterator page) {
  if (page->second.holders != 0 || page->second.mappings != 0) return;
  if (page->second.exported >= 0 && !ExportedPages::get().remove(page->second.exported)) {
    lent_.push_back(page->first);
    return;
  }
  if (page->second.imported)
    ImportedPages::get().remove(*page->second.imported);
  else if (!page->second.host)
    used_ -= page->second.bytes;
  pages_.erase(page);
}

void Memory::drop_returned() {
  for (const std::uint64_t handle : std::exchange(lent_, {})) drop(pages_.find(handle));
}

Result Memory::page_release(std::uint64_t handle) {
  const std::lock_guard lock(mutex_);
  const auto page = pages_.find(handle);
  if (page == pages_.end() || page->second.holders == 0) return kInvalidValue;
  --page->second.holders;
  drop(page);
  return kSuccess;
}

Result Memory::map(DevicePointer address, std::uint64_t bytes, std::uint64_t handle) {
  const std::lock_guard lock(mutex_);
  const auto page = pages_.find(handle);
  if (page == pages_.end() || page->second.bytes < bytes || bytes == 0) return kInvalidValue;
  if (address % kGranule != 0 || bytes % kGranule != 0) return kInvalidValue;
  const auto next = mappings_.lower_bound(address);
  if (next != mappings_.end() && next->first < address + bytes) return kInvalidValue;
  if (next != mappings_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes > address) return kInvalidValue;
  }
  mappings_.emplace(address, Mapping{bytes, handle});
  ++page->second.mappings;
  return kSuccess;
}

Result Memory::unmap(DevicePointer address, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const DevicePointer end = address + bytes;
  auto mapping = mappings_.find(address);
  for (DevicePointer at = address; at < end; at += mapping++->second.bytes)
    if (mapping == mappings_.end() || mapping->first != at || mapping->second.bytes > end - at)
      return kInvalidValue;
  for (mapping = mappings_.find(address); mapping != mappings_.end() && mapping->first < end;) {
    const auto page = pages_.find(mapping->second.page);
    --page->second.mappings;
    drop(page);
    mapping = mappings_.erase(mapping);
  }
  return kSuccess;
}

// ---- pages of several processes -------------------------------------------------------------------------

Result Memory::page_export(std::uint64_t handle, int* descriptor) {
  const std::lock_guard lock(mutex_);
  const auto page = pages_.find(handle);
  if (page == pages_.end() || !page->second.shareable) return kInvalidValue;
  std::int64_t& place = page->second.exported;
  if (place < 0) place = ExportedPages::get().add(page->second.bytes, device_);
  return place >= 0 ? ExportedPages::get().open(place, descriptor) : kUnknownError;
}

Result Memory::page_import(int descriptor, std::uint64_t* out) {
  ImportedPages::Page page;
  if (const Result result = ImportedPages::get().add(descriptor, &page); result != kSuccess) return result;
  Memory* const memory = memory_of(page.device);
  if (memory == nullptr) {
    ImportedPages::get().remove(page);
    return kInvalidDevice;
  }
  const std::lock_guard lock(memory->mutex_);
  *out = memory->add_page({.bytes = page.bytes, .holders = 1, .imported = page});
  return kSuccess;
}

// ---- devices --------------------------------------------------------------------------------------------

int& chosen_device() {
  thread_local int device = 0;
  return device;
}

Memory* memory_of(int device) {
  static auto* const memories = [] {
    auto* const made = new std::deque<Memory>;
    for (int i = 0; i < Profile::get().devices; ++i) made->emplace_back(i);
    return made;
  }();
  return device >= 0 && device < static_cast<int>(memories->size()) ? &(*memories)[device] : nullptr;
}

Memory& memory_at(DevicePointer address) {
  DevicePointer begin;
  std::uint64_t bytes;
  for (int i = 0; Memory* memory = memory_of(i); ++i)
    if (memory->find(address, &begin, &bytes)) return *memory;
  return *memory_of(chosen_device());
}

}  // namespace vram::null_gpu
