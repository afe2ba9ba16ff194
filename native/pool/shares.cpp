// Sharing allocations and exporting their pages.
#include "pool/shares.hpp"

#include <unistd.h>

namespace vram {

Status Shares::share(Address address, SharedBlock* out) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("share", &lock); !status.ok()) return status;
  const Index i = space().containing(address);
  if (i == 0) return {Code::invalid, 0, "share"};
  Block& block = blocks()[i];
  if (space().growing(block)) return {Code::unsupported, 0, "share"};  // its pages come and go
  {
    std::lock_guard guard(owner_of(block).lock);
    if (block.is(BlockState::suspended)) return {Code::suspended, 0, "share"};
    if (!block.is(BlockState::live)) return {Code::invalid, 0, "share"};
    block.used_elsewhere = true;  // from here on, freeing it takes the mutex
  }
  *out = {};
  out->block = space().address_of(block);
  if (const Segment& segment = space().segment(block); segment.plain) {
    out->base = segment.base;
    out->bytes = bytes_of(segment.units);
    return {};
  }
  stock().each_page(block, [&](Index page, Units, Units) {
    if (out->bytes == 0) out->base = stock().address_of(page);
    out->bytes += stock().pages()[page].bytes();
  });
  const auto [found, added] = numbers_.try_emplace(i, last_ + 1);
  if (added) ++last_;
  out->number = found->second;
  return {};
}

// The pages cannot go while the mutex is held, and not later either if the allocation lives.
Status Shares::export_pages(Address address, std::uint64_t number, std::uint64_t first, std::size_t most,
                            std::vector<SharedPage>* pages) {
  pages->clear();
  pages->reserve(most);
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("export_pages", &lock); !status.ok()) return status;
  const Index i = space().find(address);
  const auto found = numbers_.find(i);
  if (i == 0 || found == numbers_.end() || found->second != number) return {Code::invalid, 0, "export_pages"};
  Status status;
  std::uint64_t at = 0;
  stock().each_page(blocks()[i], [&](Index page, Units, Units) {
    if (at++ < first || pages->size() == most || !status.ok()) return;
    SharedPage exported{-1, stock().pages()[page].bytes()};
    status = backend_->page_export(stock().pages()[page].handle, &exported.fd);
    if (status.ok()) pages->push_back(exported);
  });
  if (status.ok()) return status;
  for (const SharedPage& page : *pages) ::close(page.fd);
  pages->clear();
  return status;
}

}  // namespace vram
