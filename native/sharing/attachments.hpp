// Memory of other processes, mapped here. Defines Attachments.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "sharing/name.hpp"

namespace vram {

// Every call may come from any thread. The process that shared the memory may end while it is attached here:
// what is mapped stays.
class Attachments {
 public:
  // Maps what the name says, or adds a use if it is mapped already. 0: *why says why, in a sentence.
  // pre: the device outlives the attachment.
  Address attach(Backend& device, std::string_view text, std::string* why);
  // Removes a use. The last one waits for the device and unmaps. If it cannot wait, as during a capture, the
  // memory stays mapped until a later call. False: nothing is attached at the address.
  bool detach(Address address);
  std::size_t count() const;

 private:
  // One mapped name.
  struct Mapped {
    Backend* device = nullptr;
    std::string name;
    Address base = 0;
    std::uint64_t bytes = 0;
    bool own = false;  // this process's own plain memory, used where it is
    bool plain = false;
    std::vector<std::pair<PageHandle, std::uint64_t>> pages;  // in order of their addresses
    std::uint64_t mapped = 0;                                 // bytes, from the base on
    std::uint64_t uses = 1;
  };
  static bool open(const SharedName& name, Mapped& into, std::string* why);
  static bool open_plain(const SharedName& name, Mapped& into, std::string* why);
  static bool import_pages(const SharedName& name, Mapped& into, std::string* why);
  static bool map_pages(Mapped& into, std::string* why);
  static void close(Mapped& mapped);
  void close_ended();

  mutable std::mutex mutex_;
  std::map<Address, Mapped> mapped_;
  std::vector<Mapped> ended_;  // unused; to be closed when the device's work is done
};

}  // namespace vram
