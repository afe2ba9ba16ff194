// The name of a shared allocation: a line of text by which another process finds it. Defines SharedName.
#pragma once

#include <string>
#include <string_view>

#include "backends/backend.hpp"
#include "sharing/wire.hpp"

namespace vram {

struct SharedName {
  static constexpr std::size_t kMostBytes = 512;  // longer than any name

  std::int64_t process = 0;  // its number, for messages
  Digits identity{};         // of the process; its server's address (server.hpp), which others can read
  Secrets secrets{};         // of that server; only those that have a name know them
  int device = 0;            // as that process numbers it
  Address address = 0;       // the start of the allocation, or of the plain segment
  std::uint64_t number = 0;  // see SharedBlock
  std::uint64_t bytes = 0;
  PlainName plain;  // if number == 0

  std::string text() const;
  // False if it is not the text of a name.
  static bool parse(std::string_view text, SharedName* out);
};

}  // namespace vram
