// Copies host memory with several threads: one thread alone uses only a fraction of the bandwidth of the
// memory or of a GPU's bus. The stream decides when a copy runs (Backend::launch); the caller owns the
// memory.
#pragma once

#include <memory>

#include "base/types.hpp"

namespace vram {

// Threads start with the first large copy and sleep between copies. Any thread may call, also concurrently.
// Fork: in the child, the calling thread copies alone.
class HostCopies : public std::enable_shared_from_this<HostCopies> {
 public:
  // threads: number of threads in one copy, including the caller; 0: chosen automatically.
  explicit HostCopies(unsigned threads = 0);
  ~HostCopies();
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  // Returns when everything is copied. pre: the ranges do not overlap.
  void copy(Address to, Address from, std::uint64_t bytes);
  unsigned threads() const { return threads_; }

 private:
  struct Crew;
  bool inherited() const;  // this process is the child of a fork

  const unsigned threads_;
  const int process_;  // the process that created this
  std::unique_ptr<Crew> crew_;
};

}  // namespace vram
