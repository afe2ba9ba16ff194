// The properties and attributes of the null device, from its profile.
#include "null_gpu/properties.hpp"

#include <dlfcn.h>

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
    case 141:
      return 1;  // pages in host memory
    default:
      return 0;
  }
}

namespace {

// The fields of cudaDeviceProp that are not 0: where they lie in CUDA 12 and in CUDA 13, and what they hold.
// Their values are those of attributes, of 4 bytes, or 8 where marked so.
constexpr struct Field {
  std::size_t at12, at13;
  int attribute;
  bool wide;
} kFields[] = {
    {296, 296, 8, true},                                                 // sharedMemPerBlock
    {304, 304, 12, false},                                               // regsPerBlock
    {308, 308, 10, false},                                               // warpSize
    {312, 312, 11, true},                                                // memPitch
    {320, 320, 1, false},                                                // maxThreadsPerBlock
    {324, 324, 2, false},                                                // maxThreadsDim
    {328, 328, 3, false},   {332, 332, 4, false}, {336, 336, 5, false},  // maxGridSize
    {340, 340, 6, false},   {344, 344, 7, false}, {352, 352, 9, true},   // totalConstMem
    {360, 360, 75, false},                                               // major
    {364, 364, 76, false},                                               // minor
    {368, 368, 14, true},                                                // textureAlignment
    {388, 384, 16, false},                                               // multiProcessorCount
    {400, 392, 19, false},                                               // canMapHostMemory
    {576, 560, 31, false},                                               // concurrentKernels
    {580, 564, 32, false},                                               // ECCEnabled
    {600, 584, 40, false},                                               // asyncEngineCount
    {604, 588, 41, false},                                               // unifiedAddressing
    {612, 592, 37, false},                                               // memoryBusWidth
    {616, 596, 38, false},                                               // l2CacheSize
    {624, 604, 39, false},                                               // maxThreadsPerMultiProcessor
    {628, 608, 78, false},                                               // streamPrioritiesSupported
    {632, 612, 79, false},                                               // globalL1CacheSupported
    {636, 616, 80, false},                                               // localL1CacheSupported
    {640, 624, 81, true},                                                // sharedMemPerMultiprocessor
    {648, 632, 82, false},                                               // regsPerMultiprocessor
    {652, 636, 83, false},                                               // managedMemory
    {676, 656, 89, false},                                               // concurrentManagedAccess
    {680, 660, 90, false},                                               // computePreemptionSupported
    {688, 668, 95, false},                                               // cooperativeLaunch
    {696, 672, 97, true},                                                // sharedMemPerBlockOptin
    {712, 688, 106, false},                                              // maxBlocksPerMultiProcessor
    {720, 696, 111, true},                                               // reservedSharedMemPerBlock
    {728, 704, 99, false},                                               // hostRegisterSupported
    {744, 720, 115, false},                                              // memoryPoolsSupported
    {772, 748, 120, false},                                              // clusterLaunch
    {776, 752, 129, false},                                              // unifiedFunctionPointers
};
// Only in CUDA 12.
constexpr Field kFields12[] = {{348, 0, 13, false}, {608, 0, 36, false}};  // clockRate, memoryClockRate

}  // namespace

int runtime_version() {
  static const int version = [] {
    const bool old = dlopen("libcudart.so.12", RTLD_LAZY | RTLD_NOLOAD) != nullptr;
    return old ? 12 : 13;
  }();
  return version;
}

void fill_properties(void* out, int device, int version) {
  const Profile& profile = Profile::get();
  char* const at = static_cast<char*>(out);
  std::memset(out, 0, version == 12 ? kProperties12 : kProperties13);
  std::strncpy(at, profile.name.c_str(), 255);
  const Uuid uuid = uuid_of(device);
  std::memcpy(at + 256, &uuid, sizeof(uuid));
  std::memcpy(at + 288, &profile.memory, sizeof(profile.memory));
  const auto fill = [&](const Field& field) {
    const std::int64_t value = attribute(field.attribute);
    std::memcpy(at + (version == 12 ? field.at12 : field.at13), &value, field.wide ? 8 : 4);
  };
  for (const Field& field : kFields) fill(field);
  if (version == 12)
    for (const Field& field : kFields12) fill(field);
  const int bus = device + 1;
  std::memcpy(at + (version == 12 ? 584 : 568), &bus, sizeof(bus));
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
