// Pages that processes share on null GPUs, as file descriptors. A process has one file for all pages that it
// exports. A descriptor that stands for a page is open on this file at the record of the page, and has a
// shared lock on the record. So has one descriptor for all pages that a process has imported from this file.
// Locks end with the descriptors that have them, however a process ends: a page whose record can be locked is
// no one else's.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

// The pages that this process exports, each at a place in its file. The child of a fork has a file of its
// own.
class ExportedPages {
 public:
  static ExportedPages& get();
  // -1: no file could be made.
  std::int64_t add(std::uint64_t bytes, int device);
  // A new descriptor of a page, which the caller closes.
  Result open(std::int64_t place, int* descriptor);
  // False: others have the page; it keeps its place.
  bool remove(std::int64_t place);

 private:
  bool own_file();  // with the lock held

  std::mutex mutex_;
  int process_ = 0;  // whose file it is
  int file_ = -1;
  std::int64_t end_ = 0;
  std::vector<std::int64_t> free_;
};

// The pages that this process has imported. It keeps one descriptor for each process that they are from.
class ImportedPages {
 public:
  struct Page {
    std::uint64_t bytes = 0;
    int device = 0;
    std::pair<std::uint64_t, std::int64_t> place;  // the file, and where in it
  };
  static ImportedPages& get();
  // Keeps the page that a descriptor stands for until it is removed as often as it was added.
  Result add(int descriptor, Page* out);
  void remove(const Page& page);

 private:
  struct File {
    int process = 0;  // that opened it
    int descriptor = -1;
    std::map<std::int64_t, int> uses;  // by place
  };
  std::mutex mutex_;
  std::map<std::uint64_t, File> files_;  // by inode
};

}  // namespace vram::null_gpu
