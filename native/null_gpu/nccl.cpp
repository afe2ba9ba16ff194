// NCCL of the null GPU: every collective is complete at once, without the other ranks. Ranks still meet where
// PyTorch itself lets them meet, at its store.
#include <cstdint>
#include <cstring>

#include "null_gpu/abi.hpp"
#include "null_gpu/memory.hpp"

using namespace vram::null_gpu;

namespace {

constexpr int kVersion = 22809;
constexpr int kInvalidArgument = 4;

struct Communicator {
  int ranks = 1;
  int rank = 0;
  int device = 0;
};
struct UniqueId {
  char bytes[128];
};

int make(Communicator** out, int ranks, int rank) {
  if (ranks < 1 || rank < 0 || rank >= ranks) return kInvalidArgument;
  *out = new Communicator{ranks, rank, chosen_device()};
  return 0;
}

}  // namespace

VRAM_NULL_API int ncclGetVersion(int* version) {
  *version = kVersion;
  return 0;
}
VRAM_NULL_API int ncclGetUniqueId(UniqueId* out) {
  std::memset(out, 1, sizeof(*out));
  return 0;
}
VRAM_NULL_API const char* ncclGetErrorString(int error) { return error == 0 ? "no error" : "invalid argument"; }
VRAM_NULL_API const char* ncclGetLastError(Communicator*) { return ""; }
VRAM_NULL_API int ncclCommInitRank(Communicator** out, int ranks, UniqueId, int rank) {
  return make(out, ranks, rank);
}
VRAM_NULL_API int ncclCommInitRankConfig(Communicator** out, int ranks, UniqueId, int rank, void*) {
  return make(out, ranks, rank);
}
VRAM_NULL_API int ncclCommInitRankScalable(Communicator** out, int ranks, int rank, int, UniqueId*, void*) {
  return make(out, ranks, rank);
}
VRAM_NULL_API int ncclCommInitAll(Communicator** out, int count, const int* devices) {
  for (int i = 0; i < count; ++i) out[i] = new Communicator{count, i, devices != nullptr ? devices[i] : i};
  return 0;
}
// The ranks of one colour are not known here; the new group is taken to be as large as the old one.
VRAM_NULL_API int ncclCommSplit(Communicator* from, int colour, int, Communicator** out, void*) {
  if (colour < 0) {
    *out = nullptr;
    return 0;
  }
  return make(out, from->ranks, from->rank);
}
VRAM_NULL_API int ncclCommShrink(Communicator* from, int*, int excluded, Communicator** out, void*, int) {
  const int ranks = from->ranks - excluded;
  return make(out, ranks, from->rank < ranks ? from->rank : ranks - 1);
}
VRAM_NULL_API int ncclCommCount(const Communicator* each, int* out) {
  *out = each->ranks;
  return 0;
}
VRAM_NULL_API int ncclCommUserRank(const Communicator* each, int* out) {
  *out = each->rank;
  return 0;
}
VRAM_NULL_API int ncclCommCuDevice(const Communicator* each, int* out) {
  *out = each->device;
  return 0;
}
VRAM_NULL_API int ncclCommGetAsyncError(Communicator*, int* out) {
  *out = 0;
  return 0;
}
VRAM_NULL_API int ncclCommFinalize(Communicator*) { return 0; }
VRAM_NULL_API int ncclCommDestroy(Communicator* each) {
  delete each;
  return 0;
}
VRAM_NULL_API int ncclCommAbort(Communicator* each) {
  delete each;
  return 0;
}
VRAM_NULL_API int ncclMemAlloc(void** out, std::size_t bytes) {
  DevicePointer address = 0;
  const Result result = memory_of(chosen_device())->allocate(bytes, &address);
  *out = reinterpret_cast<void*>(address);
  return result == kSuccess ? 0 : 1;
}
VRAM_NULL_API int ncclMemFree(void* pointer) {
  const auto address = reinterpret_cast<DevicePointer>(pointer);
  return memory_at(address).free(address) == kSuccess ? 0 : kInvalidArgument;
}
VRAM_NULL_API int ncclCommRegister(Communicator*, void* memory, std::size_t, void** out) {
  *out = memory;
  return 0;
}
VRAM_NULL_API int ncclCommDeregister(Communicator*, void*) { return 0; }
VRAM_NULL_API int ncclCommWindowRegister(Communicator*, void* memory, std::size_t, void** out, int) {
  *out = memory;
  return 0;
}
VRAM_NULL_API int ncclCommWindowDeregister(Communicator*, void*) { return 0; }
VRAM_NULL_API int ncclRedOpCreatePreMulSum(int* out, void*, int, int, Communicator*) {
  *out = 100;
  return 0;
}
VRAM_NULL_API int ncclRedOpDestroy(int, Communicator*) { return 0; }

// ---- collectives ----------------------------------------------------------------------------------------

VRAM_NULL_API int ncclGroupStart() { return 0; }
VRAM_NULL_API int ncclGroupEnd() { return 0; }
VRAM_NULL_API int ncclAllReduce(...) { return 0; }
VRAM_NULL_API int ncclAllGather(...) { return 0; }
VRAM_NULL_API int ncclReduceScatter(...) { return 0; }
VRAM_NULL_API int ncclBroadcast(...) { return 0; }
VRAM_NULL_API int ncclBcast(...) { return 0; }
VRAM_NULL_API int ncclReduce(...) { return 0; }
VRAM_NULL_API int ncclAlltoAll(...) { return 0; }
VRAM_NULL_API int ncclSend(...) { return 0; }
VRAM_NULL_API int ncclRecv(...) { return 0; }
