// What every policy implements: an allocator's algorithm on a counting device. A policy decides where a
// request is placed and when it calls the driver; replay.hpp feeds it the recording.
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

// A plain segment of the recorded allocator.
struct RecordedSegment {
  std::uint64_t size = 0;
  Address address = 0;
};

// The driver of a device with `capacity` bytes, as seen by a policy: it allocates or refuses, and counts.
// Addresses matter if an allocator prefers the lower of two equal blocks. As long as a policy requests what
// the recorded allocator requested, it gets the recorded addresses; after that, what CUDA's driver usually
// returns: each below the last, at multiples of 32 MiB, and small ones in the space behind the last.
// Invariant: reserved() <= capacity.
class PolicyDevice {
 public:
  // As a capacity: unlimited. Far below 2^64, so that sums of sizes do not overflow.
  static constexpr std::uint64_t kUnlimited = std::uint64_t{1} << 60;
  // Recorded addresses are moved up by this: all others are below.
  static constexpr Address kRecordedBase = std::uint64_t{1} << 62;

  // keep_sizes: for sizes(). recorded: in order.
  explicit PolicyDevice(std::uint64_t capacity, bool keep_sizes = false,
                        std::vector<RecordedSegment> recorded = {})
      : capacity_(capacity), keep_sizes_(keep_sizes), recorded_(std::move(recorded)) {}

  // One plain allocation (cudaMalloc). post: addresses that no other allocation has.
  bool allocate(std::uint64_t bytes, Address* address);
  void release(Address address, std::uint64_t bytes);
  // Pages of `page` bytes each, created and mapped (or unmapped and released) together.
  bool map(std::uint64_t bytes, std::uint64_t page);
  void unmap(std::uint64_t bytes, std::uint64_t page);
  // More of a range that is assumed to have been allocated in one call at the beginning.
  bool extend(std::uint64_t bytes) { return grow(bytes); }
  // A range of addresses without memory; 0 if there is none of that size.
  Address reserve_addresses(std::uint64_t bytes, std::uint64_t alignment);

  std::uint64_t capacity() const { return capacity_; }
  std::uint64_t reserved() const { return reserved_; }
  std::uint64_t peak_reserved() const { return peak_reserved_; }
  std::uint64_t calls() const { return calls_; }
  double us() const { return us_; }
  // Bytes of every growth in order, if they are kept.
  const std::vector<std::uint64_t>& sizes() const { return sizes_; }

 private:
  bool grow(std::uint64_t bytes);
  bool has_addresses(std::uint64_t bytes, std::uint64_t alignment) const;
  Address place(std::uint64_t bytes);
  // The next recorded address, or 0 if the recording no longer matches.
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
  Address lowest_ = kRecordedBase;         // of all assigned addresses
  Address rest_ = 0;                       // the unused addresses behind the last segment
  Address rest_end_ = 0;
  std::vector<std::uint64_t> sizes_;
};

// A successful request; only the policy that returned it can interpret it, until it is freed.
using Token = void*;

using Ticket = std::uint64_t;

struct Placement {
  Address address = 0;
  std::uint64_t size = 0;  // allocated bytes, at least the requested ones
};

// What spilling to host memory did so far, and what it costs. A recording has no uses of memory, so they are
// assumed: see VramPolicy.
struct SpillTraffic {
  std::uint64_t moved_out = 0;   // bytes moved to host pages
  std::uint64_t moved_back = 0;  // … and back
  std::uint64_t read = 0;        // bytes that kernels read in place, over the bus
  std::uint64_t swaps = 0;       // to the host
  std::uint64_t returns = 0;
  std::uint64_t peak = 0;  // most bytes of host pages
  double held_us = 0;      // how long swaps held the streams
  double read_us = 0;      // how long the bus takes for `read`
  double created_us = 0;   // what creating host pages takes, while the streams run
};

// What a policy did so far.
struct PolicyUsage {
  std::uint64_t allocated = 0;  // bytes allocated for the program
  std::uint64_t peak_allocated = 0;
  std::uint64_t reserved = 0;  // bytes reserved from the device
  std::uint64_t peak_reserved = 0;
  std::uint64_t driver_calls = 0;
  double driver_us = 0;       // modelled from measured costs
  std::uint64_t retries = 0;  // requests served only after cached memory was released
  SpillTraffic spill;
};

// One allocator. Calls come from one thread. Times are microseconds of the recording and never decrease.
class Policy {
 public:
  virtual ~Policy() = default;

  // Returns nullptr if it is out of memory; everything except caches is then unchanged.
  virtual Token allocate(std::uint64_t size, std::uint32_t stream, std::int64_t time_us) = 0;
  // The program frees memory that only its own stream has used.
  virtual void free(Token token, std::int64_t time_us) = 0;
  // The program frees memory of `stream` while another stream still uses it. Returns the argument for
  // complete() when that use has ended.
  virtual Ticket free_later(Token token, std::uint32_t stream, std::int64_t time_us) = 0;
  // A policy may already have waited by itself; then this has no effect.
  virtual void complete(Ticket ticket) = 0;
  // The program releases cached memory to the device (torch.cuda.empty_cache). A policy that never releases
  // memory does nothing.
  virtual void trim() {}
  // A step of the program begins.
  virtual void step() {}

  virtual Placement placement(Token token) const = 0;
  virtual PolicyUsage usage() const = 0;
  virtual const std::vector<std::uint64_t>& segment_sizes() const = 0;
  // The traffic up to the beginning of each step; empty unless the policy spills.
  virtual std::vector<SpillTraffic> spill_steps() const { return {}; }
  // Whether every invariant holds; otherwise *why names the first violated one.
  virtual bool check(std::string* why) const = 0;
};

}  // namespace vram
