// Memory that models in different processes share: a page's file has its number and size in place of
// contents.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "backends/model.hpp"

namespace vram {

namespace {

// The contents of a page's file.
struct ExportedPage {
  static constexpr std::uint64_t kMagic = 0x7672616d70616765;
  std::uint64_t magic = kMagic;
  std::uint64_t bytes = 0;
  PageHandle page = 0;
};

}  // namespace

Status ModelBackend::page_export(PageHandle page, int* fd) {
  Lock lock;
  Status status;
  if (!begin(kPageExport, &lock, &status)) return status;
  const Ledger::Page* found = ledger_.page(page);
  if (found == nullptr) return {Code::invalid, 0, "page_export"};
  const ExportedPage exported{ExportedPage::kMagic, found->bytes, found->imported ? found->offset : page};
  const int made = memfd_create("vram-model-page", MFD_CLOEXEC);
  if (made < 0) return {Code::failed, errno, "page_export"};
  if (pwrite(made, &exported, sizeof exported, 0) != sizeof exported) {
    ::close(made);
    return {Code::failed, errno, "page_export"};
  }
  *fd = made;
  return {};
}

Status ModelBackend::page_import(int fd, std::uint64_t bytes, PageHandle* out) {
  Lock lock;
  Status status;
  if (!begin(kPageImport, &lock, &status)) return status;
  ExportedPage exported;
  if (pread(fd, &exported, sizeof exported, 0) != sizeof exported) return {Code::invalid, 0, "page_import"};
  if (exported.magic != ExportedPage::kMagic || exported.bytes != bytes || !is_page_size(bytes))
    return {Code::invalid, 0, "page_import"};
  *out = ledger_.page_import(bytes, exported.page);
  return {};
}

Status ModelBackend::plain_export(Address address, PlainName* out) {
  Lock lock;
  Status status;
  if (!begin(kPlainExport, &lock, &status)) return status;
  std::memcpy(out->bytes, &address, sizeof address);
  return {};
}

Status ModelBackend::plain_open(const PlainName& name, Address* out) {
  Lock lock;
  Status status;
  if (!begin(kPlainOpen, &lock, &status)) return status;
  std::memcpy(out, name.bytes, sizeof *out);
  ++opened_[*out];
  return {};
}

Status ModelBackend::plain_close(Address address) {
  Lock lock;
  Status status;
  if (!begin(kPlainClose, &lock, &status)) return status;
  const auto found = opened_.find(address);
  if (found == opened_.end()) return {Code::invalid, 0, "plain_close"};
  if (--found->second == 0) opened_.erase(found);
  return {};
}

PageHandle ModelBackend::page_shown(Address address) {
  const Lock lock = hold();
  PageHandle handle = 0;
  const Ledger::Page* page = ledger_.mapped_at(address, &handle);
  return page != nullptr && page->imported ? page->offset : handle;
}

}  // namespace vram
