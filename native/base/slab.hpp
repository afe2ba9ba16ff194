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
#include <vector>

#include "base/types.hpp"

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
  ~LazyArray() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  LazyArray(LazyArray&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
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
  // The first bit of [from, to) that is set, or `to`.
  std::size_t first_from(std::size_t from, std::size_t to) const {
    for (; from < to; from = (from / kWord + 1) * kWord)
      if (const std::uint64_t found = words_[from / kWord] & mask_of(from, to))
        return from / kWord * kWord + static_cast<std::size_t>(std::countr_zero(found));
    return to;
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

// Numbers below `capacity`, in levels of bits: a bit of one level says that a word of the level below is not
// zero. Every call takes at most a step a level, whatever the set holds.
class OrderedSet {
 public:
  explicit OrderedSet(std::size_t capacity) {
    do levels_.emplace_back(capacity = capacity / kWord + 1);
    while (capacity > 1);
  }

  void insert(std::size_t i) {
    for (LazyArray<std::uint64_t>& level : levels_) {
      std::uint64_t& word = level[i / kWord];
      const bool known = word != 0;
      word |= std::uint64_t{1} << (i % kWord);
      if (known) return;
      i /= kWord;
    }
  }
  void erase(std::size_t i) {
    for (LazyArray<std::uint64_t>& level : levels_) {
      std::uint64_t& word = level[i / kWord];
      word &= ~(std::uint64_t{1} << (i % kWord));
      if (word != 0) return;
      i /= kWord;
    }
  }
  // The largest number of the set that is at most `i`, or 0. Adds the words it looked at to *steps.
  std::size_t last_up_to(std::size_t i, std::uint64_t* steps) const {
    for (std::size_t up = 0; up < levels_.size(); ++up) {
      ++*steps;
      const std::uint64_t word = levels_[up][i / kWord] & (~std::uint64_t{0} >> (kWord - 1 - i % kWord));
      if (word != 0) {
        i = i / kWord * kWord + highest(word);
        for (; up > 0; --up, ++*steps) i = i * kWord + highest(levels_[up - 1][i]);
        return i;
      }
      if (i < kWord) return 0;
      i = i / kWord - 1;
    }
    return 0;
  }
  // The smallest number of the set that is at least `i`, or 0 where there is none. pre: 0 is not in the set.
  std::size_t first_from(std::size_t i, std::uint64_t* steps) const {
    for (std::size_t up = 0; up < levels_.size() && i / kWord < levels_[up].capacity(); ++up) {
      ++*steps;
      const std::uint64_t word = levels_[up][i / kWord] & (~std::uint64_t{0} << (i % kWord));
      if (word != 0) {
        i = i / kWord * kWord + lowest(word);
        for (; up > 0; --up, ++*steps) i = i * kWord + lowest(levels_[up - 1][i]);
        return i;
      }
      i = i / kWord + 1;
    }
    return 0;
  }
  // Returns the memory of [first, first + count) to the system. pre: none of them is in the set.
  void forget(std::size_t first, std::size_t count) {
    levels_[0].forget((first + kWord - 1) / kWord, count / kWord);
  }

 private:
  static constexpr std::size_t kWord = 64;
  static std::size_t highest(std::uint64_t word) {
    return kWord - 1 - static_cast<std::size_t>(std::countl_zero(word));
  }
  static std::size_t lowest(std::uint64_t word) { return static_cast<std::size_t>(std::countr_zero(word)); }

  std::vector<LazyArray<std::uint64_t>> levels_;  // the lowest first
};

// Some of a pool's streams, in order of their numbers: those of which there is something to look at, so that
// the others cost nothing.
class StreamSet {
 public:
  void add(std::uint16_t stream) { numbers_.insert(stream + 1u); }
  void remove(std::uint16_t stream) { numbers_.erase(stream + 1u); }
  // Calls visit(stream) for those from `from` on; stops when it returns true. The set may change meanwhile.
  template <typename Visit>
  void each(Visit visit, std::uint16_t from = 0) const {
    for (std::size_t i = from + 1u; (i = numbers_.first_from(i, &steps_)) != 0; ++i)
      if (visit(static_cast<std::uint16_t>(i - 1))) return;
  }
  std::uint64_t steps() const { return steps_; }  // words looked at so far

 private:
  OrderedSet numbers_{std::size_t{1} << 16};
  mutable std::uint64_t steps_ = 0;
};

// Elements that are added by index and recycled last in, first out. Index 0 is never used.
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
  std::size_t capacity() const { return items_.capacity(); }
  bool has_room(std::size_t count = 1) const { return size_ + count < items_.capacity(); }
  Index end() const { return end_; }  // all indices ever used are below it

 private:
  LazyArray<T> items_;
  LazyArray<Index> next_free_;
  Index free_head_ = 0;
  Index end_ = 1;
  std::size_t size_ = 0;
};

// The same, in chunks of one system page that belong to a group each. Elements of two groups lie on one page
// only when the capacity is nearly used up. So threads that write to elements of different groups do not take
// lines from each other, neither by sharing them nor by prefetching: processors prefetch within a page.
template <typename T>
class GroupedSlab {
 public:
  using GroupNumber = std::uint16_t;
  explicit GroupedSlab(std::size_t capacity)
      : items_(capacity), next_free_(capacity), homes_(capacity / kChunk + 1), groups_(kGroups) {}

  // post: a default-constructed element, or 0 when the capacity is used up.
  Index add(GroupNumber group) {
    const Index i = take(group);
    if (i == 0) return 0;
    new (&items_[i]) T();
    ++size_;
    return i;
  }
  void drop(Index i) {
    Group& home = groups_[homes_[i / kChunk]];
    next_free_[i] = home.free_head;
    home.free_head = i;
    --size_;
  }
  T& operator[](Index i) { return items_[i]; }
  const T& operator[](Index i) const { return items_[i]; }
  std::size_t size() const { return size_; }
  std::size_t capacity() const { return items_.capacity(); }
  bool has_room(std::size_t count = 1) const { return size_ + count < items_.capacity(); }
  Index end() const { return end_; }  // all indices ever used are below it; what was never used is zero

 private:
  static constexpr std::size_t kChunk = 4096 / sizeof(T);
  static constexpr std::size_t kGroups = std::size_t{1} << 16;
  struct Group {
    Index free_head;  // elements that were dropped
    Index next;       // the first element of its last chunk that was never used …
    Index past;       // … and the end of that chunk
  };

  Index take(GroupNumber number) {
    Group& group = groups_[number];
    if (group.free_head == 0 && group.next == group.past && !add_chunk(number)) return take_anywhere();
    return take_from(group);
  }
  // pre: the group has an element.
  Index take_from(Group& group) {
    if (group.free_head == 0) return group.next++;
    return std::exchange(group.free_head, next_free_[group.free_head]);
  }
  bool add_chunk(GroupNumber number) {
    if (end_ >= items_.capacity()) return false;
    homes_[end_ / kChunk] = number;
    Group& group = groups_[number];
    group.next = end_;
    end_ = static_cast<Index>(std::min(items_.capacity(), (end_ / kChunk + 1) * kChunk));
    group.past = end_;
    return true;
  }
  Index take_anywhere() {
    if (size_ + 1 >= items_.capacity()) return 0;
    for (std::size_t tried = 0; tried < kGroups; ++tried, spare_ = (spare_ + 1) % kGroups)
      if (Group& group = groups_[spare_]; group.free_head != 0 || group.next != group.past)
        return take_from(group);
    return 0;
  }

  LazyArray<T> items_;
  LazyArray<Index> next_free_;
  LazyArray<GroupNumber> homes_;  // by chunk
  LazyArray<Group> groups_;
  std::size_t spare_ = 0;  // the group that take_anywhere looks at next
  Index end_ = 1;
  std::size_t size_ = 0;
};

}  // namespace vram
