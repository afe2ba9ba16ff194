// What every policy fulfils: an allocator's algorithm, run on a device that is only counted. A policy decides
// where a request lies and when it goes to the driver; what a recording says, and in which order it happened,
// is for replay.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/types.hpp"

namespace vram {

// A plain segment that the recorded allocator got.
struct RecordedSegment {
  std::uint64_t size = 0;
  Address address = 0;
};

// The driver of a device with `capacity` bytes, as a policy meets it: it grants or refuses, and counts.
// Addresses matter where an allocator prefers the lower of two equal blocks. As long as a policy asks for
// what the recorded allocator asked for, it gets the recorded addresses; from then on what CUDA's driver
// mostly gives: each below the last, at multiples of 32 MiB, and small ones in the rest behind the last.
// Invariant: reserved() <= capacity.
class PolicyDevice {
 public:
  // As a capacity: never full. Far below 2^64, so that sums of sizes do not wrap.
  static constexpr std::uint64_t kUnlimited = std::uint64_t{1} << 60;
  // Recorded addresses are moved up by this: all others lie below.
  static constexpr Address kRecordedBase = std::uint64_t{1} << 62;

  // keep_sizes: for sizes(). recorded: in order.
  explicit PolicyDevice(std::uint64_t capacity, bool keep_sizes = false,
                        std::vector<RecordedSegment> recorded = {})
      : capacity_(capacity), keep_sizes_(keep_sizes), recorded_(std::move(recorded)) {}

  // One plain allocation (cudaMalloc). post: addresses that no other allocation has.
  bool allocate(std::uint64_t bytes, Address* address);
  void release(Address address, std::uint64_t bytes);
  // Pages of `page` bytes each, created and mapped (or unmapped and given back) together.
  bool map(std::uint64_t bytes, std::uint64_t page);
  void unmap(std::uint64_t bytes, std::uint64_t page);
  // More of a piece that is thought to have been taken in one call at the beginning.
  bool extend(std::uint64_t bytes) { return grow(bytes); }
  // A range of addresses without memory.
  Address reserve_addresses(std::uint64_t bytes, std::uint64_t alignment);

  std::uint64_t capacity() const { return capacity_; }
  std::uint64_t reserved() const { return reserved_; }
  std::uint64_t peak_reserved() const { return peak_reserved_; }
  std::uint64_t calls() const { return calls_; }
  double us() const { return us_; }
  // Bytes of every growth in order, where asked to keep them.
  const std::vector<std::uint64_t>& sizes() const { return sizes_; }

 private:
  bool grow(std::uint64_t bytes);
  Address place(std::uint64_t bytes);
  // The next recorded address, or 0 where the recording no longer fits.
  Address follow(std::uint64_t bytes);

  std::uint64_t capacity_;
  bool keep_sizes_;
  std::uint64_t reserved_ = 0;
  std::uint64_t peak_reserved_ = 0;
  std::uint64_t calls_ = 0;
  double us_ = 0;
  std::vector<RecordedSegment> recorded_;
  std::map<Address, std::uint64_t> held_;  // plain allocations: bytes by address
  std::size_t followed_ = 0;               // of the recorded segments
  Address lowest_ = kRecordedBase;         // of all addresses given
  Address rest_ = 0;                       // the unused addresses behind the last segment
  Address rest_end_ = 0;
  std::vector<std::uint64_t> sizes_;
};

// A request that was served; meaningless to everyone but the policy that gave it, until it is freed.
using Token = void*;

using Ticket = std::uint64_t;

struct Placement {
  Address address = 0;
  std::uint64_t size = 0;  // bytes set aside, at least those asked for
};

// What a policy did so far.
struct PolicyUsage {
  std::uint64_t allocated = 0;  // bytes set aside for what the program holds
  std::uint64_t peak_allocated = 0;
  std::uint64_t reserved = 0;  // bytes taken from the device
  std::uint64_t peak_reserved = 0;
  std::uint64_t driver_calls = 0;
  double driver_us = 0;       // modelled from measured prices
  std::uint64_t retries = 0;  // requests served only after cached memory was given back
};

// One allocator. Calls come from one thread. Times are microseconds of the recording and never fall.
class Policy {
 public:
  virtual ~Policy() = default;

  // Returns nullptr when out of memory; everything but caches is then as before.
  virtual Token allocate(std::uint64_t size, std::uint32_t stream, std::int64_t time_us) = 0;
  // The program gives the memory up, and only its own stream has used it.
  virtual void free(Token token, std::int64_t time_us) = 0;
  // The program gives memory of `stream` up while another one still uses it. Returns what complete() wants
  // when that use has ended.
  virtual Ticket free_later(Token token, std::uint32_t stream, std::int64_t time_us) = 0;
  // A policy may have waited by itself before; then this changes nothing.
  virtual void complete(Ticket ticket) = 0;
  // The program wants cached memory given back to the device (torch.cuda.empty_cache). A policy that keeps
  // its memory for good does nothing.
  virtual void trim() {}

  virtual Placement placement(Token token) const = 0;
  virtual PolicyUsage usage() const = 0;
  virtual const std::vector<std::uint64_t>& segment_sizes() const = 0;
  // Whether every invariant holds; else *why names the first that does not.
  virtual bool check(std::string* why) const = 0;
};

}  // namespace vram
