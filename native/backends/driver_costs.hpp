// Costs of driver calls on an H200, in microseconds as measured. The model device and the policies charge
// them.
#pragma once

#include <cstdint>
#include <iterator>

#include "base/types.hpp"

namespace vram::prices {

struct Page {
  double create, map, set_access, unmap, release;
};
// For pages of 2, 8, 32 and 128 MiB; other sizes cost as much as the next larger of these.
inline constexpr Page kPages[kPageSizes] = {
    {11.0, 1.6, 29.0, 20.0, 11.0},
    {10.2, 1.3, 27.75, 19.5, 15.0},
    {9.4, 1.0, 26.5, 19.0, 19.0},
    {11.5, 1.0, 28.5, 20.0, 49.0},
};
constexpr const Page& page(std::uint64_t bytes) {
  return kPages[bytes <= kSlotBytes ? 0 : bytes <= 4 * kSlotBytes ? 1 : bytes <= 16 * kSlotBytes ? 2 : 3];
}

// Host pages of the same sizes. Creating one includes its permanent mapping for copies.
struct HostPage {
  double create, set_access;
};
inline constexpr HostPage kHostPages[kPageSizes] = {
    {780.0, 188.0},
    {2190.0, 229.0},
    {7820.0, 390.0},
    {28380.0, 1113.0},
};
constexpr const HostPage& host_page(std::uint64_t bytes) {
  return kHostPages[bytes <= kSlotBytes ? 0 : bytes <= 4 * kSlotBytes ? 1 : bytes <= 16 * kSlotBytes ? 2 : 3];
}

// A copy between a device page and a host page: 55 GB/s.
constexpr double host_page_copy(std::uint64_t bytes) { return static_cast<double>(bytes) / 55e3; }
// A kernel that reads a host page from beginning to end: 50 GB/s.
constexpr double host_page_read(std::uint64_t bytes) { return static_cast<double>(bytes) / 50e3; }

struct Plain {
  double bytes, us;
};
inline constexpr Plain kPlain[] = {
    {2.0 * kMiB, 86.0}, {64.0 * kMiB, 156.0}, {512.0 * kMiB, 429.0}, {4.0 * kGiB, 3100.0}};
// The share of the cost of plain memory that is charged for allocating it; the rest is charged for releasing
// it.
inline constexpr double kReserveShare = 0.6;

// The cost of allocating and releasing `bytes` of plain memory together.
constexpr double plain(std::uint64_t bytes) {
  const double size = static_cast<double>(bytes);
  const Plain* low = kPlain;
  while (low + 2 < std::end(kPlain) && size > low[1].bytes) ++low;
  return low[0].us + (size - low[0].bytes) / (low[1].bytes - low[0].bytes) * (low[1].us - low[0].us);
}

}  // namespace vram::prices
