// Throws PyTorch's own out-of-memory error. Compiled by vram.torch.companion against the PyTorch in use, as
// the error's type lives in that PyTorch's libc10.
#include <c10/util/Exception.h>

#include <cstdint>

// Which PyTorch and vram this was made for (companion.py).
extern "C" __attribute__((visibility("default"))) const char vram_torch_identity[] = VRAM_IDENTITY;

extern "C" __attribute__((visibility("default"))) void vram_torch_out_of_memory(const char* message) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)};
  throw c10::OutOfMemoryError(here, message);
}
