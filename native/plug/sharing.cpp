// Memory of the plug's pools for other processes, and theirs for this one.
#include <unistd.h>

#include <cstring>
#include <new>

#include "base/forks.hpp"
#include "plug/engine_parts.hpp"
#include "plug/plug.hpp"
#include "sharing/attachments.hpp"
#include "sharing/server.hpp"

namespace vram {

namespace {

PerProcess<Attachments> attachments;

Status export_pages(const PageRequest& request, std::vector<SharedPage>* pages) {
  Pool* const pool = request.device >= 0 && request.device < Plug::kDevices
                         ? Plug::pool(static_cast<int>(request.device))
                         : nullptr;
  if (pool == nullptr) return {Code::invalid, 0, "device"};
  return pool->export_pages(request.address, request.number, request.first, kPagesAtATime, pages);
}

const char* refusal(Code code) {
  switch (code) {
    case Code::invalid:
      return "vram has no allocation there";
    case Code::suspended:
      return "it is suspended; resume it first";
    case Code::unsupported:
      return "its kind of memory cannot be exported (growable buffers, memory of a custom allocator, or "
             "pages "
             "on a platform without shareable handles)";
    default:
      return "the driver failed to export it";
  }
}

// The name of the live allocation that contains the address; empty: there is none, or it cannot be shared.
std::string name_of(Address address, std::int64_t* offset, const char** why) {
  *why = refusal(Code::invalid);
  for (int device = 0; device < Plug::kDevices; ++device) {
    Pool* const pool = Plug::pool(device);
    SharedBlock block;
    if (pool == nullptr) continue;
    if (const Status shared = pool->share(address, &block); !shared.ok()) {
      if (shared.code == Code::invalid) continue;
      *why = refusal(shared.code);
      return {};
    }
    SharedName name;
    name.process = getpid();
    name.identity = ShareServer::identity();
    name.secrets = ShareServer::secrets();
    name.device = device;
    name.address = block.number != 0 ? block.block : block.base;
    name.number = block.number;
    name.bytes = block.bytes;
    const Status status = block.number != 0 ? ShareServer::start(export_pages)
                                            : pool->backend().plain_export(block.base, &name.plain);
    *offset = static_cast<std::int64_t>(address - block.base);
    if (!status.ok()) *why = refusal(status.code);
    return status.ok() ? name.text() : std::string();
  }
  return {};
}

}  // namespace

}  // namespace vram

using namespace vram;

extern "C" {

std::size_t vram_engine_share(void* address, char* name, std::size_t room, std::int64_t* offset,
                              const char** why) try {
  const std::string text = name_of(reinterpret_cast<Address>(address), offset, why);
  if (text.size() > room) return 0;
  std::memcpy(name, text.data(), text.size());
  return text.size();
} catch (const std::bad_alloc&) {
  *why = "this process has no memory left";
  return 0;
}

void* vram_engine_attach(int device, const char* name, std::size_t length, const char** why) try {
  thread_local std::string reason;
  Pool* const pool = Plug::serving(device);
  Address address = 0;
  if (pool == nullptr) {
    reason = "vram is not installed for cuda:" + std::to_string(device);
  } else {
    address = attachments.get().attach(pool->backend(), {name, length}, &reason);
  }
  *why = reason.c_str();
  return reinterpret_cast<void*>(address);
} catch (const std::bad_alloc&) {
  *why = "this process has no memory left";
  return nullptr;
}

void vram_engine_detach(void* address) try {
  (void)attachments.get().detach(reinterpret_cast<Address>(address));
} catch (const std::bad_alloc&) {
  // It stays mapped.
}
}  // extern "C"
