// Replays a recorded program of allocations and frees through a policy, in pieces, and reports what it would
// have cost. Recordings are plain columns here; they are read elsewhere.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <queue>

#include "replay/policies/policy.hpp"

namespace vram {

// One row per operation, in order of time; a long program may come in pieces.
struct ReplayProgram {
  std::size_t rows = 0;
  const std::uint8_t* op = nullptr;       // 0: allocate, 1: free
  const std::uint32_t* id = nullptr;      // of the allocation; may be reused after its free
  const std::uint64_t* size = nullptr;    // bytes requested
  const std::uint32_t* stream = nullptr;  // number of the stream
  const std::int64_t* time_us = nullptr;  // since the first event
  const std::int64_t* event = nullptr;    // of the recording; never decreases
  // For a free that waited for other streams: the event that ended the wait; else -1.
  const std::int64_t* completed = nullptr;
  // Not by row: the events at which the program emptied the allocator's cache, in order.
  std::size_t trims = 0;
  const std::int64_t* trim = nullptr;
  // … and those at which its steps begin.
  std::size_t steps = 0;
  const std::int64_t* step = nullptr;
};

struct ReplayFailure {
  std::size_t row = 0;
  std::uint64_t size = 0;
  std::uint64_t allocated = 0;
  std::uint64_t reserved = 0;
};

struct ReplayResult {
  PolicyUsage usage;
  double seconds = 0;
  std::size_t rows = 0;  // run so far
  std::optional<ReplayFailure> failure;
};

// A program that is replayed through a policy. After the first failed request, nothing more is run.
class Replayer {
 public:
  explicit Replayer(std::unique_ptr<Policy> policy) : policy_(std::move(policy)) {}

  // `poll` is called about every millisecond; if it throws, the replay is abandoned. False: out of memory.
  bool run(const ReplayProgram& program, const std::function<void()>& poll = nullptr);
  ReplayResult result() const;
  const Policy& policy() const { return *policy_; }
  Policy& policy() { return *policy_; }
  // What the policy knows the live ones of these allocations by.
  std::vector<Token> tokens(const std::vector<std::uint32_t>& ids) const;

 private:
  struct Waiting {
    std::int64_t event;
    Ticket ticket;
    friend bool operator<(const Waiting& a, const Waiting& b) { return a.event > b.event; }
  };

  // True unless memory ran out.
  bool step(const ReplayProgram& program, std::size_t row);
  void complete_until(std::int64_t event);

  std::unique_ptr<Policy> policy_;
  std::vector<Token> tokens_;  // by id
  std::priority_queue<Waiting> waiting_;
  ReplayResult result_;
};

}  // namespace vram
