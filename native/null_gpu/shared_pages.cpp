#include "null_gpu/shared_pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace vram::null_gpu {

namespace {

struct Record {  // what the file says of a page
  char kind[8];
  std::uint64_t bytes;
  std::int64_t device;
};
constexpr char kKind[8] = {'v', 'r', 'a', 'm', 'p', 'a', 'g', 'e'};

// Locks belong to the open file, not to the process (F_OFD_SETLK).
bool lock(int descriptor, short kind, std::int64_t place) {
  struct flock range{};
  range.l_type = kind;
  range.l_whence = SEEK_SET;
  range.l_start = place;
  range.l_len = sizeof(Record);
  return fcntl(descriptor, F_OFD_SETLK, &range) == 0;
}

// The file of a descriptor, opened again, with locks of its own.
int open_again(int descriptor) {
  return open(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), O_RDWR | O_CLOEXEC);
}

}  // namespace

// ---- exported -------------------------------------------------------------------------------------------

ExportedPages& ExportedPages::get() {
  static auto* const pages = new ExportedPages;  // used until the process has ended
  return *pages;
}

bool ExportedPages::own_file() {
  if (process_ == getpid()) return file_ >= 0;
  if (file_ >= 0) close(file_);  // that of the parent
  file_ = memfd_create("vram null pages", MFD_CLOEXEC);
  process_ = getpid();
  end_ = 0;
  free_.clear();
  return file_ >= 0;
}

std::int64_t ExportedPages::add(std::uint64_t bytes, int device) {
  const std::lock_guard guard(mutex_);
  if (!own_file()) return -1;
  const std::int64_t place = free_.empty() ? end_ : free_.back();
  Record record{{}, bytes, device};
  std::memcpy(record.kind, kKind, sizeof(kKind));
  if (pwrite(file_, &record, sizeof(record), place) != sizeof(record)) return -1;
  if (free_.empty())
    end_ += static_cast<std::int64_t>(sizeof(record));
  else
    free_.pop_back();
  return place;
}

Result ExportedPages::open(std::int64_t place, int* descriptor) {
  const std::lock_guard guard(mutex_);
  if (process_ != getpid()) return kInvalidValue;  // the parent exported it
  *descriptor = open_again(file_);
  if (*descriptor < 0) return kUnknownError;
  if (lseek(*descriptor, place, SEEK_SET) == place && lock(*descriptor, F_RDLCK, place)) return kSuccess;
  close(*descriptor);
  return kUnknownError;
}

bool ExportedPages::remove(std::int64_t place) {
  const std::lock_guard guard(mutex_);
  if (process_ != getpid()) return true;
  if (!lock(file_, F_WRLCK, place)) return false;
  lock(file_, F_UNLCK, place);
  free_.push_back(place);
  return true;
}

// ---- imported -------------------------------------------------------------------------------------------

ImportedPages& ImportedPages::get() {
  static auto* const pages = new ImportedPages;  // used until the process has ended
  return *pages;
}

Result ImportedPages::add(int descriptor, Page* out) {
  struct stat status{};
  Record record{};
  if (fstat(descriptor, &status) != 0) return kUnknownError;
  const std::int64_t place = lseek(descriptor, 0, SEEK_CUR);
  if (place < 0 || pread(descriptor, &record, sizeof(record), place) != sizeof(record)) return kInvalidValue;
  if (std::memcmp(record.kind, kKind, sizeof(kKind)) != 0) return kInvalidValue;
  *out = {record.bytes, static_cast<int>(record.device), {status.st_ino, place}};
  const std::lock_guard guard(mutex_);
  File& file = files_[status.st_ino];
  if (file.process != getpid()) {  // new, or opened by the parent, which keeps its own locks
    if (file.descriptor >= 0) close(file.descriptor);
    file = {getpid(), open_again(descriptor), {}};
  }
  int& uses = file.uses[place];
  if (uses == 0 && (file.descriptor < 0 || !lock(file.descriptor, F_RDLCK, place))) {
    file.uses.erase(place);
    if (file.uses.empty()) {
      if (file.descriptor >= 0) close(file.descriptor);
      files_.erase(status.st_ino);
    }
    return kUnknownError;
  }
  ++uses;
  return kSuccess;
}

void ImportedPages::remove(const Page& page) {
  const std::lock_guard guard(mutex_);
  const auto file = files_.find(page.place.first);
  if (file == files_.end() || file->second.process != getpid()) return;  // the parent imported it
  const auto uses = file->second.uses.find(page.place.second);
  if (uses == file->second.uses.end() || --uses->second != 0) return;
  lock(file->second.descriptor, F_UNLCK, page.place.second);
  file->second.uses.erase(uses);
  if (!file->second.uses.empty()) return;
  close(file->second.descriptor);
  files_.erase(file);
}

}  // namespace vram::null_gpu
