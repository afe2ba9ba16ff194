// What PyTorch records of its allocator: events with stacks, annotations, and the stacks of live blocks.
// Defines History. Any thread may call it; it never calls the engine, which may call it under its own locks.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "versions.hpp"

namespace vram_torch {

using traces::AllocatorTraceTracker;
using traces::AnnotationEntry;
using traces::CreateContextFn;
using traces::RecordContext;
using traces::TraceEntry;
using Context = std::shared_ptr<c10::GatheredContext>;

class History {
 public:
  // Whether anything is recorded or followed. If not, nothing below needs to be called.
  bool active() const { return active_.load(std::memory_order_relaxed); }
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

  void record(bool enabled, CreateContextFn recorder, std::size_t entries, RecordContext when, bool clear,
              const std::vector<std::string>& skipped);
  void follow(AllocatorTraceTracker tracker);
  // The stack of this thread, if stacks of this level are recorded. May need Python's lock.
  Context gather(RecordContext level) const;

  void note(TraceEntry::Action action, int device, std::uint64_t address, std::uint64_t bytes, void* stream,
            c10::MempoolId_t heap, const Context& context);
  void annotate(int device, const std::vector<std::pair<std::string, std::string>>& metadata);
  // The stacks with which blocks and segments were allocated, by their addresses. They are kept until these
  // are freed, also if nothing is recorded any more.
  enum class Kind { block, segment };
  bool remembers() const { return remembers_.load(std::memory_order_relaxed); }
  void remember(Kind kind, std::uint64_t address, const Context& context);
  void forget(Kind kind, std::uint64_t address);
  Context remembered(Kind kind, std::uint64_t address) const;

  // With times in microseconds of the Unix epoch; a list for each of so many devices.
  std::vector<std::vector<TraceEntry>> entries(int devices);
  std::vector<AnnotationEntry> annotations();

  // Of the calling thread.
  static void push_compile_context(const std::string& text) { compile_contexts().push_back(text); }
  static void pop_compile_context() {
    if (!compile_contexts().empty()) compile_contexts().pop_back();
  }
  static std::string& user_metadata() {
    thread_local std::string text;
    return text;
  }

  // While it lives, what the engine does on this thread is noted with this stack.
  class Under {
   public:
    explicit Under(const Context& context) : outer_(current()) { current() = &context; }
    ~Under() { current() = outer_; }
    Under(const Under&) = delete;
    Under& operator=(const Under&) = delete;
    static Context context() { return current() != nullptr ? *current() : nullptr; }

   private:
    static const Context*& current() {
      thread_local const Context* context = nullptr;
      return context;
    }
    const Context* const outer_;
  };

 private:
  static std::vector<std::string>& compile_contexts() {
    thread_local std::vector<std::string> texts;
    return texts;
  }
  void update_active() { active_ = enabled_ || !trackers_.empty(); }

  mutable std::mutex mutex_;
  std::atomic<bool> active_{false};
  std::atomic<bool> enabled_{false};
  std::atomic<bool> remembers_{false};
  std::atomic<CreateContextFn> recorder_{nullptr};
  std::atomic<RecordContext> when_{RecordContext::NEVER};
  std::size_t most_ = 1;
  std::unordered_set<int> skipped_;
  std::vector<AllocatorTraceTracker> trackers_;
  std::unordered_map<int, std::deque<TraceEntry>> entries_;
  std::deque<AnnotationEntry> annotations_;
  std::unordered_map<std::uint64_t, Context> contexts_[2];  // by kind
  c10::ApproximateClockToUnixTimeConverter clock_;          // measures from now until it converts
};

}  // namespace vram_torch
