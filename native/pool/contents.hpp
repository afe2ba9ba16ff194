// The contents of suspended memory: ranges of device addresses and the host memory that keeps their bytes.
// Defines Contents. What is suspended and when is decided in suspender.cpp; the host memory comes from the
// store that each piece names.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "placement/room.hpp"
#include "pool/allocator.hpp"

namespace vram {

// A piece of host memory from a store.
struct KeptPiece {
  std::shared_ptr<Allocator> store;
  Address host = 0;
  std::uint64_t bytes = 0;
  // If the host has no memory to do so, the store keeps it.
  void release() const noexcept {
    try {
      (void)store->free_slow(host);
    } catch (const std::bad_alloc&) {
    }
  }
};

// Invariants
//   ranges do not overlap, and each is inside the piece that it names
//   pieces[p].left = Σ bytes of the ranges that name p > 0
// Guarded by the pool's mutex. It frees host memory only through the pieces that drop() returns, so that the
// caller chooses when.
class Contents {
 public:
  struct Piece {
    KeptPiece memory;
    std::uint64_t left = 0;
  };
  using Pieces = std::map<Address, Piece>;  // by host address

  // pre: nothing is kept of [address, address + piece.bytes). A call that throws changes nothing.
  void add(Address address, const KeptPiece& piece) {
    const auto added = pieces_.insert({piece.host, {piece, piece.bytes}}).first;
    try {
      ranges_[address] = {piece.bytes, piece.host, piece.host};
    } catch (const std::bad_alloc&) {
      pieces_.erase(added);
      throw;
    }
    bytes_ += piece.bytes;
  }

  // Calls visit(address, host, bytes) for what is kept of the range, in order.
  template <typename Visit>
  void each(Address address, std::uint64_t bytes, Visit visit) const {
    for (auto it = first(address); it != ranges_.end() && it->first < address + bytes; ++it) {
      const Address from = std::max(address, it->first);
      const Address to = std::min(address + bytes, it->first + it->second.bytes);
      visit(from, it->second.host + (from - it->first), to - from);
    }
  }

  // Calls visit(address, bytes) for what is not.
  template <typename Visit>
  void each_missing(Address address, std::uint64_t bytes, Visit visit) const {
    Address at = address;
    each(address, bytes, [&](Address from, Address, std::uint64_t length) {
      if (from > at) visit(at, from - at);
      at = from + length;
    });
    if (at < address + bytes) visit(at, address + bytes - at);
  }

  // Calls visit(store) for each of these ranges. If the store was closed, its bytes are lost.
  template <typename Visit>
  void each_store(Address address, std::uint64_t bytes, Visit visit) const {
    for (auto it = first(address); it != ranges_.end() && it->first < address + bytes; ++it)
      visit(pieces_.at(it->second.piece).memory.store);
  }

  // post: so many calls of drop() do not allocate; each divides one range at most.
  void make_room(std::size_t drops) {
    vram::make_room(spare_, drops);
    while (spare_.size() < drops) {
      std::map<Address, Range> made{{0, Range{}}};
      spare_.push_back(made.extract(made.begin()));
    }
  }
  // Forgets the range; `unused` gets the pieces of which nothing is kept any more.
  void drop(Address address, std::uint64_t bytes, Pieces& unused) {
    const Address end = address + bytes;
    for (auto it = first(address); it != ranges_.end() && it->first < end;) {
      const Address begin = it->first;
      const Range range = it->second;
      const Address from = std::max(address, begin);
      const Address to = std::min(end, begin + range.bytes);
      const Range rest{begin + range.bytes - to, range.host + (to - begin), range.piece};
      if (begin < from) {
        if (rest.bytes != 0) keep(to, rest);
        it->second.bytes = from - begin;
        ++it;
      } else {
        auto node = ranges_.extract(it++);
        node.key() = to;
        node.mapped() = rest;
        if (rest.bytes != 0) it = ranges_.insert(std::move(node)).position;
      }
      lose(range.piece, to - from, unused);
    }
  }

  void drop_all(Pieces& unused) {
    unused.merge(pieces_);
    ranges_.clear();
    pieces_.clear();
    spare_.clear();
    bytes_ = 0;
  }

  std::uint64_t bytes() const { return bytes_; }

  bool check(std::string* why) const {
    std::map<Address, std::uint64_t> left;
    Address end = 0;
    std::uint64_t bytes = 0;
    bool good = true;
    for (const auto& [address, range] : ranges_) {
      const auto piece = pieces_.find(range.piece);
      good = good && address >= end && range.bytes != 0 && piece != pieces_.end() &&
             range.host >= range.piece &&
             range.host + range.bytes <= range.piece + piece->second.memory.bytes;
      left[range.piece] += range.bytes;
      bytes += range.bytes;
      end = address + range.bytes;
    }
    good = good && left.size() == pieces_.size() && bytes == bytes_;
    for (const auto& [host, piece] : pieces_) good = good && left[host] == piece.left;
    if (!good && why != nullptr) *why = "what is kept of suspended memory";
    return good;
  }

 private:
  struct Range {
    std::uint64_t bytes = 0;
    Address host = 0;
    Address piece = 0;  // host address of its beginning
  };

  // The first range that ends behind the address.
  std::map<Address, Range>::const_iterator first(Address address) const {
    auto it = ranges_.upper_bound(address);
    if (it == ranges_.begin()) return it;
    const auto before = std::prev(it);
    return before->first + before->second.bytes > address ? before : it;
  }
  std::map<Address, Range>::iterator first(Address address) {
    return ranges_.erase(std::as_const(*this).first(address), std::as_const(*this).first(address));
  }

  void keep(Address address, const Range& range) {
    make_room(1);
    auto node = std::move(spare_.back());
    spare_.pop_back();
    node.key() = address;
    node.mapped() = range;
    ranges_.insert(std::move(node));
  }

  void lose(Address host, std::uint64_t bytes, Pieces& unused) {
    const auto piece = pieces_.find(host);
    bytes_ -= bytes;
    if ((piece->second.left -= bytes) != 0) return;
    unused.insert(pieces_.extract(piece));
  }

  std::map<Address, Range> ranges_;  // by device address
  Pieces pieces_;
  std::vector<std::map<Address, Range>::node_type> spare_;  // nodes without a range
  std::uint64_t bytes_ = 0;
};

}  // namespace vram
