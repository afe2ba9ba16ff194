// A table of objects with handles: constant-time lookup, and a removed handle never becomes valid again. The
// owner defines the objects and does the locking.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace vram {

// A handle is (generation << 32) | index, so it is never 0. An entry is live while its generation is odd;
// adding and removing both increment it, which invalidates old handles.
template <class Value>
class HandleTable {
 public:
  std::uint64_t add(Value value) {
    const std::uint32_t index = free_.empty() ? grow() : pop_free();
    Entry& entry = entries_[index];
    entry.value = std::move(value);
    ++entry.generation;
    ++size_;
    return (std::uint64_t{entry.generation} << 32) | index;
  }
  // nullptr if the handle is unknown. The pointer is valid until the next add.
  Value* find(std::uint64_t handle) {
    const std::uint32_t index = static_cast<std::uint32_t>(handle);
    const std::uint32_t generation = static_cast<std::uint32_t>(handle >> 32);
    if (index >= entries_.size() || entries_[index].generation != generation) return nullptr;
    return generation % 2 == 1 ? &entries_[index].value : nullptr;
  }
  const Value* find(std::uint64_t handle) const { return const_cast<HandleTable*>(this)->find(handle); }
  // Never fails. pre: find(handle) is not null.
  void remove(std::uint64_t handle) {
    const std::uint32_t index = static_cast<std::uint32_t>(handle);
    entries_[index].value = Value{};
    ++entries_[index].generation;
    free_.push_back(index);
    --size_;
  }
  std::uint64_t size() const { return size_; }
  template <class Visit>
  void each(Visit visit) const {
    for (std::uint32_t index = 0; index < entries_.size(); ++index) {
      const Entry& entry = entries_[index];
      if (entry.generation % 2 == 1) visit((std::uint64_t{entry.generation} << 32) | index, entry.value);
    }
  }

 private:
  struct Entry {
    Value value{};
    std::uint32_t generation = 0;
  };
  std::uint32_t grow() {
    if (free_.capacity() <= entries_.size()) free_.reserve(2 * entries_.size() + 1);  // for remove()
    entries_.emplace_back();
    return static_cast<std::uint32_t>(entries_.size() - 1);
  }
  std::uint32_t pop_free() {
    const std::uint32_t index = free_.back();
    free_.pop_back();
    return index;
  }

  std::vector<Entry> entries_;
  std::vector<std::uint32_t> free_;
  std::uint64_t size_ = 0;
};

}  // namespace vram
