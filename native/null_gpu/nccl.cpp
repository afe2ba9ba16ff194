// NCCL of the null GPU: every collective is complete at once, without the other ranks. Ranks still meet where
// PyTorch itself lets them meet, at its store.
#include <cstdint>
#include <cstring>
#include <iterator>

#include "null_gpu/abi.hpp"
#include "null_gpu/contents.hpp"
#include "null_gpu/memory.hpp"
#include "null_gpu/order.hpp"
#include "null_gpu/values.hpp"

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
VRAM_NULL_API const char* ncclGetErrorString(int error) {
  return error == 0 ? "no error" : "invalid argument";
}
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
VRAM_NULL_API int ncclCommFinalize(Communicator*) {
  Order::get().collectives_end();
  return 0;
}
VRAM_NULL_API int ncclCommDestroy(Communicator* each) {
  Order::get().collectives_end();
  delete each;
  return 0;
}
VRAM_NULL_API int ncclCommAbort(Communicator* each) {
  Order::get().collectives_end();
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

// All ranks are taken to send the same; sums are not multiplied.
namespace {

std::size_t size_of(int type) {
  static constexpr std::size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // of ncclDataType_t
  return type >= 0 && static_cast<std::size_t>(type) < std::size(kSizes) ? kSizes[type] : 1;
}

}  // namespace

VRAM_NULL_API int ncclGroupStart() { return 0; }
VRAM_NULL_API int ncclGroupEnd() { return 0; }
VRAM_NULL_API int ncclAllReduce(const void* send, void* receive, std::size_t count, int type, int,
                                Communicator*, Handle stream) {
  Order::get().collective(stream);
  copied(receive, send, count * size_of(type));
  return 0;
}
VRAM_NULL_API int ncclReduce(const void* send, void* receive, std::size_t count, int type, int, int root,
                             Communicator* each, Handle stream) {
  Order::get().collective(stream);
  if (each->rank == root) copied(receive, send, count * size_of(type));  // others may receive nowhere
  return 0;
}
VRAM_NULL_API int ncclBroadcast(const void* send, void* receive, std::size_t count, int type, int,
                                Communicator*, Handle stream) {
  Order::get().collective(stream);
  if (send == nullptr)  // only the root must send
    Contents::get().forget(reinterpret_cast<DevicePointer>(receive), count * size_of(type));
  else if (send != receive)
    copied(receive, send, count * size_of(type));
  return 0;
}
VRAM_NULL_API int ncclBcast(void*, std::size_t, int, int, Communicator*, Handle stream) {
  Order::get().collective(stream);
  return 0;
}
VRAM_NULL_API int ncclAllGather(const void* send, void* receive, std::size_t count, int type,
                                Communicator* each, Handle stream) {
  Order::get().collective(stream);
  const std::size_t bytes = count * size_of(type);
  for (int i = 0; i < each->ranks; ++i)
    copied(static_cast<char*>(receive) + static_cast<std::size_t>(i) * bytes, send, bytes);
  return 0;
}
VRAM_NULL_API int ncclReduceScatter(const void* send, void* receive, std::size_t count, int type, int,
                                    Communicator* each, Handle stream) {
  Order::get().collective(stream);
  const std::size_t bytes = count * size_of(type);
  copied(receive, static_cast<const char*>(send) + static_cast<std::size_t>(each->rank) * bytes, bytes);
  return 0;
}
VRAM_NULL_API int ncclAlltoAll(const void* send, void* receive, std::size_t count, int type,
                               Communicator* each, Handle stream) {
  Order::get().collective(stream);
  copied(receive, send, count * size_of(type) * static_cast<std::size_t>(each->ranks));
  return 0;
}
VRAM_NULL_API int ncclSend(const void*, std::size_t, int, int, Communicator*, Handle stream) {
  Order::get().collective(stream);
  return 0;
}
VRAM_NULL_API int ncclRecv(void* receive, std::size_t count, int type, int, Communicator*, Handle stream) {
  Order::get().collective(stream);
  Contents::get().forget(reinterpret_cast<DevicePointer>(receive), count * size_of(type));
  return 0;
}
