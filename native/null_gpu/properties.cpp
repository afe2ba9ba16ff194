// The properties and attributes of the null device, from its profile.
#include "null_gpu/properties.hpp"

#include <cstring>

#include "null_gpu/memory.hpp"
#include "null_gpu/profile.hpp"

namespace vram::null_gpu {

namespace {

constexpr int kReservedShared = 1024;  // bytes of shared memory that every block takes
constexpr int kUnbounded = 2147483647;

int opt_in_shared(const Profile& profile) { return profile.shared_bytes - kReservedShared; }

}  // namespace

// Numbers of CUdevice_attribute; what is not listed is 0, "not supported".
int attribute(int number) {
  const Profile& profile = Profile::get();
  switch (number) {
    case 1:
      return 1024;  // threads of a block, and its extents
    case 2:
      return 1024;
    case 3:
      return 1024;
    case 4:
      return 64;
    case 5:
      return kUnbounded;  // extents of a grid
    case 6:
      return 65535;
    case 7:
      return 65535;
    case 8:
      return 49152;  // shared memory of a block
    case 9:
      return 65536;  // constant memory
    case 10:
      return 32;  // threads of a warp
    case 11:
      return kUnbounded;
    case 12:
      return 65536;  // registers of a block
    case 13:
      return profile.clock_khz;
    case 14:
      return 512;  // alignment of textures
    case 16:
      return profile.multiprocessors;
    case 19:
      return 1;  // host memory can be mapped
    case 31:
      return 1;  // kernels run concurrently
    case 32:
      return 1;  // memory corrects errors
    case 33:
      return 1;  // the bus
    case 36:
      return profile.memory_clock_khz;
    case 37:
      return profile.bus_bits;
    case 38:
      return profile.l2_bytes;
    case 39:
      return profile.threads;
    case 40:
      return 3;  // copy engines
    case 41:
      return 1;  // one address space
    case 75:
      return profile.major;
    case 76:
      return profile.minor;
    case 78:
      return 1;  // streams have priorities
    case 81:
      return profile.shared_bytes;
    case 82:
      return 65536;  // registers of a multiprocessor
    case 83:
      return 1;  // managed memory
    case 89:
      return 1;  // concurrent managed access
    case 95:
      return 1;  // cooperative launches
    case 97:
      return opt_in_shared(profile);
    case 102:
      return 1;  // virtual memory
    case 103:
      return 1;  // … shared by file descriptors
    case 106:
      return profile.blocks;
    case 111:
      return kReservedShared;
    case 115:
      return 1;  // memory pools
    case 119:
      return 1;  // … shared by file descriptors
    default:
      return 0;
  }
}

namespace {

// Where the fields of cudaDeviceProp lie in CUDA 13.
struct Layout13 {
  char* at;
  template <typename T>
  void set(std::size_t offset, T value) const {
    std::memcpy(at + offset, &value, sizeof(T));
  }
};

}  // namespace

void fill_properties13(void* out, int device) {
  const Profile& profile = Profile::get();
  std::memset(out, 0, kProperties13);
  const Layout13 p{static_cast<char*>(out)};
  std::strncpy(p.at, profile.name.c_str(), 255);
  p.set(256, uuid_of(device));
  p.set<std::size_t>(288, profile.memory);
  p.set<std::size_t>(296, 49152);
  p.set(304, 65536);
  p.set(308, 32);
  p.set<std::size_t>(312, kUnbounded);
  p.set(320, 1024);
  for (int i = 0; i < 3; ++i) p.set(324 + 4 * static_cast<std::size_t>(i), attribute(2 + i));
  for (int i = 0; i < 3; ++i) p.set(336 + 4 * static_cast<std::size_t>(i), attribute(5 + i));
  p.set<std::size_t>(352, 65536);
  p.set(360, profile.major);
  p.set(364, profile.minor);
  p.set<std::size_t>(368, 512);
  p.set(384, profile.multiprocessors);
  p.set(392, 1);
  p.set(560, 1);
  p.set(564, 1);
  p.set(568, device + 1);
  p.set(584, 3);
  p.set(588, 1);
  p.set(592, profile.bus_bits);
  p.set(596, profile.l2_bytes);
  p.set(604, profile.threads);
  p.set(608, 1);
  p.set(612, 1);
  p.set(616, 1);
  p.set<std::size_t>(624, static_cast<std::size_t>(profile.shared_bytes));
  p.set(632, 65536);
  p.set(636, 1);
  p.set(656, 1);
  p.set(668, 1);
  p.set<std::size_t>(672, static_cast<std::size_t>(opt_in_shared(profile)));
  p.set(688, profile.blocks);
  p.set<std::size_t>(696, kReservedShared);
  p.set(704, 1);
  p.set(720, 1);
  p.set(736, 1);
  p.set(748, profile.major >= 9 ? 1 : 0);
  p.set(752, 1);
}

Uuid uuid_of(int device) {
  Uuid uuid{};
  std::memcpy(uuid.bytes, "vram null GPU  ", 15);
  uuid.bytes[15] = static_cast<unsigned char>(device);
  return uuid;
}

int blocks_of(int threads) {
  const Profile& profile = Profile::get();
  const int fit = profile.threads / (threads > 0 ? threads : 256);
  return fit < 1 ? 1 : fit > profile.blocks ? profile.blocks : fit;
}

}  // namespace vram::null_gpu
