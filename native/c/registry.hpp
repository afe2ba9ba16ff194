// The handles of C programs: numbers that look like pointers and are looked up before every use. The owner
// decides what a handle refers to and when it may be destroyed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>

namespace vram::c {

// A handle is (generation << 32) | (kind << 24) | index. It is never null, a destroyed handle does not become
// valid again before its entry was reused 2^31 times, and handles of another kind are detected. An entry is
// live while its generation is odd. Entries never move and are never released, so a lookup takes no lock; it
// must not race with take() of the same handle.
template <class Object, class Handle, std::uint8_t kKind>
class Registry {
  static_assert(sizeof(Handle*) == 8, "handles need 64 bits");
  static_assert(kKind != 0);

 public:
  // Throws std::bad_alloc if there is no memory for another entry.
  Handle* add(std::unique_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    const std::uint32_t index = free_ != 0 ? free_ : ++last_;
    Entry& entry = free_ != 0 ? *at(index) : make(index);
    if (index == free_) free_ = entry.next;
    entry.object = object.release();
    const std::uint32_t generation = entry.generation.load(std::memory_order_relaxed) + 1;
    entry.generation.store(generation, std::memory_order_release);
    const std::uint64_t handle =
        (std::uint64_t{generation} << 32) | (std::uint64_t{kKind} << kIndexBits) | index;
    return reinterpret_cast<Handle*>(handle);
  }
  // Null if the handle is not valid.
  Object* find(Handle* handle) const {
    const Entry* const entry = live(handle);
    return entry == nullptr ? nullptr : entry->object;
  }
  // Invalidates the handle; null if it was not valid.
  std::unique_ptr<Object> take(Handle* handle) {
    const std::lock_guard lock(mutex_);
    Entry* const entry = live(handle);
    if (entry == nullptr) return nullptr;
    entry->generation.fetch_add(1, std::memory_order_release);
    entry->next = free_;
    free_ = index_of(handle);
    Object* const object = entry->object;
    entry->object = nullptr;
    return std::unique_ptr<Object>(object);
  }

 private:
  static constexpr int kIndexBits = 24;
  static constexpr std::uint32_t kChunk = 1024;
  static constexpr std::uint32_t kChunks = 256;  // a quarter of a million handles at once
  struct Entry {
    std::atomic<std::uint32_t> generation{0};
    std::uint32_t next = 0;  // free entry after this one; 0: none
    Object* object = nullptr;
  };

  static std::uint32_t index_of(Handle* handle) {
    return static_cast<std::uint32_t>(reinterpret_cast<std::uint64_t>(handle)) & ((1u << kIndexBits) - 1);
  }
  Entry* at(std::uint32_t index) const {
    Entry* const chunk =
        index / kChunk < kChunks ? chunks_[index / kChunk].load(std::memory_order_acquire) : nullptr;
    return chunk == nullptr ? nullptr : &chunk[index % kChunk];
  }
  Entry* live(Handle* handle) const {
    const auto bits = reinterpret_cast<std::uint64_t>(handle);
    const auto generation = static_cast<std::uint32_t>(bits >> 32);
    if (((bits >> kIndexBits) & 0xff) != kKind || generation % 2 == 0) return nullptr;
    Entry* const entry = at(index_of(handle));
    const bool same = entry != nullptr && entry->generation.load(std::memory_order_acquire) == generation;
    return same ? entry : nullptr;
  }
  // Returns the entry of an index that was never used.
  Entry& make(std::uint32_t index) {
    if (index / kChunk >= kChunks) {
      --last_;
      throw std::bad_alloc();
    }
    if (at(index) == nullptr) {
      Entry* const chunk = new (std::nothrow) Entry[kChunk];
      if (chunk == nullptr) {
        --last_;
        throw std::bad_alloc();
      }
      chunks_[index / kChunk].store(chunk, std::memory_order_release);
    }
    return *at(index);
  }

  std::mutex mutex_;
  std::uint32_t last_ = 0;  // the largest index in use; 0 is not an index
  std::uint32_t free_ = 0;
  std::atomic<Entry*> chunks_[kChunks] = {};
};

}  // namespace vram::c
