// The ledger of a backend that manages its own memory: what is reserved, created and mapped, and whether a
// call keeps the contract. Defines Ledger. The host and model backends each have one; they provide the memory
// itself and the lock around the ledger.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "base/handles.hpp"
#include "base/types.hpp"

namespace vram {

// Every change has two steps: may_x() returns Code::ok if the preconditions of x hold, and x() then records
// it. The backend performs the call in between, so a failed call leaves no trace here.
//
// Invariants
//   plain_bytes = Σ bytes of plain ranges;  host_bytes = Σ bytes of host pages
//   page_bytes = Σ bytes of the other pages that were not imported
//   plain_bytes + page_bytes <= capacity;  host_bytes <= host_capacity
//   Σ over pages of page.mappings = mappings = number of slots with part == 0
//   a mapping occupies bytes / kSlotBytes consecutive slots of one space, with parts 0, 1, 2, …
class Ledger {
 public:
  struct Page {
    std::uint64_t bytes = 0;
    std::uint64_t offset = 0;    // used by the backend: position of the page in its store
    std::uint32_t mappings = 0;  // addresses it is mapped at
    bool imported = false;       // another process's memory
    bool host = false;           // host memory, which is not part of the capacity
    Address copies = 0;          // host: where work finds it for copies
  };
  // Plain memory is reserved in multiples of the grain.
  explicit Ledger(std::uint64_t capacity, std::uint64_t grain = kSlotBytes,
                  std::uint64_t host_capacity = ~std::uint64_t{0})
      : capacity_(capacity), grain_(grain), host_capacity_(host_capacity) {}

  // ---- memory -----------------------------------------------------------------------------------
  Code may_reserve(std::uint64_t bytes) const;
  void reserve(Address address, std::uint64_t bytes);
  Code may_release(Address address, std::uint64_t bytes) const;
  void release(Address address);

  // ---- pages ------------------------------------------------------------------------------------
  Code may_space_reserve(std::uint64_t bytes) const;
  void space_reserve(Address address, std::uint64_t bytes);
  Code may_space_release(Address address, std::uint64_t bytes) const;
  void space_release(Address address);
  Code may_page_create(std::uint64_t bytes) const;
  PageHandle page_create(std::uint64_t bytes, std::uint64_t offset = 0);
  PageHandle page_import(std::uint64_t bytes, std::uint64_t offset);
  Code may_host_page_create(std::uint64_t bytes) const;
  PageHandle host_page_create(std::uint64_t bytes, std::uint64_t offset, Address copies);
  Code may_host_page_release(PageHandle page, std::uint64_t bytes, Address copies) const;
  Code may_page_release(PageHandle page, std::uint64_t bytes) const;
  void page_release(PageHandle page);
  const Page* page(PageHandle handle) const { return pages_.find(handle); }
  Code may_map(Address address, std::uint64_t bytes, PageHandle page) const;
  void map(Address address, std::uint64_t bytes, PageHandle page);
  // As with the driver, the range must consist of whole mappings.
  Code may_set_access(Address address, std::uint64_t bytes) const;
  void set_access(Address address, std::uint64_t bytes);
  Code may_unmap(Address address, std::uint64_t bytes) const;
  void unmap(Address address, std::uint64_t bytes);
  // The page that is mapped at an address, or null.
  const Page* mapped_at(Address address, PageHandle* handle) const;
  std::uint32_t part_at(Address address) const { return slot_at(address)->part; }  // pre: mapped there
  // Calls visit(page) for each mapping in a range that may_set_access allows.
  template <class Visit>
  void each_mapping(Address address, std::uint64_t bytes, Visit visit) const {
    for (Address at = address; at < address + bytes;) {
      const Page& page = *pages_.find(slot_at(at)->page);
      visit(page);
      at += page.bytes;
    }
  }

  // Whether work may use the range: it is not null, and if it is in a space, it is mapped with access.
  // Addresses outside all spaces are not checked: they may be host memory.
  Code may_touch(Address address, std::uint64_t bytes) const;

  // ---- state ------------------------------------------------------------------------------------
  std::uint64_t capacity() const { return capacity_; }
  std::uint64_t used_bytes() const { return plain_bytes_ + page_bytes_; }
  std::uint64_t plain_bytes() const { return plain_bytes_; }
  std::uint64_t page_bytes() const { return page_bytes_; }
  std::uint64_t host_bytes() const { return host_bytes_; }
  std::uint64_t plain_count() const { return plain_.size(); }
  std::uint64_t space_count() const { return spaces_.size(); }
  std::uint64_t page_count() const { return pages_.size(); }
  std::uint64_t mapping_count() const { return mappings_; }
  // Calls visit(address, bytes) for every plain range and every space.
  template <class Visit>
  void each_range(Visit visit) const {
    for (const auto& [address, bytes] : plain_) visit(address, bytes);
    for (const Space& space : spaces_) visit(space.address, space.bytes);
  }
  template <class Visit>
  void each_page(Visit visit) const {
    pages_.each([&](PageHandle, const Page& page) { visit(page); });
  }
  // Verifies the invariants above; on failure *why names the violated one.
  bool check(std::string* why) const;

 private:
  struct Slot {
    PageHandle page = 0;      // 0: nothing is mapped here
    std::uint32_t part = 0;   // index of the slot in its page
    bool accessible = false;  // set_access was called
  };
  struct Space {
    Address address = 0;
    std::uint64_t bytes = 0;
    std::uint64_t mappings = 0;
    std::vector<Slot> slots;  // up to the last slot that was ever mapped
  };
  const Space* space_of(Address address, std::uint64_t bytes) const;
  Space* space_of(Address address, std::uint64_t bytes) {
    return const_cast<Space*>(static_cast<const Ledger*>(this)->space_of(address, bytes));
  }
  static const Slot* slot_in(const Space& space, Address address);
  const Slot* slot_at(Address address) const;
  bool fits(std::uint64_t bytes) const { return bytes <= capacity_ - used_bytes(); }

  std::uint64_t capacity_;
  std::uint64_t grain_;
  std::uint64_t host_capacity_;
  std::uint64_t plain_bytes_ = 0;
  std::uint64_t page_bytes_ = 0;
  std::uint64_t host_bytes_ = 0;
  std::uint64_t mappings_ = 0;
  std::unordered_map<Address, std::uint64_t> plain_;
  std::vector<Space> spaces_;  // by address
  HandleTable<Page> pages_;
};

bool is_page_size(std::uint64_t bytes);

}  // namespace vram
