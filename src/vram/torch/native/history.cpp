// Recording what PyTorch asks for. See history.hpp.
#include "history.hpp"

#include <algorithm>

namespace vram_torch {

void History::record(bool enabled, CreateContextFn recorder, std::size_t entries, RecordContext when,
                     bool clear, const std::vector<std::string>& skipped) {
  TORCH_CHECK(when == RecordContext::NEVER || recorder != nullptr, "stacks are wanted without a recorder");
  std::unordered_set<int> actions;
#if VRAM_TORCH_SINCE(11)
  for (const std::string& name : skipped)
    actions.insert(static_cast<int>(traces::parseTraceEntryAction(name)));
#endif
  const std::lock_guard lock(mutex_);
  enabled_ = enabled;
  recorder_ = enabled ? recorder : nullptr;
  when_ = enabled ? when : RecordContext::NEVER;
  most_ = std::max<std::size_t>(1, entries);
  skipped_ = std::move(actions);
  if (!enabled || clear) {
    entries_.clear();
    annotations_.clear();
  }
  for (auto& [_, kept] : entries_)
    while (kept.size() > most_) kept.pop_front();
  update_active();
}

void History::follow(AllocatorTraceTracker tracker) {
  const std::lock_guard lock(mutex_);
  trackers_.push_back(std::move(tracker));
  update_active();
}

Context History::gather(RecordContext level) const {
  const CreateContextFn recorder = recorder_.load();
  return recorder != nullptr && when_.load() >= level ? recorder() : nullptr;
}

void History::note(TraceEntry::Action action, int device, std::uint64_t address, std::uint64_t bytes,
                   void* stream, c10::MempoolId_t heap, const Context& context) {
  const std::string compiled = compile_contexts().empty() ? std::string("N/A") : compile_contexts().back();
  const std::lock_guard lock(mutex_);
  TraceEntry entry(action, static_cast<c10::DeviceIndex>(device), address, bytes,
                   static_cast<cudaStream_t>(stream), heap, c10::getApproximateTime(),
                   when_ >= RecordContext::ALLOC ? context : nullptr, compiled);
#if VRAM_TORCH_SINCE(10)
  entry.user_metadata_ = user_metadata();
#endif
  for (const AllocatorTraceTracker& tracker : trackers_) tracker(entry);
  if (!enabled_ || skipped_.count(static_cast<int>(action)) != 0) return;
  std::deque<TraceEntry>& kept = entries_[device];
  if (kept.size() >= most_) kept.pop_front();
  kept.push_back(std::move(entry));
}

void History::annotate(int device, const std::vector<std::pair<std::string, std::string>>& metadata) {
  AnnotationEntry entry(static_cast<c10::DeviceIndex>(device), c10::getApproximateTime());
  for (const auto& [name, value] : metadata) entry.recordUserMetadata(name, value);
  const std::lock_guard lock(mutex_);
  if (!enabled_) return;
  if (annotations_.size() >= most_) annotations_.pop_front();
  annotations_.push_back(std::move(entry));
}

void History::remember(Kind kind, std::uint64_t address, const Context& context) {
  if (context == nullptr) return;
  const std::lock_guard lock(mutex_);
  contexts_[static_cast<int>(kind)][address] = context;
  remembers_ = true;
}

void History::forget(Kind kind, std::uint64_t address) {
  Context released;  // destroyed after the lock: it may hold Python objects
  const std::lock_guard lock(mutex_);
  auto& contexts = contexts_[static_cast<int>(kind)];
  const auto found = contexts.find(address);
  if (found == contexts.end()) return;
  released = std::move(found->second);
  contexts.erase(found);
  remembers_ = !contexts_[0].empty() || !contexts_[1].empty();
}

Context History::remembered(Kind kind, std::uint64_t address) const {
  const std::lock_guard lock(mutex_);
  const auto& contexts = contexts_[static_cast<int>(kind)];
  const auto found = contexts.find(address);
  return found != contexts.end() ? found->second : nullptr;
}

std::vector<std::vector<TraceEntry>> History::entries(int devices) {
  std::vector<std::vector<TraceEntry>> result(static_cast<std::size_t>(devices));
  const std::lock_guard lock(mutex_);
  const auto to_unix = clock_.makeConverter();
  for (const auto& [device, kept] : entries_) {
    if (device >= devices) continue;
    std::vector<TraceEntry>& out = result[static_cast<std::size_t>(device)];
    out.assign(kept.begin(), kept.end());
    for (TraceEntry& entry : out) entry.time_.t_ = to_unix(entry.time_.approx_t_) / 1000;
  }
  return result;
}

std::vector<AnnotationEntry> History::annotations() {
  const std::lock_guard lock(mutex_);
  const auto to_unix = clock_.makeConverter();
  std::vector<AnnotationEntry> result(annotations_.begin(), annotations_.end());
  for (AnnotationEntry& entry : result) entry.time_.t_ = to_unix(entry.time_.approx_t_) / 1000;
  return result;
}

}  // namespace vram_torch
