// Copies within host memory by several threads at once: one thread alone moves a fraction of what the memory,
// or a GPU's bus, can take. When a copy runs is its stream's business (Backend::launch); who owns the memory,
// the caller's.
#pragma once

#include <memory>

#include "base/types.hpp"

namespace vram {

// Threads start with the first large copy and sleep between copies. Any thread may call, several at once.
// Fork: in the child copies are made by the calling thread alone.
class HostCopies : public std::enable_shared_from_this<HostCopies> {
 public:
  // threads: that take part in one copy, the caller's included; 0: as many as pay.
  explicit HostCopies(unsigned threads = 0);
  ~HostCopies();
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  // Returns when all is copied. pre: the ranges do not overlap.
  void copy(Address to, Address from, std::uint64_t bytes);
  unsigned threads() const { return threads_; }

 private:
  struct Crew;
  bool inherited() const;  // this process is a fork's child

  const unsigned threads_;
  const int process_;  // the one that made this
  std::unique_ptr<Crew> crew_;
};

}  // namespace vram
