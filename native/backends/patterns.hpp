// Fills memory with a repeated pattern, such as one element of an array. Backends fill only with single
// bytes.
#pragma once

#include <algorithm>

#include "backends/backend.hpp"

namespace vram {

constexpr std::uint64_t kMaxPatternBytes = 16;  // the largest element type

// In stream order, with device operations only, so that it can be captured: one fill for each byte of the
// pattern, then copies that double the finished part.
// pre: 1 <= length <= kMaxPatternBytes, and length divides bytes. After a failure the contents are undefined.
inline Status fill_pattern(Backend& backend, Address to, const std::uint8_t* pattern, std::uint64_t length,
                           std::uint64_t bytes, StreamHandle stream) {
  if (std::all_of(pattern, pattern + length, [&](std::uint8_t each) { return each == pattern[0]; }))
    return backend.fill(to, pattern[0], bytes, stream);
  for (std::uint64_t i = 0; i < length; ++i)
    if (const Status status = backend.fill(to + i, pattern[i], 1, stream); !status.ok()) return status;
  for (std::uint64_t done = length; done < bytes; done *= 2)
    if (const Status status = backend.copy(to + done, to, std::min(done, bytes - done), stream); !status.ok())
      return status;
  return {};
}

}  // namespace vram
