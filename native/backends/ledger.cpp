// Validates and records the calls that change memory; ledger.hpp has the invariants.
#include "backends/ledger.hpp"

#include <algorithm>

namespace vram {

namespace {

bool whole_slots(std::uint64_t bytes) { return bytes > 0 && bytes % kSlotBytes == 0; }

}  // namespace

bool is_page_size(std::uint64_t bytes) {
  return std::any_of(std::begin(kPageSlots), std::end(kPageSlots),
                     [bytes](std::uint32_t slots) { return bytes == slots * kSlotBytes; });
}

// ---- memory -------------------------------------------------------------------------------------

Code Ledger::may_reserve(std::uint64_t bytes) const {
  if (bytes == 0 || bytes % grain_ != 0) return Code::invalid;
  return fits(bytes) ? Code::ok : Code::out_of_memory;
}

void Ledger::reserve(Address address, std::uint64_t bytes) {
  plain_.emplace(address, bytes);
  plain_bytes_ += bytes;
}

Code Ledger::may_release(Address address, std::uint64_t bytes) const {
  const auto found = plain_.find(address);
  return found != plain_.end() && found->second == bytes ? Code::ok : Code::invalid;
}

void Ledger::release(Address address) {
  const auto found = plain_.find(address);
  plain_bytes_ -= found->second;
  plain_.erase(found);
}

// ---- spaces and pages ---------------------------------------------------------------------------

Code Ledger::may_space_reserve(std::uint64_t bytes) const {
  return whole_slots(bytes) ? Code::ok : Code::invalid;
}

void Ledger::space_reserve(Address address, std::uint64_t bytes) {
  const auto later = std::upper_bound(spaces_.begin(), spaces_.end(), address,
                                      [](Address at, const Space& space) { return at < space.address; });
  Space space;
  space.address = address;
  space.bytes = bytes;
  spaces_.insert(later, std::move(space));
}

Code Ledger::may_space_release(Address address, std::uint64_t bytes) const {
  const Space* space = space_of(address, bytes);
  if (!space || space->address != address || space->bytes != bytes) return Code::invalid;
  return space->mappings == 0 ? Code::ok : Code::invalid;
}

void Ledger::space_release(Address address) {
  const Space* space = space_of(address, kSlotBytes);
  spaces_.erase(spaces_.begin() + (space - spaces_.data()));
}

Code Ledger::may_page_create(std::uint64_t bytes) const {
  if (!is_page_size(bytes)) return Code::invalid;
  return fits(bytes) ? Code::ok : Code::out_of_memory;
}

PageHandle Ledger::page_create(std::uint64_t bytes, std::uint64_t offset) {
  const PageHandle page = pages_.add({bytes, offset, 0});  // if it throws, nothing has changed
  page_bytes_ += bytes;
  return page;
}

PageHandle Ledger::page_import(std::uint64_t bytes, std::uint64_t offset) {
  return pages_.add({bytes, offset, 0, true});
}

Code Ledger::may_host_page_create(std::uint64_t bytes) const {
  if (!is_page_size(bytes)) return Code::invalid;
  return bytes <= host_capacity_ - host_bytes_ ? Code::ok : Code::out_of_memory;
}

PageHandle Ledger::host_page_create(std::uint64_t bytes, std::uint64_t offset, Address copies) {
  const PageHandle page = pages_.add({bytes, offset, 0, false, true, copies});
  host_bytes_ += bytes;
  return page;
}

Code Ledger::may_host_page_release(PageHandle handle, std::uint64_t bytes, Address copies) const {
  const Page* page = pages_.find(handle);
  const bool known = page && page->host && page->bytes == bytes && page->copies == copies;
  return known && page->mappings == 0 ? Code::ok : Code::invalid;
}

Code Ledger::may_page_release(PageHandle handle, std::uint64_t bytes) const {
  const Page* page = pages_.find(handle);
  return page && !page->host && page->bytes == bytes && page->mappings == 0 ? Code::ok : Code::invalid;
}

void Ledger::page_release(PageHandle handle) {
  if (const Page* page = pages_.find(handle); !page->imported)
    (page->host ? host_bytes_ : page_bytes_) -= page->bytes;
  pages_.remove(handle);
}

// ---- mappings -----------------------------------------------------------------------------------

Code Ledger::may_map(Address address, std::uint64_t bytes, PageHandle handle) const {
  const Page* page = pages_.find(handle);
  if (!page || page->bytes != bytes || address % kSlotBytes != 0) return Code::invalid;
  const Space* space = space_of(address, bytes);
  if (!space) return Code::invalid;
  for (Address at = address; at < address + bytes; at += kSlotBytes) {
    if (slot_in(*space, at)) return Code::invalid;
  }
  return Code::ok;
}

void Ledger::map(Address address, std::uint64_t bytes, PageHandle page) {
  Space* space = space_of(address, bytes);
  const std::uint64_t first = (address - space->address) / kSlotBytes;
  const std::uint64_t count = bytes / kSlotBytes;
  if (space->slots.size() < first + count) space->slots.resize(first + count);
  for (std::uint32_t part = 0; part < count; ++part) space->slots[first + part] = {page, part, false};
  ++space->mappings;
  ++mappings_;
  ++pages_.find(page)->mappings;
}

Code Ledger::may_set_access(Address address, std::uint64_t bytes) const {
  if (!whole_slots(bytes) || address % kSlotBytes != 0) return Code::invalid;
  const Space* space = space_of(address, bytes);
  if (!space) return Code::invalid;
  for (Address at = address; at < address + bytes;) {
    const Slot* slot = slot_in(*space, at);
    if (!slot || slot->part != 0) return Code::invalid;
    at += pages_.find(slot->page)->bytes;
    if (at > address + bytes) return Code::invalid;
  }
  return Code::ok;
}

void Ledger::set_access(Address address, std::uint64_t bytes) {
  Space* space = space_of(address, bytes);
  const std::uint64_t first = (address - space->address) / kSlotBytes;
  for (std::uint64_t index = first; index < first + bytes / kSlotBytes; ++index) {
    space->slots[index].accessible = true;
  }
}

Code Ledger::may_unmap(Address address, std::uint64_t bytes) const {
  if (!is_page_size(bytes) || address % kSlotBytes != 0) return Code::invalid;
  const Slot* slot = slot_at(address);
  if (!slot || slot->part != 0) return Code::invalid;
  return pages_.find(slot->page)->bytes == bytes ? Code::ok : Code::invalid;
}

void Ledger::unmap(Address address, std::uint64_t bytes) {
  Space* space = space_of(address, bytes);
  const std::uint64_t first = (address - space->address) / kSlotBytes;
  --pages_.find(space->slots[first].page)->mappings;
  --space->mappings;
  --mappings_;
  for (std::uint64_t index = first; index < first + bytes / kSlotBytes; ++index) space->slots[index] = {};
}

Code Ledger::may_touch(Address address, std::uint64_t bytes) const {
  if (bytes == 0) return Code::ok;
  if (address == 0 || address + bytes < address) return Code::invalid;
  const Space* space = space_of(address, 1);
  if (!space) return Code::ok;
  if (bytes > space->address + space->bytes - address) return Code::invalid;
  const Address first = address / kSlotBytes * kSlotBytes;
  for (Address at = first; at < address + bytes; at += kSlotBytes) {
    const Slot* slot = slot_in(*space, at);
    if (!slot || !slot->accessible) return Code::invalid;
  }
  return Code::ok;
}

// ---- lookup and check ---------------------------------------------------------------------------

const Ledger::Space* Ledger::space_of(Address address, std::uint64_t bytes) const {
  const auto later = std::upper_bound(spaces_.begin(), spaces_.end(), address,
                                      [](Address at, const Space& space) { return at < space.address; });
  if (later == spaces_.begin()) return nullptr;
  const Space& space = *(later - 1);
  const std::uint64_t offset = address - space.address;
  return offset < space.bytes && bytes <= space.bytes - offset ? &space : nullptr;
}

const Ledger::Slot* Ledger::slot_in(const Space& space, Address address) {
  const std::uint64_t index = (address - space.address) / kSlotBytes;
  if (index >= space.slots.size() || space.slots[index].page == 0) return nullptr;
  return &space.slots[index];
}

const Ledger::Slot* Ledger::slot_at(Address address) const {
  const Space* space = space_of(address, 1);
  return space ? slot_in(*space, address) : nullptr;
}

const Ledger::Page* Ledger::mapped_at(Address address, PageHandle* handle) const {
  const Slot* slot = slot_at(address);
  *handle = slot ? slot->page : 0;
  return slot ? pages_.find(slot->page) : nullptr;
}

bool Ledger::check(std::string* why) const {
  const auto broken = [why](const char* what) {
    if (why) *why = what;
    return false;
  };
  std::uint64_t plain_bytes = 0, page_bytes = 0, host_bytes = 0, page_mappings = 0, mappings = 0;
  for (const auto& [address, bytes] : plain_) plain_bytes += bytes;
  pages_.each([&](PageHandle, const Page& page) {
    if (!page.imported) (page.host ? host_bytes : page_bytes) += page.bytes;
    page_mappings += page.mappings;
  });
  if (plain_bytes != plain_bytes_) return broken("plain_bytes is not the sum of the plain ranges");
  if (page_bytes != page_bytes_) return broken("page_bytes is not the sum of the pages");
  if (host_bytes != host_bytes_ || host_bytes_ > host_capacity_) return broken("host_bytes");
  if (used_bytes() > capacity_) return broken("more bytes are used than the capacity");
  for (const Space& space : spaces_) {
    std::uint64_t here = 0;
    for (std::size_t index = 0; index < space.slots.size(); ++index) {
      const Slot& slot = space.slots[index];
      if (slot.page == 0) continue;
      const Page* page = pages_.find(slot.page);
      if (!page) return broken("a slot names a page that does not exist");
      const bool first = slot.part == 0;
      here += first ? 1 : 0;
      const std::size_t head = index - slot.part;
      if (slot.part > index || space.slots[head].page != slot.page || space.slots[head].part != 0) {
        return broken("a mapping's slots are not consecutive");
      }
      const std::size_t length = page->bytes / kSlotBytes;
      if (slot.part >= length || head + length > space.slots.size()) {
        return broken("a mapping is cut short or too long");
      }
      if (space.slots[head + length - 1].page != slot.page) return broken("a mapping is cut short");
    }
    if (here != space.mappings) return broken("a space miscounts its mappings");
    mappings += here;
  }
  if (mappings != mappings_) return broken("the mappings in all spaces are miscounted");
  if (page_mappings != mappings_) return broken("the pages miscount their mappings");
  return true;
}

}  // namespace vram
