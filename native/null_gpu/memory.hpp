// `Memory`: the memory of one null device. Addresses are reserved and never backed by anything; what is
// counted is how many bytes a device would have given out.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "null_gpu/abi.hpp"
#include "null_gpu/shared_pages.hpp"

namespace vram::null_gpu {

inline constexpr std::uint64_t kGranule = std::uint64_t{2} << 20;  // the driver's smallest piece of memory

// Addresses of all devices, in one reservation of the process, so that an address says what it is.
//
// A driver hands out addresses downwards, in stretches of 32 MiB that following requests fill from their
// front, and hands the range of an allocation that was freed to the next one of the same size. PyTorch takes
// the lowest of equal blocks, so this order decides where memory fragments.
class Addresses {
 public:
  static Addresses& get();
  DevicePointer take(std::uint64_t bytes);  // 0: none left. Rounds up to whole granules
  void give(DevicePointer address, std::uint64_t bytes);
  bool holds(const void* pointer) const {
    const auto at = reinterpret_cast<std::uint64_t>(pointer);
    return at >= base_ && at < end_;
  }

 private:
  Addresses();
  static constexpr std::uint64_t kStretch = std::uint64_t{32} << 20;
  static constexpr std::uint64_t kSpace = std::uint64_t{1} << 43, kLeastSpace = std::uint64_t{1} << 32;

  struct Rest {
    DevicePointer address;
    std::uint64_t bytes;
  };
  std::mutex mutex_;
  DevicePointer base_ = 0, end_ = 0, lowest_ = 0;
  std::vector<Rest> rests_;  // what stretches have left, the latest last
  std::multimap<std::uint64_t, DevicePointer> freed_;
};

class Memory {
 public:
  explicit Memory(int device);

  Result allocate(std::uint64_t bytes, DevicePointer* out);
  Result free(DevicePointer address);  // not_found: nothing was allocated there
  void info(std::uint64_t* free_bytes, std::uint64_t* total_bytes);
  std::uint64_t used();
  std::uint64_t peak();
  std::uint64_t refused();  // bytes of the last request that was refused; 0: none was

  // Bytes without an address, for memory pools, which give out addresses over what they hold.
  bool take(std::uint64_t bytes);
  void give(std::uint64_t bytes);
  void add_range(DevicePointer address, std::uint64_t bytes);
  void remove_range(DevicePointer address);
  // The allocation or mapping that holds an address.
  bool find(DevicePointer address, DevicePointer* begin, std::uint64_t* bytes);

  // The same, of memory that `allocate` has given out alone.
  bool find_allocated(DevicePointer address, DevicePointer* begin, std::uint64_t* bytes);

  // Pages: physical memory without an address, kept until it is released and mapped nowhere.
  Result page_create(std::uint64_t bytes, std::uint64_t* out, bool shareable = false);
  // The same in host memory, which is not counted.
  Result host_page_create(std::uint64_t bytes, std::uint64_t* out);
  // A file descriptor that stands for the page, and keeps it, in any process that has it; the caller closes
  // it.
  Result page_export(std::uint64_t page, int* descriptor);
  // Another handle of the page that a file descriptor stands for. It counts for the process that created it.
  static Result page_import(int descriptor, std::uint64_t* out);
  bool page_known(std::uint64_t page, bool* shareable);
  Result page_retain(DevicePointer address, std::uint64_t* out);
  Result page_release(std::uint64_t page);
  Result map(DevicePointer address, std::uint64_t bytes, std::uint64_t page);
  Result unmap(DevicePointer address, std::uint64_t bytes);
  int device() const { return device_; }

 private:
  struct Page {
    std::uint64_t bytes = 0;
    int holders = 0;  // the caller's handles
    int mappings = 0;
    bool shareable = false;
    bool host = false;
    std::int64_t exported = -1;                        // its place among ExportedPages
    std::optional<ImportedPages::Page> imported = {};  // of another process, or exported by this one
  };
  struct Mapping {
    std::uint64_t bytes = 0;
    std::uint64_t page = 0;
  };
  bool take_locked(std::uint64_t bytes);  // what is refused is reported
  void drop(std::unordered_map<std::uint64_t, Page>::iterator page);
  std::uint64_t add_page(const Page& page);
  void drop_returned();  // pages that only descriptors have kept

  const int device_;
  std::mutex mutex_;
  std::uint64_t used_;
  std::uint64_t peak_;
  std::uint64_t refused_ = 0;
  std::map<DevicePointer, std::uint64_t> blocks_;
  std::map<DevicePointer, std::uint64_t> ranges_;  // of memory pools and of other processes
  std::map<DevicePointer, Mapping> mappings_;
  std::unordered_map<std::uint64_t, Page> pages_;
  std::vector<std::uint64_t> lent_;  // pages that were dropped here while others had descriptors of them
  std::uint64_t last_page_ = 0;
};

// The device that the calling thread has chosen, and others by number; nullptr: there is no such device.
int& chosen_device();
int device_of_context(Handle context);
Memory* memory_of(int device);
// The device whose memory holds an address, or the chosen one.
Memory& memory_at(DevicePointer address);

}  // namespace vram::null_gpu
