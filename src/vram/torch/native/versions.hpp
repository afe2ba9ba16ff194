// What differs between the versions of PyTorch (2.9 and later) that the allocator is compiled against.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/version.h>

// Whether this is PyTorch 2.`minor` or later.
#define VRAM_TORCH_SINCE(minor) \
  (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= (minor)))

// After functions that older versions lack, or have with other parameters.
#if VRAM_TORCH_SINCE(10)
#define VRAM_OVERRIDES_SINCE_10 override
#else
#define VRAM_OVERRIDES_SINCE_10
#endif
#if VRAM_TORCH_SINCE(11)
#define VRAM_OVERRIDES_SINCE_11 override
#else
#define VRAM_OVERRIDES_SINCE_11
#endif

namespace vram_torch {

// Where the types of traces and snapshots are.
#if VRAM_TORCH_SINCE(11)
namespace traces = c10::CachingDeviceAllocator;
#else
namespace traces = c10::cuda::CUDACachingAllocator;
#endif

}  // namespace vram_torch
