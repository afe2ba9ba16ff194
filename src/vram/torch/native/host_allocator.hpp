// PyTorch's pinned host memory on vram. Defines install_host_allocator.
#pragma once

#include "engine.h"

namespace vram_torch {

void install_host_allocator(const VramEngine* engine);

}  // namespace vram_torch
