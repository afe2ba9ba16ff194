#include "null_gpu/unknown.hpp"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

namespace {

// ---- stubs ----------------------------------------------------------------------------------------------

struct Reported {
  std::mutex mutex;
  std::set<std::string> names;
};
Reported& reported() {
  static auto* const made = new Reported;  // used until the process has ended
  return *made;
}

Result do_nothing() { return kSuccess; }

#if defined(__x86_64__)
constexpr std::size_t kStubBytes = 32;
void write_stub(unsigned char* at, const void* name, const void* handler) {
  const unsigned char code[] = {0x48, 0xBF, 0, 0, 0, 0, 0, 0, 0, 0,  // mov rdi, name
                                0x48, 0xB8, 0, 0, 0, 0, 0, 0, 0, 0,  // mov rax, handler
                                0xFF, 0xE0};                         // jmp rax
  std::memcpy(at, code, sizeof(code));
  std::memcpy(at + 2, &name, sizeof(name));
  std::memcpy(at + 12, &handler, sizeof(handler));
}
#elif defined(__aarch64__)
constexpr std::size_t kStubBytes = 32;
void write_stub(unsigned char* at, const void* name, const void* handler) {
  const std::uint32_t code[] = {0x58000080,   // ldr x0, name
                                0x580000B0,   // ldr x16, handler
                                0xD61F0200,   // br x16
                                0xD503201F};  // nop
  std::memcpy(at, code, sizeof(code));
  std::memcpy(at + 16, &name, sizeof(name));
  std::memcpy(at + 24, &handler, sizeof(handler));
}
#else
#error "the null GPU has no stubs for this processor"
#endif

// ---- which functions of a library may do nothing ----------------------------------------------------------

// Compute functions of libraries whose results nobody sees. `not_with`: parts of names of functions that
// return something; these are written by hand or unknown.
constexpr struct Silent {
  std::string_view prefix;
  std::string_view not_with[4];
} kSilent[] = {
    {"cublas", {"Get", "Query", "Create", "Alloc"}},
    {"cudnn", {"Get", "Query", "Create", "Find"}},
    {"curand", {"Get", "Create", "Query", "Alloc"}},
    {"cufft", {"Get", "Create", "Make", "Estimate"}},
    {"cusolver", {"Get", "Create", "bufferSize", "Alloc"}},
    {"cusparse", {"Get", "Create", "bufferSize", "SpGEMM"}},
};

bool is_silent(std::string_view name) {
  for (const Silent& each : kSilent) {
    if (!name.starts_with(each.prefix)) continue;
    for (const std::string_view part : each.not_with)
      if (name.find(part) != name.npos) return false;
    return true;
  }
  return false;
}

// Functions that need no device and are left to the real library: descriptors of cuDNN's tensors, filters,
// convolutions and the like.
bool is_left(std::string_view name) {
  return name.starts_with("cudnn") &&
         (name.ends_with("Descriptor") || name.starts_with("cudnnSetConvolution") ||
          name.ends_with("DescriptorEx") || name.ends_with("Descriptor_v9"));
}

bool is_cudas(std::string_view name) {
  static constexpr std::string_view kPrefixes[] = {"cublas", "cudnn",  "cufft", "cusparse", "cusolver",
                                                   "curand", "__cuda", "nccl",  "nvshmem",  "cuFile"};
  for (const std::string_view prefix : kPrefixes)
    if (name.starts_with(prefix)) return true;
  const bool capital = name.size() > 4 &&
                       (std::isupper(static_cast<unsigned char>(name[2])) != 0 ||
                        (name.starts_with("cuda") && std::isupper(static_cast<unsigned char>(name[4])) != 0));
  return name.starts_with("cu") && capital;
}

// ---- the tables of loaded libraries -----------------------------------------------------------------------

struct Tables {
  ElfW(Addr) base = 0;
  const ElfW(Sym) * symbols = nullptr;
  const char* strings = nullptr;
  const ElfW(Rela) * relocations[2] = {};
  std::size_t bytes[2] = {};
};

bool is_function_slot(const ElfW(Rela) & each) {
  const auto type = ELF64_R_TYPE(each.r_info);
#if defined(__x86_64__)
  return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT;
#else
  return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT;
#endif
}

void write_slot(void** slot, void* value) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const begin = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(slot) / page * page);
  mprotect(begin, page, PROT_READ | PROT_WRITE);  // the table may be read-only after it was filled
  *slot = value;
}

void redirect(const Tables& tables) {
  for (int i = 0; i < 2; ++i)
    for (std::size_t j = 0; j < tables.bytes[i] / sizeof(ElfW(Rela)); ++j) {
      const ElfW(Rela)& each = tables.relocations[i][j];
      const ElfW(Sym)& symbol = tables.symbols[ELF64_R_SYM(each.r_info)];
      const char* const name = tables.strings + symbol.st_name;
      if (!is_function_slot(each) || symbol.st_shndx != SHN_UNDEF) continue;
      if (!is_cudas(name) || is_left(name)) continue;
      if (ELF64_ST_TYPE(symbol.st_info) == STT_OBJECT) continue;
      Dl_info here;
      void* const ours = dlsym(RTLD_DEFAULT, name);
      if (ours != nullptr && dladdr(ours, &here) != 0 && here.dli_fbase == [] {
            Dl_info self;
            return dladdr(reinterpret_cast<void*>(&is_silent), &self) != 0 ? self.dli_fbase : nullptr;
          }())
        continue;  // bound to us
      write_slot(reinterpret_cast<void**>(tables.base + each.r_offset),
                 is_silent(name) ? reinterpret_cast<void*>(&do_nothing) : stub_for(name));
    }
}

