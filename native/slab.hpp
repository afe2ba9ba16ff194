// Arrays whose elements never move: address space is reserved once, memory is touched as it is used.
// The pool's blocks, pages and tables live in them, so that an index or a reference stays valid while
// other threads add elements. They leave all locking to their owner.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <new>
#include <utility>

#include "types.hpp"

namespace vram {

// `capacity` zero-filled elements; untouched ones cost no memory.
template <typename T>
class LazyArray {
 public:
  explicit LazyArray(std::size_t capacity) : bytes_(capacity * sizeof(T)) {
    void* memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(memory);
  }
  ~LazyArray() { munmap(data_, bytes_); }
  LazyArray(const LazyArray&) = delete;
  LazyArray& operator=(const LazyArray&) = delete;

  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  std::size_t capacity() const { return bytes_ / sizeof(T); }
  // Returns the memory of [first, first + count) to the system; the elements read as zero again.
  void forget(std::size_t first, std::size_t count) {
    constexpr std::size_t kOsPage = 64 * 1024;  // the largest base page of the systems we run on
    const std::size_t from = round_up(first * sizeof(T), kOsPage);
    const std::size_t to = (first + count) * sizeof(T) / kOsPage * kOsPage;
    if (to > from) madvise(reinterpret_cast<char*>(data_) + from, to - from, MADV_DONTNEED);
  }

 private:
  T* data_;
  std::size_t bytes_;
};

// `capacity` bits, all zero at first; a range is set or counted by words.
class Bits {
 public:
  explicit Bits(std::size_t capacity) : words_(capacity / kWord + 1) {}

  void set(std::size_t from, std::size_t to, bool value) {
    for (; from < to; from = std::min(to, (from / kWord + 1) * kWord)) {
      const std::uint64_t mask = mask_of(from, to);
      std::uint64_t& word = words_[from / kWord];
      word = value ? word | mask : word & ~mask;
    }
  }
  // The 64 bits among which bit `i` lies.
  std::uint64_t word(std::size_t i) const { return words_[i / kWord]; }
  std::uint32_t count(std::size_t from, std::size_t to) const {
    int ones = 0;
    for (; from < to; from = (from / kWord + 1) * kWord)
      ones += std::popcount(words_[from / kWord] & mask_of(from, to));
    return static_cast<std::uint32_t>(ones);
  }

 private:
  static constexpr std::size_t kWord = 64;
  // The bits of [from, to) that lie in the word of `from`.
  static std::uint64_t mask_of(std::size_t from, std::size_t to) {
    const std::size_t length = std::min(to - from, kWord - from % kWord);
    return (~std::uint64_t{0} >> (kWord - length)) << (from % kWord);
  }

  LazyArray<std::uint64_t> words_;
};

// Elements handed out by index, recycled last in first out. Index 0 is never handed out.
template <typename T>
class Slab {
 public:
  explicit Slab(std::size_t capacity) : items_(capacity), next_free_(capacity) {}

  // post: a default-constructed element, or 0 when the capacity is used up.
  Index add() {
    Index i = free_head_;
    if (i != 0) {
      free_head_ = next_free_[i];
    } else {
      if (end_ >= items_.capacity()) return 0;
      i = end_++;
    }
    new (&items_[i]) T();
    ++size_;
    return i;
  }
  void drop(Index i) {
    next_free_[i] = free_head_;
    free_head_ = i;
    --size_;
  }
  T& operator[](Index i) { return items_[i]; }
  const T& operator[](Index i) const { return items_[i]; }
  std::size_t size() const { return size_; }
  Index end() const { return end_; }  // all indices ever handed out are below it

 private:
  LazyArray<T> items_;
  LazyArray<Index> next_free_;
  Index free_head_ = 0;
  Index end_ = 1;
  std::size_t size_ = 0;
};

}  // namespace vram
