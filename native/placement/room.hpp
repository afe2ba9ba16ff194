// Room in a vector for elements that are added later without allocating. Defines make_room.
#pragma once

#include <algorithm>
#include <vector>

namespace vram {

// post: `count` elements fit. Grows by factors, so that one more element each time costs constant time.
template <typename T>
void make_room(std::vector<T>& elements, std::size_t count) {
  if (elements.capacity() < count) elements.reserve(std::max(count, 2 * elements.capacity()));
}

}  // namespace vram