Tables tables_of(const dl_phdr_info& object) {
  Tables tables;
  tables.base = object.dlpi_addr;
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    if (object.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    for (auto* entry = reinterpret_cast<const ElfW(Dyn)*>(object.dlpi_addr + object.dlpi_phdr[i].p_vaddr);
         entry->d_tag != DT_NULL; ++entry) {
      const ElfW(Addr) at = entry->d_un.d_ptr;
      if (entry->d_tag == DT_SYMTAB) tables.symbols = reinterpret_cast<const ElfW(Sym)*>(at);
      if (entry->d_tag == DT_STRTAB) tables.strings = reinterpret_cast<const char*>(at);
      if (entry->d_tag == DT_JMPREL) tables.relocations[0] = reinterpret_cast<const ElfW(Rela)*>(at);
      if (entry->d_tag == DT_PLTRELSZ) tables.bytes[0] = entry->d_un.d_val;
      if (entry->d_tag == DT_RELA) tables.relocations[1] = reinterpret_cast<const ElfW(Rela)*>(at);
      if (entry->d_tag == DT_RELASZ) tables.bytes[1] = entry->d_un.d_val;
    }
  }
  return tables;
}

// NVIDIA's own libraries call each other; what calls them is redirected.
bool is_nvidias(std::string_view path) {
  const std::string_view file = path.substr(path.rfind('/') + 1);
  static constexpr std::string_view kPrefixes[] = {"libcu", "libnv", "libnccl"};
  for (const std::string_view prefix : kPrefixes)
    if (file.starts_with(prefix)) return true;
  return file.starts_with("ld-") || file.starts_with("libc.so") || file.starts_with("linux-vdso");
}

int adopt(dl_phdr_info* object, std::size_t, void* done) {
  auto& seen = *static_cast<std::set<ElfW(Addr)>*>(done);
  if (object->dlpi_name == nullptr || object->dlpi_name[0] == 0 || is_nvidias(object->dlpi_name)) return 0;
  if (!seen.insert(object->dlpi_addr).second) return 0;
  const Tables tables = tables_of(*object);
  if (tables.symbols != nullptr && tables.strings != nullptr) redirect(tables);
  return 0;
}

}  // namespace

Result not_supported(const char* name) {
  const std::lock_guard lock(reported().mutex);
  if (reported().names.insert(name).second)
    std::fprintf(stderr, "vram: the null GPU does not have %s; the call fails\n", name);
  return kNotSupported;
}

void* stub_for(const char* name) {
  static std::mutex mutex;
  static auto* const stubs = new std::unordered_map<std::string, void*>;
  static unsigned char* page = nullptr;
  static std::size_t used = 0;
  constexpr std::size_t kPage = 64 * 1024;
  const std::lock_guard lock(mutex);
  const auto [stub, added] = stubs->try_emplace(name, nullptr);
  if (!added) return stub->second;
  if (page == nullptr || used + kStubBytes > kPage) {
    page = static_cast<unsigned char*>(
        mmap(nullptr, kPage, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    used = 0;
  }
  unsigned char* const at = page + used;
  used += kStubBytes;
  write_stub(at, stub->first.c_str(), reinterpret_cast<const void*>(&not_supported));
  __builtin___clear_cache(reinterpret_cast<char*>(at), reinterpret_cast<char*>(at + kStubBytes));
  return stub->second = at;
}

std::string unknown_calls() {
  const std::lock_guard lock(reported().mutex);
  std::string names;
  for (const std::string& name : reported().names) names += (names.empty() ? "" : "\n") + name;
  return names;
}

void adopt_libraries() {
  static std::mutex mutex;
  static auto* const seen = new std::set<ElfW(Addr)>;
  const std::lock_guard lock(mutex);
  dl_iterate_phdr(&adopt, seen);
}

}  // namespace vram::null_gpu

// ---- loading --------------------------------------------------------------------------------------------

// Libraries that this one stands in for, by the names they are opened by, with or without a folder.
static bool is_ours(std::string_view path) {
  const std::string_view file = path.substr(path.rfind('/') + 1);
  for (const std::string_view name : {"libcuda.so", "libnvidia-ml.so", "libnvrtc.so"})
    if (file.starts_with(name)) return true;
  return false;
}

// Libraries that a program opens by name are ours, too, and what it opens is adopted.
VRAM_NULL_API void* dlopen(const char* name, int flags) {
  using Open = void* (*)(const char*, int);
  static const Open real = reinterpret_cast<Open>(dlsym(RTLD_NEXT, "dlopen"));
  const std::string_view file = name != nullptr ? std::string_view(name) : std::string_view();
  if (is_ours(file)) {
    Dl_info self;
    dladdr(reinterpret_cast<void*>(&vram::null_gpu::stub_for), &self);
    return real(self.dli_fname, flags);
  }
  void* library = real(name, flags);
  if (library == nullptr && !file.empty() && file.find('/') == file.npos) {
    // The loader looks beside the library that calls; from here it would look beside this one.
    Dl_info caller;
    if (dladdr(__builtin_return_address(0), &caller) != 0) {
      const std::string beside(caller.dli_fname);
      library = real((beside.substr(0, beside.rfind('/') + 1) + name).c_str(), flags);
    }
  }
  if (library != nullptr) vram::null_gpu::adopt_libraries();
  return library;
}
